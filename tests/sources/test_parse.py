"""Tests of the parser and its limits, which must not depend on the caller's stack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sources.naive import naive_rows
from tokenmill.errors import RowError
from tokenmill.sources import limits
from tokenmill.sources.block import PORTION, read_block
from tokenmill.sources.block import _split_lines as split_lines
from tokenmill.sources.parse import PARSING, SHALLOW, decode, nesting, over_limit, parse, parse_many
from tokenmill.sources.parse import _refusal as refusal
from tokenmill.sources.rows import open_rows


def nested(levels: int, opening: bytes = b'{"a":', closing: bytes = b"}") -> bytes:
    return opening * levels + b"1" + closing * levels


def refused(raw: bytes) -> str:
    with pytest.raises(RowError) as raised:
        parse(raw)
    return raised.value.reason


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a": 604462909807314587353088}', {"a": 2**79}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        (b'{"a": "\xe2\x80\xa8\xc2\x85"}', {"a": "\u2028\x85"}),
        (b'{"a": "{\\"b\\": [1]}"}', {"a": '{"b": [1]}'}),
        (b'{"a": null, "b": -0.0, "c": 1e5}', {"a": None, "b": -0.0, "c": 100000.0}),
        (b"{}", {}),
    ],
)
def test_parse_good_rows_verbatim(raw: bytes, value: object) -> None:
    assert parse(raw) == value
    assert parse(raw + b" \r\n \t\r\n") == value


@pytest.mark.parametrize(
    "raw",
    [b'{"a": NaN}', b'{"a": 1e400}', b'{"a": -Infinity}', b'{"a": "\\ud800"}', b'{"a": "\xff"}',
     b'{"a": "\x00"}', b'{"a": 1} {"b": 2}', b"[1]", b'"a"', b"1", b"null", b"{", b"", b"{'a': 1}",
     b'{"a": 01}', b'{"a": 1,}', b'\xef\xbb\xbf{"a": 1}', b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_parse_bad_rows_are_bad_json(raw: bytes) -> None:
    assert refused(raw) == "bad_json"


def test_nesting_limit_is_exact_for_objects_and_arrays() -> None:
    limit = limits.MAX_NESTING
    assert parse(nested(limit))
    assert refused(nested(limit + 1)) == "limit"
    assert parse(b'{"a":' + nested(limit - 1, b"[", b"]") + b"}")
    assert refused(b'{"a":' + nested(limit, b"[", b"]") + b"}") == "limit"
    assert refused(nested(100_000)) == "limit"
    assert refused(b"[" * 1_000_000) == "limit"
    wide = b'{"a": [' + b"[],{}," * 1000 + b'"]]]{{{\\"[["]}'
    assert nesting(wide) == 3
    assert len(parse(wide)["a"]) == 2001


def test_parse_deep_caller_accepts_what_a_shallow_one_does() -> None:
    row = nested(limits.MAX_NESTING)

    def descend(levels: int) -> object:
        return descend(levels - 1) if levels else parse(row)

    depth = 0
    frame = sys._getframe()
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    assert descend(sys.getrecursionlimit() - depth - 120) == parse(row)


def test_line_over_the_limit_is_a_bad_row_and_not_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small limit, so that a long line takes many buffers."""
    limit = 40_000
    for module in ("parse", "scan", "lines", "block"):
        monkeypatch.setattr(f"tokenmill.sources.{module}.MAX_ROW", limit)
    monkeypatch.setattr("tokenmill.sources.lines.LARGE_ROW", 1000)
    monkeypatch.setattr("tokenmill.sources.scan.CUT_MAX", 30_000)
    monkeypatch.setattr("tokenmill.sources.scan.CUT_MIN", 1000)
    monkeypatch.setattr("tokenmill.sources.rows.LineScan.__init__.__defaults__", (4096,))
    fits = b'{"a": "' + b"x" * (limit - 9) + b'"}'
    assert len(fits) == limit
    over = b'{"b": "' + b"y" * 300_000 + b'"}'
    blank = b" " * 200_000
    lines = [b'{"n": 1}', fits + b"\r", over + b"\r", blank, b'{"n": 2}', fits[:-1] + b" }", over]
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = open_rows(path)
    assert len(rows) == 6
    outcomes = [value for _, value in rows.scan()]
    assert outcomes[0] == {"n": 1}
    assert outcomes[3] == {"n": 2}
    assert rows[1] == outcomes[1] == {"a": "x" * (limit - 9)}
    for number, line in ((2, 3), (4, 6), (5, 7)):
        error = outcomes[number]
        assert isinstance(error, RowError)
        assert (error.reason, error.row, error.line) == ("limit", number, line)
        assert error.offset == sum(len(text) + 1 for text in lines[: line - 1])
        for look in (rows.__getitem__, rows.raw, lambda number: rows.batch([0, number])):
            with pytest.raises(RowError, match="more than the limit"):
                look(number)
    assert rows.origin(2).length == len(over)
    assert rows.origin(5).length == len(over)
    read = [read_block(block) for block in rows.blocks()]
    values = [value for one in read for value in one.values]
    assert [str(value) for value in values] == [str(value) for value in outcomes]
    assert [int(length) for one in read for length in one.length] == [
        rows.origin(number).length for number in range(6)
    ]


