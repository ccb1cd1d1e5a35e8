"""Encoded rows: ids and masks of a batch, flat, and what became of the rows that are not there.

The encoder, or `tokenized` for rows that bring their ids, makes an `Encoded` of a batch; a build
cuts it by `apply_length` and writes it. Rows keep their number: a rejected row stays in `Encoded`
as an empty one, so that index *i* still speaks of text *i*; `Encoded.kept` lists the others.
`apply_length` is the length policy: it rejects rows in which nothing is trained, and drops or cuts
the ones that are too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokenmill.errors import RowError, UsageError

OVERLONG = ("drop", "truncate")


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
        """The same batch with exactly these rows rejected: emptied of tokens and turns."""
        gone = np.zeros(len(self), dtype=bool)
        gone[list(rejected)] = True
        left = _cut(self, np.where(gone, 0, np.diff(self.row_starts)), gone) if gone.any() else self
        return replace(left, rejected=sorted(rejected.items()))

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


def apply_length(encoded: Encoded, max_length: int | None, overlong: str = "drop") -> Encoded:
    """Reject rows without a trained token, and rows that are too long or what is left of them.

    Args:
        encoded: A batch; it is not changed.
        max_length: Most tokens a row may have; None for no limit.
        overlong: ``drop`` rejects a longer row; ``truncate`` keeps its first tokens, and rejects
            it when none of them is trained.
    """
    if overlong not in OVERLONG:
        raise UsageError(f"overlong={overlong!r}: choose one of {', '.join(OVERLONG)}")
    if max_length is not None and max_length < 1:
        raise UsageError(f"max_length={max_length}: at least 1")
    lengths = encoded.lengths.astype(np.int64)
    refused = dict(encoded.rejected)
    for row in np.flatnonzero(encoded.trained == 0).tolist():
        refused.setdefault(
            row, RowError("no token of this row would be trained", reason="no_trained_tokens")
        )
    if max_length is not None and bool((lengths > max_length).any()):
        too_long = np.flatnonzero(lengths > max_length)
        if overlong == "truncate":
            lengths = np.minimum(lengths, max_length)
            encoded = _cut(encoded, lengths, np.zeros(len(encoded), dtype=bool))
            too_long = too_long[encoded.trained[too_long] == 0]
        for row in too_long.tolist():
            refused.setdefault(row, _too_long(max_length, overlong))
    return encoded if len(refused) == len(encoded.rejected) else encoded.rejecting(refused)


def _too_long(max_length: int, overlong: str) -> RowError:
    if overlong == "truncate":
        return RowError(
            f"nothing trained is left in the first {max_length} tokens", reason="no_trained_tokens"
        )
    return RowError(overlong_message(max_length), reason="overlong")


def overlong_message(max_length: int) -> str:
    """What a dropped row is told; deriving another limit says it in the same words."""
    return f"longer than max_length={max_length} tokens"


def _cut(encoded: Encoded, lengths: np.ndarray, gone: np.ndarray) -> Encoded:
    """Keep the first tokens of every row; rows that are gone lose their turns as well."""
    old = np.diff(encoded.row_starts)
    # Two steps per row in a running sum: keep from its start on, stop at its new end.
    steps = np.zeros(len(encoded.ids) + 1, dtype=np.int8)
    cut = lengths < old
    np.add.at(steps, encoded.row_starts[:-1][cut] + lengths[cut], 1)
    np.subtract.at(steps, encoded.row_starts[1:][cut], 1)
    keep = np.cumsum(steps[:-1], dtype=np.int8) == 0
    turns = np.diff(encoded.turn_starts)
    rows_of_turns = np.repeat(np.arange(len(lengths)), turns)
    turn_ends = np.minimum(encoded.turn_ends, lengths[rows_of_turns]).astype(np.int32)
    return replace(
        encoded,
        ids=encoded.ids[keep],
        mask=encoded.mask[keep],
        row_starts=starts_of(lengths),
        turn_ends=turn_ends[~gone[rows_of_turns]],
        turn_starts=starts_of(np.where(gone, 0, turns)),
    )
