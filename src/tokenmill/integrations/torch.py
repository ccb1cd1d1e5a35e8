"""A torch DataLoader whose state is exact for any number of workers, and a map-style `Dataset`.

The main process computes the steps of a `tokenmill.Loader` and sends each as the "index" of one
batch, which a worker fills. The next cursor of every step waits in a queue and becomes the
current one when its batch is returned. So prefetched batches are never counted, and workers have no
state.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tokenmill._core.optional import optional
from tokenmill._core.options import check_names
from tokenmill.data.cursor import Cursor
from tokenmill.data.fill import Batch, check_multiple, fill_rows
from tokenmill.data.loader import BatchFiller, Loader, LoaderIterator
from tokenmill.data.mixture import Mixture
from tokenmill.data.samples import Step
from tokenmill.data.view import View, as_view
from tokenmill.errors import TokenmillError, UsageError, WorkerError
from tokenmill.integrations.trainers import TORCH, ItemRows, RowDataset
from tokenmill.store import Store
from tokenmill.store.by_source import SourceRows

with optional("torch"):
    import torch
    from torch.utils import data as torch_data

__all__ = ["DataLoader", "Dataset"]

Item = dict[str, "torch.Tensor"]
TensorBatch = dict[str, Any]


def as_tensors(batch: Batch) -> TensorBatch:
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }


class _Steps(torch_data.Dataset[Any]):  # type: ignore[misc]
    """The dataset of the workers: its "index" is a step."""

    def __init__(self, filler: BatchFiller) -> None:
        self._filler = filler

    def __getitem__(self, step: Step) -> TensorBatch | list[TensorBatch]:
        filled = self._filler.fill(step)
        return list(map(as_tensors, filled)) if isinstance(filled, list) else as_tensors(filled)


class _StepSampler:
    """The steps of torch's next iterator; their next cursors are appended to a queue."""

    def __init__(self) -> None:
        self._next: tuple[Iterator[tuple[Step, Cursor]], deque[Cursor]] = iter(()), deque()

    def begin(self, steps: Iterator[tuple[Step, Cursor]]) -> deque[Cursor]:
        cursors: deque[Cursor] = deque()
        self._next = steps, cursors
        return cursors

    def __iter__(self) -> Iterator[Step]:
        # Bound now: torch takes the first step later, and may request a second iterator first.
        return self._walk(*self._next)

    @staticmethod
    def _walk(steps: Iterator[tuple[Step, Cursor]], cursors: deque[Cursor]) -> Iterator[Step]:
        for step, next_cursor in steps:
            cursors.append(next_cursor)
            yield step


class DataLoader:
    """Batches of a `tokenmill.Loader` as tensors, filled in worker processes.

    Args:
        data: A loader, or the data of one.
        num_workers: Worker processes; 0 fills batches in this one.
        pin_memory: Return batches in page-locked memory.
        prefetch_factor: Batches per worker that may be ready.
        persistent_workers: Keep workers from one ``iter`` to the next; then only the latest
            iterator may be used.
        multiprocessing_context: fork, forkserver, spawn, or a context.
        timeout: Seconds to wait for a batch; 0 waits for ever.
        worker_init_fn: Called in every worker with its number.
        **arguments: Of `tokenmill.Loader`, when ``data`` is not one.
    """

    def __init__(
        self,
        data: Loader | Store | SourceRows | View | Mixture,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(data, Loader) and arguments:
            raise UsageError(f"Pass {', '.join(arguments)} to the Loader.")
        own, of_loader = (
            list(inspect.signature(kind).parameters)[1:] for kind in (DataLoader, Loader)
        )
        check_names(arguments, {*own, *of_loader} - {"arguments"}, "arguments")
        self.loader = data if isinstance(data, Loader) else Loader(data, **arguments)
        self.has_workers = num_workers > 0
        self._persistent = persistent_workers
        self._sampler = _StepSampler()
        # Weak, so that a dropped iterator ends its workers at once, not when garbage is collected.
        self._latest: weakref.ref[_Iterator] | None = None
        # A generator of its own: torch would draw a base seed from the global one at every iter().
        generator = torch.Generator()
        generator.manual_seed(0)
        self._torch: Any = torch_data.DataLoader(
            _Steps(self.loader.filler),
            batch_size=None,
            sampler=self._sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            collate_fn=_unchanged,
            generator=generator,
        )

    def __iter__(self) -> Iterator[TensorBatch]:
        return self._latest_of(_Iterator(self))

    def repeat(self, epochs: int | None = None) -> Iterator[TensorBatch]:
        self.loader.repeat(epochs)  # validates
        return self._latest_of(_Iterator(self, repeat=True, epochs=epochs))

    def _latest_of(self, iterator: _Iterator) -> _Iterator:
        self._latest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def served(self) -> dict[str, dict[str, int]]:
        return self.loader.served()

    def open(
        self, cursor: Cursor, end: int | None, *, repeat: bool
    ) -> Iterator[tuple[TensorBatch, Cursor]]:
        cursors = self._sampler.begin(self.loader.steps(cursor, end, repeat=repeat))
        return ((batch, cursors.popleft()) for batch in iter(self._torch))

    def is_stale(self, iterator: _Iterator) -> bool:
        latest = None if self._latest is None else self._latest()
        return self._persistent and latest is not iterator


class _Iterator(LoaderIterator):
    def __init__(
        self, owner: DataLoader, *, repeat: bool = False, epochs: int | None = None
    ) -> None:
        super().__init__(owner.loader, repeat=repeat, epochs=epochs)
        self._owner = owner

    def _open(self, cursor: Cursor, end: int | None) -> Iterator[tuple[TensorBatch, Cursor]]:
        return self._owner.open(cursor, end, repeat=self._repeat)

    def __next__(self) -> Any:
        if self._owner.is_stale(self):
            raise UsageError("Persistent workers serve one iterator at a time. Use the latest one.")
        try:
            return super().__next__()
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if not (self._owner.has_workers and _is_death_of_a_worker(error)):
                raise
            raise WorkerError(f"A worker process died: {error}") from error


def _is_death_of_a_worker(error: Exception) -> bool:
    # torch marks exceptions of the worker's own code with "Caught".
    if isinstance(error, TokenmillError) or str(error).startswith("Caught "):
        return False
    return not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker")


def _unchanged(batch: TensorBatch) -> TensorBatch:
    # A step is a whole batch. A function, because workers pickle it.
    return batch


class Dataset(RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows of a store or view by number: input_ids, labels and loss_mask as tensors.

    The other arguments are for `collate`, which pads like `tokenmill.Loader`.
    """

    trainer = TORCH

    def __init__(
        self,
        data: Store | SourceRows | View,
        *,
        pad_token_id: int | None = None,
        padding_side: str = "right",
        pad_to_multiple_of: int | None = None,
    ) -> None:
        self.view = self.trainer.check(as_view(data))
        self.item_rows = ItemRows(len(self.view))
        self._pad_token_id = self.view.pad_token_or(pad_token_id)
        self._pad_side = padding_side
        self._multiple = check_multiple(pad_to_multiple_of)

    def collate(self, items: Sequence[Item]) -> TensorBatch:
        if self._pad_token_id is None:
            raise UsageError("The tokenizer has no pad or eos token. Set ", ("pad_token_id",), ".")
        pieces = [
            (item["input_ids"].numpy().astype(np.int32), item["loss_mask"].numpy())
            for item in items
        ]
        batch = fill_rows(pieces, self._pad_token_id, side=self._pad_side, multiple=self._multiple)
        return as_tensors(batch)
