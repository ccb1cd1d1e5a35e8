"""Units: what an order counts, rows or groups of rows.

The rest of the loader speaks of *units* by number: an order permutes them, a batch holds some of
them, a pack takes or leaves them. `Units` says how many there are, how long each is, and turns them
into rows at the end: a unit is laid out as the pieces of its rows, one after the other. Where rows
stand for themselves, a unit is a row; where they belong together (`tokenmill.store.Groups`), it is
a group, which is how nothing in here can part one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenmill.dataset import View, rows_of_groups
from tokenmill.errors import UsageError, check_one_of
from tokenmill.packing import Packs
from tokenmill.sampling import Int64Array

UNITS = ("auto", "rows", "groups")


@dataclass(frozen=True)
class Units:
    """The units of a view.

    Args:
        view: The rows.
        grouped: Whether units are groups of them.
        taken: How much of a pack rows of given lengths take; None: their lengths.
    """

    view: View
    grouped: bool = False
    taken: Callable[[Int64Array], Int64Array] | None = None

    @classmethod
    def of(
        cls, view: View, unit: str, taken: Callable[[Int64Array], Int64Array] | None = None
    ) -> Units:
        """The units that somebody asks for; ``auto``: groups where there are any."""
        check_one_of("unit", unit, UNITS)
        if unit == "groups" and not view.has_groups:
            raise UsageError("unit='groups', but the rows of this data stand for themselves")
        return cls(view, view.has_groups and unit != "rows", taken)

    @property
    def count(self) -> int:
        return self.view.group_count if self.grouped else len(self.view)

    def lengths_at(self, units: Int64Array) -> Int64Array:
        """How much of a pack they take: of groups, all rows together."""
        return self._summed(units, self._row_lengths)

    def tokens_at(self, units: Int64Array) -> Int64Array:
        return self._summed(units, self.view.lengths_at)

    def trained_at(self, units: Int64Array) -> Int64Array:
        return self._summed(units, self.view.trained_at)

    def patches_at(self, units: Int64Array) -> Int64Array:
        """What their pictures cost a vision model."""
        return self._summed(units, self.view.patches_at)

    def shapes_at(self, units: Int64Array) -> tuple[Int64Array, Int64Array]:
        """How many rows each has, and the tokens of its longest."""
        rows, bounds = self._rows(units)
        lengths = self.view.lengths_at(rows)
        longest = np.maximum.reduceat(lengths, bounds[:-1]) if units.size else lengths
        return np.diff(bounds), longest

    def as_packs(self, units: Int64Array) -> Packs:
        """Every unit a pack of its own."""
        rows, bounds = self._rows(units)
        return Packs(rows, np.zeros_like(rows), self._row_lengths(rows), bounds)

    def expand(self, packs: Packs) -> Packs:
        """Packs whose pieces are units as packs whose pieces are rows."""
        if not self.grouped:
            return packs
        rows, bounds = rows_of_groups(self.view, packs.rows)
        return Packs(rows, np.zeros_like(rows), self._row_lengths(rows), bounds[packs.bounds])

    def _rows(self, units: Int64Array) -> tuple[Int64Array, Int64Array]:
        if self.grouped:
            return rows_of_groups(self.view, units)
        return units, np.arange(units.size + 1, dtype=np.int64)

    def _row_lengths(self, rows: Int64Array) -> Int64Array:
        lengths = self.view.lengths_at(rows)
        return lengths if self.taken is None else self.taken(lengths)

    def _summed(self, units: Int64Array, of_rows: Callable[[Int64Array], Int64Array]) -> Int64Array:
        """What rows have, added up for each unit."""
        if not self.grouped:
            return of_rows(units)
        rows, bounds = self._rows(units)
        totals = np.concatenate(([0], np.cumsum(of_rows(rows))))
        sums: Int64Array = np.diff(totals[bounds])
        return sums
