"""Other readers get the rows of the store back from every format."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.store.making import make_columns, make_store
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import mix
from tokenmill.data.packs import Pack
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import concat
from tokenmill.errors import UsageError
from tokenmill.exports import export_files as plans
from tokenmill.store import Row, Store

LENGTHS = np.random.default_rng(2).integers(1, 40, 90).tolist()
EXTRA: dict[str, list[Any]] = {
    "lang": ["en", "de", None, 'zh "中"', "null"] * 18,
    "score": [1, 2.5, None] * 30,
    "count": [n - 45 for n in range(90)],
    "large": [2**62 + n for n in range(90)],
    "good": [True, False, None] * 30,
    "nothing": [None] * 90,
    "mixed": [1, "1", 1.0] * 30,
    "tags": [["a"], [], [1, None]] * 30,
    "meta": [{"a": 1}, {"b": {"c": [2]}}, None] * 30,
    "huge": [2**70, 1, 2] * 30,
    "origin": ["taken"] * 90,
}
BRIDGE: dict[str, Any] = {"pack": Pack(64), "layout": "megatron-bridge"}
PLAIN = ("lang", "score", "count", "large", "good", "nothing")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    def part(first: int, stop: int) -> Any:
        extra = {name: [json.dumps(v) for v in c[first:stop]] for name, c in EXTRA.items()}
        return make_columns(LENGTHS[first:stop], seed=first, extra=extra)

    slices = [part(0, 40), part(40, 90)]
    slices[0].mask[0] = 1  # a row whose first token is trained
    return make_store(tmp_path_factory.mktemp("cache"), slices, pad_token_id=9)


def labels_of(row: Row) -> list[int]:
    labels = [int(t) if on else -100 for t, on in zip(row.input_ids, row.loss_mask, strict=True)]
    return [-100, *labels[1:]]


def origin_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row.origin, name) for name in ("path", "row", "line", "offset", "length")}


def check_records(records: list[dict[str, Any]], store: Store, mask: str, *, text: bool) -> None:
    assert len(records) == len(store)
    for number, (record, row) in enumerate(zip(records, store, strict=True)):
        assert record["input_ids"] == row.input_ids.tolist()
        assert record[mask] == (row.loss_mask.tolist() if mask == "loss_mask" else labels_of(row))
        assert record["origin"] == origin_of(row)
        assert set(record) == {"input_ids", mask, "origin", "extra.origin", *EXTRA}
        for name, values in EXTRA.items():
            value = record["extra.origin" if name == "origin" else name]
            if text and name not in (*PLAIN, "origin"):
                value = json.loads(value)
            assert value == values[number], name
            if isinstance(values[number], int):
                assert not isinstance(value, float) or math.isclose(value, values[number])


def files_at(path: Path, suffix: str) -> list[Path]:
    return sorted(path.glob(f"*{suffix}")) if path.is_dir() else [path]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    return [row for file in files_at(path, ".parquet") for row in pq.read_table(file).to_pylist()]


def read_arrow(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        datasets = pytest.importorskip("datasets")
        return list(datasets.load_from_disk(str(path)))
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().to_pylist()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    texts = [file.read_text() for file in files_at(path, ".jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


READERS = {"parquet": read_parquet, "arrow": read_arrow, "jsonl": read_jsonl}


@pytest.mark.parametrize("mask", ["loss_mask", "labels"])
@pytest.mark.parametrize("name", READERS)
def test_rows_have_their_origin_and_kept_columns(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mask: str
) -> None:
    monkeypatch.setattr(plans, "BLOCK_TOKENS", 100)
    exported = tm.export(store, name, tmp_path / f"rows.{name}", mask=mask)
    assert (exported.rows, exported.files, exported.found) == (len(store), 1, False)
    assert exported.bytes == exported.path.stat().st_size
    check_records(READERS[name](exported.path), store, mask, text=name != "jsonl")
    monkeypatch.setattr(plans, "SHARD_TOKENS", 400)
    shards = tm.export(store, name, tmp_path / "shards", mask=mask)
    assert shards.files > 4
    assert shards.bytes == sum(path.stat().st_size for path in shards.path.iterdir())
    check_records(READERS[name](shards.path), store, mask, text=name != "jsonl")


def test_columns_of_json_text_are_marked_and_others_have_plain_types(
    store: Store, tmp_path: Path
) -> None:
    schema = pq.read_schema(tm.export(store, "parquet", tmp_path / "a.parquet").path)
    kinds = {name: str(schema.field(name).type) for name in PLAIN}
    assert kinds == {"lang": "string", "score": "double", "count": "int64", "large": "int64",
                     "good": "bool", "nothing": "string"}  # fmt: skip
    for name in ("mixed", "tags", "meta", "huge"):
        assert schema.field(name).metadata[b"tokenmill"] == b"json"
    assert not schema.field("lang").metadata or b"tokenmill" not in schema.field("lang").metadata


def test_arrow_file_opens_as_a_dataset_without_a_copy(store: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    exported = tm.export(store, "arrow", tmp_path / "a.arrow")
    dataset = datasets.Dataset.from_file(str(exported.path))
    assert dataset.cache_files == [{"filename": str(exported.path)}]
    assert dataset[11]["input_ids"] == store[11].input_ids.tolist()


def check_trainer(records: Any, rows: Any, *also: str) -> None:
    assert len(records) == len(rows)
    for record, row in zip(records, rows, strict=True):
        assert list(record) == ["input_ids", "attention_mask", "labels", *also]
        assert record["input_ids"] == row.input_ids.tolist()
        assert record["attention_mask"] == [1] * len(row)
        assert record["labels"] == labels_of(row)


@pytest.mark.parametrize(("name", "out"), [("axolotl", "a"), ("hf", "a"), ("hf", "a.parquet")])
def test_trainer_formats_have_three_columns(
    store: Store, tmp_path: Path, name: str, out: str
) -> None:
    exported = tm.export(store, name, tmp_path / out)
    read = read_parquet if exported.path.is_file() else read_arrow
    check_trainer(read(exported.path), store)


def test_trainer_formats_have_requested_columns(store: Store, tmp_path: Path) -> None:
    also = ["lengths", "origin", "count", "meta", "length"]
    exported = tm.export(store, "hf", tmp_path / "a", also=also)
    records = read_arrow(exported.path)
    check_trainer(records, store, "lengths", "origin", "length", "count", "meta")
    for number, (record, row) in enumerate(zip(records, store, strict=True)):
        assert record["lengths"] == record["length"] == len(row)
        assert record["origin"] == origin_of(row)
        assert record["count"] == EXTRA["count"][number]
        assert json.loads(record["meta"]) == EXTRA["meta"][number]


def test_splits_are_a_dataset_of_splits(store: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = store.split({"train": 0.7, "validation": 0.3})
    exported = tm.export(parts, "hf", tmp_path / "a", also=["length"])
    dataset = datasets.load_from_disk(str(exported.path))
    assert isinstance(dataset, datasets.DatasetDict)
    assert (list(dataset), exported.rows) == (["train", "validation"], len(store))
    for name, view in parts.items():
        check_trainer(list(dataset[name]), view, "length")
    again = tm.export(parts, "hf", tmp_path / "a", also=["length"])
    assert (again.found, again.bytes, again.files) == (True, exported.bytes, exported.files)
    (exported.path / "train" / "more").write_text("mine")
    with pytest.raises(UsageError, match="not this export"):
        tm.export(parts, "hf", tmp_path / "a", also=["length"])


def read_indexed(prefix: Path) -> tuple[list[list[int]], list[int], np.dtype[Any]]:
    raw = prefix.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\0\0"
    version, code, sequences, documents = struct.unpack("<QBQQ", raw[9:34])
    assert version == 1
    kind = np.dtype({1: "<u1", 4: "<i4"}[code])
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * documents
    data = prefix.with_suffix(".bin").read_bytes()
    rows = [
        np.frombuffer(data, kind, length, start).tolist()
        for length, start in zip(lengths.tolist(), pointers.tolist(), strict=True)
    ]
    assert len(data) == kind.itemsize * int(lengths.sum())
    return rows, bounds.tolist(), kind


def test_megatron_files_contain_tokens_and_masks(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.exports.export_files.INDEX_CHUNK", 7)
    exported = tm.export(store, "megatron", tmp_path / "megatron")
    assert exported.files == 4
    tokens, documents, kind = read_indexed(exported.path / "tokens")
    assert kind == np.int32
    assert documents == list(range(len(store) + 1))
    assert tokens == [row.input_ids.tolist() for row in store]
    masks, _, kind = read_indexed(exported.path / "loss_mask")
    assert kind == np.uint8
    assert masks == [row.loss_mask.tolist() for row in store]


@pytest.mark.parametrize("oversize", ["truncate", "split"])
def test_packs_equal_the_loaders_without_padding(
    store: Store, tmp_path: Path, oversize: str
) -> None:
    pack = Pack(30, window=32, oversize=oversize)
    exported = tm.export(store, "packed-parquet", tmp_path / "p.parquet", pack=pack, seed=3)
    records = read_parquet(exported.path)
    loader = Loader(store, 1, seed=3, pack=pack, indices=True)
    batches = list(loader)
    assert exported.rows == len(records) == len(batches)
    for record, batch in zip(records, batches, strict=True):
        is_token = batch["seq_idx"][0] >= 0
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert record[name] == batch[name][0][is_token].tolist(), name
        bounds = [bound for bound in batch["cu_seqlens"].tolist() if bound <= int(is_token.sum())]
        assert record["cu_seqlens"] == bounds
        assert record["seq_lengths"] == np.diff(bounds).tolist()
        assert record["rows"] == batch["indices"].tolist()


def read_as_bridge(record: dict[str, Any], eos: int) -> tuple[list[int], list[int], list[int]]:
    """Return trained tokens, slots and logical lengths of rows, by the rules of its collator."""
    edges = [*record["seq_start_id"], len(record["input_ids"])]
    trained, slots, logical = [], [], []
    for first, stop in pairwise(edges):
        ids, mask = record["input_ids"][first:stop], record["loss_mask"][first:stop]
        trained += [token for token, on in zip(ids[1:], mask[:-1], strict=True) if on]
        slots.append(len(ids) - 1)
        logical.append(max((n + 1 for n, token in enumerate(ids[:-1]) if token != eos), default=0))
    return trained, slots, logical


@pytest.mark.parametrize("multiple", [1, 8, 16])
@pytest.mark.parametrize("oversize", ["truncate", "split", "drop"])
def test_rows_in_packs_of_megatron_bridge_are_padded_to_a_multiple(
    store: Store, tmp_path: Path, multiple: int, oversize: str
) -> None:
    pack, eos = Pack(32, window=32, oversize=oversize), 1
    more: dict[str, Any] = {"layout": "megatron-bridge", "pad_multiple": multiple, "pack": pack}
    exported = tm.export(store, "packed-parquet", tmp_path / "packs", **more)
    records = read_parquet(exported.path)
    assert list(records[0]) == ["input_ids", "loss_mask", "seq_start_id"]
    read = [read_as_bridge(record, eos) for record in records]
    slots = [slot for _, row_slots, _ in read for slot in row_slots]
    if multiple == 1:  # The packs are those of the loader.
        batches = Loader(store, 1, pack=pack)
        labels = [batch["labels"][0] for batch in batches]
        assert [tokens for tokens, _, _ in read] == [each[each != -100].tolist() for each in labels]
    else:
        assert not any(slot % multiple for slot in slots)
        assert max(sum(row_slots) for _, row_slots, _ in read) <= pack.length
        limit = {"drop": 0, "truncate": pack.length + 1, "split": 1 << 30}[oversize]
        kept = [labels_of(row) for row in store if len(row) <= pack.length + 1 or limit]
        kept = [labels[: limit or None] for labels in kept]
        trained = sorted(t for labels in kept for t in labels if t != -100)
        assert sorted(token for tokens, _, _ in read for token in tokens) == trained
        # If padding follows the last token of a row, that token is an input, too.
        expected = [
            min(len(labels) - start, -(-(len(labels) - 1 - start) // multiple) * multiple, 32)
            for labels in kept
            for start in range(0, max(len(labels) - 1, 1), pack.length)
        ]
        logical = [n for _, _, row_logical in read for n in row_logical]
        assert sorted(logical) == sorted(max(n, 1) for n in expected)
    (metadata,) = json.loads((exported.path / "_metadata.json").read_text())
    packed = [sum(row_slots) for _, row_slots, _ in read]
    assert metadata == {
        "dataset_max_seqlen": max(slots),
        "max_samples_per_bin": max(len(row_slots) for _, row_slots, _ in read),
        "packing_factor": round(len(slots) / len(read), 2),
        "packing_efficiency": round(sum(packed) / len(read) / pack.length * 100, 2),
        "pack_size": pack.length,
        "min_packed_seqlen": min(packed),
    }


def test_megatron_bridge_rows_may_be_one_token_longer_than_the_pack(
    store: Store, tmp_path: Path
) -> None:
    longest = max(LENGTHS)
    assert longest % 2, "its predictions are a multiple"
    more: dict[str, Any] = {"layout": "megatron-bridge", "pad_multiple": 2}
    exported = tm.export(store, "packed-parquet", tmp_path / "a", pack=Pack(longest - 1), **more)
    trained = [t for record in read_parquet(exported.path) for t in read_as_bridge(record, 1)[0]]
    assert len(trained) == sum(label != -100 for row in store for label in labels_of(row))
    with pytest.raises(UsageError, match="tokens, a pack has"):
        tm.export(store, "packed-parquet", tmp_path / "b", pack=Pack(longest - 3), **more)


def test_export_accepts_views_mixtures_orders_and_epochs(store: Store, tmp_path: Path) -> None:
    long = store.filter("length > 20")
    exported = tm.export(concat([long, store])[2:9], "parquet", tmp_path / "a.parquet")
    assert [r["input_ids"] for r in read_parquet(exported.path)] == [
        row.input_ids.tolist() for row in [*long, *store][2:9]
    ]
    data = mix({"a": store, "b": long}, {"a": 1, "b": 1})
    exported = tm.export(data, "jsonl", tmp_path / "b.jsonl", order="feistel", seed=8, epochs=2)
    run = RunIndex(data, epochs=2, seed=8)
    assert [r["input_ids"] for r in read_jsonl(exported.path)] == [
        ids.tolist() for ((ids, _),) in run.pieces(range(len(run)))
    ]


def test_columns_that_a_store_lacks_are_null(store: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "cache", [make_columns([5], extra={"id": ["7"]})], name="other")
    exported = tm.export(concat([store, other]), "parquet", tmp_path / "a.parquet")
    records = read_parquet(exported.path)
    assert [record["id"] for record in records] == [None] * len(store) + [7]
    assert records[-1]["lang"] is None


@pytest.mark.parametrize(
    ("name", "out", "more", "message"),
    [
        ("csv", "a", {}, "jsonl, hf, axolotl, llama-factory, megatron.* got 'csv'"),
        ("parquet", "a", {"mask": "both"}, "mask must be one of .*, got 'both'"),
        ("axolotl", "a", {"mask": "labels"}, "needs format='parquet'"),
        ("packed-parquet", "a", {}, "needs the length of packs in pack"),
        ("parquet", "a", {"pack": Pack(64)}, "cannot contain packs"),
        ("parquet", "a", {"layout": "megatron-bridge"}, "needs format='packed-parquet'"),
        (
            "packed-parquet",
            "a",
            {"layout": "x", "pack": Pack(64)},
            "layout must be one of .*, got 'x'",
        ),
        ("jsonl", "a.parquet", {}, "a.parquet' has the wrong suffix"),
        ("megatron", "a.jsonl", {}, "a.jsonl' has the wrong suffix"),
        ("packed-parquet", "a", {"pack": Pack(10)}, "row .* has .* tokens"),
        (
            "packed-parquet",
            "a",
            {"pack": Pack(64), "pad_multiple": 8},
            "needs layout='megatron-bridge'",
        ),
        ("packed-parquet", "a", {**BRIDGE, "pad_multiple": 0}, "pad_multiple must be a positive"),
        (
            "packed-parquet",
            "a",
            {**BRIDGE, "pad_multiple": 48},
            "must be a multiple of pad_multiple=48",
        ),
        ("parquet", "a", {"also": ["length"]}, "also needs format='hf'"),
        ("hf", "a", {"also": ["length", "length"]}, "different columns of"),
        ("hf", "a", {"also": ["nobody"]}, "columns of origin, .*lang, score.* got nobody"),
        ("hf", "a.arrow", {}, "a.arrow' has the wrong suffix"),
        ("hf", "a", {"splits": ()}, "No splits"),
        ("hf", "a", {"splits": ("a/b",)}, "Split names consist of"),
        ("parquet", "a", {"splits": ("a",)}, "Splits need a directory"),
        ("hf", "a.parquet", {"splits": ("a",)}, "Splits need a directory"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_written(
    store: Store, tmp_path: Path, name: str, out: str, more: Any, message: str
) -> None:
    more = dict(more)
    splits = more.pop("splits", None)
    data = store if splits is None else dict.fromkeys(splits, store)
    with pytest.raises(UsageError, match=message):
        tm.export(data, name, tmp_path / out, **more)
    assert not any(tmp_path.iterdir())
