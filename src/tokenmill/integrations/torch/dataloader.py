"""A DataLoader whose state is exact for any number of workers.

`DataLoader` wraps a plain `torch.utils.data.DataLoader`. The main process computes the steps of a
`tokenmill.Loader` (integers only) and sends each as the "index" of one batch; a worker fills it;
batches come back in order. The cursor behind every step waits in a queue of our own here and is
counted when its batch is handed to the trainer. So what lies prefetched in queues, workers and
the pinning thread is never counted, and workers hold no state at all: their number, start method
and prefetch may change at any resume.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data as torch_data

from tokenmill.dataset import Mixture, View
from tokenmill.errors import TokenmillError, UsageError, WorkerError
from tokenmill.integrations.torch.dataset import as_tensors
from tokenmill.loader import Cursor, Loader, LoaderIterator
from tokenmill.loader.steps import Step
from tokenmill.loader.stream import BatchFiller
from tokenmill.store import Store

TensorBatch = dict[str, Any]


class _Steps(torch_data.Dataset[Any]):  # type: ignore[misc]
    """What workers hold: a filler, to which a step is an index."""

    def __init__(self, filler: BatchFiller) -> None:
        self._filler = filler

    def __getitem__(self, step: Step) -> TensorBatch | list[TensorBatch]:
        filled = self._filler.fill(step)
        return list(map(as_tensors, filled)) if isinstance(filled, list) else as_tensors(filled)


class _Sampler:
    """Steps from a cursor to the start of an epoch; the cursors behind them wait in a queue."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.begin(loader.cursor, None)

    def begin(self, cursor: Cursor, stop: int | None) -> deque[Cursor]:
        """Where torch's next iterator runs; gives the queue."""
        self._cursor, self._stop = cursor, stop
        self._waiting: deque[Cursor] = deque()
        return self._waiting

    def __iter__(self) -> Iterator[Step]:
        # Bound now: torch asks for the first step later, and may ask for a second iterator first.
        return self._walk(self._loader.stream.steps(self._cursor, self._stop), self._waiting)

    @staticmethod
    def _walk(steps: Iterator[tuple[Step, Cursor]], waiting: deque[Cursor]) -> Iterator[Step]:
        for step, behind in steps:
            waiting.append(behind)
            yield step

    def __len__(self) -> int:
        return len(self._loader)


def as_loader(data: Loader | Store | View | Mixture, arguments: dict[str, Any]) -> Loader:
    """The loader that was given, or one of data and arguments."""
    if not isinstance(data, Loader):
        return Loader(data, **arguments)
    if arguments:
        raise UsageError(f"say {', '.join(arguments)} to the loader, not here")
    return data


class DataLoader:
    """Batches of a `tokenmill.Loader` as tensors, filled in worker processes.

    Args:
        data: A loader, or what a loader is made of.
        num_workers: Worker processes; 0 fills batches in this one.
        pin_memory: Hand out batches in page-locked memory.
        prefetch_factor: Batches per worker that may lie ready.
        persistent_workers: Keep workers from one ``iter`` to the next; then only the latest
            iterator may be used.
        multiprocessing_context: fork, forkserver, spawn, or a context.
        timeout: Seconds to wait for a batch; 0 waits for ever.
        worker_init_fn: Called in every worker with its number.
        **arguments: Of `tokenmill.Loader`, when ``data`` is not one.
    """

    def __init__(
        self,
        data: Loader | Store | View | Mixture,
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
        self.loader = as_loader(data, arguments)
        self._persistent = persistent_workers
        self.has_workers = num_workers > 0
        self._sampler = _Sampler(self.loader)
        # Weak, so that a dropped iterator ends its workers at once, not when garbage is collected.
        self._latest: weakref.ref[_Iterator] | None = None
        # A generator of its own: torch would draw a base seed from the global one at every iter().
        generator = torch.Generator()
        generator.manual_seed(0)
        self._torch: Any = torch_data.DataLoader(
            _Steps(self.loader.stream.filler),
            batch_size=None,
            sampler=self._sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            collate_fn=_as_it_is,
            generator=generator,
        )

    def __iter__(self) -> Iterator[TensorBatch]:
        """The rest of the epoch, as `tokenmill.Loader` serves it."""
        return self._latest_of(_Iterator(self))

    def repeat(self) -> Iterator[TensorBatch]:
        """As `tokenmill.Loader.repeat`."""
        return self._latest_of(_Iterator(self, repeat=True))

    def _latest_of(self, iterator: _Iterator) -> _Iterator:
        self._latest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """As of `tokenmill.Loader`: batches of the epoch it stands in."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """As `tokenmill.Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As `tokenmill.Loader.state_dict`: counts what was handed out."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `tokenmill.Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def served(self) -> dict[str, dict[str, int]]:
        """As `tokenmill.Loader.served`."""
        return self.loader.served()

    def open(self, cursor: Cursor, stop: int | None) -> Iterator[tuple[TensorBatch, Cursor]]:
        """What torch hands out from a cursor on, each with the cursor behind it."""
        waiting = self._sampler.begin(cursor, stop)
        return ((batch, waiting.popleft()) for batch in iter(self._torch))

    def is_stale(self, iterator: _Iterator) -> bool:
        """Whether persistent workers now serve another iterator."""
        latest = None if self._latest is None else self._latest()
        return self._persistent and latest is not iterator


class _Iterator(LoaderIterator):
    """The loader's own iterator, with batches from torch."""

    def __init__(self, owner: DataLoader, *, repeat: bool = False) -> None:
        self._owner = owner
        super().__init__(owner.loader, repeat=repeat)

    def _open(self, cursor: Cursor, stop: int | None) -> Iterator[tuple[TensorBatch, Cursor]]:
        return self._owner.open(cursor, stop)

    def __next__(self) -> Any:
        if self._owner.is_stale(self):
            raise UsageError("persistent workers serve one iterator at a time: use the latest")
        try:
            return super().__next__()
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if not (self._owner.has_workers and _is_death_of_a_worker(error)):
                raise
            raise WorkerError(f"a worker process died: {error}") from error


def _is_death_of_a_worker(error: Exception) -> bool:
    """Torch says so itself, or the pipe that a tensor came through is broken."""
    # What a worker's own code raised comes with torch's remark that it was caught there.
    if isinstance(error, TokenmillError) or str(error).startswith("Caught "):
        return False
    return not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker")


def _as_it_is(batch: TensorBatch) -> TensorBatch:
    """Nothing to collate: a step is a whole batch (a function, because workers pickle it)."""
    return batch
