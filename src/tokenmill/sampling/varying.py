"""Interleaving sources whose shares change along the stream, computed from the position.

A `VaryingInterleave` is the twin of `Interleave` for mixture schedules: given the sources' rates at
some positions, the shares in between are linear, before the first and behind the last they stand
still. It answers the same question, which source is drawn at position p and how often it was drawn
before, in exact integers and without having walked there.

T(t) of a source is the sum of its shares over the positions before t: what it is due by then. Going
through t = 1, 2, 3, …, a source is drawn whenever ⌈T(t)⌉ rises, several at one t in their
order. The draws due by t are at least t and fewer than t + sources, so the t that belongs to a
position is found among a few, and no draw before position p depends on a share at or behind p:
changing the tail of a schedule leaves the stream before it as it was. At any position a source is
less than one draw above its share, and below it by less than one draw per source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.sampling.order import Recent
from tokenmill.sampling.permutation import Int64Array

Rates = Sequence[Fraction]

_BLOCK = 4096  # positions whose draws are worked out together
_EXACT = 1 << 62  # numerators below it are exact in 64 bits


@dataclass(frozen=True)
class _Ramp:
    """A stretch of positions over which shares are linear.

    Args:
        start: Its first position.
        shares: There.
        slopes: By which they change from one position to the next.
        due: What every source is due before it.
    """

    start: int
    shares: tuple[Fraction, ...]
    slopes: tuple[Fraction, ...]
    due: tuple[Fraction, ...]

    def shares_at(self, position: int) -> tuple[Fraction, ...]:
        return tuple(
            share + slope * (position - self.start)
            for share, slope in zip(self.shares, self.slopes, strict=True)
        )

    def due_at(self, time: int) -> tuple[Fraction, ...]:
        steps = time - self.start
        return tuple(
            due + share * steps + slope * (steps * (steps - 1) // 2)
            for due, share, slope in zip(self.due, self.shares, self.slopes, strict=True)
        )


class VaryingInterleave:
    """Draws from sources in shares that are linear between points.

    Args:
        points: (position, rates of all sources there, relative to each other), positions ascending
            from 0 or more. A rate may be 0, all of a point may not.
    """

    def __init__(self, points: Sequence[tuple[int, Rates]]) -> None:
        self.points = tuple((position, _normalised(rates)) for position, rates in points)
        positions = [position for position, _ in self.points]
        if not positions or positions[0] < 0 or sorted(set(positions)) != positions:
            raise UsageError(f"points of a schedule must ascend from 0, not {positions}")
        self.sources = len(self.points[0][1])
        self._ramps = _ramps(self.points)
        self._starts = [ramp.start for ramp in self._ramps]
        self._block = Recent(self._draw_block, keep=4)

    def _ramp(self, position: int) -> _Ramp:
        return self._ramps[bisect_right(self._starts, position) - 1]

    def shares(self, position: int) -> tuple[Fraction, ...]:
        """The share of every source at a position."""
        return self._ramp(position).shares_at(position)

    def up_to(self, position: int) -> list[tuple[int, list[str]]]:
        """What decides about the draws before a position, however its points were given."""
        if position < 1:
            return []
        ramps = [self._ramps[0]]
        for ramp in self._ramps[1:]:
            # A point on the line through its neighbours changes nothing.
            if ramp.start < position - 1 and ramp.slopes != ramps[-1].slopes:
                ramps.append(ramp)
        ends = {ramp.start: ramp.shares for ramp in ramps} | {
            position - 1: self.shares(position - 1)
        }
        return [(place, [str(share) for share in shares]) for place, shares in ends.items()]

    def _due(self, time: int) -> list[int]:
        """Draws of every source that are due by a time."""
        return [ceil(due) for due in self._ramp(time).due_at(time)]

    def _time(self, position: int) -> int:
        """The last time by which no more draws are due than a position has behind it."""
        time = max(0, position - self.sources)
        while sum(self._due(time + 1)) <= position:
            time += 1
        return time

    def counts(self, position: int) -> list[int]:
        """How often each source is drawn in the first ``position`` draws."""
        time = self._time(position)
        counts = self._due(time)
        left = position - sum(counts)
        for source, due in enumerate(self._due(time + 1)):
            if left and due > counts[source]:
                counts[source] += 1
                left -= 1
        return counts

    def draw(self, position: int) -> tuple[int, int]:
        """Source at a position, and how often it was drawn before: the scalar twin of `draws`."""
        before, behind = self.counts(position), self.counts(position + 1)
        source = next(s for s in range(self.sources) if behind[s] > before[s])
        return source, before[source]

    def draws(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Sources at many positions, and how often each was drawn before."""
        positions = np.asarray(positions, dtype=np.int64)
        blocks, within = np.divmod(positions, _BLOCK)
        sources = np.empty(positions.shape, dtype=np.int64)
        before = np.empty(positions.shape, dtype=np.int64)
        for number in np.unique(blocks).tolist():
            here = blocks == number
            drawn, drawn_before = self._block(number)
            sources[here] = drawn[within[here]]
            before[here] = drawn_before[within[here]]
        return sources, before

    def _draw_block(self, number: int) -> tuple[Int64Array, Int64Array]:
        """The draws of a block of positions, ramp by ramp."""
        start = self._time(number * _BLOCK)
        stop = (number + 1) * _BLOCK  # by then at least this many draws are due
        due = [np.asarray([self._due(start)], dtype=np.int64)]
        time = start
        while time < stop:
            ramp = self._ramp(time)
            place = bisect_right(self._starts, time)
            end = min(self._starts[place], stop) if place < len(self._starts) else stop
            due.append(_ceilings(ramp, time, end))
            time = end
        table = np.concatenate(due)
        # Row by row, the sources that rise: the draws in their order.
        times, sources = np.nonzero(np.diff(table, axis=0))
        before = table[times, sources]
        skipped = number * _BLOCK - int(table[0].sum())
        taken = slice(skipped, skipped + _BLOCK)
        return sources[taken].astype(np.int64), before[taken]


