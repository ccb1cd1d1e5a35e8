"""Shares that change along the stream, against drawing one by one."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.sampling import Schedule, VaryingInterleave

Points = list[tuple[int, list[Fraction]]]


@st.composite
def schedules(draw: Any, latest: int = 60) -> Points:
    sources = draw(st.integers(1, 4))
    positions = draw(st.lists(st.integers(0, latest), min_size=1, max_size=5, unique=True))
    rate = st.one_of(st.integers(0, 5), st.fractions(0, 3, max_denominator=10**6))
    found = []
    for position in sorted(positions):
        rates = draw(st.lists(rate, min_size=sources, max_size=sources))
        found.append(
            (position, [Fraction(r) for r in rates] if any(rates) else [Fraction(1)] * sources)
        )
    return found


def shares_at(points: Points, position: int) -> list[Fraction]:
    """By the definition: linear between normalised points, still outside of them."""
    normal = [(at, [rate / sum(rates) for rate in rates]) for at, rates in points]
    place = bisect_right([at for at, _ in normal], position)
    if not place:
        return normal[0][1]
    if place == len(normal):
        return normal[-1][1]
    (a, low), (b, high) = normal[place - 1], normal[place]
    return [x + (y - x) * Fraction(position - a, b - a) for x, y in zip(low, high, strict=True)]


def one_by_one(points: Points, size: int) -> list[int]:
    """The stream: a source is drawn whenever the sum of its shares, rounded up, rises."""
    due, drawn, stream = [Fraction(0)] * len(points[0][1]), [0] * len(points[0][1]), []
    for position in range(size):
        for source, share in enumerate(shares_at(points, position)):
            due[source] += share
            if ceil(due[source]) > drawn[source]:
                drawn[source] += 1
                stream.append(source)
    return stream[:size]


@settings(max_examples=40, deadline=None)
@given(points=schedules())
def test_every_draw_is_the_one_of_drawing_one_by_one(points: Points) -> None:
    draws, expected = VaryingInterleave(points), one_by_one(points, 80)
    sources, before = draws.draws(np.arange(80))
    assert sources.tolist() == expected
    counts, due = [0] * draws.sources, [Fraction(0)] * draws.sources
    for position, source in enumerate(expected):
        assert draws.counts(position) == counts
        assert draws.draw(position) == (source, counts[source]) == (source, before[position])
        counts[source] += 1
        due = [sum(pair) for pair in zip(due, shares_at(points, position), strict=True)]
        # Beside its share, at every position.
        assert all(-draws.sources < c - d < 1 for c, d in zip(counts, due, strict=True))


@settings(max_examples=40, deadline=None)
@given(points=schedules(latest=10**9), start=st.integers(0, 2 * 10**9))
def test_far_positions_agree_with_the_scalar_twin(points: Points, start: int) -> None:
    """Also over the border of a block, and where numerators leave 64 bits."""
    draws = VaryingInterleave(points)
    border = start // 4096 * 4096
    for first in (start, border):
        sources, before = draws.draws(np.arange(max(first - 3, 0), first + 3))
        for at, source, drawn in zip(
            range(max(first - 3, 0), first + 3), sources.tolist(), before.tolist(), strict=True
        ):
            assert draws.draw(at) == (source, drawn)


@settings(max_examples=40, deadline=None)
@given(points=schedules(), other=schedules(), change=st.integers(0, 70))
def test_changed_tail_leaves_the_stream_before_it(
    points: Points, other: Points, change: int
) -> None:
    sources = len(points[0][1])
    here = shares_at(points, max(change - 1, 0))
    tail = [(change + 1 + at, (rates * sources)[:sources]) for at, rates in other]
    tail = [(at, rates) for at, rates in tail if any(rates)]
    kept = [point for point in points if point[0] < change - 1]
    changed = [*kept, (max(change - 1, 0), here), *tail]
    one, two = VaryingInterleave(points), VaryingInterleave(changed)
    assert one.up_to(change) == two.up_to(change)
    before = np.arange(change)
    assert [a.tolist() for a in one.draws(before)] == [b.tolist() for b in two.draws(before)]


def test_numerators_beyond_64_bits_are_exact() -> None:
    first = [Fraction(1, 999_999_937), Fraction(2, 999_999_929)]
    draws = VaryingInterleave([(0, first), (1_000_000_007, first[::-1])])
    for start in (0, 4090, 999_999_990):
        sources, before = draws.draws(np.arange(start, start + 20))
        expected = [draws.draw(position) for position in range(start, start + 20)]
        assert list(zip(sources.tolist(), before.tolist(), strict=True)) == expected


def test_blocks_may_begin_between_draws_that_are_due_together() -> None:
    draws = VaryingInterleave([(0, [Fraction(1)] * 3)])
    sources, before = draws.draws(np.arange(3 * 4096))
    assert sources.tolist() == [position % 3 for position in range(3 * 4096)]
    assert before.tolist() == [position // 3 for position in range(3 * 4096)]


def test_schedule_that_differs_before_a_position_is_told() -> None:
    one = VaryingInterleave([(0, [Fraction(1), Fraction(1)]), (10, [Fraction(1), Fraction(3)])])
    two = VaryingInterleave([(0, [Fraction(1), Fraction(1)]), (11, [Fraction(1), Fraction(3)])])
    assert one.up_to(0) == two.up_to(0) == []
    assert one.up_to(1) == two.up_to(1)
    assert one.up_to(2) != two.up_to(2)


@pytest.mark.parametrize(
    "points",
    [[], [(-1, [1])], [(5, [1]), (5, [1])], [(5, [1]), (3, [1])], [(0, [0, 0])], [(0, [1, -1])]],
)
def test_impossible_schedules_are_refused(points: Any) -> None:
    with pytest.raises(UsageError):
        VaryingInterleave([(at, [Fraction(r) for r in rates]) for at, rates in points])


def test_source_that_fades_out_holds_no_epoch_open() -> None:
    draws = VaryingInterleave([(0, [Fraction(1), Fraction(1)]), (10, [Fraction(0), Fraction(1)])])
    for exhausted in ("repeat", "stop"):
        schedule = Schedule([100, 100], draws, exhausted)
        assert schedule.rows < 110
        assert schedule.served(0, schedule.rows)[1] == 100
    with pytest.raises(UsageError, match="repeat"):
        Schedule([100, 100], draws, "drop")
