"""Mixtures: several sources, each in its own order and its own epochs, as one order.

A `Schedule` says, for a position of an epoch of the mixture, which source stands there, in which
epoch of its own and at which position of that; it owns the policy for an exhausted source. A
`MixedOrder` asks the sources' own orders and answers with indices into their concatenation.

    repeat   an exhausted source starts its next epoch; the mixture's epoch ends when every
             source was served whole at least once (but for those that a schedule fades out)
    stop     the mixture's epoch ends when the first source is exhausted; the next epoch goes on
             where each source stood, so nothing is passed over
    drop     an exhausted source leaves and the others share its place; every row once per epoch

Under `repeat` and `stop` epochs of the mixture only mark places on one endless interleaved stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tokenmill.errors import UsageError, check_one_of
from tokenmill.sampling.interleave import Interleave, as_fraction
from tokenmill.sampling.order import Order, make_order
from tokenmill.sampling.permutation import LARGEST, Int64Array
from tokenmill.sampling.varying import VaryingInterleave

EXHAUSTED = ("repeat", "stop", "drop")


@dataclass(frozen=True)
class _Phase:
    """A stretch of a `drop` epoch during which the same sources are alive."""

    start: int
    alive: tuple[int, ...]
    served: tuple[int, ...]  # rows of every source before this phase
    draws: Interleave


class Schedule:
    """Which source is served where.

    Args:
        sizes: Rows per source.
        rates: Draws per source, relative to each other; or draws in shares that change, which
            `drop` cannot have.
        exhausted: repeat, stop or drop.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rates: Sequence[Fraction | float | int] | VaryingInterleave,
        exhausted: str,
    ) -> None:
        check_one_of("exhausted", exhausted, EXHAUSTED)
        sources = rates.sources if isinstance(rates, VaryingInterleave) else len(rates)
        if len(sizes) != sources or not sizes or min(sizes) < 1:
            raise UsageError(f"every source of a mixture needs rows: sizes are {list(sizes)}")
        self.sizes = tuple(sizes)
        self.exhausted = exhausted
        self._phases: list[_Phase] = []
        self._draws: Interleave | VaryingInterleave
        if isinstance(rates, VaryingInterleave):
            if exhausted == "drop":
                raise UsageError("shares that change need exhausted='repeat' or 'stop'")
            self._draws = rates
            lasting = [share > 0 for share in rates.points[-1][1]]
        else:
            lasting = [True] * sources
            fractions = [as_fraction(rate) for rate in rates]
            self._draws = Interleave(fractions)
        if exhausted == "drop":
            self.rows = sum(sizes)
            self._phases = _drop_phases(self.sizes, fractions)
        else:
            stops = exhausted == "stop"

            def is_over(position: int) -> bool:
                counts = self._draws.counts(position)
                whole = [count >= size for count, size in zip(counts, self.sizes, strict=True)]
                return any(whole) if stops else all(np.asarray(whole)[lasting])

            self.rows = _first(is_over)

    def locate(
        self, epoch: int, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Source, epoch of that source, and position in that epoch, for many positions."""
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
            sources[here] = np.asarray(phase.alive, dtype=np.int64)[drawn]
            before[here] = drawn_before + np.asarray(phase.served, dtype=np.int64)[sources[here]]
        return sources, np.full(positions.shape, epoch, dtype=np.int64), before

    def up_to(self, epoch: int, position: int) -> list[Any]:
        """What decides about the stream before a position, where shares change along it."""
        if not isinstance(self._draws, VaryingInterleave):
            return []
        # In a later epoch the length of one says where in the stream a position is.
        return [self.rows * bool(epoch), self._draws.up_to(epoch * self.rows + position)]

    def served(self, epoch: int, position: int) -> list[int]:
        """Rows of every source before a position, over all epochs: a function of the cursor."""
        if self.exhausted != "drop":
            return self._draws.counts(epoch * self.rows + position)
        phase = self._phases[bisect_right([p.start for p in self._phases], position) - 1]
        counts = [epoch * size for size in self.sizes]
        for source, served in enumerate(phase.served):
            counts[source] += served
        for source, drawn in zip(
            phase.alive, phase.draws.counts(position - phase.start), strict=True
        ):
            counts[source] += drawn
        return counts


class MixedOrder:
    """The sources' own orders, interleaved, as indices into their concatenation.

    Args:
        schedule: Which source is served where.
        orders: One order per source.
    """

    def __init__(self, schedule: Schedule, orders: Sequence[Order]) -> None:
        self.schedule = schedule
        self.rows = schedule.rows
        self.orders = list(orders)
        self._offsets = np.concatenate(([0], np.cumsum(schedule.sizes))).astype(np.int64)

    @classmethod
    def of(cls, schedule: Schedule, name: str, seed: int) -> MixedOrder:
        """Every source in the order of one name, none shuffled like another."""
        sizes = enumerate(schedule.sizes, 1)
        return cls(schedule, [make_order(name, size, seed, stream) for stream, size in sizes])

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        """The indices at many positions of one epoch of the mixture."""
        sources, epochs, places = self.schedule.locate(epoch, positions)
        found = np.empty(sources.shape, dtype=np.int64)
        for source in np.unique(sources).tolist():
            of_source = sources == source
            for own_epoch in np.unique(epochs[of_source]).tolist():
                here = of_source & (epochs == own_epoch)
                own = self.orders[source].indices(own_epoch, places[here])
                found[here] = own + self._offsets[source]
        return found

    def index(self, epoch: int, position: int) -> int:
        return int(self.indices(epoch, np.asarray([position], dtype=np.int64))[0])


def _first(holds: Callable[[int], bool]) -> int:
    """The smallest number for which a monotone condition holds."""
    high = 1
    while not holds(high):
        high *= 2
        if high > LARGEST:
            raise UsageError("these weights would take more than 2**62 positions to serve a source")
    low = high // 2
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _drop_phases(sizes: tuple[int, ...], rates: list[Fraction]) -> list[_Phase]:
    """Cut an epoch where sources run out; each phase interleaves those that are left."""
    phases: list[_Phase] = []
    start, served, alive = 0, [0] * len(sizes), list(range(len(sizes)))
    while alive:
        draws = Interleave([rates[source] for source in alive])
        left = [sizes[source] - served[source] for source in alive]
        phases.append(_Phase(start, tuple(alive), tuple(served), draws))

        def one_is_out(position: int, draws: Interleave = draws, left: list[int] = left) -> bool:
            return any(c >= n for c, n in zip(draws.counts(position), left, strict=True))

        length = _first(one_is_out)
        for source, drawn in zip(alive, draws.counts(length), strict=True):
            served[source] += drawn
        start += length
        alive = [source for source in alive if served[source] < sizes[source]]
    return phases
