"""Weights from the source to the store and out of it: each token counts what its message says.

The oracle looks a token's turn up in `Row.turns` and the turn's message in the source row.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import conversation, files_of, prepare, small_cuts, write_rows
from tokenmill._core import fingerprint
from tokenmill.data.view import as_view
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import Row, Store
from tokenmill.store.layout import MANIFEST, WEIGHT_FILES
from tokenmill.store.manifest import encode_manifest
from tokenmill.store.transfer import copy_store

Document = dict[str, Any]
Source = tuple[Path, list[Document]]


def expected(row: Row, source: Document) -> list[float]:
    found = []
    for at, trained in enumerate(row.loss_mask.tolist()):
        turn = next(n for n, (_, start, end) in enumerate(row.turns) if start <= at < end)
        said = source["messages"][turn].get("weight"), source.get("weight")
        product = np.prod([1.0 if one is None else float(one) for one in said])
        found.append(float(np.float32(product)) if trained else 0.0)
    return found


def check(store: Store, rows: list[Document]) -> None:
    for row in store:
        assert row.weights.dtype == np.float32
        assert row.weights.tolist() == expected(row, rows[row.origin.row])


def weighted(number: int) -> Document:
    row, more = conversation(number), conversation(number + 1000)
    row["messages"] += more["messages"]
    if number % 4 == 0:
        row["messages"][1]["weight"] = 0.5
        row["messages"][3]["weight"] = number % 3  # of the last, 0 and 1 are masks as ever
    if number % 8 == 4:
        row["weight"] = 3
    return row


WEIGHTS = st.sampled_from([None, 0, 1, 0.5, 2, 1.25, True, False, 1e-6])


@st.composite
def sources(draw: Any) -> list[Document]:
    rows = []
    for number in range(draw(st.integers(1, 5))):
        row = weighted(number * 4 + 1)
        for message in row["messages"]:
            if draw(st.booleans()):
                message["weight"] = draw(WEIGHTS)
        if draw(st.booleans()):
            row["weight"] = draw(WEIGHTS)
        rows.append(row)
    return rows


@settings(max_examples=12, deadline=None)
@given(rows=sources())
def test_tokens_count_what_their_message_and_row_say(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Document]
) -> None:
    path = write_rows(tmp_path_factory.mktemp("w") / "rows.jsonl", [*rows, conversation(99)])
    store = prepare(path, disable_cache=True)
    rows = [*rows, conversation(99)]
    check(store, rows)
    kept = {row.origin.row for row in store}
    for number, row in enumerate(rows):
        answers = [m.get("weight") for m in row["messages"] if m["role"] == "assistant"]
        none = row.get("weight") in (0, False) and row.get("weight") is not None
        assert (number not in kept) == (none or all(w is not None and w == 0 for w in answers))
    assert store.rejected == (
        {"no_trained_tokens": len(rows) - len(kept)} if len(kept) < len(rows) else {}
    )
    said = any(weight not in (0, 1) for row in store for weight in row.weights.tolist())
    assert store.has_weights == said


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    small_cuts(monkeypatch)
    rows = [weighted(n if n < 40 else n * 4 + 1) for n in range(80)]
    return write_rows(tmp_path / "rows.jsonl", rows), rows


def test_slices_and_stores_say_so_where_they_have_weights(source: Source, tmp_path: Path) -> None:
    store = prepare(source[0])
    check(store, source[1])
    assert set(WEIGHT_FILES) < set(store.manifest["files"])
    stated = [store.slice_at(at).record.has_weights for at in range(len(store.table))]
    assert set(stated) == {False, True}
    for at, has_weights in enumerate(stated):
        numbers = np.flatnonzero(np.asarray([row._slice for row in store]) == at)
        said = any(set(store[int(n)].weights.tolist()) - {0.0, 1.0} for n in numbers)
        assert said == has_weights
    assert store.verify()
    check(Store(copy_store(store, tmp_path / "copy"), verify="open"), source[1])


def test_no_weights_no_trace(tmp_path: Path) -> None:
    rows = [conversation(number) for number in range(5)]
    rows[0]["messages"][1]["weight"] = 1
    rows[1]["weight"] = 1.0
    store = prepare(write_rows(tmp_path / "rows.jsonl", rows))
    assert not set(WEIGHT_FILES) & set(store.manifest["files"])
    assert not any((store.path / name).exists() for name in WEIGHT_FILES)
    check(store, rows)


def test_manifest_that_hides_a_file_of_weights_is_refused(source: Source, tmp_path: Path) -> None:
    store = prepare(source[0])
    copy_store(store, tmp_path / "copy")
    files = {k: v for k, v in store.manifest["files"].items() if k != "run_weights.bin"}
    manifest = {k: v for k, v in store.manifest.items() if k != "digest"} | {"files": files}
    manifest["digest"] = fingerprint.key(manifest)
    path = tmp_path / "copy" / MANIFEST
    path.chmod(0o644)
    path.write_bytes(encode_manifest(manifest))
    with pytest.raises(CorruptionError, match="must list the files"):
        tm.open_store(tmp_path / "copy")


@pytest.mark.parametrize("limit", [155, None])
def test_derived_slices_keep_weights(source: Source, tmp_path: Path, limit: int | None) -> None:
    path, rows = source
    rows += [conversation(5, words=40) | {"weight": 0.25}]
    write_rows(path, rows)
    prepare(path, cache_dir=tmp_path / "a", max_length=None if limit else 500)
    derived = prepare(path, cache_dir=tmp_path / "a", max_length=limit)
    fresh = prepare(path, cache_dir=tmp_path / "b", max_length=limit)
    assert derived.key == fresh.key
    check(derived, rows)
    ours, theirs = files_of(tmp_path / "a", "slices"), files_of(tmp_path / "b", "slices")
    assert theirs.items() <= ours.items()


def test_what_is_no_weight_rejects_its_row(tmp_path: Path) -> None:
    rows = [conversation(0)]
    for bad in (-1, "2", [1], {}, 1e40, 1e-40, -0.5, "NaN"):
        for whose in ("row", "message"):
            rows.append(conversation(len(rows)))
            (rows[-1] if whose == "row" else rows[-1]["messages"][1])["weight"] = bad
    rows.append(conversation(99) | {"weight": 1e25})
    rows[-1]["messages"][1]["weight"] = 1e25  # their product is too large
    store = prepare(write_rows(tmp_path / "rows.jsonl", rows))
    assert (len(store), store.rejected) == (1, {"bad_shape": 17})
    for origin, _, detail in list(store.rejected_rows())[:-1]:
        assert f"weight of {'the row' if origin.row % 2 else 'a message'} must be" in detail


def test_each_turn_by_itself_keeps_its_weight(source: Source) -> None:
    store = prepare(source[0], expand="turns")
    check(store, source[1])
    assert {row.part for row in store if set(row.weights.tolist()) - {0, 1}} == {0, 1}


def test_row_weighs_everything_where_everything_is_trained(tmp_path: Path) -> None:
    rows = [weighted(4), {"text": "amber birch", "weight": 2.5}]
    chat = prepare(write_rows(tmp_path / "a.jsonl", rows[:1]), train_on="everything")
    assert set(chat[0].weights.tolist()) == {3.0}  # weights of messages do not count
    text = prepare(write_rows(tmp_path / "b.jsonl", rows[1:]))
    assert set(text[0].weights.tolist()) == {2.5}


def test_rows_that_come_as_tokens_have_a_weight_too(tmp_path: Path) -> None:
    rows: list[Document] = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "weight": 0.5},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "weight": "heavy"},
        {"input_ids": [5, 6], "loss_mask": [0, 1]},
    ]
    store = prepare(write_rows(tmp_path / "rows.jsonl", rows), format="tokens")
    assert [row.weights.tolist() for row in store] == [[0, 0.5, 0.5], [0, 1]]
    assert store.rejected == {"bad_shape": 1}


@pytest.mark.parametrize("mask", ["labels", "loss_mask"])
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_weights_of_an_export_come_back_as_tokens(tmp_path: Path, format: str, mask: str) -> None:  # noqa: A002
    rows = [weighted(number) for number in range(24)]
    store = prepare(write_rows(tmp_path / "rows.jsonl", rows))
    assert len({weight for row in store for weight in row.weights.tolist()}) > 3
    exported = tmp_path / f"exported.{format}"
    tm.export(store, format, exported, mask=mask)
    again = prepare(exported, format="tokens")
    assert (len(again), again.rejected) == (len(store), {})
    for row, wanted in zip(again, store, strict=True):
        assert row.loss_mask.tolist() == wanted.loss_mask.tolist()
        assert row.weights.tolist() == wanted.weights.tolist()
    padded = {"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0],
              "loss_weights": [0, 0, 0.5, 1, 0]}  # fmt: skip
    alone = prepare(write_rows(tmp_path / "alone.jsonl", [padded]), format="tokens")
    assert alone[0].weights.tolist() == [0, 0.5, 1]


def pair(number: int) -> Document:
    asked = {"role": "user", "content": f"{number} amber?"}
    answers = {
        name: [{"role": "assistant", "content": f"{name} birch {number}", "weight": weight}]
        for name, weight in (("chosen", 0.5), ("rejected", 2))
    }
    return {"prompt": [asked], **answers, "weight": number + 1}


def test_pairs_have_weights_on_both_sides(tmp_path: Path) -> None:
    store = prepare(write_rows(tmp_path / "rows.jsonl", map(pair, range(4))))
    assert store.has_weights
    assert store.has_groups
    for number, group in enumerate(store.groups):
        found = [set(row.weights[row.loss_mask > 0].tolist()) for row in group.rows]
        assert found == [{0.5 * (number + 1)}, {2.0 * (number + 1)}]
    [batch] = tm.Loader(store, batch_size=4, shuffle=False)
    for side in ("chosen", "rejected"):
        weights, labels = batch[f"{side}_loss_weights"], batch[f"{side}_labels"]
        assert weights.shape == labels.shape
        assert np.array_equal(weights > 0, labels != -100)
    total = batch["chosen_loss_weights"].sum() + batch["rejected_loss_weights"].sum()
    assert batch["weight_sum"] == total


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("weights")
    path = write_rows(root / "rows.jsonl", [weighted(number) for number in range(12)])
    return prepare(path, cache_dir=root / "cache")


@pytest.mark.parametrize(
    ("kind", "mask"),
    [("parquet", "labels"), ("jsonl", "loss_mask"), ("hf", "labels"), ("to_hf", "labels"),
     ("parquet", "loss_mask"), ("to_hf", "loss_mask")],
)  # fmt: skip
def test_exports_and_lazy_datasets_have_a_column_of_weights(
    store: Store, tmp_path: Path, kind: str, mask: str
) -> None:
    target = tmp_path / f"rows.{'jsonl' if kind == 'jsonl' else 'parquet'}"
    if kind == "to_hf":
        pytest.importorskip("datasets")
        rows = tm.to_hf(store, mask=mask)
        assert rows.column_names == ["input_ids", mask, "loss_weights"]
        found = rows[:]["loss_weights"]
        assert rows[3]["loss_weights"] == found[3]
    elif kind == "jsonl":
        tm.export(store, kind, target, mask=mask)
        found = [json.loads(line)["loss_weights"] for line in target.read_text().splitlines()]
    else:
        tm.export(store, kind, target, **({} if kind == "hf" else {"mask": mask}))
        table = pq.read_table(target)
        found = table["loss_weights"].to_pylist()
        if kind == "hf":
            assert table.column_names == ["input_ids", "attention_mask", "labels", "loss_weights"]
    if mask == "labels":  # whose first token has no label
        assert found == [[0.0, *row.weights[1:].tolist()] for row in store]
    else:
        assert found == [row.weights.tolist() for row in store]


VERL = {"pad_mode": "no_padding", "max_length": 4096}
HOSTS: dict[str, tuple[str, Callable[[Store], tuple[Any, ...]]]] = {
    "TRL": ("hf:for_trl", lambda store: (store,)),
    "a map-style dataset": ("torch:Dataset", lambda store: (store,)),
    "SkyRL": ("skyrl:SFTDataset", lambda store: (store,)),
    "sft_rollout of miles and slime": ("miles.source:Lookup", lambda store: (store,)),
    "verl": ("verl:SFTDataset", lambda store: ([str(store.path)], None, VERL)),
    "NeMo RL": ("nemo_rl:MessageLogs", lambda store: (as_view(store),)),
    "Megatron-LM": ("megatron:PackedSamples", lambda store: (as_view(store), tm.Pack(256))),
}


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_that_know_masks_alone_are_refused_by_name(store: Store, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("datasets")
    host, arguments = HOSTS[name]
    reader = pkgutil.resolve_name(f"tokenmill.integrations.{host}")
    with pytest.raises(UsageError, match=f"which {name} does not support"):
        reader(*arguments(store))


@pytest.mark.parametrize("kind", ["axolotl", "megatron", "packed-parquet"])
def test_formats_that_know_masks_alone_are_refused_by_name(
    store: Store, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("datasets")
    pack = {"pack": tm.Pack(256)} if kind == "packed-parquet" else {}
    with pytest.raises(UsageError, match=f"which format {kind} does not support"):
        tm.export(store, kind, tmp_path / "out", **pack)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="which a dataset with assistant_masks does not support"):
        tm.to_hf(store, mask="assistant_masks")
