"""Tests of the same rows in every format."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sources.make import COLUMNAR_MAKERS, TEXT_MAKERS, Rows, jsonl, parquet
from tokenmill._core.origin import Origin
from tokenmill.sources.block import read_block
from tokenmill.sources.rows import open_rows

SAMPLE: Rows = [
    {
        "id": number,
        "text": f"row {number} " + 'é😀\u2028"\\ ' * (number % 5),
        "score": number / 7,
        "flag": number % 2 == 0,
        "tags": [f"t{k}" for k in range(number % 3)],
        "metadata": {"source": "made", "n": number, "deep": {"list": [[1, 2], []], "x": "[{,"}},
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    for number in range(40)
]
EVERY = TEXT_MAKERS + COLUMNAR_MAKERS


@pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
def test_rows_same_data_any_format_equal(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(SAMPLE, tmp_path)
    rows = open_rows(path)
    assert len(rows) == len(SAMPLE)
    assert list(rows) == SAMPLE
    assert rows.batch([3, 39, 3, 0, -1]) == [SAMPLE[n] for n in (3, 39, 3, 0, -1)]
    assert [rows[n] for n in range(-len(SAMPLE), len(SAMPLE))] == SAMPLE + SAMPLE
    assert rows.batch(range(len(SAMPLE))) == [rows[n] for n in range(len(SAMPLE))] == SAMPLE
    assert list(rows[5:-3:4]) == SAMPLE[5:-3:4]
    assert list(rows[::-1]) == SAMPLE[::-1]
    assert rows[2:30][3:][0] == SAMPLE[5]
    with pytest.raises(IndexError, match="row 40 is out of range: there are 40"):
        rows[40]
    with pytest.raises(IndexError):
        rows[-41]
    assert list(pickle.loads(pickle.dumps(rows[3:9]))) == SAMPLE[3:9]
    blocks = list(rows.blocks())
    read = [read_block(pickle.loads(pickle.dumps(block))) for block in blocks]
    assert [value for one in read for value in one.values] == SAMPLE
    assert [raw for one in read for raw in one.raw] == [rows.raw(n) for n in range(len(rows))]
    assert sum(block.rows for block in blocks) == len(rows)
    if make in COLUMNAR_MAKERS:
        assert rows.origin(11) == Origin(str(path), 11, None, None, len(rows.raw(11)))
    (file,) = rows.files
    assert (file.path, file.rows, len(file.digest)) == (str(path), len(rows), 40)


@pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
def test_blocks_of_a_slice_have_exactly_its_rows(make: Callable[..., Path], tmp_path: Path) -> None:
    rows = open_rows(make(SAMPLE, tmp_path))
    for first, last in ((0, 40), (0, 1), (39, 40), (5, 5), (7, 29), (1, 39)):
        read = [read_block(block) for block in rows[first:last].blocks()]
        assert [value for one in read for value in one.values] == SAMPLE[first:last]
    twice = [block.digest for block in rows[7:29].blocks()]
    assert [block.digest for block in rows[7:29].blocks()] == twice


def test_digest_same_lines_any_compression_equal(tmp_path: Path) -> None:
    makers = {make.__name__: make for make in TEXT_MAKERS}
    names = ["jsonl", "json_lines", "jsonl_gz", "jsonl_gz_members", "jsonl_zst", "jsonl_zst_frames"]
    opened = [open_rows(makers[name](SAMPLE, tmp_path / name)) for name in names]
    assert len({rows.files[0].digest for rows in opened}) == 1
    assert len({tuple(block.digest for block in rows.blocks()) for rows in opened}) == 1
    assert len({rows.raw(17) for rows in opened}) == 1


@pytest.mark.parametrize("make", TEXT_MAKERS, ids=lambda make: make.__name__)
def test_origin_of_text_formats_locates_the_raw_bytes(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    path = make(SAMPLE, tmp_path)
    rows = open_rows(path)
    content = _content(path)
    for number in range(len(rows)):
        origin = rows.origin(number)
        assert (origin.path, origin.row) == (str(path), number)
        raw = content[origin.offset : origin.offset + origin.length]
        assert raw.replace(b"\n", b"\t") == rows.raw(number)
        line = None if "array" in make.__name__ else 1 + content[: origin.offset].count(b"\n")
        assert origin.line == line


RAGGED: Rows = [
    {
        "tools": [{"name": "f", "parameters": {"a": {"type": "int"}}}],
        "meta": {"x": 1},
        "leaf": {"p": 1},
        "label": None,
    },
    {"tools": [{"name": "g", "parameters": {"b": {"type": "str", "enum": ["u", None]}}}]},
    {"tools": [], "meta": {"y": {"z": 2}}, "leaf": {"q": 2}, "label": None},
    {"label": "last"},
]


@pytest.mark.parametrize("make", COLUMNAR_MAKERS, ids=lambda make: make.__name__)
def test_ragged_structs_columnar_gain_no_null_keys(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    expected = [{k: v for k, v in row.items() if v is not None} for row in RAGGED]
    rows = open_rows(make(RAGGED, tmp_path))
    assert list(rows) == expected
    assert [rows[n] for n in range(len(rows))] == expected
    assert list(open_rows(jsonl(RAGGED, tmp_path / "lines"))) == RAGGED  # explicit nulls stay


def test_concatenation_of_formats_keeps_order_and_origins(tmp_path: Path) -> None:
    first = jsonl(SAMPLE[:10], tmp_path / "a")
    second = parquet(SAMPLE[10:25], tmp_path / "b")
    third = jsonl(SAMPLE[25:], tmp_path / "c")
    rows = open_rows([first, second, third, f"{first}@[-2:]"])
    expected: list[Any] = [*SAMPLE, *SAMPLE[8:10]]
    assert list(rows) == expected
    assert [rows[n] for n in range(len(rows))] == expected
    assert list(rows[8:27]) == expected[8:27]
    assert rows.batch([41, 0, 12, 26]) == [expected[n] for n in (41, 0, 12, 26)]
    assert (rows.origin(41).path, rows.origin(41).row) == (str(first), 9)
    assert (rows.origin(12).path, rows.origin(12).row) == (str(second), 2)
    assert len(rows.files) == 3
    read = [read_block(block) for block in rows.blocks()]
    assert [value for one in read for value in one.values] == expected


def _content(path: Path) -> bytes:
    import gzip

    import zstandard

    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return data
