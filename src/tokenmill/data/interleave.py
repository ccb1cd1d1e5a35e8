"""Interleave sources by weight, as a function of the position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from tokenmill.data.order import LARGEST, Int64Array, Order, make_order
from tokenmill.errors import UsageError, check_one_of

Positions = TypeVar("Positions", int, Int64Array)
LARGEST_DENOMINATOR = (1 << 31) - 1  # keeps remainder × numerator within 62 bits


def as_fraction(weight: Any) -> Fraction:
    """Return the decimal value of a weight: 0.7 is 7/10, not the nearest binary number."""
    try:
        # The `str` of a numpy number has its precision: 0.1 for np.float32(0.1).
        decimal = str(weight) if isinstance(weight, np.number) else repr(weight)
        return weight if isinstance(weight, Fraction) else Fraction(decimal)
    except (ValueError, TypeError) as error:
        raise UsageError(f"a weight must be a number, got {weight!r}") from error


@dataclass(frozen=True)
class _Node:
    """A node of the tree; a leaf is one source."""

    first: int
    numerator: int = 0
    denominator: int = 1
    left: _Node | None = None
    right: _Node | None = None

    def left_before(self, positions: Positions) -> Positions:
        """Return ⌊(p·num + den/2) / den⌋ without overflow of 64 bits."""
        whole, rest = divmod(positions, self.denominator)
        part = (rest * self.numerator + self.denominator // 2) // self.denominator
        counts: Positions = whole * self.numerator + part
        return counts


class Interleave:
    """Draws from sources in exact proportion to their rates.

    Sources are the leaves of a binary tree. At a node with left share num/den, exactly
    ⌊(p·num + den/2) / den⌋ of the first p draws are from the left side (a Beatty sequence). Draw p
    is a left one if that count increases there; the count is then the position in the left side.
    So with weights 0.7 and 0.3, positions 10k to 10k + 9 have seven and three draws. At any
    position, a source deviates from its share by at most one draw per level of the tree.
    """

    def __init__(self, rates: Sequence[Fraction | float | int]) -> None:
        fractions = [as_fraction(rate) for rate in rates]
        if not fractions or any(rate <= 0 for rate in fractions):
            raise UsageError(f"weights must be positive, got {[float(f) for f in fractions]}")
        self.sources = len(fractions)
        self._tree = _grow(fractions, 0, len(fractions))

    def draws(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the sources at positions, and the number of earlier draws of each."""
        positions = np.asarray(positions, dtype=np.int64)
        sources = np.empty(positions.shape, dtype=np.int64)
        before = np.empty(positions.shape, dtype=np.int64)
        waiting = [(self._tree, np.arange(positions.size), positions)]
        while waiting:
            node, numbers, within = waiting.pop()
            if node.left is None or node.right is None:
                sources[numbers] = node.first
                before[numbers] = within
                continue
            counts = node.left_before(within)
            is_left = node.left_before(within + 1) > counts
            is_right = ~is_left
            waiting.append((node.left, numbers[is_left], counts[is_left]))
            waiting.append((node.right, numbers[is_right], (within - counts)[is_right]))
        return sources, before

    def counts(self, position: int) -> list[int]:
        """Return the number of draws of each source in the first ``position`` draws."""
        counts = [0] * self.sources
        waiting = [(self._tree, position)]
        while waiting:
            node, within = waiting.pop()
            if node.left is None or node.right is None:
                counts[node.first] = within
                continue
            before = node.left_before(within)
            waiting.append((node.left, before))
            waiting.append((node.right, within - before))
        return counts


def _grow(rates: list[Fraction], first: int, stop: int) -> _Node:
    if stop - first == 1:
        return _Node(first)
    middle = (first + stop) // 2
    left, total = sum(rates[first:middle]), sum(rates[first:stop])
    share = Fraction(left, total).limit_denominator(LARGEST_DENOMINATOR)
    return _Node(
        first,
        share.numerator,
        share.denominator,
        _grow(rates, first, middle),
        _grow(rates, middle, stop),
    )


EXHAUSTED = ("repeat", "stop", "drop")


@dataclass(frozen=True)
class _Phase:
    """A part of a `drop` epoch with the same active sources."""

    start: int
    active: tuple[int, ...]
    served: tuple[int, ...]  # rows of every source before this phase
    draws: Interleave


