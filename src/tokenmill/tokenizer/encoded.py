"""Encoded rows: ids and masks of a batch, flat.

The encoder makes an `Encoded` of a batch of texts, and `tokenized` of rows that bring their ids. A
rejected row stays in it as an empty one, so that index *i* still means text *i*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokenmill.errors import RowError


def starts_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64: where each of several stretches that lie end to end starts, and the total."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of rows as tokens.

    Attributes:
        ids: int32, all rows one after the other.
        row_starts: int64, one more than rows: row *i* is ``ids[row_starts[i]:row_starts[i + 1]]``.
        mask: uint8 per token, 1 where trained.
        turn_ends: int32, per turn the number of tokens of its row up to its end.
        turn_starts: int64, one more than rows: where each row's turns start in ``turn_ends``.
        rejected: (row, why) of rows that hold nothing here, by row.
        notes: Counters for the store's proof: engine, audited, mismatches, …
    """

    ids: np.ndarray
    row_starts: np.ndarray
    mask: np.ndarray
    turn_ends: np.ndarray
    turn_starts: np.ndarray
    rejected: list[tuple[int, RowError]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.row_starts).astype(np.int32)

    @property
    def trained(self) -> np.ndarray:
        counts = np.zeros(len(self), dtype=np.int32)
        filled = np.flatnonzero(np.diff(self.row_starts))
        if len(filled):  # rows that hold something lie end to end
            starts = self.row_starts[filled]
            counts[filled] = np.add.reduceat(self.mask, starts, dtype=np.int32)
        return counts

    @property
    def kept(self) -> np.ndarray:
        """int64: the rows that are not rejected."""
        alive = np.ones(len(self), dtype=bool)
        alive[[row for row, _ in self.rejected]] = False
        return np.flatnonzero(alive)

    def rejecting(self, rejected: Mapping[int, RowError]) -> Encoded:
        """Return the batch with exactly these rows rejected: without tokens and turns."""
        if not rejected:
            return replace(self, rejected=[])
        keep = np.ones(len(self), dtype=bool)
        keep[list(rejected)] = False
        lengths, turns = np.diff(self.row_starts), np.diff(self.turn_starts)
        tokens = np.repeat(keep, lengths)
        return replace(
            self,
            ids=self.ids[tokens],
            mask=self.mask[tokens],
            row_starts=starts_of(np.where(keep, lengths, 0)),
            turn_ends=self.turn_ends[np.repeat(keep, turns)],
            turn_starts=starts_of(np.where(keep, turns, 0)),
            rejected=sorted(rejected.items()),
        )

    def repeated(self, counts: np.ndarray) -> Encoded:
        """The same batch with each token as often as this says, at least once."""
        places = starts_of(counts)
        row_starts = np.repeat(self.row_starts[:-1], np.diff(self.turn_starts))
        turn_ends = places[row_starts + self.turn_ends] - places[row_starts]
        return replace(
            self,
            ids=np.repeat(self.ids, counts),
            mask=np.repeat(self.mask, counts),
            row_starts=places[self.row_starts],
            turn_ends=turn_ends.astype(np.int32),
        )

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids, mask and turn ends of one row."""
        tokens = slice(self.row_starts[number], self.row_starts[number + 1])
        turns = slice(self.turn_starts[number], self.turn_starts[number + 1])
        return self.ids[tokens], self.mask[tokens], self.turn_ends[turns]
