"""The same rows in every format, and tools for tests that need another process."""

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


def as_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def jsonl(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.jsonl", as_lines(rows))


def ndjson_without_final_newline(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.ndjson", as_lines(rows).rstrip(b"\n"))


def crlf_with_bom_and_blank_lines(rows: Rows, directory: Path) -> Path:
    data = b"\xef\xbb\xbf" + as_lines(rows).replace(b"\n", b"\r\n\r\n \t\r\n")
    return _written(directory / "rows.jsonl", data)


def json_lines(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.json", as_lines(rows))


def json_array(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.json", json.dumps(rows).encode())


def json_array_indented(rows: Rows, directory: Path) -> Path:
    data = json.dumps(rows, indent=3, ensure_ascii=False).encode() + b"\n\n"
    return _written(directory / "rows.json", data)


def json_array_gz(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.json.gz", gzip.compress(json.dumps(rows).encode()))


def jsonl_gz(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.jsonl.gz", gzip.compress(as_lines(rows)))


def jsonl_gz_members(rows: Rows, directory: Path) -> Path:
    data = as_lines(rows)
    middle = len(data) // 3
    members = gzip.compress(data[:middle]) + gzip.compress(b"") + gzip.compress(data[middle:])
    return _written(directory / "rows.jsonl.gz", members + bytes(512))


def jsonl_zst(rows: Rows, directory: Path) -> Path:
    return _written(directory / "rows.jsonl.zst", zstandard.compress(as_lines(rows)))


def jsonl_zst_frames(rows: Rows, directory: Path) -> Path:
    data = as_lines(rows)
    middle = len(data) // 3
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    frames = zstandard.compress(data[:middle]) + skippable + zstandard.compress(data[middle:])
    return _written(directory / "rows.jsonl.zst", frames)


def parquet(rows: Rows, directory: Path) -> Path:
    path = directory / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def arrow_stream(rows: Rows, directory: Path) -> Path:
    return _arrow(rows, directory, pa.ipc.new_stream)


def arrow_file(rows: Rows, directory: Path) -> Path:
    return _arrow(rows, directory, pa.ipc.new_file)


def _arrow(rows: Rows, directory: Path, new: Callable[..., Any]) -> Path:
    table = pa.Table.from_pylist(rows)
    path = directory / "rows.arrow"
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path


TEXT_MAKERS: list[Callable[[Rows, Path], Path]] = [
    jsonl,
    ndjson_without_final_newline,
    crlf_with_bom_and_blank_lines,
    json_lines,
    json_array,
    json_array_indented,
    json_array_gz,
    jsonl_gz,
    jsonl_gz_members,
    jsonl_zst,
    jsonl_zst_frames,
]
COLUMNAR_MAKERS: list[Callable[[Rows, Path], Path]] = [parquet, arrow_stream, arrow_file]


def _written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def settle() -> None:
    """Wait until what was just written counts as having come to rest."""
    time.sleep(RACY_NS / 1e9 + 0.05)
