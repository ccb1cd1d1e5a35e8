"""Hugging Face datasets over a store: the same rows, nothing held, everything `datasets` does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tokenmill as tm
from tests.integrations.conftest import labels_of
from tests.sampling import sampled
from tests.store.making import damage_slice, make_columns, make_store
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import mix
from tokenmill.data.packs import Pack
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import concat
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import Store, open_store

datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")

from tokenmill.integrations import hf  # noqa: E402

# Older versions of transformers shuffle by themselves, of which `for_trl` warns; no trainer here.
pytestmark = pytest.mark.filterwarnings("ignore:this transformers shuffles every training set")

LENGTHS = np.random.default_rng(0).integers(1, 30, 67).tolist()
MASKS = ("labels", "loss_mask", "assistant_masks")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    columns = [make_columns(LENGTHS[:40]), make_columns(LENGTHS[40:], seed=1)]
    columns[0].mask[0] = 1  # a row whose first token is trained
    return make_store(tmp_path_factory.mktemp("cache"), columns, pad_token_id=9)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()


def expected(row: Any, mask: str) -> dict[str, list[int]]:
    ids, trained = row.input_ids.tolist(), row.loss_mask.tolist()
    if mask == "loss_mask":
        return {"input_ids": ids, "loss_mask": trained}
    if mask == "assistant_masks":
        return {"input_ids": ids, "assistant_masks": [0, *trained[1:]]}
    return {"input_ids": ids, "labels": labels_of(row)}


@pytest.mark.parametrize("mask", MASKS)
def test_rows_are_the_stores(store: Store, mask: str) -> None:
    assert store[0].loss_mask[0] == 1  # which no label and no assistant's mask has
    found = tm.to_hf(store, mask=mask)
    wanted = [expected(row, mask) for row in store]
    assert found.column_names == list(wanted[0])
    assert list(found) == wanted
    assert [found[number] for number in range(-len(store), 0)] == wanted
    assert found[[5, 2, -1]] == {name: [wanted[n][name] for n in (5, 2, -1)] for name in wanted[0]}
    assert found[:3]["input_ids"] == [row["input_ids"] for row in wanted[:3]]
    assert found["input_ids"][7] == wanted[7]["input_ids"]


def test_stored_columns_are_those_of_load_from_disk(store: Store) -> None:
    ours, theirs = tm.to_hf(store, mask="loss_mask"), datasets.load_from_disk(str(store.path))
    assert ours.features == theirs.features
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("mask", MASKS)
def test_methods_of_datasets_work(store: Store, tmp_path: Path, mask: str) -> None:
    found, wanted = tm.to_hf(store, mask=mask), [expected(row, mask) for row in store]
    assert list(found.select(range(5, 9))) == wanted[5:9]
    assert list(found.select([9, 3])) == [wanted[9], wanted[3]]
    assert list(found.shard(3, 1, contiguous=True)) == wanted[23:45]
    assert found.shard(3, 1, contiguous=True).select(range(2, 4))[1] == wanted[26]
    assert sorted(map(str, found.shuffle(seed=1))) == sorted(map(str, wanted))
    assert found.remove_columns(mask)[4] == {"input_ids": wanted[4]["input_ids"]}
    assert found.select_columns([mask])[4] == {mask: wanted[4][mask]}
    assert found.rename_column(mask, "other")[4]["other"] == wanted[4][mask]
    counted = found.map(lambda row: {"n": len(row["input_ids"])})
    assert counted["n"][:] == LENGTHS
    assert len(found.filter(lambda row: len(row["input_ids"]) > 9)) == sum(n > 9 for n in LENGTHS)
    assert list(found.to_iterable_dataset(num_shards=2)) == wanted
    assert list(datasets.concatenate_datasets([found, found])) == wanted * 2
    cast = found.cast_column("input_ids", datasets.Sequence(datasets.Value("int64")))
    assert cast[6] == wanted[6]
    assert cast.features["input_ids"].feature.dtype == "int64"
    found.save_to_disk(str(tmp_path / "saved"))
    assert list(datasets.load_from_disk(str(tmp_path / "saved"))) == wanted
    tensors = found.with_format("torch")[8]
    assert tensors[mask].tolist() == wanted[8][mask]
    assert found.data.column(0).to_pylist() == [row["input_ids"] for row in wanted]


def test_views_and_mixtures_are_accepted(store: Store) -> None:
    long = store.filter("length > 9")
    assert list(tm.to_hf(long)) == [expected(row, "labels") for row in long]
    assert list(tm.to_hf(concat([long, store])[3:])) == [
        expected(row, "labels") for row in [*long, *store][3:]
    ]
    data = mix({"a": store, "b": long}, {"a": 3, "b": 1})
    order = Loader(data, 1, shuffle=False, indices=True)
    rows = [int(batch["indices"][0]) for batch in order]
    assert list(tm.to_hf(data)) == [expected(data.view[row], "labels") for row in rows]


def test_unknown_mask_and_other_objects_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="labels, loss_mask"):
        tm.to_hf(store, mask="both")
    with pytest.raises(UsageError, match="a store or a view"):
        tm.to_hf([1, 2])  # type: ignore[arg-type]


def test_corrupt_block_raises_before_its_row_is_served(tmp_path: Path) -> None:
    made = make_store(tmp_path, [make_columns([5000] * 20)])
    damage_slice(tmp_path)
    found = tm.to_hf(open_store(made.path), mask="loss_mask")
    with pytest.raises(CorruptionError):
        list(found)


def test_dataset_pickles_small_and_keeps_its_fingerprint(store: Store) -> None:
    for found in (tm.to_hf(store), hf.for_trl(store, epochs=3, pack=Pack(64))[0]):
        again = pickle.loads(pickle.dumps(found))
        assert len(pickle.dumps(found)) < 16 << 10
        assert str(again[5]) == str(found[5])
        assert again._fingerprint == found._fingerprint
    names = {tm.to_hf(store, mask=mask)._fingerprint for mask in MASKS}
    names |= {hf.for_trl(store, seed=seed, epochs=2)[0]._fingerprint for seed in (1, 2)}
    assert len(names) == len(MASKS) + 2, "another content, another name"
    assert tm.to_hf(open_store(store.path))._fingerprint == tm.to_hf(store)._fingerprint


def test_run_of_billions_of_rows_holds_no_memory_per_row(tmp_path: Path) -> None:
    rows = make_store(tmp_path, [make_columns([3] * 100_000)])
    many = concat([concat([rows] * 100)] * 100)
    before = pa.total_allocated_bytes()
    found, _ = hf.for_trl(many, epochs=3)
    assert len(found) == 3_000_000_000
    assert len(found[2_999_999_999]["input_ids"]) == 3
    assert len(found.select(range(2_000_000_000, 2_000_000_005))) == 5
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize(("context", "workers"), sampled([("fork", 2), ("spawn", 1)], 2))
@pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing.*")
def test_worker_processes_serve_the_same_run(store: Store, context: str, workers: int) -> None:
    found, _ = hf.for_trl(store, epochs=2, seed=7, pack=Pack(64, window=16))
    plain = [{name: value.tolist() for name, value in row.items()} for row in found]
    loader = torch.utils.data.DataLoader(
        found, batch_size=4, num_workers=workers, collate_fn=list, multiprocessing_context=context
    )
    rows = [{name: value.tolist() for name, value in row.items()} for b in loader for row in b]
    assert rows == plain


def test_accelerates_shards_are_the_loaders_ranks(store: Store) -> None:
    accelerate = pytest.importorskip("accelerate")
    found, _ = hf.for_trl(store, epochs=2, seed=7)
    for rank in range(3):
        plain = torch.utils.data.DataLoader(found, batch_size=4, collate_fn=list)
        shard = accelerate.data_loader.prepare_data_loader(
            plain, num_processes=3, process_index=rank, put_on_device=False
        )
        ranks = Loader(store, 4, seed=7, rank=rank, world_size=3)
        for batch, wanted in zip(shard, list(ranks.repeat(2))[:-1], strict=False):
            ids = [row["input_ids"].tolist() for row in batch]
            kept = wanted["attention_mask"].astype(bool)
            assert ids == [
                row[on].tolist() for row, on in zip(wanted["input_ids"], kept, strict=True)
            ]


def test_balanced_packs_without_rows_are_one_untrained_token(store: Store) -> None:
    pack = Pack(40, method="balanced", window=5)
    found, _ = hf.for_trl(store, pack=pack, world_size=4)
    empty = [n for n, pieces in enumerate(RunIndex(store, pack=pack, world_size=4).pieces(
        range(len(found)))) if not pieces]  # fmt: skip
    assert empty
    sample = {name: value.tolist() for name, value in found[empty[0]].items()}
    assert sample == {"input_ids": [9], "labels": [-100], "seq_lengths": [1]}
