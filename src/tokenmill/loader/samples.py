"""Samples: what a position of an epoch holds, a row or a pack.

A `Samples` answers two questions about an epoch: which samples follow a cursor, and how many there
are. `RowSamples` takes rows straight from an order. `PackSamples` packs the order window by window
and shuffles each window's packs; it remembers the last two windows, which are pure functions of
(epoch, number). Both answer with `Packs` (a row is a pack of one piece, a group one of as many as
it has rows), as integers only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tokenmill.errors import StateError
from tokenmill.loader.cursor import Cursor
from tokenmill.loader.units import Units
from tokenmill.packing import Pack, Packs, pack_window, share_of
from tokenmill.sampling import (
    PURPOSE_PACKS,
    Int64Array,
    Order,
    Permutation,
    Recent,
    derive_key,
)


class Samples(Protocol):
    """The samples of every epoch."""

    def take(self, cursor: Cursor, count: int) -> tuple[Packs, Cursor]:
        """Up to ``count`` samples of the cursor's epoch, and the cursor behind them.

        Fewer come only where the epoch ends. Behind the last sample of an epoch stands the start
        of the next, never an epoch without samples left.
        """

    def has(self, cursor: Cursor, count: int) -> bool:
        """Whether the cursor's epoch has this many samples left."""

    def count(self, epoch: int) -> int:
        """How many samples an epoch has."""

    def check(self, cursor: Cursor) -> None:
        """Refuse a cursor that lies outside of its epoch."""


class RowSamples:
    """Rows, or groups of them, one per position of the order."""

    def __init__(self, order: Order, units: Units) -> None:
        self._order = order
        self._units = units

    def take(self, cursor: Cursor, count: int) -> tuple[Packs, Cursor]:
        stop = min(cursor.position + count, self._order.rows)
        units = self._order.indices(cursor.epoch, np.arange(cursor.position, stop, dtype=np.int64))
        behind = Cursor(cursor.epoch, stop)
        if stop == self._order.rows:
            behind = cursor.next_epoch()
        return self._units.as_packs(units), behind

    def has(self, cursor: Cursor, count: int) -> bool:
        return self._order.rows - cursor.position >= count

    def count(self, epoch: int) -> int:
        return self._order.rows

    def check(self, cursor: Cursor) -> None:
        """Positions run to the number of rows; behind the last row stands the next epoch."""
        if cursor.position >= self._order.rows:
            raise StateError(
                f"the state's position is {cursor.position}, an epoch has {self._order.rows} rows"
            )


class PackSamples:
    """Packs, formed inside windows of the order and shuffled inside their window.

    Args:
        order: Position → row, or group.
        units: Rows or groups.
        pack: How to pack.
        ranks: Data-parallel ranks, which only `balanced` asks for.
        seed: For the shuffle of packs; None leaves them in the order of their first rows.
        max_patches: Patches of a pack's pictures, at most; None sets no bound.
    """

    def __init__(
        self,
        order: Order,
        units: Units,
        pack: Pack,
        ranks: int,
        seed: int | None,
        max_patches: int | None = None,
    ) -> None:
        self._order = order
        self._units = units
        self._pack = pack
        self._ranks = ranks
        self._seed = seed
        self._max_patches = max_patches
        self.window = pack.window
        self.windows = -(-order.rows // pack.window)
        self.packed = Recent(self._packed)
        self._counts = Recent(self._count)

    def _rows(self, epoch: int, window: int) -> tuple[Int64Array, Int64Array]:
        start = window * self._pack.window
        stop = min(start + self._pack.window, self._order.rows)
        rows = self._order.indices(epoch, np.arange(start, stop, dtype=np.int64))
        return rows, self._units.lengths_at(rows)

    def _pack_window(self, epoch: int, window: int) -> Packs:
        shares = None if self._max_patches is None else self._shares
        return pack_window(*self._rows(epoch, window), self._pack, self._ranks, shares)

    def _shares(self, units: Int64Array) -> Int64Array:
        assert self._max_patches is not None
        return share_of(self._units.patches_at(units), self._max_patches, self._pack.length)

    def _packed(self, epoch: int, window: int) -> Packs:
        """The packs of a window, as pieces of units."""
        packs = self._pack_window(epoch, window)
        if self._seed is None or not len(packs):
            return packs
        key = derive_key(PURPOSE_PACKS, self._seed, epoch, window)
        return packs.take(Permutation(len(packs), key).indices(np.arange(len(packs))))

    def take(self, cursor: Cursor, count: int) -> tuple[Packs, Cursor]:
        """Packs at the next positions, over as many windows as it takes."""
        parts: list[Packs] = []
        while cursor.window < self.windows:
            packs = self.packed(cursor.epoch, cursor.window)
            first = cursor.position - cursor.packs_before
            if not count and first < len(packs):
                break
            stop = min(first + count, len(packs))
            parts.append(packs.take(np.arange(first, stop, dtype=np.int64)))
            count -= stop - first
            position = cursor.position + stop - first
            if stop < len(packs):
                cursor = Cursor(cursor.epoch, position, cursor.window, cursor.packs_before)
                break
            cursor = Cursor(cursor.epoch, position, cursor.window + 1, position)
        if cursor.window >= self.windows:
            cursor = cursor.next_epoch()
        return self._units.expand(Packs.join(parts)), cursor

    def has(self, cursor: Cursor, count: int) -> bool:
        """Looks through as many windows as it takes."""
        left = cursor.packs_before - cursor.position
        for window in range(cursor.window, self.windows):
            left += len(self.packed(cursor.epoch, window))
            if left >= count:
                return True
        return False

    def count(self, epoch: int) -> int:
        """Packs of a whole epoch: packs every window of it once."""
        return self._counts(epoch)

    def _count(self, epoch: int) -> int:
        return sum(self.window_counts(epoch))

    def window_counts(self, epoch: int) -> list[int]:
        """Packs of every window of an epoch: packs each of them once."""
        return [len(self._pack_window(epoch, window)) for window in range(self.windows)]

    def fill(self, epoch: int) -> tuple[int, int]:
        """Packs and tokens in them, of a whole epoch."""
        packs = tokens = 0
        for window in range(self.windows):
            packed = self._pack_window(epoch, window)
            packs += len(packed)
            tokens += packed.tokens
        return packs, tokens

    def check(self, cursor: Cursor) -> None:
        """The window and the place in it must exist; packs that window, as going on does."""
        if cursor.window >= max(self.windows, 1):
            raise StateError(
                f"the state stands in window {cursor.window}, an epoch has {self.windows}"
            )
        if cursor.packs_before and not cursor.window:
            raise StateError(
                f"the state has {cursor.packs_before} packs before its window, which is the first"
            )
        inside = cursor.position - cursor.packs_before
        packs = len(self.packed(cursor.epoch, cursor.window))
        if inside and inside >= packs:  # behind the last pack stands the next window
            raise StateError(f"the state stands at pack {inside} of a window of {packs} packs")
