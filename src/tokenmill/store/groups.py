"""Groups of adjacent rows, such as the answers to one prompt, by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from tokenmill.store.columns import row_numbers

if TYPE_CHECKING:
    from tokenmill.data.view import View
    from tokenmill.store.store import Row, Store


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """Rows that stay together, such as the answers to one prompt."""

    rows: tuple[Row, ...]  # chosen first, or by rank

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> tuple[bool, ...] | None:
        """Whether each row is preferred: (True, False) for a pair; None for ranked rows."""
        labels = [row.label for row in self.rows]
        return None if None in labels else tuple(bool(label) for label in labels)

    @property
    def scores(self) -> tuple[float, ...] | None:
        scores = [row.score for row in self.rows]
        return None if None in scores else tuple(score for score in scores if score is not None)

    @property
    def margin(self) -> float | None:
        return self.rows[0].margin

    @property
    def prompt_tokens(self) -> int | None:
        """Number of untrained tokens that all rows begin with.

        None if the template renders the prompt differently for different answers.
        """
        return self.rows[0].prompt_tokens

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(row)) for row in self.rows)
        return f"Group({sizes} tokens, {self.prompt_tokens} of the prompt, {self.rows[0].origin})"


class Groups(Sequence[Group]):
    """The groups of a store or a view; empty if it has none."""

    def __init__(self, data: Store | View) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.group_count if self._data.has_groups else 0

    @property
    def rows(self) -> Store | View:
        """The store or view that contains the groups; pass it to a loader."""
        return self._data

    @overload
    def __getitem__(self, index: SupportsIndex) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> Groups: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Group | Groups:
        if isinstance(index, slice):
            return Groups(self.select(range(len(self))[index]))
        first, stop = self._bounds([index])
        return Group(tuple(self._data.batch(range(int(first[0]), int(stop[0])))))

    def select(self, groups: Iterable[SupportsIndex]) -> View:
        """Return a view of the rows of some groups, in this order."""
        firsts, stops = self._bounds(groups)
        return self._data.select(
            row
            for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True)
            for row in range(first, stop)
        )

    def _bounds(
        self, groups: Iterable[SupportsIndex]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        numbers = row_numbers(groups, len(self), "group")
        return self._data.group_starts(numbers), self._data.group_starts(numbers + 1)

    def __repr__(self) -> str:
        return f"Groups({len(self):,})"
