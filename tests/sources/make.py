"""Write the same rows in every format."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tokenmill.sources.limits import RACY_NS

Rows = list[dict[str, Any]]
Maker = Callable[[Rows, Path], Path]


def as_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _text(name: str, file: str, encode: Callable[[Rows], bytes]) -> Maker:
    def make(rows: Rows, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(encode(rows))
        return directory / file

    make.__name__ = name
    return make


def _gzip_members(rows: Rows) -> bytes:
    data = as_lines(rows)
    middle = len(data) // 3
    pieces = (data[:middle], b"", data[middle:])
    return b"".join(map(gzip.compress, pieces)) + bytes(512)


def _zstd_frames(rows: Rows) -> bytes:
    data = as_lines(rows)
    middle = len(data) // 3
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    return zstandard.compress(data[:middle]) + skippable + zstandard.compress(data[middle:])


jsonl = _text("jsonl", "rows.jsonl", as_lines)
jsonl_gz = _text("jsonl_gz", "rows.jsonl.gz", lambda rows: gzip.compress(as_lines(rows)))
jsonl_zst = _text("jsonl_zst", "rows.jsonl.zst", lambda rows: zstandard.compress(as_lines(rows)))
json_array_indented = _text(
    "json_array_indented",
    "rows.json",
    lambda rows: json.dumps(rows, indent=3, ensure_ascii=False).encode() + b"\n\n",
)
TEXT_MAKERS: list[Maker] = [
    jsonl,
    _text("ndjson_without_final_newline", "rows.ndjson", lambda rows: as_lines(rows)[:-1]),
    _text(
        "crlf_with_bom_and_blank_lines",
        "rows.jsonl",
        lambda rows: b"\xef\xbb\xbf" + as_lines(rows).replace(b"\n", b"\r\n\r\n \t\r\n"),
    ),
    _text("json_lines", "rows.json", as_lines),
    _text("json_array", "rows.json", lambda rows: json.dumps(rows).encode()),
    json_array_indented,
    _text("json_array_gz", "rows.json.gz", lambda rows: gzip.compress(json.dumps(rows).encode())),
    jsonl_gz,
    _text("jsonl_gz_members", "rows.jsonl.gz", _gzip_members),
    jsonl_zst,
    _text("jsonl_zst_frames", "rows.jsonl.zst", _zstd_frames),
]


def parquet(rows: Rows, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def arrow_stream(rows: Rows, directory: Path) -> Path:
    return _arrow(rows, directory, pa.ipc.new_stream)


def arrow_file(rows: Rows, directory: Path) -> Path:
    return _arrow(rows, directory, pa.ipc.new_file)


def _arrow(rows: Rows, directory: Path, new: Callable[..., Any]) -> Path:
    table = pa.Table.from_pylist(rows)
    directory.mkdir(exist_ok=True)
    path = directory / "rows.arrow"
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path


COLUMNAR_MAKERS: list[Maker] = [parquet, arrow_stream, arrow_file]


def wait_until_stable() -> None:
    """Wait until the timestamp of a new file proves its content."""
    time.sleep(RACY_NS / 1e9 + 0.05)
