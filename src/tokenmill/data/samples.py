"""Samples of an epoch, as integers: rows, groups of rows, or packs of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenmill.data.cursor import Cursor
from tokenmill.data.order import PURPOSE_PACKS, Int64Array, Order, Permutation, Recent, derive_key
from tokenmill.data.packs import Pack, Packs, pack_window, share_of
from tokenmill.data.view import View
from tokenmill.errors import StateError, UsageError, check_one_of

UNITS = ("auto", "rows", "groups")


@dataclass(frozen=True)
class Samples:
    """The units that an order permutes: rows of a view, or its groups."""

    view: View
    grouped: bool = False
    tokens_in_pack: Callable[[Int64Array], Int64Array] | None = None  # of row lengths

    @classmethod
    def of(
        cls, view: View, unit: str, tokens_in_pack: Callable[[Int64Array], Int64Array] | None = None
    ) -> Samples:
        check_one_of("unit", unit, UNITS)
        if unit == "groups" and not view.has_groups:
            raise UsageError("unit='groups' needs data with groups; this data has none")
        return cls(view, view.has_groups and unit != "rows", tokens_in_pack)

    @property
    def count(self) -> int:
        return self.view.group_count if self.grouped else len(self.view)

    def lengths_at(self, units: Int64Array) -> Int64Array:
        """Return the tokens that units take in a pack."""
        return self._sums(units, self._row_lengths)

    def tokens_at(self, units: Int64Array) -> Int64Array:
        return self._sums(units, self.view.lengths_at)

    def trained_at(self, units: Int64Array) -> Int64Array:
        return self._sums(units, self.view.trained_at)

    def patches_at(self, units: Int64Array) -> Int64Array:
        return self._sums(units, self.view.patches_at)

    def as_packs(self, units: Int64Array) -> Packs:
        """Return every unit as its own pack."""
        rows, bounds = self._rows(units)
        return Packs(rows, np.zeros_like(rows), self._row_lengths(rows), bounds)

    def expand(self, packs: Packs) -> Packs:
        """Convert packs of units to packs of rows."""
        if not self.grouped:
            return packs
        rows, bounds = self.view.row_index.rows_of_groups(packs.rows)
        return Packs(rows, np.zeros_like(rows), self._row_lengths(rows), bounds[packs.bounds])

    def _rows(self, units: Int64Array) -> tuple[Int64Array, Int64Array]:
        if self.grouped:
            return self.view.row_index.rows_of_groups(units)
        return units, np.arange(units.size + 1, dtype=np.int64)

    def _row_lengths(self, rows: Int64Array) -> Int64Array:
        if self.view.is_by_source:
            return np.zeros_like(rows)  # known when the rows are read
        lengths = self.view.lengths_at(rows)
        return lengths if self.tokens_in_pack is None else self.tokens_in_pack(lengths)

    def _sums(self, units: Int64Array, of_rows: Callable[[Int64Array], Int64Array]) -> Int64Array:
        if not self.grouped:
            return of_rows(units)
        rows, bounds = self._rows(units)
        totals = np.concatenate(([0], np.cumsum(of_rows(rows))))
        sums: Int64Array = np.diff(totals[bounds])
        return sums


class RowSamples:
    """Samples that are single rows or groups."""

    def __init__(self, order: Order, units: Samples) -> None:
        self._order = order
        self._units = units

    def take(self, cursor: Cursor, count: int) -> tuple[Packs, Cursor]:
        """Return up to ``count`` samples of the cursor's epoch, and the next cursor.

        There are fewer only at the end of an epoch, and the next cursor is then the start of the
        next epoch.
        """
        stop = min(cursor.position + count, self._order.rows)
        units = self._order.indices(cursor.epoch, np.arange(cursor.position, stop, dtype=np.int64))
        is_end = stop == self._order.rows
        return self._units.as_packs(units), (
            cursor.next_epoch() if is_end else Cursor(cursor.epoch, stop)
        )

    def has(self, cursor: Cursor, count: int) -> bool:
        """Return whether the cursor's epoch has this many samples left."""
        return self._order.rows - cursor.position >= count

    def count(self, epoch: int) -> int:
        return self._order.rows

    def check(self, cursor: Cursor) -> None:
        """Raise `StateError` if a cursor is outside of its epoch."""
        if cursor.position >= self._order.rows:
            raise StateError(
                f"position in the state is {cursor.position}, an epoch has {self._order.rows} rows"
            )


class PackSamples:
    """Packs of windows of the order, shuffled inside their window."""

    def __init__(
        self,
        order: Order,
        units: Samples,
        pack: Pack,
        ranks: int,  # used only by the method `balanced`
        seed: int | None,  # None does not shuffle packs
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
        self.packed = Recent(self._shuffled_window)
        self._counts = Recent(lambda epoch: sum(self.window_counts(epoch)))

    def lengths_at(self, units: Int64Array) -> Int64Array:
        return self._units.lengths_at(units)

    def _pack_window(self, epoch: int, window: int) -> Packs:
        start = window * self._pack.window
        stop = min(start + self._pack.window, self._order.rows)
        units = self._order.indices(epoch, np.arange(start, stop, dtype=np.int64))
        shares = None if self._max_patches is None else self._shares
        lengths = self.lengths_at(units)
        return pack_window(units, lengths, self._pack, self._ranks, shares)

    def _shares(self, units: Int64Array) -> Int64Array:
        assert self._max_patches is not None
        return share_of(self._units.patches_at(units), self._max_patches, self._pack.length)

    def _shuffled_window(self, epoch: int, window: int) -> Packs:
        packs = self._pack_window(epoch, window)
        if self._seed is None or not len(packs):
            return packs
        key = derive_key(PURPOSE_PACKS, self._seed, epoch, window)
        return packs.take(Permutation(len(packs), key).indices(np.arange(len(packs))))

    def take(self, cursor: Cursor, count: int) -> tuple[Packs, Cursor]:
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
        left = cursor.packs_before - cursor.position
        for window in range(cursor.window, self.windows):
            left += len(self.packed(cursor.epoch, window))
            if left >= count:
                return True
        return False

    def count(self, epoch: int) -> int:
        return self._counts(epoch)

    def window_counts(self, epoch: int) -> list[int]:
        return [len(self._pack_window(epoch, window)) for window in range(self.windows)]

    def check(self, cursor: Cursor) -> None:
        if cursor.window >= max(self.windows, 1):
            raise StateError(
                f"window in the state is {cursor.window}, an epoch has {self.windows} windows"
            )
        if cursor.packs_before and not cursor.window:
            raise StateError(
                f"the state is in the first window, but packs_before is {cursor.packs_before}"
            )
        inside = cursor.position - cursor.packs_before
        packs = len(self.packed(cursor.epoch, cursor.window))
        if inside and inside >= packs:  # after the last pack, a cursor is in the next window
            raise StateError(f"the state is at pack {inside} of a window of {packs} packs")


@dataclass(frozen=True)
class Step:
    """One global batch as integers; this rank has samples ``first`` to ``stop``."""

    packs: Packs
    first: int
    stop: int

    @classmethod
    def of_rank(cls, packs: Packs, rank: int, world_size: int) -> Step:
        """Return the step of one rank; sizes of ranks differ by at most one sample."""
        each, extra = divmod(len(packs), world_size)
        first = rank * each + min(rank, extra)
        return cls(packs, first, first + each + (rank < extra))
