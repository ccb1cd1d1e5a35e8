"""Tests of network faults: transient errors are retried, others are raised."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.remote.conftest import Upload
from tests.remote.servers import RangeServer
from tests.remote.test_rows import ROWS
from tests.sources.make import as_lines as lines
from tokenmill._core import ranged, remote
from tokenmill._core.ranged import RemoteFile
from tokenmill.errors import SourceChanged, SourceError
from tokenmill.sources.block import read_block
from tokenmill.sources.rows import open_rows

DATA = lines(ROWS)


@pytest.fixture
def url(web: RangeServer, monkeypatch: pytest.MonkeyPatch) -> str:
    ranged.recent.clear()
    (web.root / "rows.jsonl").write_bytes(DATA)
    return web.url("rows.jsonl")


@pytest.mark.parametrize("faults", [["drop"], [503, 503], [429, "drop", 500, 408, "drop"]])
def test_transient_faults_are_retried(web: RangeServer, url: str, faults: list[str | int]) -> None:
    file = RemoteFile(url)
    web.faults[:] = faults
    assert file.pread(len(DATA), 0) == DATA
    assert not web.faults


def test_permanent_fault_is_a_source_error_with_url_and_offset(web: RangeServer, url: str) -> None:
    file = RemoteFile(url)
    web.faults[:] = [503] * 100
    with pytest.raises(SourceError, match=r"after 6 attempts.*503") as caught:
        file.pread(10, 2 * ranged.BLOCK - 5 if len(DATA) > 2 * ranged.BLOCK else 0)
    assert caught.value.path == url
    assert caught.value.offset is not None
    assert len(web.faults) == 100 - remote.ATTEMPTS


def test_forbidden_object_is_refused_at_once(web: RangeServer, url: str) -> None:
    web.faults[:] = [403, 403]
    with pytest.raises(SourceError, match="403"):
        RemoteFile(url)
    assert web.faults == [403]


def test_server_without_ranges_is_refused_before_the_body_is_read(
    web: RangeServer, url: str
) -> None:
    web.without_ranges = True
    with pytest.raises(SourceError, match="does not support range requests"):
        open_rows(url)
    assert len(web.requests) == 1


@pytest.mark.parametrize("returned", ["{first}-{middle}", "{later}-{last}", "0-{last}", "*", "x-y"])
def test_response_with_another_range_is_refused(
    web: RangeServer, url: str, monkeypatch: pytest.MonkeyPatch, returned: str
) -> None:
    """The body has the requested length, so only Content-Range shows the difference."""
    first, last = ranged.BLOCK, len(DATA) - 1
    file = RemoteFile(url)
    changed = returned.format(first=first, middle=last - 1, later=first + 1, last=last)

    def answer(handler: Any) -> bool:
        body = DATA[first:]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {changed}/{len(DATA)}")
        handler.send_header("ETag", file.version.token.removeprefix("etag="))
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    monkeypatch.setattr(web, "answer", answer)
    with pytest.raises(SourceError, match=r"another range|does not return its size"):
        file.pread(len(DATA) - first, first)


def test_body_longer_than_its_range_is_not_read_whole(
    web: RangeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends the range that was requested, and a chunked body of 400 MB."""
    file = RemoteFile(url)
    sent = 0

    def answer(handler: Any) -> bool:
        nonlocal sent
        last = min(ranged.BLOCK, len(DATA)) - 1
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{last}/{len(DATA)}")
        handler.send_header("ETag", file.version.token.removeprefix("etag="))
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        piece = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                handler.wfile.write(piece)
                sent += len(piece)
            handler.wfile.write(b"0\r\n\r\n")
        return True

    monkeypatch.setattr(web, "answer", answer)
    with pytest.raises(SourceError, match="more than the requested bytes"):
        file.pread(10, 0)
    assert sent < 64 << 20  # buffers of the sockets


def test_closed_port_is_a_source_error(web: RangeServer, url: str) -> None:
    web.shutdown()
    web.server_close()
    with pytest.raises(SourceError, match="after 6 attempts"):
        RemoteFile(url)


