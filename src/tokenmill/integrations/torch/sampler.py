"""A sampler for torchdata's `StatefulDataLoader`.

`StatefulSampler` yields row numbers in our order: one at a time (``sampler=``, with the same
batch size there as here) or as batches (``batch_sampler=``). One pass of torchdata's loader is one
epoch (``epochs`` of them, where that is given); the next pass goes on with the next. Its *iterator*
carries the state, which torchdata stores with every batch that it hands out and gives back on
loading, so that prefetched batches are not counted.

Exact where torchdata is. Where it is not (0.11): a state must be loaded with the number of
workers it was saved with, else torchdata raises; `DataLoader` beside this has no such limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils import data as torch_data

from tokenmill.dataset import Mixture, View
from tokenmill.errors import StateError, UsageError
from tokenmill.integrations.torch.dataloader import as_loader
from tokenmill.loader import Cursor, Loader
from tokenmill.store import Store

_INSIDE = "inside"  # items of the batch behind the cursor that were already yielded


class StatefulSampler(torch_data.Sampler[Any]):  # type: ignore[misc]
    """Row numbers in our order, with a state torchdata can carry.

    Args:
        data: A loader without packing, or what one is made of.
        batches: Yield lists (for ``batch_sampler=``) rather than single numbers.
        **arguments: Of `tokenmill.Loader`, when ``data`` is not one.
    """

    def __init__(
        self, data: Loader | Store | View | Mixture, *, batches: bool = False, **arguments: Any
    ) -> None:
        self.loader = as_loader(data, arguments)
        if self.loader.stream.pack is not None:
            raise UsageError("a sampler yields rows, not packs: use DataLoader beside this")
        if self.loader.stream.units.grouped:
            raise UsageError(
                "a sampler yields rows, which would part groups: use DataLoader beside this, or say"
                " unit='rows' to take every answer by itself"
            )
        self.batches = batches
        self._next = self.loader.cursor
        self._loaded = False

    @property
    def epochs_per_pass(self) -> int:
        """How many epochs one ``iter`` runs through."""
        return self.loader.epochs or 1

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of an epoch.

        A state that was just loaded into this epoch keeps its place.
        """
        if not (self._loaded and self._next.epoch == epoch):
            self._next = Cursor(self.loader.stream.checked_epoch(epoch))

    def begin_next_pass_at(self, cursor: Cursor, *, loaded: bool = False) -> None:
        """Where the next pass begins: a pass that came to its end says so."""
        self._next = cursor
        self._loaded = loaded

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, self._next)

    def __len__(self) -> int:
        """Batches, or samples, of a pass of one epoch."""
        steps = self.loader.stream.stepper.count(self._next, self._next.epoch)
        if self.batches:
            return steps
        if self.loader.stream.geometry.last == "wrap":
            return steps * self.loader.stream.geometry.batch_size
        epoch = self._next.epoch
        whole_pass = self.loader.stream.steps(Cursor(epoch), epoch + self.epochs_per_pass)
        return sum(step.stop - step.first for step, _ in whole_pass)


class SamplerIterator(Iterator[Any]):
    """One pass; stateful in torchdata's sense.

    Args:
        sampler: Whose pass it is.
        start: Where it begins.
    """

    def __init__(self, sampler: StatefulSampler, start: Cursor) -> None:
        self._sampler = sampler
        self._go(start, start.epoch, 0)

    def _go(self, cursor: Cursor, first_epoch: int, inside: int) -> None:
        self._first_epoch = first_epoch
        self._end = first_epoch + self._sampler.epochs_per_pass
        self._cursor = cursor  # behind the last batch that was yielded whole
        self._behind = cursor  # behind the batch under way
        self._steps = self._sampler.loader.stream.steps(cursor, self._end)
        self._rows: list[int] = []
        self._inside = 0
        for _ in range(inside):
            next(self)

    def _next_rows(self) -> list[int]:
        try:
            step, self._behind = next(self._steps)
        except StopIteration:
            # Too little may be left of an epoch for a batch (``last="drop"``): the next begins.
            done = self._cursor.epoch >= self._end
            self._sampler.begin_next_pass_at(self._cursor if done else Cursor(self._end))
            raise
        return [int(row) for row in step.packs.rows[step.first : step.stop]]

    def __next__(self) -> Any:
        if self._sampler.batches:
            rows = self._next_rows()
            self._cursor = self._behind
            return rows
        while self._inside == len(self._rows):
            self._cursor = self._behind
            self._rows, self._inside = self._next_rows(), 0
        self._inside += 1
        row = self._rows[self._inside - 1]
        if self._inside == len(self._rows):
            self._cursor, self._rows, self._inside = self._behind, [], 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, counting what it yielded."""
        state = self._sampler.loader.stream.passport.stamp(self._cursor, self._first_epoch)
        return {**state, _INSIDE: self._inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where a saved pass stood."""
        stream = self._sampler.loader.stream
        cursor, first_epoch = stream.passport.admit(state)
        stream.check(cursor)
        inside = state.get(_INSIDE, 0)
        if isinstance(inside, bool) or not isinstance(inside, int) or inside < 0:
            raise StateError(f"the state's {_INSIDE} is {inside!r}, not a whole number")
        try:
            self._go(cursor, first_epoch, inside)
        except StopIteration:
            raise StateError(f"the state's {_INSIDE} is {inside}, beyond its pass") from None
        if cursor.epoch >= self._end:
            # torchdata drops an iterator that is finished: the sampler must know the way.
            self._sampler.begin_next_pass_at(cursor, loaded=True)
