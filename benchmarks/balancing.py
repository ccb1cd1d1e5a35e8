"""How verl and slime distribute a step over ranks and micro-batches, from their documentation.

Both give every rank equally many rows, then split each rank's rows into micro-batches separately.
Both use the largest differencing method (Karmarkar-Karp) for both steps. verl balances estimated
work and takes as many micro-batches as the fullest rank's tokens need; slime balances tokens and
takes as many as first fit needs. Neither compares the resulting micro-batches with a budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Plan = list[list[list[int]]]
"""Row numbers of every micro-batch of every rank."""


def differencing(values: Sequence[int], parts: int, *, equal_size: bool) -> list[list[int]]:
    """Partition by largest differencing; with ``equal_size`` parts have equally many members.

    A state is a way to split some members into ``parts`` sets. The two states whose largest and
    smallest sets differ most are joined, the largest set of one with the smallest of the other.
    """
    order = sorted(range(len(values)), key=lambda at: values[at])
    if equal_size:
        firsts = [order[at : at + parts] for at in range(0, len(order), parts)]
        states = [[(values[at], [at]) for at in members] for members in firsts]
    else:
        states = [[(values[at], [at])] for at in order]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, state in enumerate(states):
        sets = state + [(0, [])] * (parts - len(state))
        sets.sort(key=lambda item: -item[0])
        heap.append((sets[-1][0] - sets[0][0], number, sets))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        joined = [
            (a + b, left + right) for (a, left), (b, right) in zip(one, reversed(two), strict=True)
        ]
        joined.sort(key=lambda item: -item[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [members for _, members in heap[0][2]]


def first_fit_count(lengths: Sequence[int], budget: int) -> int:
    """Return the number of micro-batches that first fit fills."""
    batches: list[int] = []
    for length in lengths:
        for at, tokens in enumerate(batches):
            if tokens + length <= budget:
                batches[at] += length
                break
        else:
            batches.append(length)
    return len(batches)


def _planned(
    shared: list[list[int]],
    lengths: Sequence[int],
    cost: Sequence[int],
    needed: Callable[[list[int]], int],
) -> Plan:
    each = max(needed([lengths[at] for at in rank]) for rank in shared)
    plan = []
    for rank in shared:
        parts = differencing([cost[at] for at in rank], each, equal_size=False)
        plan.append([[rank[at] for at in part] for part in parts])
    return plan


def verl(lengths: Sequence[int], work: Sequence[int], ranks: int, budget: int) -> Plan:
    """Balance work over ranks, then over as many micro-batches as the fullest rank needs."""
    shared = differencing(work, ranks, equal_size=True)
    return _planned(shared, lengths, work, lambda own: -(-sum(own) // budget))


def slime(lengths: Sequence[int], ranks: int, budget: int) -> Plan:
    """Balance tokens over ranks, then over as many micro-batches as first fit needs."""
    shared = differencing(lengths, ranks, equal_size=True)
    return _planned(shared, lengths, lengths, lambda own: first_fit_count(own, budget))
