"""Tests of addresses: slices as in Python, splits and percentages as in `datasets`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources.make import jsonl
from tokenmill.errors import SourceError, SourceMissing, UsageError
from tokenmill.sources.discover import Address, parse_address, parse_selection
from tokenmill.sources.rows import open_rows


def test_slice_on_concatenation_of_files_equals_list_slicing(tmp_path: Path) -> None:
    rows = [{"n": number} for number in range(7)]
    for name, part in (("a", rows[:3]), ("b", rows[3:4]), ("c", rows[4:])):
        jsonl(part, tmp_path / name).rename(tmp_path / f"{name}.jsonl")
    for start in (None, -8, -4, -3, -1, 0, 1, 3, 4, 6, 9):
        for stop in (None, -8, -4, -1, 0, 2, 3, 4, 7, 9):
            text = f"@[{'' if start is None else start}:{'' if stop is None else stop}]"
            opened = open_rows(f"{tmp_path}/*.jsonl{text}")
            assert list(opened) == rows[start:stop], text
            assert len(opened) == len(rows[start:stop])


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(-100, 100), st.integers(-100, 100))
def test_percent_any_total_equals_datasets(total: int, start: int, stop: int) -> None:
    from datasets import ReadInstruction

    spec = f"train[{start}%:{stop}%]"
    (absolute,) = ReadInstruction.from_spec(spec).to_absolute({"train": total})
    first, last = parse_selection(f"[{start}%:{stop}%]", spec).resolve(total)
    expected = list(range(total))[absolute.from_ : absolute.to]
    assert list(range(total))[first:last] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x.jsonl@[1:2:3]", "cannot have a step"),
        ("x.jsonl@[1]", "write a slice"),
        ("x.jsonl@[a:b]", "not a row number"),
        ("x.jsonl@[:101%]", "more than 100%"),
        ("@[1:2]", "before the @"),
        ("", "empty string"),
    ],
)
def test_address_malformed_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_address(text)


def test_existing_file_with_an_at_sign_is_not_parsed(tmp_path: Path) -> None:
    path = jsonl([{"a": 1}], tmp_path).rename(tmp_path / "data@[0:0].jsonl")
    assert parse_address(str(path)) == Address(str(path))
    assert len(open_rows(path)) == 1
    assert len(open_rows(f"{path}@[:0]")) == 0


def test_saved_dataset_splits_and_slices(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    train = Dataset.from_list([{"n": n, "m": {"a": n} if n % 2 else {"b": n}} for n in range(50)])
    test = Dataset.from_list([{"n": -n} for n in range(3)])
    DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "both"), num_shards={
        "train": 3, "test": 1})  # fmt: skip
    train.select(range(49, -1, -1)).save_to_disk(str(tmp_path / "one"))
    both = tmp_path / "both"
    assert [row["n"] for row in open_rows(f"{both}@train")] == list(range(50))
    assert [row["n"] for row in open_rows(f"{both}@train[:10]")] == list(range(10))
    assert [row["n"] for row in open_rows(f"{both}@train[10%:20%]")] == list(range(5, 10))
    assert [row["n"] for row in open_rows(f"{both}@test[-1:]")] == [-2]
    assert [row["n"] for row in open_rows(both / "train")] == list(range(50))
    assert [row["n"] for row in open_rows(tmp_path / "one")] == list(range(49, -1, -1))
    assert open_rows(f"{both}@train")[1] == {"n": 1, "m": {"a": 1}}
    with pytest.raises(UsageError, match="splits train, test; select one"):
        open_rows(both)
    with pytest.raises(UsageError, match="no split 'valid'"):
        open_rows(f"{both}@valid[:3]")
    with pytest.raises(UsageError, match="a file has no splits"):
        open_rows(f"{jsonl([{'a': 1}], tmp_path)}@train[:3]")


def test_split_of_a_plain_directory_equals_datasets(tmp_path: Path) -> None:
    for name, number in (("train-0", 1), ("train-1", 2), ("test", 3)):
        jsonl([{"n": number}] * 2, tmp_path).rename(tmp_path / f"{name}.jsonl")
    assert [row["n"] for row in open_rows(f"{tmp_path}@train[1:3]")] == [1, 2]
    assert [row["n"] for row in open_rows(f"{tmp_path}@test[:50%]")] == [3]
    with pytest.raises(UsageError, match=r"no split 'valid'\. Splits: train, test"):
        open_rows(f"{tmp_path}@valid")


def test_card_that_names_a_file_outside_of_its_directory_is_refused(tmp_path: Path) -> None:
    jsonl([{"secret": 1}], tmp_path)
    (tmp_path / "data").mkdir()
    card = "---\nconfigs:\n- config_name: default\n  data_files: ../rows.jsonl\n---\n"
    (tmp_path / "data" / "README.md").write_text(card)
    with pytest.raises(UsageError, match="outside of the dataset"):
        open_rows(f"{tmp_path}/data@train")


@pytest.mark.parametrize("name", ["../other.arrow", "x/../../other.arrow", "ABSOLUTE", "..",
                                  "memory://x/other.arrow"])  # fmt: skip
def test_saved_dataset_names_no_file_outside_of_its_directory(tmp_path: Path, name: str) -> None:
    from datasets import Dataset

    Dataset.from_list([{"secret": 1}]).save_to_disk(str(tmp_path / "mine"))
    (tmp_path / "mine" / "data-00000-of-00001.arrow").rename(tmp_path / "other.arrow")
    Dataset.from_list([{"n": 1}]).save_to_disk(str(tmp_path / "theirs"))
    state = tmp_path / "theirs" / "state.json"
    document = json.loads(state.read_text())
    named = str(tmp_path / "other.arrow") if name == "ABSOLUTE" else name
    state.write_text(json.dumps({**document, "_data_files": [{"filename": named}]}))
    with pytest.raises(SourceError, match="outside of the directory") as caught:
        open_rows(tmp_path / "theirs")
    assert caught.value.path == str(tmp_path / "theirs")


def test_directory_hidden_and_foreign_files_skipped(tmp_path: Path) -> None:
    rows = [{"n": number} for number in range(4)]
    for number, row in enumerate(rows):
        jsonl([row], tmp_path).rename(tmp_path / f"{number}.jsonl")
    jsonl([{"n": 99}], tmp_path).rename(tmp_path / ".hidden.jsonl")
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "more").mkdir()
    jsonl([{"n": 98}], tmp_path / "more")
    assert list(open_rows(tmp_path)) == rows
    assert list(open_rows(f"{tmp_path}@[1:3]")) == rows[1:3]
    assert list(open_rows(f"{tmp_path}/**/[0-9].jsonl")) == rows


@pytest.mark.parametrize("address", ["{0}", "{0}/*"])
def test_mixed_formats_are_a_usage_error(address: str, tmp_path: Path) -> None:
    jsonl([{"a": 1}], tmp_path)
    (tmp_path / "more.json").write_text("[]")
    with pytest.raises(UsageError, match="several formats"):
        open_rows(address.format(tmp_path))


@pytest.mark.parametrize("name", ["missing.jsonl", "*.jsonl", "nowhere/", "sub"])
def test_no_match_is_source_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(SourceMissing):
        open_rows(f"{tmp_path}/{name}")
    with pytest.raises(FileNotFoundError):
        open_rows(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("name", "data"), [("a.jsonl", b""), ("a.jsonl", b" \n\r\n"), ("a.json", b"[ ]"),
                       ("a.json", b""), ("a.parquet", b""), ("a.jsonl.gz", b"")],
)  # fmt: skip
def test_empty_file_is_source_missing(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceMissing):
        open_rows(tmp_path / name)


def test_unknown_or_misleading_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b")
    (tmp_path / "data.jsonl").write_bytes(b"\x1f\x8b\x08rest")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "object.json").write_text('{\n "data": []\n}')
    source: Any
    for source, error, message in (
        (tmp_path / "data.csv", UsageError, "unknown file format"),
        (tmp_path / "data.jsonl", SourceError, "contains gzip"),
        (tmp_path / "pipe.jsonl", UsageError, "not a regular file"),
        (tmp_path / "object.json", SourceError, "several lines"),
        ([], UsageError, "no source"),
        ([3], UsageError, "must be a path"),
    ):
        with pytest.raises(error, match=message):
            open_rows(source)


@pytest.mark.parametrize("form", ["text", "path", "directory", "glob", "link", "in a directory"])
def test_names_that_are_not_utf8_are_refused_by_name(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "rows"
    named = directory / os.fsdecode(b"a\xff.jsonl")
    if form == "in a directory":
        directory = tmp_path / os.fsdecode(b"rows\xff")
        named = directory / "a.jsonl"
    directory.mkdir()
    named.write_text('{"text": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(named)
    sources = {
        "text": str(named), "path": named, "directory": directory, "glob": f"{directory}/*.jsonl",
        "link": tmp_path / "link.jsonl", "in a directory": f"{tmp_path}/*/a.jsonl",
    }  # fmt: skip
    with pytest.raises((UsageError, SourceError), match=r"\\udcff"):
        open_rows(sources[form], cache_dir=tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match=r"cache_dir is not a valid path: .*udcff"):
        open_rows(tmp_path / "a.jsonl", cache_dir=tmp_path / os.fsdecode(b"\xff"))
