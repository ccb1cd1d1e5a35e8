"""Parse the bytes of a row to a dict, or raise `RowError`.

All rows are parsed by msgspec. Nesting is limited here, because the recursion limit of the parser
depends on the caller's stack. So the result depends on the bytes alone.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from tokenmill.errors import RowError
from tokenmill.sources.limits import MAX_NESTING, MAX_ROW

decode = msgspec.json.Decoder(dict[str, Any]).decode  # for `parse`, and rows known to be short
SHALLOW = 2 * MAX_NESTING  # bytes; a shorter row cannot exceed the limit, each level takes two
PARSING = (msgspec.MsgspecError, ValueError, RecursionError)  # exceptions of `decode`
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)

T = TypeVar("T")


def parse(raw: bytes) -> dict[str, Any]:
    """Parse one row. The caller adds the origin to a `RowError`."""
    if len(raw) > MAX_ROW:
        raise RowError(over_limit(len(raw)), reason="limit")
    # Counting brackets is fast and sufficient for nearly all rows.
    if len(raw) > SHALLOW and raw.count(b"{") + raw.count(b"[") > MAX_NESTING:
        return _parse_bracketed(raw)
    return _parse(raw)


def parse_many(rows: Iterable[bytes]) -> list[dict[str, Any] | RowError]:
    """Return the result or the error of `parse` for each row."""
    values: list[dict[str, Any] | RowError] = []
    for raw in rows:
        try:
            # `parse` inlined for usual rows: the calls would take a third of the time.
            if len(raw) <= SHALLOW or (
                raw.count(b"{") + raw.count(b"[") <= MAX_NESTING and len(raw) <= MAX_ROW
            ):
                values.append(decode(raw))
                continue
        except PARSING:
            pass
        values.append(attempt(parse, raw))
    return values


def attempt(function: Callable[..., T], *arguments: Any) -> T | RowError:
    """Call a function; return a RowError instead of raising it."""
    try:
        return function(*arguments)
    except RowError as error:
        return error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        return decode(raw)
    except RecursionError:
        return _parse_on_fresh_stack(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _refusal(error) from error


def _parse_bracketed(raw: bytes) -> dict[str, Any]:
    """Parse a row with many brackets, such as a long agent run; few of them are nested."""
    try:
        value = decode(raw)
        deepest = _valid_nesting(raw)
    except PARSING:
        value, deepest = None, nesting(raw)  # `_valid_nesting` needs valid JSON
    if deepest > MAX_NESTING:
        raise RowError(f"nested more than {MAX_NESTING} levels deep", reason="limit")
    return _parse(raw) if value is None else value


def _valid_nesting(raw: bytes) -> int:
    """Return the nesting of valid JSON, or an upper bound that is within the limit."""
    # Without escaped backslashes and quotes, the remaining quotes delimit strings.
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    structure = b"".join(unescaped.split(b'"')[::2])
    openers = structure.count(b"{") + structure.count(b"[")
    return openers if openers <= MAX_NESTING else _deepest(structure)


def over_limit(length: int) -> str:
    return (
        f"the row has {length} bytes, more than the limit of {MAX_ROW}; divide it into several"
        " rows, and put images in files"
    )


def nesting(raw: bytes) -> int:
    """Return the deepest level of brackets outside strings; an upper bound for invalid JSON."""
    return _deepest(_STRINGS.sub(b"", raw))


def _deepest(structure: bytes) -> int:
    characters = np.frombuffer(structure, dtype=np.uint8)
    steps = np.zeros(len(characters), dtype=np.int8)
    steps[(characters == ord("{")) | (characters == ord("["))] = 1
    steps[(characters == ord("}")) | (characters == ord("]"))] = -1
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def _parse_on_fresh_stack(raw: bytes) -> dict[str, Any]:
    """Parse in a new thread, because the caller's stack is nearly full."""
    outcome: list[dict[str, Any] | Exception] = []

    def work() -> None:
        try:
            outcome.append(decode(raw))
        except PARSING as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    result = outcome[0]
    if isinstance(result, RecursionError):
        raise RowError(f"nested more than {MAX_NESTING} levels deep", reason="limit") from result
    if isinstance(result, Exception):
        raise _refusal(result) from result
    return result


def _refusal(error: Exception) -> RowError:
    if isinstance(error, UnicodeDecodeError):
        return RowError(f"not UTF-8: {error.reason}", reason="bad_json")
    if isinstance(error, msgspec.ValidationError) and "Expected `object`" in str(error):
        return RowError(f"not a JSON object: {error}", reason="bad_json")
    return RowError(f"not valid JSON: {error}", reason="bad_json")
