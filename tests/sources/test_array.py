"""Tests of JSON arrays as lines: compared with json.loads, and random bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokenmill.errors import RowError, SourceError
from tokenmill.sources.copy import array_lines
from tokenmill.sources.rows import open_rows

no_deadline = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
text = st.text(st.sampled_from('"\\[]{},: \n\u2028é😀x'), max_size=8)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=6,
)
objects = st.dictionaries(text, values, max_size=3)
blanks = st.text(st.sampled_from(" \t\r\n"), max_size=300)


def spelled(items: list[Any], gaps: list[str], ascii_only: bool) -> bytes:
    """Return an array with the given white space around its elements."""
    parts = [json.dumps(item, ensure_ascii=ascii_only) for item in items]
    around = [gaps[n % len(gaps)] for n in range(2 * len(parts) + 2)]
    inside = ",".join(around[2 * n] + part + around[2 * n + 1] for n, part in enumerate(parts))
    return (around[-1] + "[" + inside + around[-2] + "]" + around[-1]).encode()


def converted(data: bytes, piece: int) -> bytes | str:
    """Convert an array in pieces of this size; return its lines or the error message."""
    pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
    try:
        return b"".join(array_lines(pieces, "array.json"))
    except SourceError as error:
        return error.message


@no_deadline
@given(
    st.lists(objects, min_size=1, max_size=8),
    st.lists(blanks, min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 200),
)
def test_array_any_layout_equals_whole_parse(
    tmp_path: Path, items: list[Any], gaps: list[str], ascii_only: bool, piece: int
) -> None:
    data = spelled(items, gaps, ascii_only)
    path = tmp_path / "array.json"
    path.write_bytes(data)
    rows = open_rows(path)
    assert list(rows) == json.loads(data) == [rows[n] for n in range(len(items))]
    for number in range(len(rows)):
        origin = rows.origin(number)
        raw = data[origin.offset : origin.offset + origin.length]
        assert raw == rows.raw(number) == raw.strip()
        assert json.loads(raw) == items[number]
        assert (origin.row, origin.line) == (number, None)
    lines = converted(data, piece)
    assert len(lines) == len(data)
    assert lines == converted(data, len(data))


@no_deadline
@example(b"[]", 1)
@example(b'[{}, {"a": [1, 2]}]', 3)
@given(st.binary(max_size=200).map(lambda noise: b"[" + noise), st.integers(1, 64))
def test_array_random_bytes_are_lines_or_a_source_error(data: bytes, piece: int) -> None:
    lines = converted(data, piece)
    assert lines == converted(data, len(data))
    try:
        parsed = json.loads(data)
    except ValueError:
        return
    assert isinstance(lines, bytes)
    assert [json.loads(line) for line in lines.split(b"\n") if line] == parsed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"a": 1}', "truncated"),
        (b'[{"a": 1},', "truncated"),
        (b'[{"a": "]', "truncated"),
        (b"[", "truncated"),
        (b'[{"a": 1}] x', "text after"),
        (b'[{"a": 1}][]', "text after"),
    ],
)
def test_malformed_array_is_a_source_error(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(data)
    with pytest.raises(SourceError, match=message) as raised:
        open_rows(tmp_path / "broken.json")
    assert raised.value.offset is not None


def test_array_bad_elements_are_bad_rows_with_their_offset(tmp_path: Path) -> None:
    data = b'[ {"a": 1],\n {"b": 2} , 3, {"s": "x\ny"}, {"c": NaN}, [[]] , ]'
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    outcomes = [value for _, value in open_rows(path).scan()]
    assert [type(value) for value in outcomes] == [RowError, dict, *[RowError] * 5]
    assert [value.offset for value in outcomes if isinstance(value, RowError)] == [
        2, data.index(b"3"), data.index(b'{"s"'), data.index(b'{"c"'), data.index(b"[[]]"),
        len(data) - 1,
    ]  # fmt: skip
    assert str(outcomes[2]).startswith(f"{path} (row 2, byte 24): ")
    path.write_bytes(b"[,,{},\t]")
    assert [type(value) for _, value in open_rows(path).scan()] == [
        RowError,
        RowError,
        dict,
        RowError,
    ]


def test_array_with_long_gaps(tmp_path: Path) -> None:
    data = b"[" + b" " * 400 + b'{"a":[1]}' + b" " * (2 << 20) + b"," + b"\n" * 300 + b"[2]"
    data += b" " * 500 + b"]" + b" " * (3 << 20)
    path = tmp_path / "gaps.json"
    path.write_bytes(data)
    rows = open_rows(path)
    assert (rows.raw(0), rows.raw(1)) == (b'{"a":[1]}', b"[2]")
    assert rows.origin(1).offset == data.index(b"[2]")
