"""Tests of line files against a reference reader: rows, bytes and line numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.sources.naive import naive_rows
from tokenmill.errors import RowError, SourceMissing
from tokenmill.sources.block import read_block
from tokenmill.sources.bytefile import LocalFile
from tokenmill.sources.rows import open_rows
from tokenmill.sources.scan import LineScan

DIRTY = [
    b'{"a": "\xe2\x80\xa8 \xc2\x85 \x0b"}',  # U+2028 and U+0085 are not line breaks
    b'{"a": 1}\r',
    b"\xef\xbb\xbf",
    b'\xef\xbb\xbf{"bom": 1}',
    b'{"nul": "\x00"}',
    b'{"lone": "\\ud800"}',
    b'{"pair": "\\ud83d\\ude00"}',
    b'{"nan": NaN}',
    b'{"big": 1e400}',
    b'{"int80": 604462909807314587353088}',
    b'{"twice": 1, "twice": 2}',
    b"",
    b"\r",
    b" \t ",
    b"   ",
    b"[1, 2]",
    b'"text"',
    b'{"a": 1} {"b": 2}',
    b'  {"indented": true}  ',
    b'{"bad utf8": "\xff"}',
    b"[" * 3000 + b"]" * 3000,
    b'{"d":' * 300 + b"1" + b"}" * 300,
    b'{"d":' * 255 + b"1" + b"}" * 255,
    b"null",
    b"\x00",
    b"{",
    b'{"long": "' + b"x" * 400 + b'"}',
]

dirty_files = st.lists(
    st.one_of(st.sampled_from(DIRTY), st.binary(max_size=40)), min_size=1, max_size=30
).map(lambda lines: b"\n".join(lines))

no_deadline = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def naive_value(raw: bytes) -> object:
    """Return the value of Python's parser, or None if strict JSON does not allow it."""

    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=refuse, strict=True)
        text.encode().decode()
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@no_deadline
@given(data=dirty_files)
def test_dirty_file_any_bytes_equals_naive_reader(tmp_path: Path, data: bytes) -> None:
    assume(not data.startswith((b"PAR1", b"ARROW1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")))
    path = tmp_path / "dirty.jsonl"
    path.write_bytes(data)
    expected = naive_rows(data)
    if not expected:
        with pytest.raises(SourceMissing):
            open_rows(path)
        return
    rows = open_rows(path)
    assert len(rows) == len(expected)
    scanned = list(rows.scan())
    assert [index for index, _ in scanned] == list(range(len(expected)))
    good = bad = 0
    for (index, value), row in zip(scanned, expected, strict=True):
        assert rows.raw(index) == row.raw
        origin = rows.origin(index)
        assert (origin.row, origin.line, origin.offset, origin.length) == (
            index,
            row.line,
            row.offset,
            len(row.raw),
        )
        assert data[origin.offset : origin.offset + origin.length] == row.raw
        if isinstance(value, RowError):
            bad += 1
            assert value.reason in ("bad_json", "limit")
            assert (value.row, value.line, value.offset) == (index, row.line, row.offset)
            assert value.path == str(path)
            with pytest.raises(RowError) as raised:
                rows[index]
            assert str(raised.value) == str(value)
        else:
            good += 1
            assert rows[index] == value
            assert naive_value(row.raw) == value
    assert good + bad == len(rows)
    blocks = list(rows.blocks())
    assert sum(block.rows for block in blocks) == len(rows)
    assert sum(block.length for block in blocks) == len(data)
    read = [read_block(block) for block in blocks]
    assert [raw for one in read for raw in one.raw] == [row.raw for row in expected]
    for block, one in zip(blocks, read, strict=True):
        for number in range(block.rows):
            row = expected[block.first_row + number]
            assert block.offset + one.offset[number] == row.offset
            assert block.first_line + one.line[number] == row.line
            assert one.length[number] == len(row.raw)
            value = scanned[block.first_row + number][1]
            if isinstance(value, RowError):
                assert str(one.values[number]) == str(value)
            else:
                assert one.values[number] == value


@no_deadline
@given(data=dirty_files, buffer_bytes=st.integers(1, 700))
def test_scan_any_buffer_size_gives_same_index(
    tmp_path: Path, data: bytes, buffer_bytes: int
) -> None:
    path = tmp_path / "dirty.jsonl"
    path.write_bytes(data)
    whole, pieces = LineScan(LocalFile(str(path))), LineScan(LocalFile(str(path)), buffer_bytes)
    entries = [word for portion in whole.starts() for word in portion.tolist()]
    assert [word for portion in pieces.starts() for word in portion.tolist()] == entries
    assert pieces.assembler.blocks == whole.assembler.blocks
    assert pieces.bytes == whole.bytes == len(data)
