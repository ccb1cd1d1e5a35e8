"""Tests of preparing remote files: the same keys and bytes as from local files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.build.making import (
    EXAMPLES,
    INLINE,
    TOKENIZER,
    conversations,
    files_of,
    small_cuts,
    write_rows,
)
from tests.remote.conftest import Upload
from tests.remote.servers import RangeServer
from tokenmill._core import ranged
from tokenmill.build.calls import run_recipe
from tokenmill.errors import SourceChanged, UsageError

LOCAL = {**INLINE, "executor": "local", "num_workers": 2}


def source(directory: Path, form: str) -> Path:
    rows = conversations(160)
    if form == "jsonl":
        return write_rows(directory / "chat.jsonl", rows)
    path = directory / "chat.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=40)
    return path


@pytest.mark.parametrize(
    ("how", "form"),
    [
        pytest.param(INLINE, "jsonl", id="inline-jsonl"),
        pytest.param(INLINE, "parquet", id="inline-parquet"),
        pytest.param(LOCAL, "parquet", id="local-parquet", marks=pytest.mark.soak),
        pytest.param(LOCAL, "jsonl", id="local-jsonl", marks=pytest.mark.soak),
    ],
)
def test_store_of_a_remote_file_equals_that_of_a_local_file(
    upload: Upload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, object],
    form: str,
) -> None:
    small_cuts(monkeypatch)
    path = source(tmp_path, form)
    here = tm.prepare(path, tokenizer=TOKENIZER, cache_dir=tmp_path / "here", **INLINE)
    url = upload(path)
    if url.startswith("memory://") and how is LOCAL:
        with pytest.raises(UsageError, match="executor='inline'"):
            tm.prepare(url, tokenizer=TOKENIZER, cache_dir=tmp_path / "there", **how)
        return
    there = tm.prepare(url, tokenizer=TOKENIZER, cache_dir=tmp_path / "there", **how)
    assert there.key == here.key
    for part in ("slices", "stores", "tokenizers"):
        assert files_of(tmp_path / "there", part) == files_of(tmp_path / "here", part)
    assert there[3].origin == here[3].origin._replace(path=url)
    assert there.proof["paths"] == [url]
    there.verify()


def test_same_bytes_remote_are_a_hit(upload: Upload, tmp_path: Path) -> None:
    path = EXAMPLES / "conversations.jsonl"
    run_recipe(path, TOKENIZER, **INLINE)
    prepared = run_recipe(upload(path), TOKENIZER, **INLINE)
    assert prepared.hit


def test_prepare_retries_transient_faults(
    web: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    write_rows(web.root / "chat.jsonl", conversations(300))
    web.faults[:] = [503, "drop", 200 + 303, "drop"]
    store = tm.prepare(web.url("chat.jsonl"), tokenizer=TOKENIZER, **INLINE)
    assert len(store) == 300


def test_source_that_changes_between_plan_and_slice_publishes_no_store(
    web: RangeServer, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.build import run

    path = write_rows(web.root / "chat.jsonl", conversations(300))
    real = run._require_reachable

    def edit(*arguments: object) -> None:
        write_rows(path, conversations(300, first=1))
        ranged.recent.clear()  # cached blocks are of the planned version and would hide the change
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "_require_reachable", edit)
    with pytest.raises(SourceChanged):
        tm.prepare(web.url("chat.jsonl"), tokenizer=TOKENIZER, **INLINE)
    assert not list(own_cache.glob("stores/*"))
