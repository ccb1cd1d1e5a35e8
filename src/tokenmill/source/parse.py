"""The one parser: bytes of a row to a dict, or a reason why not.

msgspec decides what JSON is, everywhere: strict UTF-8, no NaN, no number beyond a double, no lone
surrogate, exact integers of any size up to 4,300 digits, the last of duplicate keys wins. A row is
one object; anything else is "bad_json". Values come out verbatim: strings that hold JSON stay
strings, explicit nulls stay None.

Nesting is limited here and not by the parser's recursion, because that depends on how deep the
caller's stack happens to be: what is accepted must be a function of the bytes.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import msgspec
import numpy as np

from tokenmill.errors import RowError
from tokenmill.source.limits import MAX_NESTING, MAX_ROW

decode = msgspec.json.Decoder(dict[str, Any]).decode  # for `parse`, and rows known to be short
SHALLOW = 2 * MAX_NESTING  # bytes: fewer cannot nest too deeply, each level takes two
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def parse(raw: bytes | memoryview) -> dict[str, Any]:
    """Parse one row.

    Raises:
        RowError: Without a place; the caller knows it and adds it.
    """
    if len(raw) > SHALLOW:
        _check_bounds(raw)
    try:
        return decode(raw)
    except RecursionError:
        return _parse_on_fresh_stack(bytes(raw))
    except (msgspec.MsgspecError, ValueError) as error:
        raise _refusal(error) from error


def _check_bounds(raw: bytes | memoryview) -> None:
    if len(raw) > MAX_ROW:
        raise RowError(over_limit(len(raw)), reason="limit")
    data = raw if isinstance(raw, bytes) else bytes(raw)
    # Counting brackets is memory speed and settles all but the strangest rows.
    if data.count(b"{") + data.count(b"[") > MAX_NESTING and nesting(data) > MAX_NESTING:
        raise RowError(f"nested more than {MAX_NESTING} levels deep", reason="limit")


def over_limit(length: int) -> str:
    """What is said about a row that is too long to be read."""
    return f"the row has {length} bytes, more than the limit of {MAX_ROW}"


def nesting(raw: bytes) -> int:
    """Deepest level of brackets outside strings; malformed text may say more."""
    bare = np.frombuffer(_STRINGS.sub(b"", raw), dtype=np.uint8)
    steps = np.zeros(len(bare), dtype=np.int8)
    steps[(bare == ord("{")) | (bare == ord("["))] = 1
    steps[(bare == ord("}")) | (bare == ord("]"))] = -1
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def _parse_on_fresh_stack(raw: bytes) -> dict[str, Any]:
    """The caller's stack is nearly used up; the row is within its limit all the same."""
    outcome: list[dict[str, Any] | Exception] = []

    def work() -> None:
        try:
            outcome.append(decode(raw))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
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
