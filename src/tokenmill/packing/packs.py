"""Packs: pieces of rows laid side by side into sequences of one length.

`Pack` is what the user asks for (length, method, window, what to do with rows that are too long). A
*piece* is a stretch of one row, nearly always the whole of it. `Packs` is the answer for one
window of the order: pieces sorted by pack, with the bounds of each pack, as integers only; no
token is looked at.

    capacity 8:   rows of 5, 4, 3, 3, 1        packs   [5 3] [4 3 1]

Changing length or method therefore re-tokenizes and copies nothing. Within a pack pieces keep the
order in which they came; packs are numbered by their first piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.packing import fit
from tokenmill.packing.fit import Int64Array

METHODS = ("best_fit", "first_fit", "sequential", "balanced")
OVERSIZE = ("error", "drop", "truncate", "split")
PACKING_VERSION = 1
"""Version of the functions lengths → packs; part of every saved state of a packing loader."""


@dataclass(frozen=True)
class Pack:
    """How rows are packed.

    Args:
        length: Tokens per pack.
        method: best_fit, first_fit, sequential, or balanced (the one that depends on the ranks).
        window: Rows of the order that are packed together; larger fills better and resumes slower.
        oversize: Rows longer than ``length``: error, drop, truncate (keep the beginning) or split.
    """

    length: int
    method: str = "best_fit"
    window: int = 65536
    oversize: str = "error"

    def __post_init__(self) -> None:
        for name in ("length", "window"):
            check_positive(f"Pack.{name}", getattr(self, name))
        check_one_of("Pack.method", self.method, METHODS)
        check_one_of("Pack.oversize", self.oversize, OVERSIZE)

    def document(self, ranks: int) -> dict[str, Any]:
        """What the packs depend on beside the order, for the saved state."""
        document = {"version": PACKING_VERSION, **asdict(self)}
        if self.method == "balanced":
            document["ranks"] = ranks
        return document


@dataclass(frozen=True)
class Slots:
    """How much of a pack a row takes where that is more or less than its tokens.

    Whoever fills the packs pads a row up to its slot.

    Args:
        multiple: A slot is a multiple of this many tokens, as context parallelism wants it.
        unpredicted: Tokens of a row that take no place: 1 where rows are cut to predictions.
    """

    multiple: int = 1
    unpredicted: int = 0

    def __post_init__(self) -> None:
        check_positive("pad_multiple", self.multiple)

    def of(self, lengths: Int64Array) -> Int64Array:
        """The slots of rows of these lengths."""
        taken = np.maximum(lengths - self.unpredicted, lengths > 0)
        return -(-taken // self.multiple) * self.multiple


@dataclass(frozen=True)
class Packs:
    """The packs of one window.

    Args:
        rows: Row of every piece, pack by pack.
        starts: First token of the piece within its row.
        lengths: Tokens of the piece.
        bounds: Where each pack's pieces begin; one more entry than packs.
    """

    rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    bounds: Int64Array

    def __len__(self) -> int:
        return self.bounds.size - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def per_pack(self, values: Int64Array) -> Int64Array:
        """Sums over the pieces of every pack."""
        ends = np.concatenate(([0], np.cumsum(values)))
        sums: Int64Array = ends[self.bounds[1:]] - ends[self.bounds[:-1]]
        return sums

    def longest(self, values: Int64Array) -> Int64Array:
        """The largest value among the pieces of every pack; 0 of a pack without any."""
        found = np.zeros(len(self), dtype=np.int64)
        np.maximum.at(found, np.repeat(np.arange(len(self)), np.diff(self.bounds)), values)
        return found

    def take(self, numbers: Int64Array) -> Packs:
        """Some packs, in the given order."""
        sizes = self.bounds[numbers + 1] - self.bounds[numbers]
        bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        # Place of every piece: its pack's old start plus its place within the pack.
        shift = np.repeat(self.bounds[numbers] - bounds[:-1], sizes)
        places = np.arange(bounds[-1], dtype=np.int64) + shift
        return Packs(self.rows[places], self.starts[places], self.lengths[places], bounds)

    @classmethod
    def join(cls, parts: list[Packs]) -> Packs:
        """Packs of several windows behind each other; of no window, none."""
        if len(parts) == 1:
            return parts[0]
        nothing = np.zeros(0, dtype=np.int64)
        ends = np.cumsum([0] + [part.rows.size for part in parts])
        bounds = [part.bounds[1:] + end for part, end in zip(parts, ends, strict=False)]
        return cls(
            np.concatenate([nothing, *(part.rows for part in parts)]),
            np.concatenate([nothing, *(part.starts for part in parts)]),
            np.concatenate([nothing, *(part.lengths for part in parts)]),
            np.concatenate([np.zeros(1, dtype=np.int64), *bounds]).astype(np.int64),
        )


def pack_window(
    rows: Int64Array,
    lengths: Int64Array,
    pack: Pack,
    ranks: int = 1,
    shares: Callable[[Int64Array], Int64Array] | None = None,
) -> Packs:
    """Pack the rows of one window.

    Args:
        rows: Row numbers in the order of the stream.
        lengths: Their token counts.
        pack: What is wished.
        ranks: Data-parallel ranks, for `balanced` only.
        shares: What rows take of another budget of a pack, as `share_of` says it.
    """
    rows = np.asarray(rows, dtype=np.int64)
    pieces = _pieces(rows, np.asarray(lengths, dtype=np.int64), pack)
    sizes = pieces[2] if shares is None else np.maximum(pieces[2], shares(pieces[0]))
    methods: dict[str, Callable[[], Int64Array]] = {
        "best_fit": lambda: fit.best_fit(sizes, pack.length),
        "first_fit": lambda: fit.first_fit(sizes, pack.length),
        "sequential": lambda: fit.sequential(sizes, pack.length),
        "balanced": lambda: fit.balanced(sizes, pack.length, ranks),
    }
    numbers = methods[pack.method]() if sizes.size else np.zeros(0, dtype=np.int64)
    packs = _sorted_by_pack(*pieces, numbers)
    if pack.method == "balanced":
        # Packs without a piece have no number yet; they are real, so that all ranks have as many.
        missing = -len(packs) % ranks
        bounds = np.concatenate((packs.bounds, np.repeat(packs.bounds[-1:], missing)))
        packs = Packs(packs.rows, packs.starts, packs.lengths, bounds)
    return packs


def share_of(amounts: Int64Array, most: int, tokens: int) -> Int64Array:
    """What amounts take of a budget, in tokens of a budget of tokens.

    Whoever adds up, of every row, the larger of this and its tokens keeps both budgets.
    """
    return -(-amounts * tokens // most)


def _pieces(
    rows: Int64Array, lengths: Int64Array, pack: Pack
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Apply the oversize policy; rows without tokens take no place."""
    kept = lengths > 0
    too_long = lengths > pack.length
    if too_long.any():
        if pack.oversize == "error":
            place = int(np.argmax(too_long))
            raise oversize_error(int(rows[place]), int(lengths[place]), pack)
        if pack.oversize == "drop":
            kept &= ~too_long
        elif pack.oversize == "truncate":
            lengths = np.minimum(lengths, pack.length)
    if not kept.all():
        rows, lengths = rows[kept], lengths[kept]
    if pack.oversize != "split" or not too_long.any():
        return rows, np.zeros(rows.size, dtype=np.int64), lengths
    counts = -(-lengths // pack.length)
    owner = np.repeat(np.arange(rows.size), counts)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    starts = (np.arange(owner.size) - first[owner]) * pack.length
    return rows[owner], starts, np.minimum(lengths[owner] - starts, pack.length)


def oversize_error(row: int, length: int, pack: Pack, unit: str = "row") -> UsageError:
    """What to say of a row, or a group, that does not fit."""
    ways = "'drop' | 'truncate' | 'split'" if unit == "row" else "'drop'"
    return UsageError(
        f"{unit} {row} has {length} tokens and a pack only {pack.length}; "
        f"choose Pack(oversize={ways}) or a larger length"
    )


def _sorted_by_pack(
    rows: Int64Array, starts: Int64Array, lengths: Int64Array, numbers: Int64Array
) -> Packs:
    """Sort pieces by pack, packs by their first piece."""
    if not numbers.size:
        return Packs(rows, starts, lengths, np.zeros(1, dtype=np.int64))
    by_number = np.argsort(numbers, kind="stable")
    firsts = by_number[np.flatnonzero(np.diff(numbers[by_number], prepend=-1))]
    renumbered = np.empty(int(numbers.max()) + 1, dtype=np.int64)
    renumbered[numbers[np.sort(firsts)]] = np.arange(firsts.size)
    numbers = renumbered[numbers]
    places = np.argsort(numbers, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(numbers)))).astype(np.int64)
    return Packs(rows[places], starts[places], lengths[places], bounds)