def _ceilings(ramp: _Ramp, time: int, end: int) -> Int64Array:
    """What is due by the times behind ``time`` up to ``end``, rounded up; a row per time."""
    found = np.empty((end - time, len(ramp.shares)), dtype=np.int64)
    dues, shares = ramp.due_at(time), ramp.shares_at(time)
    for source, (due, share, slope) in enumerate(zip(dues, shares, ramp.slopes, strict=True)):
        whole, rest = divmod(due, 1)
        common = lcm(rest.denominator, share.denominator, slope.denominator)
        # A numerator stays below common × (steps + 1), because a share is at most 1 throughout.
        steps_exact = max(common, abs(int(slope * common)) * (end - time)) * (end - time + 1)
        kind = np.int64 if steps_exact < _EXACT else object
        steps = np.arange(1, end - time + 1, dtype=np.int64).astype(kind)
        numerator = (
            steps * int(share * common)
            + (steps * (steps - 1) // 2) * int(slope * common)
            + int(rest * common)
        )
        found[:, source] = -(-numerator // common) + whole
    return found


def _normalised(rates: Rates) -> tuple[Fraction, ...]:
    total = sum(rates)
    if any(rate < 0 for rate in rates) or not total:
        raise UsageError(
            "weights must be 0 or more and not all 0, not "
            f"{[float(rate) for rate in rates]} at one point of a schedule"
        )
    return tuple(Fraction(rate, total) for rate in rates)


def _ramps(points: Sequence[tuple[int, tuple[Fraction, ...]]]) -> list[_Ramp]:
    still = tuple(Fraction(0) for _ in points[0][1])
    ramps: list[_Ramp] = []
    due = still
    if points[0][0]:
        ramps.append(_Ramp(0, points[0][1], still, due))
    for number, (start, shares) in enumerate(points):
        if ramps:
            due = ramps[-1].due_at(start)
        slopes = still
        if number + 1 < len(points):
            stop, following = points[number + 1]
            slopes = tuple(
                (after - before) / (stop - start)
                for before, after in zip(shares, following, strict=True)
            )
        ramps.append(_Ramp(start, shares, slopes, due))
    return ramps
