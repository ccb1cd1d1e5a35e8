"""Packs: pieces of rows placed side by side in sequences of one length, as integers only.

A *piece* is a range of one row, nearly always the whole row. Within a pack pieces keep their order;
packs are numbered by their first piece.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError, check_one_of, check_positive

Int64Array = npt.NDArray[np.int64]

METHODS = ("best_fit", "first_fit", "sequential", "balanced")
OVERSIZE = ("error", "drop", "truncate", "split")
PACKING_VERSION = 1  # of the functions lengths → packs; part of every saved state


@dataclass(frozen=True)
class Pack:
    """How rows are packed.

    Args:
        length: Tokens per pack.
        method: best_fit (longest first, each into the fullest pack that still has room),
            first_fit (in the given order, each into the first pack that has room), sequential (a
            new pack when the next row does not fit), or balanced (packs as equal in tokens as
            possible, their number a multiple of the ranks).
        window: Rows of the order that are packed together; larger fills better and resumes slower.
        oversize: Rows longer than ``length``: error, drop, truncate (keep the beginning) or split.
    """

    length: int
    method: str = "best_fit"
    window: int = 65536
    oversize: str = "error"

    def __post_init__(self) -> None:
        for name in ("length", "window"):
            check_positive(name, getattr(self, name))
        check_one_of("method", self.method, METHODS)
        check_one_of("oversize", self.oversize, OVERSIZE)

    def document(self, ranks: int) -> dict[str, Any]:
        document = {"version": PACKING_VERSION, **asdict(self)}
        if self.method == "balanced":
            document["ranks"] = ranks
        return document


@dataclass(frozen=True)
class Slots:
    """Tokens of a pack that a row takes, if not its length. The reader of a pack pads its rows."""

    multiple: int = 1  # of every slot, as context parallelism needs it
    unpredicted: int = 0  # tokens of a row without a slot: 1 where rows are cut to predictions

    def __post_init__(self) -> None:
        check_positive("pad_multiple", self.multiple)

    def of(self, lengths: Int64Array) -> Int64Array:
        taken = np.maximum(lengths - self.unpredicted, lengths > 0)
        return -(-taken // self.multiple) * self.multiple


@dataclass(frozen=True)
class Packs:
    """The packs of one window."""

    rows: Int64Array  # of every piece, pack by pack
    starts: Int64Array  # first token of every piece within its row
    lengths: Int64Array  # tokens of every piece
    bounds: Int64Array  # where each pack's pieces begin; one more entry than packs

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
        sizes = self.bounds[numbers + 1] - self.bounds[numbers]
        bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        # Place of every piece: its pack's old start plus its place within the pack.
        shift = np.repeat(self.bounds[numbers] - bounds[:-1], sizes)
        places = np.arange(bounds[-1], dtype=np.int64) + shift
        return Packs(self.rows[places], self.starts[places], self.lengths[places], bounds)

    @classmethod
    def join(cls, parts: list[Packs]) -> Packs:
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
    """Pack the rows of one window; ``shares`` is what they take of a second budget (`share_of`)."""
    rows = np.asarray(rows, dtype=np.int64)
    pieces = _pieces(rows, np.asarray(lengths, dtype=np.int64), pack)
    sizes = pieces[2] if shares is None else np.maximum(pieces[2], shares(pieces[0]))
    methods: dict[str, Callable[[], Int64Array]] = {
        "best_fit": lambda: _best_fit(sizes, pack.length),
        "first_fit": lambda: _first_fit(sizes, pack.length),
        "sequential": lambda: _sequential(sizes, pack.length),
        "balanced": lambda: _balanced(sizes, pack.length, ranks),
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
    """Amounts of another budget, scaled to a budget of tokens.

    The larger of this and the tokens of every row, added up, keeps both budgets.
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
    ways = ("drop", "truncate", "split") if unit == "row" else ("drop",)
    return UsageError(
        f"{unit} {row} has {length} tokens and a pack only {pack.length}; choose ",
        ("oversize", *ways),
        " or a larger length",
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


# Bin packing: lengths between 1 and the capacity → one pack number per piece.


def _best_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """Best fit, decreasing.

    All pieces of one length meet all packs with one amount of room at once. That gives exactly the
    packs of the one-by-one algorithm: a pack that took a piece and still has room for another such
    is then the fullest that has.
    """
    descending = np.argsort(-lengths, kind="stable")
    ordered = lengths[descending]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
    packs_ordered = np.empty(lengths.size, dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set when some pack has room for r tokens: the search is one shift
    packs = 0
    for start, stop in zip(starts, [*starts[1:], lengths.size], strict=True):
        length = int(ordered[start])
        while start < stop:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                each = room // length
                wanted = -(-(stop - start) // each)
                available = by_room[room]
                chosen = available[-wanted:]
                del available[-wanted:]
                if not available:
                    rooms ^= 1 << room
            else:
                room, each = capacity, capacity // length
                wanted = -(-(stop - start) // each)
                chosen = list(range(packs, packs + wanted))
                packs += wanted
            placed = min(stop - start, len(chosen) * each)
            filled = chosen if each == 1 else np.repeat(chosen, each)[:placed]
            packs_ordered[start : start + placed] = filled
            start += placed
            # All chosen packs are full to the same mark, except that the last may have taken fewer.
            last_took = placed - (len(chosen) - 1) * each
            for group, left in (
                (chosen[:-1], room - each * length),
                (chosen[-1:], room - last_took * length),
            ):
                if group and left:
                    by_room[left].extend(group)
                    rooms |= 1 << left
    numbers = np.empty(lengths.size, dtype=np.int64)
    numbers[descending] = packs_ordered
    return numbers


def _first_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """First fit, in the given order; a tree of maxima finds the first pack with room."""
    leaves = 1 << max(0, int(lengths.size - 1).bit_length())
    most_room = [capacity] * (2 * leaves)  # packs not yet begun have all their room
    numbers = np.empty(lengths.size, dtype=np.int64)
    for place, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            if most_room[node] < length:
                node += 1
        numbers[place] = node - leaves
        most_room[node] -= length
        node //= 2
        while node:
            better = max(most_room[2 * node], most_room[2 * node + 1])
            if most_room[node] == better:
                break
            most_room[node] = better
            node //= 2
    return numbers


def _sequential(lengths: Int64Array, capacity: int) -> Int64Array:
    ends = np.cumsum(lengths)
    starts_pack = np.zeros(lengths.size, dtype=np.int64)
    place, before = 0, 0
    while place < lengths.size:
        starts_pack[place] = 1
        place = int(np.searchsorted(ends, before + capacity, side="right"))
        before = int(ends[place - 1])
    return np.cumsum(starts_pack) - 1


def _balanced(lengths: Int64Array, capacity: int, ranks: int) -> Int64Array:
    """Packs of about equal token counts, as many as a multiple of ``ranks``.

    Longest first, each piece into the emptiest pack, over the smallest such number of packs for
    which nothing overflows. Where pieces are fewer than packs, the last packs stay empty: every
    rank gets the same number of them all the same.
    """
    descending = np.argsort(-lengths, kind="stable")
    ordered = lengths[descending].tolist()
    packs = max(1, -(-int(lengths.sum()) // capacity))
    packs = -(-packs // ranks) * ranks
    numbers = np.empty(lengths.size, dtype=np.int64)
    while True:
        placed = _emptiest_first(ordered, capacity, packs)
        if placed is not None:
            numbers[descending] = placed
            return numbers
        packs += max(ranks, packs // 64 // ranks * ranks)  # large plans need not creep


def _emptiest_first(ordered: list[int], capacity: int, packs: int) -> list[int] | None:
    heap = [(0, number) for number in range(packs)]
    placed = []
    for length in ordered:
        tokens, number = heap[0]
        if tokens + length > capacity:
            return None
        heapq.heapreplace(heap, (tokens + length, number))
        placed.append(number)
    return placed
