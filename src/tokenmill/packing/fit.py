"""Bin packing of lengths: which pack each piece goes into.

Every function here takes an int64 array of lengths (1 ≤ length ≤ capacity) and returns one pack
number per piece. They are deterministic and know nothing of rows, files or ranks.

    best_fit     longest first, each into the fullest pack that still has room; near-optimal
    first_fit    in the given order, each into the first pack that has room
    sequential   in the given order, a new pack when the next piece does not fit
    balanced     packs as equal in tokens as possible, their number a multiple of the ranks

`best_fit` works on groups rather than pieces: all pieces of one length meet all packs with one
amount of room at once, which gives exactly the packs of the one-by-one algorithm (a pack that
took a piece and still has room for another such is then the fullest that has) at a fraction of
its time.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def best_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """Best fit, decreasing."""
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


def first_fit(lengths: Int64Array, capacity: int) -> Int64Array:
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


def sequential(lengths: Int64Array, capacity: int) -> Int64Array:
    """One pack after the other."""
    ends = np.cumsum(lengths)
    starts_pack = np.zeros(lengths.size, dtype=np.int64)
    place, before = 0, 0
    while place < lengths.size:
        starts_pack[place] = 1
        place = int(np.searchsorted(ends, before + capacity, side="right"))
        before = int(ends[place - 1])
    return np.cumsum(starts_pack) - 1


def balanced(lengths: Int64Array, capacity: int, ranks: int) -> Int64Array:
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
