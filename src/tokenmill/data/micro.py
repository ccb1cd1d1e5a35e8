"""Micro-batches: cut a step into batches under a token budget with about equal work.

A *unit* must stay together: a row, a pack, a group of rows. Its tokens count against the budget and
its cost is balanced; both are integers, so every machine computes the same plan. Micro-batch
``rank × each + k`` is the k-th of that rank. A *slab* is the rows of one micro-batch side by side.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm

import numpy as np

from tokenmill.data.packs import Int64Array, Packs, share_of
from tokenmill.errors import UsageError, check_one_of, check_positive

BALANCE = ("tokens", "work", "trained")
LAYOUTS = ("slab", "padded")
SHARDS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Align:
    """To which multiples batches are padded.

    Args:
        sequence: Tokens of every sequence: 2 × context-parallel ranks, say. Padded rows: the width.
        slab: Tokens of every slab: what tensor parallelism with sequence parallelism, expert
            parallelism or the blocks of FP8 (16) and MXFP8 (32) want. Padded rows: the width, too.
    """

    sequence: int = 1
    slab: int = 1

    def __post_init__(self) -> None:
        for name in ("sequence", "slab"):
            check_positive(f"Align.{name}", getattr(self, name))


@dataclass(frozen=True)
class MicroBatches:
    """How a step is cut into micro-batches.

    Args:
        max_tokens: Tokens that a rank holds in one micro-batch, padding included, at most. Where
            ranks share a slab (``context_parallel``), the slab has as many times more.
        balance: What is made equal over ranks and micro-batches: tokens; work, tokens and the
            square of every sequence's length in the proportion of a transformer; or trained
            tokens.
        align: Multiples for sequences and slabs.
        context_parallel: So many consecutive ranks share every slab, each with its shard.
        shards: zigzag: of every sequence the r-th and the r-th last of twice as many stretches as
            ranks; contiguous: the r-th stretch of the slab. Padded rows are cut row by row.
        layout: slab lays rows side by side; padded gives every row its own line. With a `Pack` the
            samples are packs, one per line.
        hidden_size: Of the model, for ``balance="work"``: a token's matrices take as much work as
            attention to 6 × hidden_size others.
        max_patches: Patches of the images of a micro-batch, at most; with a `Pack` also those of a
            pack. None sets no bound.
    """

    max_tokens: int
    balance: str = "work"
    align: Align = field(default_factory=Align)
    context_parallel: int = 1
    shards: str = "zigzag"
    layout: str = "slab"
    hidden_size: int = 4096
    max_patches: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "context_parallel", "hidden_size"):
            check_positive(f"MicroBatches.{name}", getattr(self, name))
        if self.max_patches is not None:
            check_positive("MicroBatches.max_patches", self.max_patches)
        if not isinstance(self.align, Align):
            raise UsageError(f"MicroBatches.align must be a tm.Align, not {self.align!r}")
        for name, known in (("balance", BALANCE), ("shards", SHARDS), ("layout", LAYOUTS)):
            check_one_of(f"MicroBatches.{name}", getattr(self, name), known)
        if self.budget < self.slab:
            raise UsageError(
                f"a slab is a multiple of {self.slab} tokens, and max_tokens={self.max_tokens} "
                f"allows {self.max_tokens * self.context_parallel}"
            )

    @property
    def sequence(self) -> int:
        """The length of every sequence, padding included, is a multiple of this."""
        halves = 2 * self.context_parallel if self.shards == "zigzag" else 1
        shared = halves if self.context_parallel > 1 else 1
        if self.layout == "padded":
            return lcm(self.align.sequence, self.align.slab, shared, self.context_parallel)
        return lcm(self.align.sequence, shared)

    @property
    def slab(self) -> int:
        """The length of every slab is a multiple of this."""
        return lcm(self.align.slab, self.sequence, self.context_parallel)

    @property
    def budget(self) -> int:
        """Tokens of a slab, at most; the ranks that share it hold them together."""
        return self.max_tokens * self.context_parallel // self.slab * self.slab

    def places(self, lengths: Int64Array) -> Int64Array:
        return -(-lengths // self.sequence) * self.sequence

    def tokens_of(self, packs: Packs) -> Int64Array:
        places = self.places(packs.lengths)
        if self.layout == "padded":
            return packs.longest(places) * np.diff(packs.bounds)
        return packs.per_pack(places)

    def plan(
        self,
        packs: Packs,
        trained: Int64Array,
        ranks: int,
        length: int | None = None,
        patches: Int64Array | None = None,
    ) -> tuple[Int64Array, int]:
        """Micro-batch of every sample of a step, and how many each rank has.

        ``packs`` are the samples of all ranks; ``trained`` and ``patches`` (needed with
        ``max_patches``) count those of every piece; ``length`` is that of samples that are packs.
        Micro-batches k of all ranks have similar costs, so ranks that synchronize at every
        micro-batch wait little. The costliest come first, so that a run that does not fit into
        memory fails at its first step.
        """
        loads = None
        if self.max_patches is not None and patches is not None:
            loads = packs.per_pack(patches), self.max_patches
        places = self.places(packs.lengths)
        by_trained = self.balance == "trained"
        if length is None and self.layout == "padded":
            widths, lines = packs.longest(places), np.diff(packs.bounds)
            cost = packs.per_pack(trained) if by_trained else self._cost(widths)
            return cut(widths, lines, cost, ranks, self.budget, adds_up=by_trained, loads=loads)
        tokens = packs.per_pack(places)
        if length is not None:
            tokens = np.full(len(packs), length, dtype=np.int64)
        taken = tokens
        if loads is not None:
            taken = np.maximum(tokens, share_of(*loads, self.budget))
        if self.balance == "tokens":
            return level(taken, tokens, ranks, self.budget)
        cost = packs.per_pack(trained if by_trained else self._cost(places))
        return level(taken, cost, ranks, self.budget)

    def _cost(self, places: Int64Array) -> Int64Array:
        if self.balance == "tokens":
            return places
        return 6 * self.hidden_size * places + places * places


_POOLED = 1 << 14  # units that one plan divides again, at most: some 10 ms
_FINENESS = 12  # bits of precision of the cost of the costliest range
_SKIPS = 1024  # full micro-batches that are skipped, at least, before more are made


def level(tokens: Int64Array, cost: Int64Array, ranks: int, budget: int) -> tuple[Int64Array, int]:
    """Micro-batch of every unit of at most ``budget`` tokens, and how many each rank has.

    The costliest first, each to the micro-batch with the least cost so far; then the costliest and
    the cheapest are pooled and divided again, repeatedly.
    """
    total = int(tokens.sum())
    each = max(1, -(-total // (ranks * budget)))
    each += each >> 5  # a large plan need not be the tightest: finding that would take many tries
    descending = np.lexsort((-tokens, -cost))
    while True:
        placed = _costliest_first(
            tokens[descending].tolist(), cost[descending].tolist(), ranks * each, budget
        )
        if placed is not None:
            break
        each += max(1, each >> 5)
    groups = np.empty(tokens.size, dtype=np.int64)
    groups[descending] = placed
    _even_out(groups, tokens, cost, budget)
    return _deal(groups, cost, ranks, each), each


def _costliest_first(
    tokens: list[int], cost: list[int], groups: int, budget: int
) -> list[int] | None:
    """Each unit to the group of the least cost that has room; None where one finds none."""
    # A group's key orders by cost, then by number; in between by tokens where some units cost none.
    below = max(1, (groups - 1).bit_length())
    number_of = (1 << below) - 1
    if all(cost):
        steps = [worth << below for worth in cost]
    else:
        shift = budget.bit_length()
        pairs = zip(tokens, cost, strict=True)
        steps = [((worth << shift) + count) << below for count, worth in pairs]
    heap, held, placed = list(range(groups)), [0] * groups, []
    skips = max(_SKIPS, len(tokens) >> 3)
    replace = heapq.heapreplace
    for count, step in zip(tokens, steps, strict=True):
        key = heap[0]
        number = key & number_of
        passed = []
        while held[number] + count > budget:
            passed.append(heapq.heappop(heap))
            skips -= 1
            if skips < 0 or not heap:
                return None
            key = heap[0]
            number = key & number_of
        held[number] += count
        placed.append(number)
        replace(heap, key + step)
        for key in passed:
            heapq.heappush(heap, key)
    return placed


def _deal(groups: Int64Array, cost: Int64Array, ranks: int, each: int) -> Int64Array:
    """Number groups by rank: round by round, the costliest to the rank that has the least."""
    costs = np.zeros(ranks * each, dtype=np.int64)
    np.add.at(costs, groups, cost)
    descending = np.argsort(-costs, kind="stable")
    renumbered = np.empty(ranks * each, dtype=np.int64)
    loads = np.zeros(ranks, dtype=np.int64)
    for round_ in range(each):
        dealt = descending[round_ * ranks : (round_ + 1) * ranks]
        least_first = np.argsort(loads, kind="stable")
        renumbered[dealt] = least_first * each + round_
        loads[least_first] += costs[dealt]
    return renumbered[groups]


def _even_out(groups: Int64Array, tokens: Int64Array, cost: Int64Array, budget: int) -> None:
    """Pool the costliest and the cheapest group and divide them again, while that helps."""
    loads = np.zeros(int(groups.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(loads, groups, cost)
    by_group = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[by_group], np.arange(loads.size + 1))
    units = [by_group[first:stop] for first, stop in pairwise(bounds.tolist())]
    left = _POOLED
    while True:
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[high] - loads[low])
        pool = np.concatenate((units[high], units[low]))
        left -= pool.size
        if gap <= 1 or left < 0:
            return
        side = np.asarray(_halves(cost[pool].tolist()), dtype=np.bool_)
        halves = pool[~side], pool[side]
        costs = [int(cost[half].sum()) for half in halves]
        fits = all(int(tokens[half].sum()) <= budget for half in halves)
        if not fits or abs(costs[0] - costs[1]) >= gap:
            return
        for group, half, load in zip((high, low), halves, costs, strict=True):
            groups[half], units[group], loads[group] = group, half, load


def _halves(costs: list[int]) -> list[int]:
    """0 or 1 for every unit, the sums of both sides close: the largest differencing method.

    The two largest go to different sides and their difference takes their place.
    """
    heap = [(-cost, unit) for unit, cost in enumerate(costs)]
    heapq.heapify(heap)
    against = []
    while len(heap) > 1:
        first, one = heapq.heappop(heap)
        second, other = heap[0]
        heapq.heapreplace(heap, (first - second, one))
        against.append((one, other))
    side = [0] * len(costs)
    for one, other in reversed(against):
        side[other] = 1 - side[one]
    return side


def cut(
    widths: Int64Array,
    lines: Int64Array,
    cost: Int64Array,
    ranks: int,
    budget: int,
    *,
    adds_up: bool = False,
    loads: tuple[Int64Array, int] | None = None,
) -> tuple[Int64Array, int]:
    """Micro-batch of every unit where rows are padded, and how many each rank has.

    Units are sorted by width and cut into ranges, the costliest of which is as cheap as possible.

    Args:
        widths: Tokens of every unit's longest row, rounded up as the batch will be.
        lines: Rows of every unit; lines × width is at most ``budget``.
        cost: Of a line of every unit's width, not falling with the width: every line of a
            micro-batch costs as much as its longest. With ``adds_up``, of the unit.
        ranks: Among which micro-batches are shared.
        budget: Lines × longest, at most.
        adds_up: Costs of units add up, whatever the width of their batch.
        loads: What every unit takes of a second budget, each at most that, and the budget.
    """
    descending = np.lexsort((-cost, -widths))
    costs = cost[descending]
    lines_before = np.concatenate(([0], np.cumsum(lines[descending]))).tolist()
    cost_before = np.concatenate(([0], np.cumsum(costs))).tolist()
    most_lines = (budget // np.maximum(widths[descending], 1)).tolist()
    line_costs = np.maximum(costs, 1).tolist()
    units = widths.size
    load_before, most_load = [0] * (units + 1), 0
    if loads is not None:
        load_before = np.concatenate(([0], np.cumsum(loads[0][descending]))).tolist()
        most_load = loads[1]

    def stretches(most: int) -> list[int]:
        """Where stretches of at most this cost begin; a single unit may cost more."""
        starts, place = [], 0
        while place < units:
            starts.append(place)
            held = (
                most_lines[place] if adds_up else min(most_lines[place], most // line_costs[place])
            )
            stop = bisect_right(lines_before, lines_before[place] + held) - 1
            if adds_up:
                stop = min(stop, bisect_right(cost_before, cost_before[place] + most) - 1)
            stop = min(stop, bisect_right(load_before, load_before[place] + most_load) - 1)
            place = max(stop, place + 1)
        return starts

    def costliest(starts: list[int]) -> int:
        before = cost_before if adds_up else lines_before
        ends = [*starts[1:], units]
        held = [before[end] - before[start] for start, end in zip(starts, ends, strict=False)]
        if not adds_up:
            held = [count * line_costs[start] for count, start in zip(held, starts, strict=True)]
        return max(held, default=0)

    starts = stretches(max(cost_before[-1], lines_before[-1] * max(line_costs, default=0)))
    each = max(1, -(-len(starts) // ranks))
    total = cost_before[-1] if adds_up else int((costs * lines[descending]).sum())
    low, high = total // (ranks * each), costliest(starts)
    while high - low > high >> _FINENESS:
        middle = (low + high) // 2
        if len(stretches(middle)) <= ranks * each:
            high = middle
        else:
            low = middle + 1
    starts = _split_to(stretches(high), units, ranks * each)
    sizes = np.diff([*starts, units])
    groups = np.empty(units, dtype=np.int64)
    groups[descending] = np.repeat(np.arange(sizes.size), sizes)
    paid = cost
    if not adds_up:
        paid = np.empty(units, dtype=np.int64)
        paid[descending] = np.repeat(costs[starts], sizes) * lines[descending]
    return _deal(groups, paid, ranks, each), each


def _split_to(starts: list[int], units: int, wanted: int) -> list[int]:
    """Halve the stretches with the most units until there are enough, or none can be halved."""
    ends = [*starts[1:], units]
    heap = [(start - end, start, end) for start, end in zip(starts, ends, strict=False)]
    heapq.heapify(heap)
    while heap and len(heap) < wanted and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        middle = (start + end + 1) // 2
        heapq.heappush(heap, (start - middle, start, middle))
        heapq.heappush(heap, (middle - end, middle, end))
    return sorted(start for _, start, _ in heap)