def replaced(place: Upload, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    place(path)


@pytest.mark.parametrize("grown", [True, False])
def test_changed_object_is_source_changed_at_the_next_range(
    upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(DATA)
    rows = open_rows(upload(path))
    blocks = list(rows.blocks())
    ranged.recent.clear()
    other = DATA + b"{}\n" if grown else DATA.replace(b'"id": 7', b'"id": 8')
    replaced(upload, path, other)
    with pytest.raises(SourceChanged):
        rows[1]
    with pytest.raises(SourceChanged):
        list(rows)
    with pytest.raises(SourceChanged):
        read_block(blocks[0])
    assert open_rows(upload(path))[0] == ROWS[0]


def test_object_that_changes_while_it_is_indexed_is_source_changed(
    web: RangeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (web.root / "rows.jsonl").write_bytes(10 * DATA)  # several windows
    real = ranged.RemoteFile.fetch_blocks

    def fetch(self: RemoteFile, first: int, count: int) -> bytes:
        if first > 3:
            (web.root / "rows.jsonl").write_bytes(10 * DATA.replace(b'"id": 7', b'"id": 8'))
        return real(self, first, count)

    monkeypatch.setattr(ranged.RemoteFile, "fetch_blocks", fetch)
    with pytest.raises(SourceChanged):
        open_rows(url)


def test_block_of_an_object_without_etag_is_checked_by_its_digest(
    web: RangeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.without_etag = web.without_time = True
    block = next(iter(open_rows(url).blocks()))
    assert not block.is_stable
    assert len(read_block(block).raw) == block.rows
    (web.root / "rows.jsonl").write_bytes(DATA.replace(b'"id": 7', b'"id": 8'))
    with pytest.raises(SourceChanged, match="changed since it was opened"):
        read_block(block)


def test_object_with_only_a_recent_time_is_read_again(web: RangeServer, url: str) -> None:
    web.without_etag = True
    open_rows(url)
    web.reset()
    open_rows(url)
    assert web.served > len(DATA)  # within the same second it may have been written twice
    old = 1_700_000_000
    os.utime(web.root / "rows.jsonl", (old, old))
    open_rows(url)
    web.reset()
    open_rows(url)
    assert web.served <= 1


def test_reading_continues_in_a_forked_process(web: RangeServer, url: str) -> None:
    rows = open_rows(url)
    assert rows[5] == ROWS[5]
    ranged.recent.clear()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if rows[2999] == ROWS[2999] and rows[5] == ROWS[5] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rows[1234] == ROWS[1234]


def saved(path: Path, form: str, rows: list[dict[str, Any]]) -> None:
    """Write rows in one row group, or in record batches of 1,500."""
    table = pa.Table.from_pylist(rows)
    if form == "parquet":
        pq.write_table(table, path, row_group_size=len(rows))
        return
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1500)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SourceError("no network")], ids=type)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_exception_inside_a_read_shifts_no_row(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, error: BaseException
) -> None:
    """Each read fails once; afterwards every row is still correct."""
    wanted = [{"n": number, "text": "words " * 30} for number in range(4000)]
    saved(tmp_path / "rows", form, wanted)
    url = f"{memory}/rows.{form}"
    fs, inner = remote.filesystem(url)
    fs.pipe_file(inner, (tmp_path / "rows").read_bytes())
    real = RemoteFile.pread
    left = itertools.repeat(1)

    def failing(self: RemoteFile, length: int, offset: int) -> bytes:
        if not next(left):
            raise error
        return real(self, length, offset)

    monkeypatch.setattr(RemoteFile, "pread", failing)
    for fatal in range(40):
        rows = open_rows(url)
        left = itertools.chain([1] * fatal, [0], itertools.repeat(1))
        failed = 0
        for number in (0, 1027, 2100, 3999):
            try:
                assert rows[number] == wanted[number]
            except type(error):
                failed += 1
        assert [rows[number] for number in (3, 1030, 2049, 3000)] == [
            wanted[number] for number in (3, 1030, 2049, 3000)
        ]
        if not failed:
            break
    assert 0 < fatal < 39


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_exception_inside_a_decoder_shifts_no_row(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from tokenmill.sources.tables import RowForm

    wanted = [{"n": number} for number in range(4000)]
    saved(tmp_path / "rows", form, wanted)
    url = f"{memory}/rows.{form}"
    fs, inner = remote.filesystem(url)
    fs.pipe_file(inner, (tmp_path / "rows").read_bytes())
    rows, real = open_rows(url), RowForm.checked

    def interrupted(self: RowForm, batch: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(RowForm, "checked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows[3]
    monkeypatch.setattr(RowForm, "checked", real)
    assert [rows[number]["n"] for number in (3, 1027, 5, 3999, 2048)] == [3, 1027, 5, 3999, 2048]


def test_returned_row_is_not_shared(memory: str, tmp_path: Path) -> None:
    saved(tmp_path / "rows", "parquet", [{"n": {"m": 1}}, {"n": {"m": 2}}])
    fs, inner = remote.filesystem(f"{memory}/rows.parquet")
    fs.pipe_file(inner, (tmp_path / "rows").read_bytes())
    rows = open_rows(f"{memory}/rows.parquet")
    rows[0]["n"]["m"] = 7
    assert rows[0] == {"n": {"m": 1}}
