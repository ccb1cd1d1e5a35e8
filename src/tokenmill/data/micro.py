"""Micro-batches: divide a step into batches under a token budget with about equal work.

A *unit* stays together: a row, a pack, a group of rows. Its tokens count against the budget and its
cost is balanced. Both are integers, so every machine computes the same plan. Micro-batch
``rank × each + k`` is the k-th of that rank.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm

import numpy as np

from tokenmill.data.fill import MAX_MULTIPLE
from tokenmill.data.packs import Int64Array, Packs, share_of
from tokenmill.errors import UsageError, check_integer, check_one_of, check_positive

BALANCE = ("tokens", "work", "trained")
LAYOUTS = ("slab", "padded")
SHARDS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Align:
    """Multiples that batches are padded to.

    Args:
        sequence: Multiple for the tokens of every row, such as 2 × context-parallel ranks.
        slab: Multiple for the tokens of a packed micro-batch, as tensor, sequence and expert
            parallelism, FP8 (16) or MXFP8 (32) need it.

    With ``layout="padded"`` both apply to the width.
    """

    sequence: int = 1
    slab: int = 1

    def __post_init__(self) -> None:
        for name in ("sequence", "slab"):
            value = check_integer(f"Align.{name}", getattr(self, name), 1, MAX_MULTIPLE)
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class MicroBatches:
    """How a step is divided into micro-batches.

    Args:
        max_tokens: Maximum tokens per rank and micro-batch, padding included.
        balance: What to balance over ranks and micro-batches: tokens, trained tokens, or work (an
            estimate for a transformer, linear and quadratic in the length of a row).
        align: Multiples that rows and micro-batches are padded to.
        context_parallel: Number of consecutive ranks that share every micro-batch, each with its
            shard. Together they have ``max_tokens`` each.
        shards: zigzag: rank r of n has parts r and 2n - 1 - r of every row, divided into 2n;
            contiguous: part r of the packed sequence, divided into n.
        layout: slab packs the rows of a micro-batch into one sequence; padded pads them to one
            width. With a `Pack` the samples are packs.
        hidden_size: Hidden size of the model, for ``balance="work"``.
        max_patches: Maximum image patches per micro-batch and, with a `Pack`, per pack.
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
        for name in ("max_tokens", "context_parallel", "hidden_size", "max_patches"):
            value = getattr(self, name)
            if value is not None or name != "max_patches":
                value = check_positive(f"MicroBatches.{name}", value)
            object.__setattr__(self, name, value)
        if not isinstance(self.align, Align):
            raise UsageError(f"MicroBatches.align must be a tm.Align, got {self.align!r}")
        for name, known in (("balance", BALANCE), ("shards", SHARDS), ("layout", LAYOUTS)):
            check_one_of(f"MicroBatches.{name}", getattr(self, name), known)
        if self.budget < self.multiple:
            raise UsageError(
                f"max_tokens={self.max_tokens} allows {self.max_tokens * self.context_parallel} "
                f"tokens, align and context_parallel need a multiple of {self.multiple}"
            )

    @property
    def sequence(self) -> int:
        """Padded lengths of rows are multiples of this."""
        halves = 2 * self.context_parallel if self.shards == "zigzag" else 1
        shared = halves if self.context_parallel > 1 else 1
        if self.layout == "padded":
            return lcm(self.align.sequence, self.align.slab, shared, self.context_parallel)
        return lcm(self.align.sequence, shared)

    @property
    def multiple(self) -> int:
        """Lengths of packed micro-batches are multiples of this."""
        return lcm(self.align.slab, self.sequence, self.context_parallel)

    @property
    def budget(self) -> int:
        """Maximum tokens of a micro-batch, over all ranks that share it."""
        return self.max_tokens * self.context_parallel // self.multiple * self.multiple

    def padded(self, lengths: Int64Array) -> Int64Array:
        return -(-lengths // self.sequence) * self.sequence

    def tokens_of(self, packs: Packs) -> Int64Array:
        padded = self.padded(packs.lengths)
        if self.layout == "padded":
            return packs.longest(padded) * np.diff(packs.bounds)
        return packs.per_pack(padded)

    def plan(
        self,
        packs: Packs,
        trained: Int64Array,
        ranks: int,
        length: int | None = None,
        patches: Int64Array | None = None,
    ) -> tuple[Int64Array, int]:
        """Return the micro-batch of every sample of a step, and their number per rank.

        ``packs`` are the samples of all ranks; ``trained`` and ``patches`` (needed with
        ``max_patches``) count those of every piece; ``length`` is the length of packs, if any.
        The k-th micro-batches of all ranks have similar costs, which keeps waiting short.
        The costliest are first, so that a run without enough memory fails in its first step.
        """
        loads = None
        if self.max_patches is not None and patches is not None:
            loads = packs.per_pack(patches), self.max_patches
        padded = self.padded(packs.lengths)
        by_trained = self.balance == "trained"
        if length is None and self.layout == "padded":
            widths, lines = packs.longest(padded), np.diff(packs.bounds)
            cost = packs.per_pack(trained) if by_trained else self._cost(widths)
            return partition_by_width(
                widths, lines, cost, ranks, self.budget, additive=by_trained, loads=loads
            )
        tokens = packs.per_pack(padded)
        if length is not None:
            tokens = np.full(len(packs), length, dtype=np.int64)
        used = tokens
        if loads is not None:
            used = np.maximum(tokens, share_of(*loads, self.budget))
        if self.balance == "tokens":
            return balance_groups(used, tokens, ranks, self.budget)
        cost = packs.per_pack(trained if by_trained else self._cost(padded))
        return balance_groups(used, cost, ranks, self.budget)

    def _cost(self, padded: Int64Array) -> Int64Array:
        if self.balance == "tokens":
            return padded
        return 6 * self.hidden_size * padded + padded * padded


_MAX_POOLED = 1 << 14  # units that one plan divides again: about 10 ms
_PRECISION = 12  # bits, of the cost of the costliest range
_MIN_SKIPS = 1024  # full micro-batches to skip before their number is increased


def balance_groups(
    tokens: Int64Array, cost: Int64Array, ranks: int, budget: int
) -> tuple[Int64Array, int]:
    """Return the micro-batch of every unit, and their number per rank.

    Assign units, the costliest first, to the cheapest micro-batch so far. Then repeatedly pool the
    costliest and the cheapest micro-batch and divide them again.
    """
    total = int(tokens.sum())
    each = max(1, -(-total // (ranks * budget)))
    each += each >> 5  # finding the smallest number would take many tries
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
    """Assign each unit to the cheapest group that it fits; None if there is none for one."""
    # A key orders groups by cost, then by tokens (if some units have no cost), then by number.
    below = max(1, (groups - 1).bit_length())
    number_of = (1 << below) - 1
    if all(cost):
        steps = [unit_cost << below for unit_cost in cost]
    else:
        shift = budget.bit_length()
        pairs = zip(tokens, cost, strict=True)
        steps = [((unit_cost << shift) + count) << below for count, unit_cost in pairs]
    heap, used, placed = list(range(groups)), [0] * groups, []
    skips = max(_MIN_SKIPS, len(tokens) >> 3)
    replace = heapq.heapreplace
    for count, step in zip(tokens, steps, strict=True):
        key = heap[0]
        number = key & number_of
        skipped = []
        while used[number] + count > budget:
            skipped.append(heapq.heappop(heap))
            skips -= 1
            if skips < 0 or not heap:
                return None
            key = heap[0]
            number = key & number_of
        used[number] += count
        placed.append(number)
        replace(heap, key + step)
        for key in skipped:
            heapq.heappush(heap, key)
    return placed


def _deal(groups: Int64Array, cost: Int64Array, ranks: int, each: int) -> Int64Array:
    """Number groups by rank: in each round, the costliest groups go to the cheapest ranks."""
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
    """Pool the costliest and the cheapest group and divide them again while that helps."""
    loads = np.zeros(int(groups.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(loads, groups, cost)
    by_group = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[by_group], np.arange(loads.size + 1))
    units = [by_group[first:stop] for first, stop in pairwise(bounds.tolist())]
    left = _MAX_POOLED
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
    """Return a side (0 or 1) per unit with similar sums, by largest differencing.

    The two largest units go to different sides and are replaced by their difference.
    """
    heap = [(-cost, unit) for unit, cost in enumerate(costs)]
    heapq.heapify(heap)
    pairs = []
    while len(heap) > 1:
        first, one = heapq.heappop(heap)
        second, other = heap[0]
        heapq.heapreplace(heap, (first - second, one))
        pairs.append((one, other))
    side = [0] * len(costs)
    for one, other in reversed(pairs):
        side[other] = 1 - side[one]
    return side


def partition_by_width(
    widths: Int64Array,
    lines: Int64Array,
    cost: Int64Array,
    ranks: int,
    budget: int,
    *,
    additive: bool = False,
    loads: tuple[Int64Array, int] | None = None,
) -> tuple[Int64Array, int]:
    """Return the micro-batch of every unit of padded rows, and their number per rank.

    Sort units by width and divide them into ranges so that the costliest range is cheap. A unit
    has ``lines`` rows, padded to its width; rows × width of a micro-batch is at most ``budget``.
    ``cost`` is that of a row of the unit's width, because every row costs as much as the longest of
    its micro-batch. With ``additive`` it is the cost of the unit, whatever the width of its batch.
    ``loads`` are amounts of a second budget for every unit, and that budget.
    """
    descending = np.lexsort((-cost, -widths))
    costs = cost[descending]
    lines_before = np.concatenate(([0], np.cumsum(lines[descending]))).tolist()
    cost_before = np.concatenate(([0], np.cumsum(costs))).tolist()
    max_lines = (budget // np.maximum(widths[descending], 1)).tolist()
    line_costs = np.maximum(costs, 1).tolist()
    units = widths.size
    load_before, max_load = [0] * (units + 1), 0
    if loads is not None:
        load_before = np.concatenate(([0], np.cumsum(loads[0][descending]))).tolist()
        max_load = loads[1]

    def ranges(max_cost: int) -> list[int]:
        """Return the starts of ranges of at most this cost; a single unit may cost more."""
        starts, unit = [], 0
        while unit < units:
            starts.append(unit)
            rows = max_lines[unit]
            if not additive:
                rows = min(rows, max_cost // line_costs[unit])
            stop = bisect_right(lines_before, lines_before[unit] + rows) - 1
            if additive:
                stop = min(stop, bisect_right(cost_before, cost_before[unit] + max_cost) - 1)
            stop = min(stop, bisect_right(load_before, load_before[unit] + max_load) - 1)
            unit = max(stop, unit + 1)
        return starts

    def costliest(starts: list[int]) -> int:
        before = cost_before if additive else lines_before
        ends = [*starts[1:], units]
        sums = [before[end] - before[start] for start, end in zip(starts, ends, strict=False)]
        if not additive:
            sums = [count * line_costs[start] for count, start in zip(sums, starts, strict=True)]
        return max(sums, default=0)

    starts = ranges(max(cost_before[-1], lines_before[-1] * max(line_costs, default=0)))
    each = max(1, -(-len(starts) // ranks))
    total = cost_before[-1] if additive else int((costs * lines[descending]).sum())
    low, high = total // (ranks * each), costliest(starts)
    while high - low > high >> _PRECISION:
        middle = (low + high) // 2
        if len(ranges(middle)) <= ranks * each:
            high = middle
        else:
            low = middle + 1
    starts = _split_to(ranges(high), units, ranks * each)
    sizes = np.diff([*starts, units])
    groups = np.empty(units, dtype=np.int64)
    groups[descending] = np.repeat(np.arange(sizes.size), sizes)
    total_cost = cost
    if not additive:
        total_cost = np.empty(units, dtype=np.int64)
        total_cost[descending] = np.repeat(costs[starts], sizes) * lines[descending]
    return _deal(groups, total_cost, ranks, each), each


def _split_to(starts: list[int], units: int, count: int) -> list[int]:
    """Halve the ranges with the most units until there are ``count``, if possible."""
    ends = [*starts[1:], units]
    heap = [(start - end, start, end) for start, end in zip(starts, ends, strict=False)]
    heapq.heapify(heap)
    while heap and len(heap) < count and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        middle = (start + end + 1) // 2
        heapq.heappush(heap, (start - middle, start, middle))
        heapq.heappush(heap, (middle - end, middle, end))
    return sorted(start for _, start, _ in heap)
