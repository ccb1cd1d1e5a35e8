"""PyTorch: rows, collate, the DataLoader and its worker processes."""

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
from tests.store.making import damage_slice, make_columns, make_store
from tokenmill.data.loader import Loader
from tokenmill.data.view import as_view
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")

from tokenmill.integrations import torch as tt  # noqa: E402


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])) for name in theirs)


def test_dataset_items_and_collate_equal_the_loaders_batches(store: Store) -> None:
    dataset = tt.Dataset(store, padding_side="left", pad_to_multiple_of=4)
    loader = Loader(store, 8, padding_side="left", pad_to_multiple_of=4, indices=True)
    for batch in loader:
        rows = batch.pop("indices").tolist()
        batch.pop("num_trained_tokens")
        assert same(dataset.collate(dataset.__getitems__(rows)), batch)
    item = dataset[3]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["labels"][0] == -100
    assert len(pickle.dumps(dataset)) < 16 << 10


@pytest.mark.parametrize("part", [slice(None), slice(5, 40)])
def test_loader_of_a_store_or_view_in_one_call_serves_the_loaders_batches(
    store: Store, part: slice
) -> None:
    """Saved and resumed with other workers: tests/consistency/test_workers.py."""
    data = store if part == slice(None) else as_view(store)[part]
    made = data.torch(6, num_workers=1, seed=7)
    assert isinstance(made, tt.DataLoader)
    assert all(map(same, made, Loader(data, 6, seed=7)))
    assert len(made) == len(Loader(data, 6))


def test_loader_of_a_store_without_torch_names_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenmill.integrations.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"needs PyTorch: pip install 'tokenmill\[torch\]'"):
        store.torch()


def test_dataloader_takes_a_loader_or_its_arguments_but_not_both(store: Store) -> None:
    assert len(tt.DataLoader(store, batch_size=10, drop_last=True)) == 4
    assert len(tt.DataLoader(Loader(store, 10))) == 5
    with pytest.raises(UsageError, match="batch_size"):
        tt.DataLoader(Loader(store), batch_size=3)


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
served = 1
(worker,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
verdicts = []
try:
    try:
        os.kill(int(worker), signal.SIGKILL)
        while True:
            next(iterator)
            served += 1
    except RuntimeError as error:
        verdicts.append(isinstance(error, WorkerError) or "killed by signal" in str(error))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
except RuntimeError as late:  # torch raises from a signal handler, wherever the program stands
    verdicts.append("killed by signal" in str(late))
print(bool(verdicts) and all(verdicts))
print(loader.state_dict()["position"] == served * 2)
"""


def test_dataloader_killed_worker_is_an_error_and_the_state_is_kept(
    store: Store, library_zygote: Zygote
) -> None:
    done = library_zygote.program(KILLED, store.path)
    assert done.stdout == "True\nTrue\n", done.stderr


def test_dataloader_error_in_a_worker_keeps_its_type(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5] * 40)])
    damage_slice(tmp_path)
    with pytest.raises(CorruptionError, match="checksum"):
        list(tt.DataLoader(store, num_workers=1))


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


def looks_for_a_file(row: Any) -> dict[str, Any]:
    with open("/nowhere/at/all"):
        return {}


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_map_function_is_not_a_dead_worker(store: Store, workers: int) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        next(iter(store.map(looks_for_a_file).torch(batch_size=2, num_workers=workers)))
