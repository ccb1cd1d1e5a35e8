"""Groups as records: every side of the store's groups, value for value, in the order of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.build.test_groups import kto, pair, ranked
from tests.exports.test_exports import labels_of, read_arrow, read_parquet
from tokenmill.errors import UsageError
from tokenmill.exports import export_files as plans
from tokenmill.store import Row, Store

COUNT, SEED = 30, 5
COLUMNS = ("input_ids", "attention_mask", "labels")
MEDIA = {"images": None, "videos": None, "audios": None}


def prepare(directory: Path, rows: list[dict[str, Any]], **more: Any) -> Store:
    source = write_rows(directory / "rows.jsonl", rows)
    return tm.prepare(str(source), str(TOKENIZER), cache_dir=directory / "cache", **(INLINE | more))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return prepare(
        tmp_path_factory.mktemp("pairs"), list(map(pair, range(COUNT))), keep_columns=["id"]
    )


@pytest.fixture(scope="module")
def feedback(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return prepare(tmp_path_factory.mktemp("kto"), list(map(kto, range(COUNT))))


def of_row(row: Row, prefix: str) -> dict[str, list[int]]:
    values = (row.input_ids.tolist(), [1] * len(row), labels_of(row))
    return {prefix + name: value for name, value in zip(COLUMNS, values, strict=True)}


def records_of(data: Any) -> list[dict[str, Any]]:
    return [
        of_row(group.rows[0], "chosen_") | of_row(group.rows[1], "rejected_")
        for group in data.groups
    ]


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return read_parquet(path)
    return [record for file in sorted(path.glob("*.arrow")) for record in read_arrow(file)]


@pytest.mark.parametrize("out", ["a", "a.parquet"])
def test_pair_is_one_record(
    pairs: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.setattr(plans, "BLOCK_TOKENS", 100)
    monkeypatch.setattr(plans, "SHARD_TOKENS", 400)
    exported = tm.export(pairs, "hf", tmp_path / out)
    assert exported.rows == COUNT
    assert (exported.files > 4) == (out == "a")  # no group is in two files
    assert read(exported.path) == records_of(pairs)


def test_llama_factory_media_columns_are_empty(pairs: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    exported = tm.export(pairs, "llama-factory", tmp_path / "a")
    assert list(datasets.load_from_disk(str(exported.path))) == [
        r | MEDIA for r in records_of(pairs)
    ]


def test_groups_have_the_order_of_the_loader(pairs: Store, tmp_path: Path) -> None:
    exported = tm.export(pairs, "hf", tmp_path / "a", order="feistel", seed=SEED, epochs=2)
    loader = tm.Loader(pairs, batch_size=COUNT, seed=SEED, indices=True)
    numbers = [int(first) // 2 for batch in loader.repeat(2) for first in batch["indices"][::2]]
    whole = records_of(pairs)
    assert sorted(numbers[:COUNT]) == list(range(COUNT)) != numbers[:COUNT]
    assert read(exported.path) == [whole[number] for number in numbers]


def test_mixture_of_pairs_is_exported_by_group(pairs: Store, tmp_path: Path) -> None:
    other = prepare(tmp_path, [pair(100 + number) for number in range(COUNT)])
    mixed = tm.mix({"a": pairs, "b": other}, weights={"a": 2, "b": 1}, exhausted="stop")
    records = read(tm.export(mixed, "hf", tmp_path / "a").path)
    sides = [records_of(pairs), records_of(other)]
    assert all(record in sides[0] or record in sides[1] for record in records)
    assert sum(record in sides[0] for record in records[:30]) == 20


def test_kto_rows_have_label_and_mismatched_answer(feedback: Store, tmp_path: Path) -> None:
    batch = next(iter(tm.Loader(feedback, batch_size=COUNT, shuffle=False, seed=SEED)))
    expected = []
    for number, row in enumerate(feedback):
        size = int(batch["kl_attention_mask"][number].sum())
        kl = {f"kl_{name}": batch[f"kl_{name}"][number][:size].tolist() for name in COLUMNS}
        expected.append(of_row(row, "") | kl | {"label": row.label})
    assert {record["label"] for record in expected} == {True, False}
    assert read(tm.export(feedback, "hf", tmp_path / "a", seed=SEED).path) == expected
    for record in expected:
        record |= {"kto_tags": record.pop("label"), **MEDIA}
    assert read(tm.export(feedback, "llama-factory", tmp_path / "b", seed=SEED).path) == expected


def test_groups_have_requested_columns(pairs: Store, tmp_path: Path) -> None:
    also = ["margin", "id", "origin"]
    for group, record in zip(
        pairs.groups, read(tm.export(pairs, "hf", tmp_path / "a", also=also).path), strict=True
    ):
        row = group.rows[0]
        assert (record["margin"], record["id"]) == (group.margin, row.extra["id"])
        assert record["origin"]["line"] == row.origin.line


def test_unsupported_groups_raise(pairs: Store, feedback: Store, tmp_path: Path) -> None:
    several = prepare(tmp_path, [make(n) for n in range(3) for make in (ranked, pair)])
    only_ranked = prepare(tmp_path / "r", list(map(ranked, range(3))))
    for data, name, more, match in [
        (pairs, "axolotl", {}, "cannot contain groups.*for_trl"),
        (feedback, "axolotl", {}, "cannot contain groups"),
        (only_ranked, "hf", {}, "got ranked groups"),
        (several, "llama-factory", {}, "several kinds of groups"),
        (pairs, "hf", {"also": ["length"]}, "columns of origin, margin.* got length"),
        (pairs, "parquet", {"order": "feistel"}, "would split"),
    ]:
        with pytest.raises(UsageError, match=match):
            tm.export(data, name, tmp_path / "a", **more)
    assert not (tmp_path / "a").exists()
