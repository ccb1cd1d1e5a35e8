"""Packs against plain one-by-one algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.data.packs import METHODS, Pack, Packs, pack_window
from tokenmill.errors import UsageError

lengths_in_8 = st.lists(st.integers(1, 8), min_size=1, max_size=60)


def contents(packs: Packs) -> list[list[int]]:
    """Rows of every pack."""
    return [packs.rows[a:b].tolist() for a, b in zip(packs.bounds, packs.bounds[1:], strict=False)]


def plain_fit(
    lengths: list[int], rows: Iterable[int], choose: Callable[[list[int]], int], capacity: int = 8
) -> list[list[int]]:
    """Add each row to one of the packs where it fits; `choose` gets their free tokens."""
    packs: list[list[int]] = []
    for row in rows:
        free = [capacity - sum(lengths[r] for r in pack) for pack in packs]
        fitting = [
            place for place, capacity_left in enumerate(free) if capacity_left >= lengths[row]
        ]
        if fitting:
            packs[fitting[choose([free[place] for place in fitting])]].append(row)
        else:
            packs.append([row])
    return packs


def plain_sequential(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for row, length in enumerate(lengths):
        if not packs or sum(lengths[r] for r in packs[-1]) + length > capacity:
            packs.append([])
        packs[-1].append(row)
    return packs


def packed(lengths: list[int], method: str, ranks: int = 1, capacity: int = 8) -> Packs:
    rows = np.arange(len(lengths))
    return pack_window(rows, np.asarray(lengths), Pack(capacity, method), ranks)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(lengths=lengths_in_8, ranks=st.integers(1, 5))
def test_packs_any_method_hold_every_row_once_and_fit(
    method: str, lengths: list[int], ranks: int
) -> None:
    packs = packed(lengths, method, ranks)
    assert sorted(packs.rows.tolist()) == list(range(len(lengths)))
    for pack in contents(packs):
        assert sum(lengths[row] for row in pack) <= 8
        assert pack == sorted(pack)  # rows of a pack keep the order in which they came
    firsts = [pack[0] for pack in contents(packs) if pack]
    assert firsts == sorted(firsts)
    if method == "balanced":
        assert len(packs) % ranks == 0
    else:
        assert all(contents(packs))


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_in_8)
def test_best_fit_is_as_full_as_one_row_at_a_time(lengths: list[int]) -> None:
    """Which of two equally full packs is taken is free; how full all packs get is not."""

    def loads(packs: list[list[int]]) -> list[int]:
        return sorted(sum(lengths[row] for row in pack) for pack in packs)

    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    fullest = plain_fit(lengths, longest_first, lambda free: free.index(min(free)))
    assert loads(contents(packed(lengths, "best_fit"))) == loads(fullest)


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_in_8)
def test_first_fit_and_sequential_equal_the_plain_algorithms(lengths: list[int]) -> None:
    first = plain_fit(lengths, range(len(lengths)), lambda free: 0)
    assert contents(packed(lengths, "first_fit")) == first
    assert contents(packed(lengths, "sequential")) == plain_sequential(lengths, 8)


def test_best_fit_lognormal_lengths_fill_nearly_everything() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 65536), 1, 8192).astype(int)
    packs = pack_window(np.arange(65536), lengths, Pack(8192))
    assert packs.tokens / (len(packs) * 8192) > 0.995


def test_balanced_token_counts_are_nearly_equal() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 20000), 1, 8192).astype(int)
    packs = pack_window(np.arange(20000), lengths, Pack(8192, "balanced"), ranks=8)
    tokens = np.add.reduceat(packs.lengths, packs.bounds[:-1])
    assert len(packs) % 8 == 0
    assert tokens.max() - tokens.min() <= 0.01 * 8192
    assert packs.tokens / (len(packs) * 8192) > 0.95


def test_balanced_fewer_rows_than_ranks_gives_every_rank_a_pack() -> None:
    packs = packed([3, 3], "balanced", ranks=4)
    assert len(packs) == 4
    assert sorted(len(pack) for pack in contents(packs)) == [0, 0, 1, 1]


def test_oversize_error_names_row_length_and_choices() -> None:
    with pytest.raises(UsageError, match=r"row 7 has 9 tokens.*8.*split"):
        pack_window(np.asarray([5, 7]), np.asarray([3, 9]), Pack(8))


@pytest.mark.parametrize(
    ("oversize", "expected"),
    [
        ("drop", [(5, 0, 3)]),
        ("truncate", [(5, 0, 3), (7, 0, 8)]),
        ("split", [(5, 0, 3), (7, 0, 8), (7, 8, 8), (7, 16, 4)]),
    ],
)
def test_oversize_policies_make_the_stated_pieces(
    oversize: str, expected: list[tuple[int, int, int]]
) -> None:
    packs = pack_window(np.asarray([5, 7]), np.asarray([3, 20]), Pack(8, oversize=oversize))
    pieces = zip(packs.rows.tolist(), packs.starts.tolist(), packs.lengths.tolist(), strict=True)
    assert sorted(pieces) == expected


def test_rows_without_tokens_are_not_packed() -> None:
    assert contents(packed([3, 0, 4], "best_fit")) == [[0, 2]]
    assert len(pack_window(np.zeros(0, int), np.zeros(0, int), Pack(8))) == 0


def test_take_and_join_keep_packs_whole() -> None:
    packs = packed([5, 4, 3, 3, 1, 8], "best_fit")
    whole = contents(packs)
    taken = packs.take(np.asarray([2, 0]))
    assert contents(taken) == [whole[2], whole[0]]
    assert contents(Packs.join([taken, packs])) == [whole[2], whole[0], *whole]
    assert contents(packs.take(np.zeros(0, int))) == []
