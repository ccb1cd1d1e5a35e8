"""Packing: assign rows to sequences of one length. Works on lengths only.

A *piece* is a range of one row, nearly always the whole row. Pieces of a pack keep their order;
packs are numbered by their first piece.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import MAX_INT32, UsageError, check_integer, check_one_of, check_positive

Int64Array = npt.NDArray[np.int64]

METHODS = ("best_fit", "first_fit", "sequential", "balanced")
OVERSIZE = ("error", "drop", "truncate", "split")
PACKING_VERSION = 1  # of the functions lengths → packs; part of every saved state


@dataclass(frozen=True)
class Pack:
    """How rows are packed.

    Args:
        length: Tokens per pack.
        method: best_fit (longest row first, into the fullest pack that it fits), first_fit (in
            order, into the first pack that it fits), sequential (a new pack when the next row does
            not fit), or balanced (packs of about equal tokens, their number a multiple of the
            ranks).
        window: Rows of the order that are packed together. Larger windows waste fewer tokens and
            resume slower.
        oversize: What to do with rows longer than ``length``: error, drop, truncate or split.
    """

    length: int
    method: str = "best_fit"
    window: int = 65536
    oversize: str = "error"

    def __post_init__(self) -> None:
        for name in ("length", "window"):  # `cu_seqlens` has 32 bits
            number = check_integer(name, getattr(self, name), 1, MAX_INT32)
            object.__setattr__(self, name, number)
        check_one_of("method", self.method, METHODS)
        check_one_of("oversize", self.oversize, OVERSIZE)

    def document(self, ranks: int) -> dict[str, Any]:
        document = {"version": PACKING_VERSION, **asdict(self)}
        if self.method == "balanced":
            document["ranks"] = ranks
        return document


def check_pack(pack: Any) -> None:
    if not isinstance(pack, Pack):
        is_length = isinstance(pack, int) and not isinstance(pack, bool)
        advice = f"; write pack=tm.Pack({pack})" if is_length else ""
        raise UsageError(f"pack must be a tm.Pack, got {pack!r}{advice}")


@dataclass(frozen=True)
class Slots:
    """Tokens that a row takes in a pack whose reader pads every row."""

    multiple: int = 1  # slots are multiples of this, for context parallelism
    label_shift: int = 0  # tokens of a row without a slot; 1 for a reader that shifts labels

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiple", check_positive("pad_multiple", self.multiple))

    def of(self, lengths: Int64Array) -> Int64Array:
        used = np.maximum(lengths - self.label_shift, lengths > 0)
        return -(-used // self.multiple) * self.multiple


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
        """Return sums over the pieces of every pack."""
        ends = np.concatenate(([0], np.cumsum(values)))
        sums: Int64Array = ends[self.bounds[1:]] - ends[self.bounds[:-1]]
        return sums

    def longest(self, values: Int64Array) -> Int64Array:
        """Return the largest value among the pieces of every pack; 0 for an empty pack."""
        largest = np.zeros(len(self), dtype=np.int64)
        np.maximum.at(largest, np.repeat(np.arange(len(self)), np.diff(self.bounds)), values)
        return largest

    def take(self, numbers: Int64Array) -> Packs:
        sizes = self.bounds[numbers + 1] - self.bounds[numbers]
        bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        shift = np.repeat(self.bounds[numbers] - bounds[:-1], sizes)
        pieces = np.arange(bounds[-1], dtype=np.int64) + shift
        return Packs(self.rows[pieces], self.starts[pieces], self.lengths[pieces], bounds)

    @classmethod
    def join(cls, parts: list[Packs]) -> Packs:
        if len(parts) == 1:
            return parts[0]
        empty = np.zeros(0, dtype=np.int64)
        ends = np.cumsum([0] + [part.rows.size for part in parts])
        bounds = [part.bounds[1:] + end for part, end in zip(parts, ends, strict=False)]
        return cls(
            np.concatenate([empty, *(part.rows for part in parts)]),
            np.concatenate([empty, *(part.starts for part in parts)]),
            np.concatenate([empty, *(part.lengths for part in parts)]),
            np.concatenate([np.zeros(1, dtype=np.int64), *bounds]).astype(np.int64),
        )


def pack_window(
    rows: Int64Array,
    lengths: Int64Array,
    pack: Pack,
    ranks: int = 1,
    shares: Callable[[Int64Array], Int64Array] | None = None,
) -> Packs:
    """Pack the rows of one window; ``shares`` is their use of a second budget (`share_of`)."""
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
        # Add empty packs, so that all ranks have equally many.
        missing = -len(packs) % ranks
        bounds = np.concatenate((packs.bounds, np.repeat(packs.bounds[-1:], missing)))
        packs = Packs(packs.rows, packs.starts, packs.lengths, bounds)
    return packs


def share_of(amounts: Int64Array, limit: int, tokens: int) -> Int64Array:
    """Return amounts of another budget, scaled to a budget of tokens.

    A pack keeps both budgets if the sum of max(amount, tokens) over its rows is within budget.
    """
    return -(-amounts * tokens // limit)


def _pieces(
    rows: Int64Array, lengths: Int64Array, pack: Pack
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Apply the oversize policy, and drop rows without tokens."""
    keep = lengths > 0
    too_long = lengths > pack.length
    if too_long.any():
        if pack.oversize == "error":
            number = int(np.argmax(too_long))
            raise oversize_error(int(rows[number]), int(lengths[number]), pack)
        if pack.oversize == "drop":
            keep &= ~too_long
        elif pack.oversize == "truncate":
            lengths = np.minimum(lengths, pack.length)
    if not keep.all():
        rows, lengths = rows[keep], lengths[keep]
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
        f"{unit} {row} has {length} tokens, a pack has {pack.length}; set ",
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
    order = np.argsort(numbers, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(numbers)))).astype(np.int64)
    return Packs(rows[order], starts[order], lengths[order], bounds)


