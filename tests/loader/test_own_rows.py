"""A rank opens and fetches the rows it serves and no others (promise P19)."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.remote.servers import RangeServer, serving
from tests.store.making import make_columns, make_store
from tokenmill.dataset import Mixture, View, concat, filtered, mix
from tokenmill.files import ranged
from tokenmill.loader import Loader
from tokenmill.packing import MicroBatches, Pack
from tokenmill.store import Store
from tokenmill.store.columns import SliceColumns, count_within, firsts_of, runs_of

WORLD = 4
Data = Store | View | Mixture


def slices(seed: int) -> list[SliceColumns]:
    """Rows of any length whose masks change anywhere, rows without tokens and whole ones too."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(5):
        lengths = [*rng.integers(1, 60, 12).tolist(), 0]
        columns = make_columns(lengths, seed=number + 10 * seed)
        mask = (rng.random(len(columns.mask)) < 0.5).astype(np.uint8)
        first, stop = columns.starts[2], columns.starts[3]
        mask[first:stop] = number % 2
        found.append(dataclasses.replace(columns, mask=mask))
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: Any) -> tuple[Store, Store]:
    root: Path = tmp_path_factory.mktemp("stores")
    one, two = (make_store(root, slices(seed), name=str(seed), pad_id=0) for seed in (1, 2))
    return one, two


DATA: dict[str, Callable[[Store, Store], Data]] = {
    "store": lambda one, two: one,
    "concatenation": lambda one, two: concat([one, two]),
    "filter": lambda one, two: filtered(concat([one, two]), "length > 5"),
    "mix": lambda one, two: mix({"one": one, "two": two}, {"one": 0.3, "two": 0.7}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"batch_size": 2},
    "grouped": {"batch_size": 2, "group_by_length": True},
    "packed": {"batch_size": 1, "pack": Pack(64)},
    "packed and split": {"batch_size": 2, "pack": Pack(16, oversize="split")},
    "packed and truncated": {"batch_size": 2, "pack": Pack(16, oversize="truncate")},
    "packed and balanced": {"batch_size": 1, "pack": Pack(64, method="balanced")},
}
MICRO = {"batch_size": 2, "micro_batches": MicroBatches(64, balance="trained")}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", DATA)
def test_rank_opens_its_own_rows_only_and_counts_the_whole_batch(
    stores: tuple[Store, Store], data: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = DATA[data](*stores)
    opened: list[int] = []
    open_row = Store.batch

    def counting(self: Store, indices: Any) -> Any:
        opened.extend(indices)
        return open_row(self, indices)

    monkeypatch.setattr(Store, "batch", counting)
    ranks = [
        Loader(served, rank=rank, world_size=WORLD, indices=True, **SHAPES[shape]).repeat(2)
        for rank in range(WORLD)
    ]
    steps = 0
    while True:
        batches = []
        for rank in ranks:
            opened.clear()
            batches.append(next(rank, None))
            if batches[-1] is not None:
                assert len(opened) == len(batches[-1]["indices"])
        if batches[0] is None:
            break
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches if batch)
        assert [batch["num_trained_tokens"] for batch in batches if batch] == [trained] * WORLD
        steps += 1
    assert steps > 2


def test_runs_count_any_piece_of_any_mask() -> None:
    rng = np.random.default_rng(0)
    masks = [np.zeros(0, np.uint8), np.ones(1, np.uint8), np.zeros(3, np.uint8)]
    masks += [(rng.random(rng.integers(1, 20)) < 0.5).astype(np.uint8) for _ in range(200)]
    masks += [np.zeros(0, np.uint8)]
    starts = np.concatenate([[0], np.cumsum([len(mask) for mask in masks])])
    runs, bounds = runs_of(np.concatenate(masks), starts)
    assert firsts_of(runs, bounds).tolist() == [int(mask[:1].sum()) for mask in masks]
    rows = rng.integers(0, len(masks), 2000)
    sizes = np.diff(starts)[rows]
    begin = rng.integers(0, sizes + 1)
    stop = rng.integers(begin, sizes + 1)
    expected = [int(masks[row][a:b].sum()) for row, a, b in zip(rows, begin, stop, strict=True)]
    assert count_within(runs, bounds[rows], bounds[rows + 1], begin, stop).tolist() == expected


