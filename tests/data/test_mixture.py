"""Interleaving and mixtures against plain counting."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.scalar import drawn
from tokenmill.data.interleave import Interleave, Schedule
from tokenmill.errors import UsageError

weights = st.lists(
    st.one_of(st.integers(1, 1000), st.floats(0.001, 100, allow_nan=False)), min_size=1, max_size=9
)


@settings(max_examples=80, deadline=None)
@given(rates=weights, start=st.integers(0, 2**40))
def test_interleave_draws_and_counts_are_those_of_plain_integers(
    rates: list[float], start: int
) -> None:
    draws = Interleave(rates)
    positions = np.arange(start, start + 64)
    sources, before = draws.draws(positions)
    running = draws.counts(start)
    for position, source, before_it in zip(
        positions.tolist(), sources.tolist(), before.tolist(), strict=True
    ):
        assert drawn(rates, position) == (source, before_it)
        assert running[source] == before_it
        running[source] += 1
    assert draws.counts(start + 64) == running


@settings(max_examples=80, deadline=None)
@given(rates=weights, position=st.integers(1, 10**9))
def test_interleave_counts_stay_close_to_their_share(rates: list[float], position: int) -> None:
    total = sum(Fraction(repr(rate)) for rate in rates)
    for count, rate in zip(Interleave(rates).counts(position), rates, strict=True):
        share = position * Fraction(repr(rate)) / total
        # One per level of the tree, and what a 31-bit denominator may be off by.
        assert abs(count - share) <= 4 + position / 2**30


def test_interleave_decimal_weights_are_exact() -> None:
    draws = Interleave([0.7, 0.3])
    sources, _ = draws.draws(np.arange(1000))
    assert np.all(sources.reshape(-1, 10).sum(axis=1) == 3)


@pytest.mark.parametrize("rates", [[], [0], [1, -1], ["x"]])
def test_interleave_impossible_weights_are_refused(rates: list[object]) -> None:
    with pytest.raises(UsageError):
        Interleave(rates)  # type: ignore[arg-type]


def walk(schedule: Schedule, epochs: int) -> list[tuple[int, int, int]]:
    """Every (source, epoch of the source, position) of some epochs, one after the other."""
    found = []
    for epoch in range(epochs):
        located = schedule.locate(epoch, np.arange(schedule.rows))
        found += list(zip(*(column.tolist() for column in located), strict=True))
    return found


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    exhausted=st.sampled_from(["repeat", "stop", "drop"]),
    data=st.data(),
)
def test_schedule_every_source_runs_through_its_own_epochs(
    sizes: list[int], exhausted: str, data: st.DataObject
) -> None:
    rates = [data.draw(st.integers(1, 20)) for _ in sizes]
    schedule = Schedule(sizes, rates, exhausted)
    served = walk(schedule, 3)
    for source, size in enumerate(sizes):
        own = [(epoch, position) for s, epoch, position in served if s == source]
        assert own == [divmod(draw, size) for draw in range(len(own))]
    first = Counter(source for source, _, _ in served[: schedule.rows])
    if exhausted == "drop":
        assert [first[s] for s in range(len(sizes))] == sizes
    if exhausted == "stop":
        assert any(first[s] == size for s, size in enumerate(sizes))
        assert all(first[s] <= size for s, size in enumerate(sizes))
    if exhausted == "repeat":
        assert all(first[s] >= size for s, size in enumerate(sizes))
        assert any(first[s] == size for s, size in enumerate(sizes))
    for position in range(0, schedule.rows + 1, max(1, schedule.rows // 7)):
        counted = Counter(source for source, _, _ in served[: schedule.rows + position])
        expected = [counted[s] for s in range(len(sizes))]
        if position < schedule.rows:
            assert schedule.served(1, position) == expected


def test_schedule_drop_keeps_proportions_among_those_left() -> None:
    schedule = Schedule([10, 1000, 1000], [1, 3, 1], "drop")
    sources, _, _ = schedule.locate(0, np.arange(schedule.rows))
    last_of_first = int(np.flatnonzero(sources == 0)[-1])
    later = sources[last_of_first + 1 : last_of_first + 401]
    assert np.bincount(later, minlength=3).tolist() == [0, 300, 100]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1], [1], "again"), "exhausted"),
        (([1, 0], [1, 1], "stop"), "needs rows"),
        (([10**9, 10], [Fraction(1, 10**17), 1], "repeat"), r"2\*\*62"),  # never searched for
    ],
)
def test_invalid_schedule_is_rejected(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(*given)
