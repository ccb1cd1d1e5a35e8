"""PyTorch's shapes: rows, collate, samplers for torchdata, workers that end when they should."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.tools import Zygote
from tests.store.making import damage_slice, make_columns, make_group_columns, make_store
from tokenmill.dataset import as_view, mix
from tokenmill.errors import CorruptionError, StateError, UsageError
from tokenmill.loader import Loader, OrderedView
from tokenmill.packing import Pack
from tokenmill.store import Store

torch = pytest.importorskip("torch")

from tokenmill.integrations import torch as tt  # noqa: E402


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(0).integers(1, 30, 67).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_id=9)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])) for name in theirs)


def test_dataset_items_and_collate_equal_the_loaders_batches(store: Store) -> None:
    dataset = tt.Dataset(store, pad_side="left", pad_to_multiple_of=4)
    loader = Loader(store, 8, pad_side="left", pad_to_multiple_of=4, epochs=1, indices=True)
    for batch in loader:
        rows = batch.pop("indices").tolist()
        batch.pop("num_trained_tokens")
        assert same(dataset.collate(dataset.__getitems__(rows)), batch)
    item = dataset[3]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["labels"][0] == -100
    assert len(pickle.dumps(dataset)) < 16 << 10


def test_dataset_under_a_trainers_own_sampler_serves_rows_by_number(store: Store) -> None:
    dataset = tt.Dataset(store)
    plain = torch.utils.data.DataLoader(
        dataset, batch_size=5, collate_fn=dataset.collate, num_workers=1
    )
    found = [int(n) for batch in plain for n in batch["attention_mask"].sum(1)]
    assert found == store.lengths.tolist()


def test_ordered_dataset_set_epoch_reaches_persistent_workers(store: Store) -> None:
    dataset = tt.OrderedDataset(store, seed=3)
    plain = torch.utils.data.DataLoader(
        dataset, batch_size=5, collate_fn=dataset.collate, num_workers=2, persistent_workers=True
    )
    ordered = OrderedView(store, seed=3)
    for epoch in (0, 1, 4):
        dataset.set_epoch(epoch)
        ordered.set_epoch(epoch)
        found = [int(n) for batch in plain for n in batch["attention_mask"].sum(1)]
        assert found == [len(row) for row in ordered]
    assert len(pickle.dumps(dataset.view)) < 16 << 10


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", [slice(None), slice(5, 60)])
def test_loader_of_a_store_or_view_in_one_call_is_resumed_exactly(
    store: Store, part: slice, workers: int
) -> None:
    data = store if part == slice(None) else as_view(store)[part]
    made = data.torch(6, num_workers=workers, seed=7, epochs=1)
    assert isinstance(made, tt.DataLoader)
    whole = [*Loader(data, 6, seed=7, epochs=1)]
    batches = iter(made)
    first = [next(batches) for _ in range(4)]
    again = data.torch(batch_size=6, num_workers=2 - workers, seed=7, epochs=1)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    found = [*first, *again]
    assert len(found) == len(whole)
    assert all(same(ours, theirs) for ours, theirs in zip(found, whole, strict=True))


def test_loader_of_a_store_without_torch_names_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenmill.integrations.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"needs PyTorch: pip install 'tokenmill\[torch\]'"):
        store.torch()


def test_dataloader_takes_a_loader_or_its_arguments_but_not_both(store: Store) -> None:
    assert len(tt.DataLoader(store, batch_size=10, last="drop")) == 6
    assert len(tt.DataLoader(Loader(store, 10))) == 7
    with pytest.raises(UsageError, match="batch_size"):
        tt.DataLoader(Loader(store), batch_size=3)
    with pytest.raises(UsageError, match="rows, not packs"):
        tt.StatefulSampler(store, pack=Pack(64))


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_dataloader_workers_end_with_the_iterator_without_garbage_collection(store: Store) -> None:
    """A cycle here once kept workers alive for minutes and made later shutdowns wait for them."""
    before = children()
    gc.disable()
    try:
        loader = tt.DataLoader(store, num_workers=2, prefetch_factor=2)
        for _ in loader:
            break
        assert children() - before == set()
    finally:
        gc.enable()


KILLED = """
import os, signal, sys
from pathlib import Path
from tokenmill.errors import WorkerError
from tokenmill.integrations.torch import DataLoader
from tokenmill.store import open_store

