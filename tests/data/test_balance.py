"""Micro-batch plans: every unit once, no budget exceeded, equal counts, and balanced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.data.micro import MicroBatches, balance_groups, partition_by_width
from tokenmill.data.packs import Packs

Plan = Callable[..., tuple[Any, int]]


def array(values: Any) -> Any:
    return np.asarray(values, dtype=np.int64)


def lognormal(rows: int, seed: int = 0) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(6, 1, rows), 1, 8192).astype(np.int64)


def area(widths: Any, numbers: Any, groups: int, lines: Any = None) -> list[int]:
    """Lines × longest of every micro-batch, one by one."""
    found = []
    for number in range(groups):
        own = [at for at, n in enumerate(numbers) if n == number]
        height = len(own) if lines is None else sum(int(lines[at]) for at in own)
        found.append(height * max((int(widths[at]) for at in own), default=0))
    return found


def ones(units: Any) -> Any:
    return np.ones(len(units), dtype=np.int64)


units = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(units=units, ranks=st.integers(1, 7), spare=st.integers(0, 100))
def test_balance_groups_keeps_the_budget(
    units: list[tuple[int, int]], ranks: int, spare: int
) -> None:
    tokens, cost = array([t for t, _ in units]), array([c for _, c in units])
    budget = max(int(tokens.max(initial=0)) + spare, 1)
    numbers, each = balance_groups(tokens, cost, ranks, budget)
    assert numbers.size == len(units)
    assert set(numbers.tolist()) <= set(range(ranks * each))
    assert np.bincount(numbers, tokens, ranks * each).max() <= budget
    assert each == 1 or (each - 1) * ranks < max(len(units), 1)
    again, same = balance_groups(tokens.copy(), cost.copy(), ranks, budget)
    assert (again.tolist(), same) == (numbers.tolist(), each)


@settings(max_examples=200, deadline=None)
@given(
    units=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 1000), st.integers(1, 3)), max_size=60
    ),
    ranks=st.integers(1, 7),
    spare=st.integers(0, 100),
    additive=st.booleans(),
)
@example(
    units=[(10, 10, 1)] * 4, ranks=3, spare=90, additive=True
)  # the best cut has two stretches
def test_partition_by_width_keeps_the_budget(
    units: list[tuple[int, int, int]], ranks: int, spare: int, additive: bool
) -> None:
    widths, lines = array([w for w, _, _ in units]), array([n for _, _, n in units])
    cost = array([c for _, c, _ in units]) if additive else widths * 3 + widths * widths
    budget = max(int((widths * lines).max(initial=0)) + spare, 1)
    numbers, each = partition_by_width(widths, lines, cost, ranks, budget, additive=additive)
    assert set(numbers.tolist()) <= set(range(ranks * each))
    assert max(area(widths, numbers, ranks * each, lines)) <= budget
    assert each == 1 or (each - 1) * ranks < max(len(units), 1)
    if len(units) >= ranks * each:
        assert len(set(numbers.tolist())) == ranks * each  # no rank is idle while there are rows


@pytest.mark.parametrize("ranks", [2, 3])
def test_balance_groups_is_close_to_the_best_plan(ranks: int) -> None:
    """Against every assignment there is, of few units: within a tenth of the best."""
    for seed in range(12):
        tokens = array(np.random.default_rng(seed).integers(5, 60, 8))
        numbers, each = balance_groups(tokens, tokens, ranks, 10_000)
        assert each == 1
        best = min(
            max(np.bincount(plan, tokens, ranks)) for plan in product(range(ranks), repeat=8)
        )
        assert np.bincount(numbers, tokens, ranks).max() <= 1.1 * best


def test_partition_by_width_is_the_best_of_all_partitions() -> None:
    for seed in range(20):
        widths = np.sort(array(np.random.default_rng(seed).integers(1, 50, 7)))[::-1]
        numbers, each = partition_by_width(widths, ones(widths), widths, 3, 10_000)
        assert each == 1
        best = min(
            max(a * widths[0], (b - a) * widths[a], (7 - b) * widths[b])
            for a in range(1, 6)
            for b in range(a + 1, 7)
        )
        assert max(area(widths, numbers, 3)) == best


def test_ranges_are_distributed_evenly_over_ranks() -> None:
    """Padded rows are cut, not levelled: dealing them is all that makes ranks even."""
    widths = lognormal(512)
    numbers, each = partition_by_width(widths, ones(widths), widths, 8, 16384)
    ranks = np.asarray(area(widths, numbers, 8 * each)).reshape(8, each).sum(axis=1)
    assert ranks.max() <= 1.04 * ranks.mean()


@pytest.mark.parametrize("balance", ["tokens", "work", "trained"])
@pytest.mark.parametrize(("rows", "ranks"), [(512, 8), (2048, 32)])
def test_lognormal_rows_are_balanced_within_two_percent(
    balance: str, rows: int, ranks: int
) -> None:
    lengths = lognormal(rows)
    trained = lengths * np.random.default_rng(1).integers(1, 10, rows) // 10
    wish = MicroBatches(max_tokens=16384, balance=balance)
    zeros, bounds = np.zeros_like(lengths), np.arange(rows + 1)
    numbers, each = wish.plan(Packs(np.arange(rows), zeros, lengths, bounds), trained, ranks)
    cost = {"tokens": lengths, "work": 24576 * lengths + lengths**2, "trained": trained}[balance]
    costs = np.bincount(numbers, cost, ranks * each).reshape(ranks, each)
    assert costs.sum(axis=1).max() <= 1.02 * costs.sum(axis=1).mean()
    # Also where ranks wait for each other at every micro-batch.
    assert costs.max(axis=0).sum() <= 1.02 * costs.sum(axis=1).mean()
    assert np.bincount(numbers, lengths).max() <= 16384
    assert each <= -(-lengths.sum() // (16384 * ranks)) + 1


def test_units_of_several_rows_stay_together() -> None:
    """A group of rows is a unit: its tokens and its squares add up."""
    lengths, bounds = array([3, 4, 5, 6, 2, 2]), array([0, 2, 4, 6])
    packs = Packs(np.arange(6), np.zeros(6, np.int64), lengths, bounds)
    wish = MicroBatches(max_tokens=11, balance="tokens")
    numbers, each = wish.plan(packs, lengths, 1)
    assert (numbers.size, each) == (3, 2)
    assert np.bincount(numbers, [7, 11, 4]).tolist() == [11, 11]
    padded = MicroBatches(max_tokens=12, balance="tokens", layout="padded")
    numbers, each = padded.plan(packs, lengths, 1)
    assert (numbers.size, each) == (3, 3)
