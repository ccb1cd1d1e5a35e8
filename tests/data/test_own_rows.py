"""A rank reads the rows it serves and no others, and counts those of the whole global batch.

Weights are compared with a sidecar of the same values, whose layouts have tests of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.remote.servers import RangeServer, serving
from tests.sampling import sampled
from tests.store.making import make_columns, make_store
from tokenmill._core import ranged
from tokenmill.data.loader import Loader
from tokenmill.data.micro import Align, MicroBatches
from tokenmill.data.mixture import Mixture, mix
from tokenmill.data.packs import Pack
from tokenmill.data.view import View, concat
from tokenmill.errors import UsageError
from tokenmill.store import Row, Store
from tokenmill.store.columns import SliceColumns

WORLD = 4
Data = Store | View | Mixture


def slices(seed: int, *, weighted: bool) -> list[SliceColumns]:
    """Rows of any length, also without tokens, whose masks change anywhere.

    One slice in two has weights, and some of its rows have none.
    """
    rng = np.random.default_rng(seed)
    found = []
    for number in range(4):
        lengths = [*rng.integers(1, 60, 12).tolist(), 0]
        columns = make_columns(lengths, seed=number + 10 * seed)
        mask = (rng.random(len(columns.mask)) < 0.5).astype(np.uint8)
        mask[columns.starts[2] : columns.starts[3]] = number % 2
        columns = dataclasses.replace(columns, mask=mask)
        if weighted and number % 2 == 0:
            weights = mask * rng.choice(np.float32([0.5, 1, 1, 2.25]), len(mask))
            plain = slice(columns.starts[3], columns.starts[6])
            weights[plain] = mask[plain]
            columns = dataclasses.replace(columns, weights=weights)
        found.append(columns)
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    root: Path = tmp_path_factory.mktemp("stores")
    made = []
    for seed, weighted in ((1, True), (2, False)):
        columns = slices(seed, weighted=weighted)
        store = make_store(root, columns, name=str(seed), pad_token_id=0)
        expected = [own.mask if own.weights is None else own.weights for own in columns]
        store.attach("given", np.concatenate(expected), producer="test", per="token")
        made.append(store)
    assert [store.has_weights for store in made] == [True, False]
    return made[0], made[1]


DATA: dict[str, Callable[[Store, Store], Data]] = {
    "store": lambda one, two: one,
    "without weights": lambda one, two: two,
    "filter": lambda one, two: concat([one, two]).filter("length > 5"),
    "mix": lambda one, two: mix({"one": one, "two": two}, {"one": 0.3, "two": 0.7}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"batch_size": 2},
    "padded on the left": {"batch_size": 2, "padding_side": "left", "pad_to_multiple_of": 8},
    "grouped": {"batch_size": 2, "group_by_length": True},
    "packed": {"batch_size": 1, "pack": Pack(64)},
    "packed and split": {"batch_size": 2, "pack": Pack(16, oversize="split")},
    "packed and truncated": {"batch_size": 2, "pack": Pack(16, oversize="truncate")},
    "packed and balanced": {"batch_size": 1, "pack": Pack(64, method="balanced")},
    "slabs": {"batch_size": 2, "micro_batches": MicroBatches(64, align=Align(sequence=4))},
    "padded micro-batches": {"batch_size": 2, "micro_batches": MicroBatches(64, layout="padded")},
    "shards": {
        "batch_size": 4,
        "micro_batches": MicroBatches(128, context_parallel=2, align=Align(sequence=4)),
    },
}
MICRO = {"batch_size": 2, "micro_batches": MicroBatches(64, balance="trained")}


@pytest.mark.parametrize(("data", "shape"), sampled(itertools.product(DATA, SHAPES), 3))
def test_rank_opens_its_own_rows_and_counts_labels_and_weights_of_all(
    stores: tuple[Store, Store], data: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, opened, open_row = DATA[data](*stores), set[tuple[int, int]](), Store.batch

    def noting(self: Store, indices: Any) -> list[Row]:
        opened.update((id(self), int(index)) for index in indices)
        return open_row(self, indices)

    monkeypatch.setattr(Store, "batch", noting)
    ranks = [
        iter(Loader(served, rank=rank, world_size=WORLD, indices=True, **SHAPES[shape]))
        for rank in range(WORLD)
    ]
    steps = 0
    while True:
        batches: list[Any] = []
        for rank in ranks:
            opened.clear()
            found = next(rank, None)
            own = found if isinstance(found, list) else [found] if found else []
            rows = [row for batch in own for row in batch["indices"].tolist()]
            assert len(opened) == len(set(rows))
            batches += own
        if not batches:
            break
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert {batch["num_trained_tokens"] for batch in batches} == {trained}
        check_weights(batches, weighted=data != "without weights")
        steps += 1
    assert steps > 2


def check_weights(batches: list[Any], *, weighted: bool) -> None:
    if not weighted:
        assert not any({"loss_weights", "weight_sum"} & set(batch) for batch in batches)
        return
    total = 0.0
    for batch in batches:
        weights, labels = batch["loss_weights"], batch["labels"]
        assert weights.dtype == np.float32
        assert np.array_equal(weights, np.where(labels == -100, 0, batch["given"]))
        total += float(weights.sum(dtype=np.float64))
        if "shift_labels" in batch:
            assert np.array_equal(batch["shift_loss_weights"] > 0, batch["shift_labels"] != -100)
    assert {batch["weight_sum"] for batch in batches} == {total}
    if "shift_labels" in batches[0]:
        assert sum(float(batch["shift_loss_weights"].sum()) for batch in batches) == total


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[Store, RangeServer]]:
    """A store of slices of two rows, and a server of its copy: every slice is its own file."""
    store = make_store(tmp_path / "cache", [make_columns([20, 30], seed=n) for n in range(40)])
    (tmp_path / "web").mkdir()
    tm.push(store, tmp_path / "web" / "store")
    with serving(RangeServer(tmp_path / "web")) as web:
        yield store, web


def slices_of(store: Store, steps: list[Any]) -> set[str]:
    batches = [b for step in steps for b in (step if isinstance(step, list) else [step])]
    places = np.concatenate([batch["indices"] for batch in batches]) // 2
    keys = list(store.slice_keys())
    return {keys[at] for at in places.tolist()}


def fetched(store: Store, web: RangeServer) -> set[str]:
    return {
        key for key in store.slice_keys() for path, size in web.requests if key in path and size
    }


@pytest.mark.parametrize("shape", ["padded", "packed", "packed and split"])
def test_rank_fetches_no_slice_of_another_ranks_rows(
    remote: tuple[Store, RangeServer], tmp_path: Path, shape: str
) -> None:
    store, web = remote
    for rank in range(WORLD):
        ranged.recent.clear()
        there = tm.open_store(web.url("store"), cache_dir=tmp_path / f"blocks-{rank}")
        given = {"rank": rank, "world_size": WORLD, "indices": True, **SHAPES[shape]}
        loader = Loader(there, shuffle=False, **given)
        web.reset()
        wanted = slices_of(store, [next(iter(loader))])
        assert fetched(store, web) == wanted
        assert len(wanted) < 40


@pytest.mark.parametrize("shape", [SHAPES["padded"], MICRO], ids=["padded", "micro-batches"])
def test_rank_fetches_the_slices_of_its_next_steps_ahead_and_no_others(
    remote: tuple[Store, RangeServer], tmp_path: Path, shape: dict[str, Any]
) -> None:
    """One step is taken; a prefetch of two fetches those of the next steps of this rank, too."""
    store, web = remote
    given = {"rank": 1, "world_size": WORLD, "indices": True, **shape}
    steps = list(itertools.islice(Loader(store, **given).repeat(), 8))
    ranged.recent.clear()
    there = tm.open_store(web.url("store"), cache_dir=tmp_path / "blocks")
    ahead = Loader(there, prefetch=2, **given).repeat()
    next(ahead)
    # Two batches are ready, and the thread may hold a third.
    deadline = time.monotonic() + 30
    while not slices_of(store, steps[:3]) <= fetched(store, web) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert slices_of(store, steps[:3]) <= fetched(store, web) <= slices_of(store, steps[:4])
    ahead.close()


def _all_but_the_last(row: Row) -> dict[str, Any]:
    mask = np.ones_like(row.loss_mask)
    mask[-1:] = 0
    return {"loss_mask": mask}


def test_function_that_trains_more_gives_it_weight_one(stores: tuple[Store, Store]) -> None:
    view = stores[0].map(_all_but_the_last)
    for row, stored in zip(view, stores[0], strict=True):
        wanted = np.where(stored.weights > 0, stored.weights, 1)
        wanted[-1:] = 0
        assert np.array_equal(row.weights, wanted)
    for batch in Loader(view, batch_size=3):
        assert batch["weight_sum"] == batch["loss_weights"].sum(dtype=np.float64)
        assert np.array_equal(batch["loss_weights"] > 0, batch["labels"] != -100)


def test_sidecar_of_the_same_name_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, slices(3, weighted=True), pad_token_id=0)
    values = np.ones(int(store.lengths.sum()), np.float32)
    store.attach("loss_weights", values, producer="test", per="token")
    with pytest.raises(UsageError, match="loss weights and a sidecar 'loss_weights'"):
        Loader(store)
    assert "loss_weights" in next(iter(Loader(store, sidecars=())))
