"""Stores have names; commands take a name, the start of a key, a path or ``@last``."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import tokenmill as tm
from tests.build.making import TOKENIZER, conversations, prepare, write_rows
from tests.cli.harness import QUICK, Shell
from tokenmill.errors import SourceMissing, UsageError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    sizes = {"one": 3, "two": 5}
    return [write_rows(tmp_path / f"{n}.jsonl", conversations(k)) for n, k in sizes.items()]


def rows_of(shell: Shell, store: str | Path) -> int:
    return int(shell("stats", store, "--json").json["rows"])


def test_commands_take_a_name_a_short_key_a_path_or_last(shell: Shell, files: list[Path]) -> None:
    one, two = files
    first = shell("prepare", one, *QUICK, "--name", "first", "--json").json
    assert rows_of(shell, "@last") == 3
    answer = shell("prepare", two, *QUICK, "--name", "second-try_2.0")
    assert "next: tokenmill inspect second-try_2.0\n" in answer.err
    assert rows_of(shell, "@last") == 5
    for text in ("first", first["key"], first["key"][:8], first["path"]):
        assert rows_of(shell, text) == 3, text
    assert len(tm.open_store("first")) == 3
    assert shell("verify", "second-try_2.0").code == 0
    assert shell("prepare", one, *QUICK).code == 0, "a cache hit moves @last as well"
    assert rows_of(shell, "@last") == 3


def test_name_moves_to_the_store_that_got_it_last(files: list[Path]) -> None:
    one, two = files
    prepare(one, name="data")
    prepare(two, name="data")
    assert len(tm.open_store("data")) == 5
    assert prepare(one, name="data").path == tm.open_store("data").path


def test_names_of_another_cache_need_its_directory(files: list[Path], tmp_path: Path) -> None:
    prepare(files[0], name="data", cache_dir=tmp_path / "cache")
    assert len(tm.open_store("data", cache_dir=tmp_path / "cache")) == 3
    with pytest.raises(SourceMissing, match="no store of this name or key in the cache"):
        tm.open_store("data")


def test_existing_store_at_a_path_is_preferred(
    shell: Shell, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = files
    shell("prepare", two, *QUICK, "--name", "data")
    Path("data").mkdir()
    assert rows_of(shell, "data") == 5, "a directory that is no store"
    Path("data").rmdir()
    shell("prepare", one, *QUICK, "--out", "data")
    assert rows_of(shell, "data") == 3


def test_wrong_names_are_errors(shell: Shell, files: list[Path], own_cache: Path) -> None:
    for name in ("", "@last", "a/b", ".hidden", "x" * 65):
        with pytest.raises(UsageError, match="name must be up to 64 letters"):
            prepare(files[0], name=name)
    with pytest.raises(UsageError, match="names a store of the cache; remove disable_cache"):
        prepare(files[0], name="a", disable_cache=True)
    assert "@last needs a store" in shell("stats", "@last").err
    stores = [prepare(write_rows(files[0].parent / f"{n}.jsonl", conversations(1, n)), name=f"n{n}")
              for n in range(3)]  # fmt: skip
    for store in stores[1:]:  # two keys with the same start
        store.path.rename(store.path.parent / ("abcd" + store.key[4:]))
    with pytest.raises(UsageError, match="several stores have a key that starts with abcd"):
        tm.open_store("abcd")
    with pytest.raises(SourceMissing, match="the store named n1 was removed from the cache"):
        tm.open_store("n1")
    assert own_cache.is_dir()


def test_list_shows_name_sources_tokenizer_rows_size_and_age(
    shell: Shell, files: list[Path], own_cache: Path
) -> None:
    key = shell("prepare", *files, *QUICK, "--name", "both", "--json").json["key"]
    now = time.time()
    [entry] = shell("cache", "list", "--json").json["entries"]
    assert entry["names"] == ["@last", "both"]
    assert entry["sources"] == [str(file) for file in files]
    assert entry["tokenizer"] == str(TOKENIZER)
    assert abs(entry["made"] - now) < 60
    parts = [own_cache / name for name in ("slices", "notes", "stores")]
    files_of_store = [file for part in parts for file in part.rglob("*") if file.is_file()]
    assert entry["bytes"] == sum(file.stat().st_size for file in files_of_store)
    head, line = shell("cache", "list").out.splitlines()
    assert re.split(r"\s{2,}", head.strip()) == [
        "key", "rows", "tokens", "size", "age", "name", "tokenizer", "sources",
    ]  # fmt: skip
    cells = re.split(r"\s{2,}", line.strip())
    assert cells[:2] == [key[:12], "8"]
    assert re.fullmatch(r"[\d.]+ kB", cells[3])
    assert cells[5:] == ["@last, both", str(TOKENIZER), f"{files[0]} and 1 more"]


def test_gc_takes_a_name(shell: Shell, files: list[Path]) -> None:
    path = Path(shell("prepare", files[0], *QUICK, "--name", "old").out.strip())
    for grace in ("24h", "0s"):
        assert shell("cache", "gc", "--store", "old", "--grace", grace).code == 0
    assert not path.exists()
    assert "the store named old was removed" in shell("stats", "old").err
