"""Weights in batches: beside their labels in every layout, summed over the whole global batch.

What stands where is compared with a sidecar of the same values, whose layouts have tests of their
own; the sums, with what all ranks were served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.store.making import make_columns, make_store
from tokenmill.dataset import Mixture, View, concat, filtered, mix
from tokenmill.errors import UsageError
from tokenmill.loader import Loader
from tokenmill.packing import Align, MicroBatches, Pack
from tokenmill.store import Row, Store
from tokenmill.store.columns import SliceColumns, weight_runs_of, weights_along

WORLD = 4
Data = Store | View | Mixture


def slices(seed: int) -> list[SliceColumns]:
    """Masks that change anywhere; one slice in two has weights, and some of its rows have none."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(4):
        columns = make_columns(rng.integers(1, 60, 12).tolist(), seed=number + 10 * seed)
        mask = (rng.random(len(columns.mask)) < 0.5).astype(np.uint8)
        columns = dataclasses.replace(columns, mask=mask)
        if number % 2 == 0:
            weights = mask * rng.choice(np.float32([0.5, 1, 1, 2.25]), len(mask))
            plain = slice(columns.starts[3], columns.starts[6])
            weights[plain] = mask[plain]
            columns = dataclasses.replace(columns, weights=weights)
        found.append(columns)
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """One with weights and one without, both with a sidecar of what is expected."""
    root: Path = tmp_path_factory.mktemp("weights")
    one = make_store(root, slices(1), name="one", pad_id=0)
    plain = [dataclasses.replace(columns, weights=None) for columns in slices(2)]
    two = make_store(root, plain, name="two", pad_id=0)
    given = [columns.mask if columns.weights is None else columns.weights for columns in slices(1)]
    one.attach("given", np.concatenate(given), made_by="test", per="token")
    given = [columns.mask for columns in plain]
    two.attach("given", np.concatenate(given), made_by="test", per="token")
    assert (one.has_weights, two.has_weights) == (True, False)
    return one, two


DATA: dict[str, Callable[[Store, Store], Data]] = {
    "store": lambda one, two: one,
    "filter": lambda one, two: filtered(concat([one, two]), "length > 5"),
    "mix": lambda one, two: mix({"one": one, "two": two}, {"one": 0.3, "two": 0.7}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"batch_size": 2},
    "padded on the left": {"batch_size": 2, "pad_side": "left", "pad_to_multiple_of": 8},
    "short": {"batch_size": 2},
    "packed": {"batch_size": 1, "pack": Pack(64)},
    "packed and split": {"batch_size": 2, "pack": Pack(16, oversize="split")},
    "packed and truncated": {"batch_size": 2, "pack": Pack(16, oversize="truncate")},
    "slabs": {"batch_size": 2, "micro_batches": MicroBatches(64, align=Align(sequence=4))},
    "padded micro-batches": {"batch_size": 2, "micro_batches": MicroBatches(64, layout="padded")},
    "shards": {
        "batch_size": 4,
        "micro_batches": MicroBatches(128, context_parallel=2, align=Align(sequence=4)),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", DATA)
def test_weights_stand_beside_labels_and_sum_up(
    stores: tuple[Store, Store], data: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, opened, open_row = DATA[data](*stores), set[int](), Store.batch

    def noting(self: Store, indices: Any) -> list[Row]:
        rows = open_row(self, indices)
        opened.update(id(row._store) + 1000 * row._slice + row._number for row in rows)
        return rows

    monkeypatch.setattr(Store, "batch", noting)
    ranks = [
        iter(Loader(served, rank=rank, world_size=WORLD, indices=True, **SHAPES[shape]))
        for rank in range(WORLD)
    ]
    for step in range(3):
        batches = []
        for rank in ranks:
            opened.clear()
            found = next(rank, None)
            if found is None:
                assert step
                return
            own = found if isinstance(found, list) else [found]
            assert len(opened) <= len(set(np.concatenate([b["indices"] for b in own]).tolist()))
            batches += own
        total = 0.0
        for batch in batches:
            weights, labels = batch["loss_weights"], batch["labels"]
            assert weights.dtype == np.float32
            assert weights.shape == labels.shape
            assert np.array_equal(weights, np.where(labels == -100, 0, batch["given"]))
            total += float(weights.sum(dtype=np.float64))
        assert {batch["weight_sum"] for batch in batches} == {total}
        if shape == "shards":
            shifted = [float(batch["shift_loss_weights"].sum()) for batch in batches]
            assert sum(shifted) == total
            for batch in batches:
                assert np.array_equal(
                    batch["shift_loss_weights"] > 0, batch["shift_labels"] != -100
                )


def test_data_without_weights_is_served_as_ever(stores: tuple[Store, Store]) -> None:
    batch = next(iter(Loader(stores[1], batch_size=2)))
    assert not {"loss_weights", "weight_sum"} & set(batch)


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
    store = make_store(tmp_path, slices(3), pad_id=0)
    values = np.ones(int(store.lengths.sum()), np.float32)
    store.attach("loss_weights", values, made_by="test", per="token")
    with pytest.raises(UsageError, match="weights of its own and a sidecar 'loss_weights'"):
        Loader(store)
    assert "loss_weights" in next(iter(Loader(store, sidecars=())))


WEIGHTS = arrays.arrays(np.float32, st.integers(0, 12), elements=st.sampled_from([0.0, 1, 1, 0.5]))


@given(rows=st.lists(WEIGHTS, max_size=6))
def test_runs_give_back_every_weight(rows: list[Any]) -> None:
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    flat = np.concatenate([*rows, np.zeros(0, np.float32)])
    places, weights, bounds = weight_runs_of(flat, starts)
    assert len(bounds) == len(rows) + 1
    for number, row in enumerate(rows):
        own = slice(bounds[number], bounds[number + 1])
        assert (bounds[number] < bounds[number + 1]) == bool((row == 0.5).any())
        found = weights_along(places[own], weights[own], (row > 0).astype(np.uint8))
        assert found.tolist() == row.tolist()


def test_torch_serves_weights_as_tensors(stores: tuple[Store, Store]) -> None:
    torch = pytest.importorskip("torch")
    ours = Loader(stores[0], batch_size=4)
    for batch, other in zip(ours, stores[0].torch(batch_size=4), strict=True):
        assert other["loss_weights"].dtype == torch.float32
        assert np.array_equal(other["loss_weights"].numpy(), batch["loss_weights"])
        assert other["weight_sum"] == batch["weight_sum"]