def test_rows_of_a_block_have_their_origins_by_index_slice_and_iteration(
    tmp_path: Path,
) -> None:
    lines = [json.dumps({"n": number}) for number in range(3 * PORTION)]
    for number in (2, PORTION, 2 * PORTION + 3):
        lines[number] = f'{{"n": {number}'
    (tmp_path / "rows.jsonl").write_text("\n\n".join(lines))
    rows = open_rows(str(tmp_path / "rows.jsonl"), cache_dir=tmp_path / "cache")
    outcomes = [outcome for _, outcome in rows.scan()]
    [block] = rows.blocks()
    values = read_block(block).values
    wanted = list(map(str, outcomes))
    assert [list(map(str, values)), list(map(str, values))] == [wanted, wanted]
    assert [str(values[number]) for number in range(len(values))] == wanted
    assert str(values[-1]) == wanted[-1]
    assert list(map(str, values[PORTION - 1 : -4 : 3])) == wanted[PORTION - 1 : -4 : 3]
    with pytest.raises(IndexError):
        values[len(lines)]


# The fast paths against a simple parser.


def simple_parse(raw: bytes) -> dict[str, Any] | str:
    """Check every limit, then decode: return a value, or reason and message."""
    try:
        if len(raw) > limits.MAX_ROW:
            raise RowError(over_limit(len(raw)), reason="limit")
        if len(raw) > SHALLOW and nesting(raw) > limits.MAX_NESTING:
            raise RowError(f"nested more than {limits.MAX_NESTING} levels deep", reason="limit")
        return decode(raw)
    except RowError as error:
        return f"{error.reason}: {error.message}"
    except PARSING as error:
        detail = refusal(error)
        return f"{detail.reason}: {detail.message}"


def outcome(value: dict[str, Any] | RowError) -> dict[str, Any] | str:
    return f"{value.reason}: {value.message}" if isinstance(value, RowError) else value


BRACKETS = st.sampled_from(
    ["[", "]", "{", "}", '"', "\\", '\\"', "\\\\", "x", "é", "\n", "{[" * 90]
)
NESTED = st.integers(120, 140).map(lambda n: json.loads('[{"a":' * n + "1" + "}]" * n))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.lists(BRACKETS, max_size=9).map("".join) | NESTED,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
BROKEN = st.sampled_from(
    [b"", b'"', b"\\", b"[", b"{", b"}", b"NaN", b"1e400", b"\xff", b"\\ud800", b'{"a":1,"a":2}',
     b"9" * 4301, b"[" * 300, b"\x00", b"\n"]
)  # fmt: skip


@given(
    value=st.dictionaries(st.text(max_size=3), VALUES, max_size=5),
    padding=st.integers(0, 700),
    harm=BROKEN,
    place=st.floats(0, 1),
)
@settings(max_examples=300)
def test_row_has_the_value_or_error_of_the_simple_parser(
    value: dict[str, Any], padding: int, harm: bytes, place: float
) -> None:
    whole = json.dumps({**value, "padding": "[" * padding}, ensure_ascii=False).encode()
    cut = int(place * len(whole))
    for raw in (whole, whole[:cut] + harm + whole[cut:]):
        wanted = simple_parse(raw)
        assert outcome(parse_many([raw])[0]) == wanted
        try:
            assert parse(raw) == wanted
        except RowError as error:
            assert outcome(error) == wanted


PIECES = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b" ", b"\t", b"{}", b"x", b"\xef\xbb\xbf", b"\x0b"]
)


@given(pieces=st.lists(PIECES, max_size=14), first=st.booleans())
@example(pieces=[b"\xef\xbb\xbf", b"{}", b"\r", b"\r\n"], first=True)
@settings(max_examples=400)
def test_rows_of_a_block_equal_the_simple_parser(pieces: list[bytes], first: bool) -> None:
    data = b"".join(pieces)
    rows, lines, starts = split_lines(data, 0 if first else 8)
    found = list(zip(rows, (lines + 1).tolist(), starts.tolist(), strict=True))
    expected = naive_rows(data, at_start=first)
    assert found == [(row.raw, row.line, row.offset) for row in expected]
