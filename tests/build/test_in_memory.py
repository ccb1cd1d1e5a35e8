"""`prepare` takes rows in memory and treats them like a JSONL file of these rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tokenmill as tm
from tests.build.making import conversations, prepare, write_rows
from tokenmill.errors import IN_MEMORY_DIRECTORY, UsageError
from tokenmill.store.collect import collect

ROWS = conversations(7)


def tokens(store: tm.Store) -> list[Any]:
    return [(row.input_ids.tolist(), row.loss_mask.tolist(), row.extra) for row in store]


def written(cache: Path) -> list[Any]:
    [file] = (cache / IN_MEMORY_DIRECTORY).iterdir()
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def frame(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


def dataset(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "pandas": frame,
    "dataset": dataset,
    "streamed": lambda rows: dataset(rows).to_iterable_dataset(),
    "arrow": pa.Table.from_pylist,
    "polars": lambda rows: pytest.importorskip("polars").DataFrame(rows),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_in_memory_give_the_store_of_their_file(form: str, tmp_path: Path) -> None:
    expected = prepare(write_rows(tmp_path / "rows.jsonl", ROWS), keep_columns=["id"])
    cache = tmp_path / "cache"
    store = prepare(FORMS[form](ROWS), keep_columns=["id"], cache_dir=cache)
    assert tokens(store) == tokens(expected)
    [file] = (cache / IN_MEMORY_DIRECTORY).iterdir()
    assert written(cache) == ROWS
    assert str(store[3].origin) == "in-memory data#3"
    again = prepare(FORMS[form](ROWS), keep_columns=["id"], cache_dir=cache)
    assert again.path == store.path
    assert list((cache / IN_MEMORY_DIRECTORY).iterdir()) == [file]


@pytest.mark.parametrize("form", ["pandas", "dataset", "arrow", "polars"])
def test_ragged_rows_of_a_table_lose_the_nulls_that_the_table_added(
    form: str, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    rows = [{"messages": talk[:1] + talk[3:], "score": 0.5}, {"messages": talk}]
    prepare(FORMS[form](rows), keep_columns=["score"], cache_dir=tmp_path)
    assert written(tmp_path) == rows


def test_missing_values_become_null_and_numpy_values_plain(tmp_path: Path) -> None:
    row = {"text": "abc", "a": math.nan, "b": np.float32(0.5), "c": np.arange(2), "d": (1, None)}
    store = prepare([row], keep_columns=["a", "b", "c", "d"], cache_dir=tmp_path)
    assert store[0].extra == {"a": None, "b": 0.5, "c": [0, 1], "d": [1, None]}


def test_sources_of_several_kinds_can_be_combined(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ROWS[:3])
    store = prepare([file, frame(ROWS[3:])], cache_dir=tmp_path / "cache")
    assert len(store) == len(ROWS)
    assert [str(store[n].origin) for n in (2, 3)] == [f"{file}:3", "in-memory data#0"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, {"text": object()}], r"in-memory data \(row 1\): no JSON form.*object"),
        ([{"text": "a"}, 5], r"in-memory data \(row 1\): a row must be a dict, got int"),
        ([{"text": math.inf}], r"row 0\): no JSON form: inf is not a JSON number"),
        ([{"text": {1: "a"}}], r"row 0\): no JSON form: the name 1 is not a string"),
        ({"train": []}, r"a dict is not a source: pass one of its values \(train\), or a list"),
        ([], "no sources"),
    ],
    ids=["object", "row", "infinity", "name", "mapping", "empty"],
)
def test_rows_without_a_json_form_are_an_error(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(rows, cache_dir=tmp_path)
    assert not (tmp_path / IN_MEMORY_DIRECTORY).exists()


def test_rejected_row_is_named_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(tm.TokenmillError, match=r"^in-memory data:2 \(row 1, byte \d+\): no conv"):
        prepare([{"text": "a"}, {"x": 1}], max_rejected=0, cache_dir=tmp_path)


def test_disabled_cache_stays_empty(tmp_path: Path) -> None:
    store = prepare(ROWS, disable_cache=True, cache_dir=tmp_path)
    assert len(store) == len(ROWS)
    assert not list(tmp_path.iterdir())


def test_gc_removes_rows_only_with_their_store(tmp_path: Path) -> None:
    store, other = (prepare(rows, cache_dir=tmp_path) for rows in (ROWS[:2], ROWS[2:]))
    later = 2e9  # far in the future
    for now in (later, later + 2):
        collect(tmp_path, grace_s=1, stores=[other.key], now=now)
    left = [file.name for file in (tmp_path / IN_MEMORY_DIRECTORY).iterdir()]
    assert left == [str(store.sources[0]).rpartition("/")[2]]


def test_images_in_memory_are_kept_as_bytes_and_paths(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    datasets = pytest.importorskip("datasets")
    drawn = images.new("RGB", (40, 30), (200, 30, 60))
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    data = datasets.Dataset.from_list([{"text": "a", "image": drawn}], features=features)
    store = prepare(data, cache_dir=tmp_path)
    rows = tm.open_rows(str(store.sources[0]), cache_dir=tmp_path)
    prepare([{"text": "b", "image": drawn}], cache_dir=tmp_path / "other")
    assert rows[0]["image"]["bytes"] == written(tmp_path / "other")[0]["image"]
