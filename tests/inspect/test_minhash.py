"""Near-duplicates against brute force: reported pairs are exact, and similar rows are found."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.inspect.lint import minhash
from tokenmill.inspect.lint.linter import near_duplicates

Row = list[int]
SURE = 0.9  # what is so alike is missed once in 200,000 pairs; at the threshold once in 130


def naive_shingles(row: Row) -> set[tuple[int, ...]]:
    return {tuple(row[at : at + minhash.SHINGLE]) for at in range(len(row) - minhash.SHINGLE + 1)}


def naive_jaccard(one: Row, other: Row) -> float:
    mine, theirs = naive_shingles(one), naive_shingles(other)
    return len(mine & theirs) / len(mine | theirs)


def found(rows: list[Row]) -> dict[int, tuple[int, float]]:
    hashed = [minhash.shingles(np.array(row, np.int32)) for row in rows]
    pairs = list(minhash.candidates(minhash.sketches(hashed)).items())
    known = {number: np.unique(hashes) for number, hashes in enumerate(hashed)}
    return {row: (other, index) for row, other, index in near_duplicates(pairs, known)}


def changed(row: Row, places: list[int]) -> Row:
    """Return the row with new tokens at some positions, each token once."""
    other = list(row)
    for number, place in enumerate(places):
        other[place % len(row)] = 1_000_000 + 1000 * place + number
    return other


rows_of_one_kind = st.integers(0, 10_000).map(
    lambda seed: np.random.default_rng(seed).integers(0, 50_000, 200).tolist()
)
few_edits = st.lists(st.integers(0, 199), max_size=2)
many_edits = st.lists(st.integers(0, 199), min_size=60, max_size=90, unique=True)


@settings(max_examples=40)
@given(st.lists(rows_of_one_kind, min_size=1, max_size=3, unique_by=tuple), st.data())
def test_copies_with_few_edits_are_found_and_others_are_not(
    bases: list[Row], data: st.DataObject
) -> None:
    rows = [list(base) for base in bases]
    for base in bases:
        rows += [changed(base, edits) for edits in data.draw(st.lists(few_edits, max_size=3))]
        rows += [changed(base, edits) for edits in data.draw(st.lists(many_edits, max_size=2))]
    most_alike: dict[int, float] = {}
    for early, late in itertools.combinations(range(len(rows)), 2):
        index = naive_jaccard(rows[early], rows[late])
        most_alike[late] = max(index, most_alike.get(late, 0.0))
    answer = found(rows)
    assert {row for row, index in most_alike.items() if index >= SURE} <= set(answer)
    assert set(answer) <= {row for row, index in most_alike.items() if index >= minhash.THRESHOLD}
    for row, (other, index) in answer.items():
        assert other < row
        assert index == round(naive_jaccard(rows[row], rows[other]), 4)


@given(st.lists(st.lists(st.integers(0, 99), min_size=5, max_size=300), min_size=1, max_size=6))
def test_sketch_of_a_row_does_not_depend_on_its_neighbours(rows: list[Row]) -> None:
    hashed = [minhash.shingles(np.array(row, np.int32)) for row in rows]
    together = minhash.sketches(hashed)
    for number, hashes in enumerate(hashed):
        assert np.array_equal(together[number], minhash.sketches([hashes])[0])


def test_short_rows_have_no_shingles() -> None:
    assert len(minhash.shingles(np.arange(minhash.SHINGLE - 1, dtype=np.int32))) == 0
    assert len(minhash.shingles(np.arange(minhash.SHINGLE, dtype=np.int32))) == 1
