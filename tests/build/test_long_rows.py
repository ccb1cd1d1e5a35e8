"""Rows over a limit are rejected and counted, within bounded memory; the build goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.build.making import TOKENIZER, prepare, write_rows
from tokenmill.errors import SourceError
from tokenmill.sources import columnar, tables
from tokenmill.sources.limits import MAX_ROW
from tokenmill.sources.rows import open_rows
from tokenmill.tokenizers import encoder

GIB = 1 << 30
PROGRAM = f"""
import resource, sys, tokenmill as tm
resource.setrlimit(resource.RLIMIT_AS, (2 * {GIB}, 2 * {GIB}))
store = tm.prepare(sys.argv[1], {str(TOKENIZER)!r}, cache_dir=sys.argv[2], format="text",
                   tokenizer_backend="file", executor="inline", progress=False)
totals = store.manifest["totals"]
print(totals["rows_in"], len(store), totals["rejected"].get("limit", 0))
"""


def outcome(source: Path) -> list[int]:
    """Prepare a source in a child with 2 GiB of address space: rows in, kept, over a limit."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, source, source.parent / "cache"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(number) for number in done.stdout.split()]


def test_long_lines(tmp_path: Path) -> None:
    rows = [{"text": "hello"}, {"text": "a" * (20 << 20)}, {"text": " " * (15 << 20)}]
    assert outcome(write_rows(tmp_path / "a.jsonl", [*rows, {"text": "world"}])) == [4, 2, 2]


def test_parquet_whose_dictionary_repeats_a_long_value(tmp_path: Path) -> None:
    values = pa.array(["a" * (20 << 20), "hello"])
    numbers = pa.array([0] * 8 + [1] + [0] * 8, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(numbers, values)})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 5000
    assert outcome(path) == [17, 1, 16]


def test_text_over_the_limit_of_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is on the bytes of the text; other columns do not count."""
    monkeypatch.setattr(encoder, "MAX_TEXT_BYTES", 1000)
    texts = ["a" * 900, "a" * 1001, "é" * 450, "é" * 501, "b"]
    rows: list[dict[str, Any]] = [{"text": text, "other": "x" * 5000} for text in texts]
    store = prepare(write_rows(tmp_path / "a.jsonl", rows), cache_dir=tmp_path / "c", format="text")
    assert [row.origin.row for row in store] == [0, 2, 4]
    assert store.manifest["totals"]["rejected"] == {"limit": 2}


@pytest.mark.parametrize("kind", ["text", "list"])
def test_rows_decoded_at_once_follow_from_the_dictionary(tmp_path: Path, kind: str) -> None:
    values = pa.array(["a" * (1 << 20), "b"]).take(pa.array([0, 1] * 150))
    if kind == "list":
        values = pa.ListArray.from_arrays(pa.array(range(0, 301, 6), pa.int32()), values)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": values}), path, compression="zstd")
    batches = list(tables.ParquetTable(str(path), str(path)).group_batches(0))
    assert sum(batch.num_rows for batch in batches) == len(values)
    assert max(batch.nbytes for batch in batches) <= tables.MAX_BATCH
    assert pa.Table.from_batches(batches).column("x").to_pylist() == values.to_pylist()


def test_expansion_of_a_column_is_bounded_as_of_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = pa.array(["a" * (10 << 20) + str(number) for number in range(8)])
    pq.write_table(pa.table({"text": text}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(SourceError, match=r"column 'text' expands more than 1000 times"):
        open_rows(path)[0]


def test_block_that_expands_over_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "MAX_DECODED", 1 << 20)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["word " * 1000] * 300}), path)
    with pytest.raises(SourceError, match="expand to more than 1048576 bytes of rows; write"):
        prepare(path, cache_dir=tmp_path / "c", format="text")


def test_long_element_of_an_array_is_one_rejected_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "hello"}, {"text": "a" * MAX_ROW}, {"text": "world"}]))
    store = prepare(path, cache_dir=tmp_path / "c", format="text")
    assert [row.origin.row for row in store] == [0, 2]
    assert store.manifest["totals"]["rejected"] == {"limit": 1}
