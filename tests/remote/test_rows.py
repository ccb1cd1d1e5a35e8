"""Tests of remote rows: the same as local rows in every format, read by ranges."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.remote.conftest import Upload
from tests.remote.servers import RangeServer
from tests.sampling import sampled
from tests.sources.make import (
    COLUMNAR_MAKERS,
    Maker,
    json_array_indented,
    jsonl,
    jsonl_gz,
    jsonl_zst,
)
from tests.sources.make import as_lines as lines
from tokenmill._core import ranged, remote
from tokenmill.errors import RowError, SourceMissing, UsageError
from tokenmill.sources.rows import open_rows

ROWS: list[dict[str, Any]] = [
    {"id": n, "text": f"row {n} " + "word " * (n % 50), "meta": {"even": n % 2 == 0}}
    for n in range(3000)
]


MAKERS = [jsonl, jsonl_gz, jsonl_zst, json_array_indented, *COLUMNAR_MAKERS]


@pytest.mark.parametrize("make", sampled(MAKERS, 2), ids=lambda make: make.__name__)
def test_remote_rows_equal_local_rows(upload: Upload, tmp_path: Path, make: Maker) -> None:
    rows = ROWS[:300]
    path = make(rows, tmp_path / "here")
    url = upload(path)
    here, there = open_rows(path), open_rows(url)
    assert len(there) == len(here) == len(rows)
    assert list(there) == list(here) == rows
    assert dict(there.scan()) == dict(here.scan())
    for index in (0, 1, 69, 70, 150, 299, 40):
        assert there[index] == here[index]
        assert there.raw(index) == here.raw(index)
        assert there.origin(index) == here.origin(index)._replace(path=url)
    assert there.batch([299, 5, 140]) == [rows[299], rows[5], rows[140]]
    assert [file.digest for file in there.files] == [file.digest for file in here.files]
    digests = [(block.first_row, block.rows, block.digest) for block in here.blocks()]
    assert [(block.first_row, block.rows, block.digest) for block in there.blocks()] == digests
    again = pickle.loads(pickle.dumps(there[100:200]))
    assert list(again) == rows[100:200]
    assert list(open_rows(f"{url}@[-10:]")) == rows[-10:]


def test_indexed_object_is_not_read_again(web: RangeServer, tmp_path: Path) -> None:
    (web.root / "rows.jsonl").write_bytes(lines(ROWS))
    open_rows(web.url("rows.jsonl"))
    web.reset()
    assert len(open_rows(web.url("rows.jsonl"))) == len(ROWS)
    assert web.served <= 1  # one byte, for the ETag


def test_single_row_costs_one_block(
    web: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged, "BLOCK", 16 << 10)
    ranged.recent.clear()
    (web.root / "rows.jsonl").write_bytes(lines(ROWS))
    url = web.url("rows.jsonl")
    open_rows(url)
    ranged.recent.clear()
    rows = open_rows(url)
    web.reset()
    assert rows[1500] == ROWS[1500]
    assert len(web.requests) == 1
    assert web.served == 16 << 10
    assert rows[1500] == ROWS[1500]
    assert len(web.requests) == 1  # it was cached


def test_streaming_requests_growing_windows_and_each_byte_once(
    web: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged, "BLOCK", 4 << 10)
    monkeypatch.setattr(ranged, "WINDOW", 64 << 10)
    ranged.recent.clear()
    data = lines(ROWS)
    (web.root / "rows.jsonl").write_bytes(data)
    file = ranged.RemoteFile(web.url("rows.jsonl"))
    web.reset()
    got = b"".join(file.pread(3000, at) for at in range(0, file.size, 3000))
    assert got == data
    assert web.served == len(data)
    sizes = [size for _, size in web.requests]
    assert sizes[:4] == [4 << 10, 8 << 10, 16 << 10, 32 << 10]
    assert max(sizes) == 64 << 10


def test_one_row_group_of_parquet_is_fetched_alone(web: RangeServer, tmp_path: Path) -> None:
    rows = [{"id": n, "text": f"{n * 7919 % 100003}" * 100} for n in range(20_000)]
    path = web.root / "large.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000, compression="none")
    assert path.stat().st_size > 8 << 20
    opened = open_rows(web.url("large.parquet"))
    footer = web.served
    assert len(opened) == 20_000
    assert footer < 1 << 20  # neither hashed nor decoded
    assert list(opened[3000:4000]) == rows[3000:4000]
    assert opened[3500] == rows[3500]
    assert web.served < footer + (3 << 20)


def test_remote_glob_and_directory_are_listed_in_order(s3: str, memory: str) -> None:
    for root in (s3, memory):
        fs, _ = remote.filesystem(f"{root}/x")
        for number in (2, 0, 1):
            inner = fs._strip_protocol(f"{root}/data/part-{number}.jsonl")
            fs.pipe_file(inner, lines(ROWS[number * 10 : number * 10 + 10]))
        fs.pipe_file(fs._strip_protocol(f"{root}/data/notes.txt"), b"no data")
        for address in (f"{root}/data/*.jsonl", f"{root}/data", f"{root}/data/"):
            rows = open_rows(address)
            assert list(rows) == ROWS[:30]
            assert [file.path for file in rows.files] == [
                f"{root}/data/part-{number}.jsonl" for number in range(3)
            ]
        with pytest.raises(SourceMissing, match="no object matches"):
            open_rows(f"{root}/data/*.parquet")


def test_remote_saved_dataset_opens_by_split(memory: str) -> None:
    fs, _ = remote.filesystem(f"{memory}/x")
    table = pa.Table.from_pylist(ROWS[:50])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    for name, data in {
        "dataset_dict.json": b'{"splits": ["train", "test"]}',
        "train/state.json": json.dumps(state).encode(),
        "train/data-00000-of-00001.arrow": sink.getvalue().to_pybytes(),
    }.items():
        fs.pipe_file(fs._strip_protocol(f"{memory}/saved/{name}"), data)
    assert list(open_rows(f"{memory}/saved@train[:20]")) == ROWS[:20]
    with pytest.raises(UsageError, match="train, test"):
        open_rows(f"{memory}/saved")


def test_bad_remote_row_is_a_row_error_with_its_location(upload: Upload, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(lines(ROWS[:2]) + b"{no json\n" + lines(ROWS[2:4]))
    url = upload(path)
    rows = open_rows(url)
    with pytest.raises(RowError) as caught:
        rows[2]
    assert (caught.value.path, caught.value.row, caught.value.line) == (url, 2, 3)
    assert caught.value.offset == len(lines(ROWS[:2]))
    assert sum(isinstance(value, RowError) for _, value in rows.scan()) == 1


def test_signed_query_is_used_but_never_shown(web: RangeServer) -> None:
    (web.root / "rows.jsonl").write_bytes(lines(ROWS[:5]))
    rows = open_rows(web.url("rows.jsonl?signature=secret"))
    assert rows.origin(0).path == web.url("rows.jsonl")
    assert "secret" not in repr(rows)
    assert any("secret" in path for path, _ in web.requests)


def test_missing_driver_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(url: str) -> None:
        raise ImportError("Install gcsfs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UsageError, match=r'pip install "tokenmill\[remote\]"'):
        open_rows("gs://nobody/x.jsonl")


def test_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown protocol"):
        open_rows("nonsense://x/y.jsonl")


def test_missing_object_is_source_missing(upload: Upload, tmp_path: Path) -> None:
    path = tmp_path / "there.jsonl"
    path.write_bytes(lines(ROWS[:1]))
    url = upload(path)
    with pytest.raises(SourceMissing, match="no such object"):
        open_rows(url.replace("there", "nowhere"))