loader = DataLoader(open_store(sys.argv[1]), batch_size=2, num_workers=1, prefetch_factor=2)
iterator = iter(loader)
next(iterator)
handed_out = 1
(worker,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
verdicts = []
try:
    try:
        os.kill(int(worker), signal.SIGKILL)
        while True:
            next(iterator)
            handed_out += 1
    except RuntimeError as error:
        verdicts.append(isinstance(error, WorkerError) or "killed by signal" in str(error))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
except RuntimeError as late:  # torch raises from a signal handler, wherever the program stands
    verdicts.append("killed by signal" in str(late))
print(bool(verdicts) and all(verdicts))
print(loader.state_dict()["position"] == handed_out * 2)
"""


def test_dataloader_killed_worker_is_an_error_and_the_state_is_kept(
    store: Store, host_zygote: Zygote
) -> None:
    done = host_zygote.program(KILLED, store.path)
    assert done.stdout == "True\nTrue\n", done.stderr


def test_dataloader_error_in_a_worker_keeps_its_type(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5] * 40)])
    damage_slice(tmp_path)
    with pytest.raises(CorruptionError, match="checksum"):
        list(tt.DataLoader(store, num_workers=1, epochs=1))


def test_dataloader_older_iterator_of_persistent_workers_is_refused(store: Store) -> None:
    loader = tt.DataLoader(store, num_workers=1, persistent_workers=True)
    one = iter(loader)
    next(one)
    two = iter(loader)
    next(two)
    with pytest.raises(UsageError, match="one iterator at a time"):
        next(one)
    assert loader.state_dict()["position"] == 16


def test_dataloader_running_iterator_follows_a_loaded_state(store: Store) -> None:
    loader = tt.DataLoader(store, batch_size=4, num_workers=2, indices=True)
    iterator = iter(loader)
    first = next(iterator)["indices"].tolist()
    state = loader.state_dict()
    second = next(iterator)["indices"].tolist()
    for _ in range(5):
        next(iterator)
    loader.load_state_dict(json.loads(json.dumps(state)))
    assert next(iterator)["indices"].tolist() == second != first
    assert loader.served()["data"]["rows"] == 8


# torchdata

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
torchdata_noise = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def stateful(store: Store, workers: int, batches: bool, **more: Any) -> Any:
    sampler = tt.StatefulSampler(store, batch_size=4, batches=batches, last="keep", **more)
    dataset = tt.Dataset(store)
    by = {"batch_sampler": sampler} if batches else {"sampler": sampler, "batch_size": 4}
    return sampler, stateful_dataloader.StatefulDataLoader(
        dataset, collate_fn=dataset.collate, num_workers=workers, **by
    )


def first_tokens(batch: dict[str, Any]) -> list[int]:
    return [int(token) for token in batch["input_ids"][:, 0]]


def reference(store: Store, epochs: int) -> list[list[int]]:
    loader = Loader(store, 4, last="keep", epochs=epochs)
    return [first_tokens(batch) for batch in loader.repeat()]


@torchdata_noise
@pytest.mark.parametrize("batches", [True, False], ids=["batch_sampler", "sampler"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_sampler_three_passes_are_three_epochs(
    store: Store, workers: int, batches: bool
) -> None:
    _, loader = stateful(store, workers, batches)
    found = [first_tokens(batch) for _ in range(3) for batch in loader]
    assert found == reference(store, 3)


@torchdata_noise
@pytest.mark.parametrize("batches", [True, False], ids=["batch_sampler", "sampler"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_sampler_resumes_inside_and_at_the_end_of_a_pass(
    store: Store, workers: int, batches: bool
) -> None:
    expected = reference(store, 3)
    for stop in (1, 8, 16, 17, 18, 30) if workers == 0 else (5, 17, 20):
        _, loader = stateful(store, workers, batches)
        served: list[list[int]] = []
        state = None
        while state is None:
            for batch in loader:
                served.append(first_tokens(batch))
                if len(served) == stop and stop != 17:
                    state = loader.state_dict()
                    break
            if len(served) == 17 == stop:
                state = loader.state_dict()  # taken after the loop has ended, the well-known trap
        _, resumed = stateful(store, workers, batches)
        resumed.load_state_dict(state)
        while len(served) < len(expected):
            served += [first_tokens(batch) for batch in resumed]
        assert served == expected, f"resumed after {stop} batches"


@torchdata_noise
def test_stateful_sampler_state_of_another_seed_is_refused(store: Store) -> None:
    _, loader = stateful(store, 0, True)
    next(iter(loader))
    _, other = stateful(store, 0, True, seed=1)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="seed"):
        next(iter(other))


@torchdata_noise
def test_stateful_sampler_set_epoch_and_length(store: Store) -> None:
    sampler, loader = stateful(store, 0, True)
    sampler.set_epoch(2)
    assert [first_tokens(batch) for batch in loader] == reference(store, 3)[34:]
    assert len(sampler) == 17
    assert len(stateful(store, 0, False)[0]) == 67


@torchdata_noise
def test_stateful_sampler_ranks_share_global_batches(store: Store) -> None:
    one = Loader(store, 4, last="keep", epochs=1, indices=True)
    ranks = [
        tt.StatefulSampler(store, batch_size=2, batches=True, last="keep", rank=r, world_size=2)
        for r in range(2)
    ]
    for whole, first, second in zip(one, *ranks, strict=True):
        assert whole["indices"].tolist() == first + second


@torchdata_noise
def test_stateful_sampler_serves_mixtures(store: Store) -> None:
    both = mix({"a": store, "b": store}, {"a": 1, "b": 2}, exhausted="drop")
    rows = [row for rows in tt.StatefulSampler(both, batches=True, last="keep") for row in rows]
    assert sorted(rows) == list(range(134))


def test_stateful_sampler_parts_no_groups(tmp_path: Path) -> None:
    pairs = make_store(tmp_path, [make_group_columns([2] * 9, seed=1, pairs=True)])
    with pytest.raises(UsageError, match=r"would part groups: .* unit='rows'"):
        tt.StatefulSampler(pairs, batches=True)
    alone = tt.StatefulSampler(pairs, batches=True, unit="rows", last="keep")
    assert sorted(row for rows in alone for row in rows) == list(range(18))


def looks_for_a_file(row: Any) -> dict[str, Any]:
    with open("/nowhere/at/all"):
        return {}


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_map_function_is_no_dead_worker(store: Store, workers: int) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        next(iter(store.map(looks_for_a_file).torch(batch_size=2, num_workers=workers)))


def test_sampler_goes_on_where_too_little_is_left_for_a_batch(store: Store) -> None:
    small = Loader(store, batch_size=1, last="drop")
    few = iter(small)
    for _ in range(len(store) - 2):
        next(few)
    sampler = tt.StatefulSampler(store, batch_size=5, last="drop")
    sampler.begin_next_pass_at(small.cursor)
    assert [len(list(sampler)) > 0 for _ in range(3)] == [False, True, True]