class Schedule:
    """Maps positions of a mixture to sources.

    When a source is exhausted:
        repeat: It starts its next epoch. The mixture's epoch ends when every source was served
            completely at least once.
        stop: The mixture's epoch ends. The next one continues every source.
        drop: The other sources share its positions. An epoch has every row once.

    With `repeat` and `stop` the epochs of the mixture are parts of one endless stream.
    """

    def __init__(
        self, sizes: Sequence[int], rates: Sequence[Fraction | float | int], exhausted: str
    ) -> None:
        check_one_of("exhausted", exhausted, EXHAUSTED)
        if len(sizes) != len(rates) or not sizes or min(sizes) < 1:
            raise UsageError(f"every source of a mixture needs rows, got sizes {list(sizes)}")
        self.sizes = tuple(sizes)
        self.exhausted = exhausted
        fractions = [as_fraction(rate) for rate in rates]
        self._draws = Interleave(fractions)
        self._phases: list[_Phase] = []
        if exhausted == "drop":
            self.rows = sum(sizes)
            self._phases = _drop_phases(self.sizes, fractions)
        else:
            is_over = any if exhausted == "stop" else all
            self.rows = _positions_until(is_over, self._draws, self.sizes)

    def locate(
        self, epoch: int, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return source, epoch of that source, and position in that epoch, per position."""
        positions = np.asarray(positions, dtype=np.int64)
        if self.exhausted != "drop":
            sources, before = self._draws.draws(positions + epoch * self.rows)
            sizes = np.asarray(self.sizes, dtype=np.int64)[sources]
            return sources, before // sizes, before % sizes
        sources = np.empty(positions.shape, dtype=np.int64)
        before = np.empty(positions.shape, dtype=np.int64)
        starts = np.asarray([phase.start for phase in self._phases], dtype=np.int64)
        numbers = np.searchsorted(starts, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            phase = self._phases[number]
            here = numbers == number
            drawn, drawn_before = phase.draws.draws(positions[here] - phase.start)
            sources[here] = np.asarray(phase.active, dtype=np.int64)[drawn]
            before[here] = drawn_before + np.asarray(phase.served, dtype=np.int64)[sources[here]]
        return sources, np.full(positions.shape, epoch, dtype=np.int64), before

    def served(self, epoch: int, position: int) -> list[int]:
        """Count rows of every source before a position, over all epochs."""
        if self.exhausted != "drop":
            return self._draws.counts(epoch * self.rows + position)
        phase = self._phases[bisect_right([p.start for p in self._phases], position) - 1]
        counts = [epoch * size for size in self.sizes]
        for source, served in enumerate(phase.served):
            counts[source] += served
        drawn = phase.draws.counts(position - phase.start)
        for source, count in zip(phase.active, drawn, strict=True):
            counts[source] += count
        return counts


class MixedOrder(Order):
    """The orders of the sources, interleaved, as indices into their concatenation."""

    def __init__(self, schedule: Schedule, orders: Sequence[Order]) -> None:
        self.schedule = schedule
        self.rows = schedule.rows
        self.orders = list(orders)
        self._offsets = np.concatenate(([0], np.cumsum(schedule.sizes))).astype(np.int64)

    @classmethod
    def of(cls, schedule: Schedule, name: str, seed: int) -> MixedOrder:
        sizes = enumerate(schedule.sizes, 1)
        return cls(schedule, [make_order(name, size, seed, stream) for stream, size in sizes])

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        sources, epochs, own_positions = self.schedule.locate(epoch, positions)
        indices = np.empty(sources.shape, dtype=np.int64)
        for source in np.unique(sources).tolist():
            of_source = sources == source
            for own_epoch in np.unique(epochs[of_source]).tolist():
                here = of_source & (epochs == own_epoch)
                own = self.orders[source].indices(own_epoch, own_positions[here])
                indices[here] = own + self._offsets[source]
        return indices


def _positions_until(
    is_over: Callable[[Iterable[bool]], bool], draws: Interleave, sizes: Sequence[int]
) -> int:
    """Return the number of positions until any, or all, sources are exhausted."""

    def holds(position: int) -> bool:
        return is_over(c >= size for c, size in zip(draws.counts(position), sizes, strict=True))

    high = 1
    while not holds(high):
        high *= 2
        if high > LARGEST:
            raise UsageError("with these weights, serving a source takes more than 2**62 positions")
    low = high // 2
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _drop_phases(sizes: tuple[int, ...], rates: list[Fraction]) -> list[_Phase]:
    phases: list[_Phase] = []
    start, served, active = 0, [0] * len(sizes), list(range(len(sizes)))
    while active:
        draws = Interleave([rates[source] for source in active])
        left = [sizes[source] - served[source] for source in active]
        phases.append(_Phase(start, tuple(active), tuple(served), draws))
        length = _positions_until(any, draws, left)
        for source, drawn in zip(active, draws.counts(length), strict=True):
            served[source] += drawn
        start += length
        active = [source for source in active if served[source] < sizes[source]]
    return phases
