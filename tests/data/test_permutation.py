"""Tests of the keyed permutation: golden values, agreement of both versions, statistics."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.make_golden import GOLDEN, vectors
from tests.data.scalar import permuted
from tokenmill.data.order import ORDER_VERSION, FeistelOrder, Permutation, derive_key
from tokenmill.errors import UsageError


def test_order_golden_vectors_are_unchanged() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["order_version"] == ORDER_VERSION
    assert json.loads(json.dumps(vectors())) == golden


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_any_size_is_a_bijection(n: int, key: int) -> None:
    found = Permutation(n, key).indices(np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permutation_is_the_one_of_plain_integers(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    found = Permutation(n, key).indices(np.asarray(positions, dtype=np.int64))
    assert found.tolist() == [permuted(n, key, position) for position in positions]
    assert all(0 <= index < n for index in found.tolist())


def test_permutation_at_2_to_33_needs_no_memory() -> None:
    bijection = Permutation(2**33, derive_key(42, 0))
    positions = np.arange(0, 2**33, 2**33 // 1000)
    bijection.indices(positions)
    tracemalloc.start()
    found = bijection.indices(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.unique(found).size == positions.size
    assert peak < 1 << 20


def test_key_seed_and_epoch_do_not_add_up() -> None:
    keys = {derive_key(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(keys) == 10_000
    one = FeistelOrder(1000, 42).indices(1, np.arange(1000))
    other = FeistelOrder(1000, 43).indices(0, np.arange(1000))
    assert np.count_nonzero(one == other) < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "draws"), [(2, 1000), (5, 2000), pytest.param(4, 20_000, marks=pytest.mark.soak)]
)
def test_permutation_tiny_sizes_give_every_order_equally_often(n: int, draws: int) -> None:
    counts = Counter(
        tuple(Permutation(n, derive_key(k)).indices(np.arange(n)).tolist()) for k in range(draws)
    )
    orders = math.factorial(n)
    expected = draws / orders
    chi = sum((counts[order] - expected) ** 2 / expected for order in permutations(range(n)))
    assert chi < orders - 1 + 5 * math.sqrt(2 * (orders - 1)) + 3


@pytest.mark.parametrize("n", [97, 1000, 1024, 4096, 100_003])
def test_permutation_statistics_look_like_a_shuffle(n: int) -> None:
    """Four things a shuffle must not show: place, neighbours, cycles of epochs, serial order."""
    epochs = max(4, 100_000 // n)
    positions = np.arange(n)
    tables = np.stack([Permutation(n, derive_key(42, e)).indices(positions) for e in range(epochs)])
    # 1. Where a position lands is uniform: a chi-square over an 8 × 8 grid.
    grid = np.zeros((8, 8))
    for table in tables:
        np.add.at(grid, (positions * 8 // n, table * 8 // n), 1)
    share = np.bincount(positions * 8 // n, minlength=8) / n
    expected = np.outer(share, share) * n * epochs
    chi = ((grid - expected) ** 2 / expected).sum()
    assert chi < 49 + 6 * math.sqrt(2 * 49)
    # 2. Neighbours do not stay neighbours: about two in n would by chance.
    close = sum(np.count_nonzero(np.abs(np.diff(table)) == 1) for table in tables)
    assert abs(close - 2 * epochs) < 6 * math.sqrt(2 * epochs) + 3
    # 3. Serial correlation is that of noise.
    for table in tables[:4]:
        correlation = np.corrcoef(table[:-1], table[1:])[0, 1]
        assert abs(correlation) < 6 / math.sqrt(n)
    # 4. Epochs agree in about one place each.
    same = sum(np.count_nonzero(a == b) for a, b in pairwise(tables))
    assert abs(same - (epochs - 1)) < 6 * math.sqrt(epochs) + 3


@pytest.mark.parametrize("n", [-1, 2**62 + 1])
def test_permutation_impossible_size_is_refused(n: int) -> None:
    with pytest.raises(UsageError, match="must have 0 to"):
        Permutation(n, 1)


def test_permutation_position_outside_is_refused() -> None:
    for position in (-1, 10):
        with pytest.raises(IndexError):
            Permutation(10, 1).indices(np.asarray([0, position]))