# Bin packing: these functions take lengths from 1 to the capacity and return pack numbers.


def _best_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """Best fit, decreasing.

    Pieces of one length are placed together, into all packs with the same free space. This gives
    exactly the packs of the one-by-one algorithm: a pack that took a piece and fits another of
    that length is then the fullest that does.
    """
    descending = np.argsort(-lengths, kind="stable")
    ordered = lengths[descending]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
    packs_ordered = np.empty(lengths.size, dtype=np.int64)
    capacity = min(capacity, int(lengths.sum()))  # more space would not change the packs
    by_capacity: dict[int, list[int]] = defaultdict(list)
    capacities = 0  # bit r is set if a pack has r tokens free, so that a shift finds the fullest
    packs = 0
    for start, stop in zip(starts, [*starts[1:], lengths.size], strict=True):
        length = int(ordered[start])
        while start < stop:
            fitting = capacities >> length
            if fitting:
                capacity_left = length + (fitting & -fitting).bit_length() - 1
                each = capacity_left // length
                needed = -(-(stop - start) // each)
                available = by_capacity[capacity_left]
                chosen = available[-needed:]
                del available[-needed:]
                if not available:
                    capacities ^= 1 << capacity_left
            else:
                capacity_left, each = capacity, capacity // length
                needed = -(-(stop - start) // each)
                chosen = list(range(packs, packs + needed))
                packs += needed
            placed = min(stop - start, len(chosen) * each)
            filled = chosen if each == 1 else np.repeat(chosen, each)[:placed]
            packs_ordered[start : start + placed] = filled
            start += placed
            # All chosen packs take equally many pieces, except that the last may take fewer.
            last_took = placed - (len(chosen) - 1) * each
            for group, left in (
                (chosen[:-1], capacity_left - each * length),
                (chosen[-1:], capacity_left - last_took * length),
            ):
                if group and left:
                    by_capacity[left].extend(group)
                    capacities |= 1 << left
    numbers = np.empty(lengths.size, dtype=np.int64)
    numbers[descending] = packs_ordered
    return numbers


def _first_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """First fit, in order; a tree of maxima finds the first pack with enough space."""
    leaves = 1 << max(0, int(lengths.size - 1).bit_length())
    most_capacity = [capacity] * (2 * leaves)
    numbers = np.empty(lengths.size, dtype=np.int64)
    for piece, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            if most_capacity[node] < length:
                node += 1
        numbers[piece] = node - leaves
        most_capacity[node] -= length
        node //= 2
        while node:
            better = max(most_capacity[2 * node], most_capacity[2 * node + 1])
            if most_capacity[node] == better:
                break
            most_capacity[node] = better
            node //= 2
    return numbers


def _sequential(lengths: Int64Array, capacity: int) -> Int64Array:
    ends = np.cumsum(lengths)
    starts_pack = np.zeros(lengths.size, dtype=np.int64)
    piece, before = 0, 0
    while piece < lengths.size:
        starts_pack[piece] = 1
        piece = int(np.searchsorted(ends, before + capacity, side="right"))
        before = int(ends[piece - 1])
    return np.cumsum(starts_pack) - 1


def _balanced(lengths: Int64Array, capacity: int, ranks: int) -> Int64Array:
    """Packs of about equal token counts, their number a multiple of ``ranks``.

    Longest piece first, into the emptiest pack, with the smallest number of packs that suffices.
    With fewer pieces than packs, the last packs stay empty.
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
        packs += max(ranks, packs // 64 // ranks * ranks)  # larger steps for many packs


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