@pytest.mark.parametrize("shape", ["padded", "packed", "packed and split"])
def test_rank_fetches_no_slice_of_another_ranks_rows(tmp_path: Path, shape: str) -> None:
    """Every slice elsewhere is its own file, so a request for it is seen by its name."""
    rows = [make_columns([20, 30], seed=number) for number in range(20)]
    store = make_store(tmp_path / "cache", rows)
    (tmp_path / "web").mkdir()
    tm.push(store, tmp_path / "web" / "store")
    keys = list(store.slice_keys())
    with serving(RangeServer(tmp_path / "web")) as web:
        for rank in range(WORLD):
            ranged.recent.clear()
            shutil.rmtree(tmp_path / "blocks", ignore_errors=True)
            there = tm.open_store(web.url("store"), cache_dir=tmp_path / "blocks")
            loader = Loader(
                there, rank=rank, world_size=WORLD, indices=True, shuffle=False, **SHAPES[shape]
            )
            web.forget()
            rows = next(iter(loader))["indices"]
            wanted = {
                keys[at] for at in np.searchsorted(there.table["first_row"], rows, "right") - 1
            }
            fetched = {key for key in keys for path, size in web.requests if key in path and size}
            assert fetched == wanted
            assert len(wanted) < len(keys)


@pytest.mark.parametrize("stores", ["now"], indirect=True)
@pytest.mark.parametrize("data", DATA)
def test_rank_opens_its_own_rows_only_in_micro_batches(
    stores: tuple[Store, Store], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_row = Store.batch

    def counting(self: Store, indices: Any) -> Any:
        opened.extend(indices)
        return open_row(self, indices)

    monkeypatch.setattr(Store, "batch", counting)
    served = DATA[data](*stores)
    for rank in range(WORLD):
        for step in Loader(served, rank=rank, world_size=WORLD, indices=True, **MICRO):
            assert len(opened) == sum(batch["indices"].size for batch in step)
            opened.clear()


@pytest.mark.parametrize("shape", [SHAPES["padded"], MICRO], ids=["padded", "micro-batches"])
def test_rank_fetches_the_slices_of_its_next_steps_ahead_and_no_others(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    """One step is taken; a prefetch of two fetches those of the next steps of this rank, too."""
    rows = [make_columns([20, 30], seed=number) for number in range(40)]
    store = make_store(tmp_path / "cache", rows)
    (tmp_path / "web").mkdir()
    tm.push(store, tmp_path / "web" / "store")
    keys = list(store.slice_keys())
    given = {"rank": 1, "world_size": WORLD, "indices": True, **shape}

    def slices_of(steps: list[Any]) -> set[str]:
        batches = [b for step in steps for b in (step if isinstance(step, list) else [step])]
        places = np.concatenate([batch["indices"] for batch in batches]) // 2
        return {keys[at] for at in places.tolist()}

    following = Loader(store, **given).repeat()
    steps = [next(following) for _ in range(8)]
    with serving(RangeServer(tmp_path / "web")) as web:
        ranged.recent.clear()
        there = tm.open_store(web.url("store"), cache_dir=tmp_path / "blocks")
        ahead = Loader(there, prefetch=2, **given).repeat()
        next(ahead)

        def fetched() -> set[str]:
            return {key for key in keys for path, size in web.requests if key in path and size}

        # Two lie ready; a third may be in the thread's hands, waiting for room.
        deadline = time.monotonic() + 30
        while not slices_of(steps[:3]) <= fetched() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert slices_of(steps[:3]) <= fetched() <= slices_of(steps[:4])
        ahead.close()
