"""Orders: miles, sequential, grouped by length; global random generators are not used."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.data.order import (
    ORDERS,
    FeistelOrder,
    GroupedOrder,
    Order,
    SequentialOrder,
    make_order,
    unroll,
)
from tokenmill.errors import UsageError
from tokenmill.integrations.miles import MilesOrder

LENGTHS = np.random.default_rng(7).integers(1, 5000, 5000)


def lengths_at(rows: np.ndarray) -> np.ndarray:
    return LENGTHS[rows]


def test_miles_order_golden_shuffles_are_reproduced(shared: Path) -> None:
    lines = (shared / "golden" / "miles" / "shuffle.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        case = json.loads(line)
        order = MilesOrder(case["n"], case["seed"])
        found = order.indices(case["epoch"], np.arange(case["n"]))
        assert found.tolist() == case["permutation"]


@pytest.mark.parametrize(
    "order",
    [
        SequentialOrder(5000),
        FeistelOrder(5000, 3),
        MilesOrder(5000, 3),
        GroupedOrder(FeistelOrder(5000, 3), 3, lengths_at, 512, 16),
        GroupedOrder(SequentialOrder(5000), 3, lengths_at, 700, 33),
    ],
    ids=["sequential", "feistel", "miles", "grouped", "grouped_odd"],
)
class TestEveryOrder:
    """One contract for all orders."""

    def test_epoch_holds_every_row_once_and_parts_equal_the_whole(self, order: Order) -> None:
        for epoch in (0, 1, 5):
            whole = order.indices(epoch, np.arange(5000))
            assert np.array_equal(np.sort(whole), np.arange(5000))
            parts = np.array_split(np.arange(5000), 65)
            assert np.array_equal(np.concatenate([order.indices(epoch, p) for p in parts]), whole)

    def test_positions_count_on_through_the_epochs(self, order: Order) -> None:
        positions = [4999, 5000, 0, 14_999, *np.random.default_rng(0).integers(0, 15_000, 300)]
        whole = np.concatenate([order.indices(epoch, np.arange(5000)) for epoch in range(3)])
        assert np.array_equal(unroll(order, np.asarray(positions)), whole[positions])

    def test_global_random_generators_are_not_touched(self, order: Order) -> None:
        random.seed(1)
        np.random.seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist()
        order.indices(3, np.arange(5000))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_grouped_order_neighbours_are_about_equally_long_and_groups_are_shuffled() -> None:
    order = GroupedOrder(FeistelOrder(5000, 3), 3, lengths_at, 1024, 32)
    lengths = LENGTHS[order.indices(0, np.arange(4096))].reshape(-1, 32)
    plain = LENGTHS[FeistelOrder(5000, 3).indices(0, np.arange(4096))].reshape(-1, 32)

    def padding(groups: np.ndarray) -> float:
        return 1 - groups.sum() / (groups.max(axis=1) * 32).sum()

    assert padding(lengths) < 0.06
    assert padding(plain) > 0.4
    middles = np.median(lengths[:32], axis=1)
    assert abs(np.corrcoef(middles, np.arange(32))[0, 1]) < 0.6  # not from short to long


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 400), window=st.integers(1, 130), group=st.integers(1, 40))
def test_grouped_order_any_window_and_group_keeps_windows_apart(
    rows: int, window: int, group: int
) -> None:
    base = FeistelOrder(rows, 9)
    order = GroupedOrder(base, 9, lengths_at, window, group)
    for start in range(0, rows, window):
        positions = np.arange(start, min(start + window, rows))
        found, expected = order.indices(2, positions), base.indices(2, positions)
        assert sorted(found.tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "42", True])
def test_order_impossible_seed_and_name_are_refused(name: str, seed: Any) -> None:
    with pytest.raises(UsageError, match="seed"):
        make_order(name, 10, seed)
    with pytest.raises(UsageError):
        make_order("random", 10, 3)


def test_sources_of_a_mixture_are_shuffled_differently() -> None:
    positions = np.arange(1000)
    one, other = FeistelOrder(1000, 1, 1), FeistelOrder(1000, 1, 2)
    assert np.count_nonzero(one.indices(0, positions) == other.indices(0, positions)) < 10
