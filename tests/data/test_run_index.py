"""`RunIndex` has the samples that the loader serves."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.making import make_columns, make_store
from tokenmill.data.cursor import Cursor
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import mix
from tokenmill.data.packs import METHODS, Pack
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import concat
from tokenmill.errors import UsageError
from tokenmill.store import Store

LENGTHS = np.random.default_rng(3).integers(1, 24, 61).tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    slices = [make_columns(LENGTHS[:25]), make_columns(LENGTHS[25:], seed=1)]
    return make_store(tmp_path_factory.mktemp("cache"), slices)


def test_mapped_rows_cannot_be_exported(store: Store) -> None:
    for data in (store.map(dict), store.map(dict)[3:], concat([store, store.map(dict)])):
        with pytest.raises(UsageError, match="do not support map"):
            RunIndex(data)
    RunIndex(store[3:])


def served(loader: Loader, epochs: int) -> list[list[tuple[int, int, int]]]:
    """(row, start, length) of every piece, sample by sample, as a loader of one per batch says."""
    found = []
    for step, _ in loader.steps(Cursor(), epochs):
        packs = step.packs
        found.append(list(zip(packs.rows, packs.starts, packs.lengths, strict=True)))
    return found


@settings(max_examples=40)
@given(
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    order=st.sampled_from(["feistel", "sequential", "length_grouped"]),
    pack=st.none()
    | st.builds(
        Pack,
        length=st.integers(8, 40),
        method=st.sampled_from([method for method in METHODS if method != "balanced"]),
        window=st.integers(1, 70),
        oversize=st.sampled_from(["drop", "truncate", "split"]),
    ),
    mixed=st.booleans(),
    data=st.data(),
)
def test_samples_by_number_are_those_of_the_loader(
    store: Store,
    epochs: int,
    seed: int,
    order: str,
    pack: Pack | None,
    mixed: bool,
    data: st.DataObject,
) -> None:
    rows = mix({"a": store, "b": concat([store])[10:20]}, {"a": 2, "b": 1}) if mixed else store
    run = RunIndex(rows, epochs=epochs, seed=seed, order=order, pack=pack)
    how = {"shuffle": order != "sequential", "group_by_length": order == "length_grouped"}
    wanted = served(Loader(rows, 1, seed=seed, pack=pack, pad_token_id=0, **how), epochs)
    assert len(run) == len(wanted)
    numbers = data.draw(st.lists(st.integers(0, len(run) - 1), max_size=12))
    packs = pickle.loads(pickle.dumps(run)).packs(numbers)
    assert len(packs) == len(numbers)
    for place, number in enumerate(numbers):
        pieces = packs.take(np.asarray([place]))
        assert list(zip(pieces.rows, pieces.starts, pieces.lengths, strict=True)) == wanted[number]


def test_pieces_are_the_stored_tokens(store: Store) -> None:
    run = RunIndex(store, order="sequential")
    for row, ((ids, mask),) in zip(store, run.pieces(range(len(run))), strict=True):
        assert ids.tolist() == row.input_ids.tolist()
        assert mask.tolist() == row.loss_mask.tolist()
        assert not ids.flags.owndata


def test_numbers_outside_are_an_index_error(store: Store) -> None:
    run = RunIndex(store, epochs=2)
    for number in (-2 * len(store) - 1, 2 * len(store)):
        with pytest.raises(IndexError, match=f"sample {number} is out of range"):
            run.packs([number])
    assert len(run.packs([])) == 0
    assert len(RunIndex(store, pack=Pack(64)).packs([])) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"epochs": epochs}, "epochs") for epochs in (0, -1, True, 1.5)),
        ({"pack": Pack(length=1, window=9, oversize="drop")}, "no samples"),
    ],
)
def test_invalid_run_is_rejected(store: Store, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunIndex(store.filter("length > 1"), **given)


def test_list_of_a_billion_rows_is_small_and_quick(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3] * 100_000)])
    many = concat([concat([store] * 100)] * 100)
    run = RunIndex(many, epochs=3)
    assert len(run) == 3_000_000_000
    assert len(pickle.dumps(run)) < 64 << 10  # ten thousand parts
    last = run.packs([len(run) - 1]).rows.tolist()
    order = Loader(many, 1, pad_token_id=0).stream.order
    assert last == order.indices(2, np.asarray([999_999_999])).tolist()
