"""Finding the elements of a JSON array without parsing it whole.

A `.json` file that is one array can be larger than memory. `find_elements` looks at a buffer that
begins inside the array, outside any string, and finds every complete element in it with numpy:
quotes that are not escaped tell text from structure, brackets outside strings give the depth, and
the commas at depth 1 stand between elements. `ArrayScan` feeds it a buffer that grows only for an
element that does not fit.

Brackets are counted, not matched: ``{"a": 1]`` is an element, and a bad row. What cannot be
counted is refused as a whole: an array that never closes, text behind it, or an element over the
limit. Between two commas stands a row even if it is empty: then it is bad JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokenmill.errors import SourceError
from tokenmill.source.bytefile import SourceBytes
from tokenmill.source.cut import SLACK, Cutter, Integers, first_qualified
from tokenmill.source.index import Assembler
from tokenmill.source.limits import MAX_ARRAY_GAP, MAX_ROW, MIB, SCAN_BUFFER
from tokenmill.source.scan import BOM, WHITE_SPACE, Bytes

_STEPWISE = 64  # bytes of white space that all spans skip together; what has more goes alone

_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[[ord(character) for character in "[]{},"]] = True
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(WHITE_SPACE)] = True


class Elements(NamedTuple):
    """What a buffer holds of an array."""

    starts: Integers
    ends: Integers
    consumed: int  # bytes up to and including the last comma or bracket
    closed: bool  # the array's bracket was seen


def find_elements(data: Bytes, *, opens: bool = False) -> Elements:
    """Find the complete elements of a buffer that begins where an element may.

    Args:
        data: The buffer.
        opens: Whether the array's own bracket stands right before it.
    """
    structure = np.flatnonzero(_STRUCTURE[data])
    quotes = _real_quotes(data)
    outside = np.searchsorted(quotes, structure) % 2 == 0
    structure = structure[outside]
    characters = data[structure]
    depth = 1 + np.cumsum(_STEPS[characters], dtype=np.int64)
    closing = np.flatnonzero(depth == 0)
    closed = len(closing) > 0
    upto = int(closing[0]) + 1 if closed else len(structure)
    between = (characters[:upto] == ord(",")) & (depth[:upto] == 1)
    if closed:
        between[-1] = True
    stops = structure[:upto][between]
    if not len(stops):
        return Elements(stops, stops, 0, False)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
    starts, ends = _trimmed(data, begins, stops)
    if opens and closed and len(starts) == 1 and starts[0] == ends[0]:
        starts = ends = starts[:0]  # "[]"
    return Elements(starts, ends, int(stops[-1]) + 1, closed)


def _real_quotes(data: Bytes) -> Integers:
    """Positions of the quotes that open or close a string."""
    quotes = np.flatnonzero(data == ord('"'))
    if not len(quotes):
        return quotes
    after = quotes[(quotes > 0) & (data[quotes - 1] == ord("\\"))]
    if not len(after):
        return quotes
    # A quote is escaped when an odd number of backslashes stands before it.
    slashes = np.flatnonzero(data == ord("\\"))
    run_starts = slashes[np.flatnonzero(np.diff(slashes, prepend=-2) != 1)]
    run_of = run_starts[np.searchsorted(run_starts, after, side="right") - 1]
    escaped = after[(after - run_of) % 2 == 1]
    return np.setdiff1d(quotes, escaped, assume_unique=True)


def _trimmed(data: Bytes, begins: Integers, stops: Integers) -> tuple[Integers, Integers]:
    """Spans without the white space at their ends; an empty one is left at its stop."""
    starts, ends = begins.copy(), stops.copy()
    moving = np.flatnonzero((starts < ends) & _IS_SPACE[data[np.minimum(starts, len(data) - 1)]])
    for _ in range(_STEPWISE):
        starts[moving] += 1
        at = starts[moving]
        moving = moving[(at < ends[moving]) & _IS_SPACE[data[np.minimum(at, len(data) - 1)]]]
        if not len(moving):
            break
    for span in moving.tolist():
        text = data[starts[span] : ends[span]].tobytes()
        starts[span] += len(text) - len(text.lstrip(WHITE_SPACE))
    moving = np.flatnonzero((starts < ends) & _IS_SPACE[data[ends - 1]])
    for _ in range(_STEPWISE):
        ends[moving] -= 1
        moving = moving[(starts[moving] < ends[moving]) & _IS_SPACE[data[ends[moving] - 1]]]
        if not len(moving):
            break
    for span in moving.tolist():
        ends[span] = starts[span] + len(
            data[starts[span] : ends[span]].tobytes().rstrip(WHITE_SPACE)
        )
    return starts, ends


def element_spans(data: bytes, *, opens: bool) -> tuple[Integers, Integers]:
    """The elements of a block."""
    skip = 0
    if opens:
        text = data.removeprefix(BOM).lstrip(WHITE_SPACE)
        skip = len(data) - len(text) + 1
    found = find_elements(np.frombuffer(data, dtype=np.uint8)[skip:], opens=opens)
    return found.starts + skip, found.ends + skip


class ArrayScan:
    """One pass over an array file; the same shape as `LineScan`."""

    def __init__(self, file: SourceBytes, buffer_bytes: int = SCAN_BUFFER) -> None:
        self.assembler = Assembler()
        self.bytes = 0
        self._file = file
        self._capacity = buffer_bytes
        self._cutter = Cutter()

    def starts(self) -> Iterator[Integers]:
        """Scan, giving the start of every element, and at last the end of the file."""
        base, size, opens = self._skip_opening(), self._capacity, True
        while True:
            buffer = bytearray(size + SLACK)
            filled = self._file.read_into(memoryview(buffer)[:size], base)
            data = np.frombuffer(buffer, dtype=np.uint8, count=filled)
            found = find_elements(data, opens=opens)
            if not found.consumed:
                if filled < size:
                    raise self._refused("the array is not closed: the file is truncated", base)
                if size > MAX_ROW + 2 * MAX_ARRAY_GAP:
                    raise self._refused(f"an element has more than {MAX_ROW} bytes", base)
                size *= 2
                continue
            self._check_gaps(found, base)
            yield self._feed(buffer, base, found)
            base += found.consumed
            opens, size = False, self._capacity
            if found.closed:
                break
        yield self._finish(base)

    def _refused(self, message: str, offset: int) -> SourceError:
        return SourceError(message, path=self._file.path, offset=offset)

    def _check_gaps(self, found: Elements, base: int) -> None:
        begins = np.concatenate([np.zeros(1, dtype=np.int64), found.ends[:-1] + 1])
        if len(found.starts) and int((found.starts - begins).max()) > MAX_ARRAY_GAP:
            raise self._refused(f"more than {MAX_ARRAY_GAP} bytes between two elements", base)

    def _feed(self, buffer: bytearray, base: int, found: Elements) -> Integers:
        starts, ends = found.starts, found.ends
        lengths = ends - starts

        def qualified(lo: int, hi: int) -> int:
            return first_qualified(buffer, starts, lengths, lo, hi)

        cuts = self._cutter.feed(starts + base, ends + base, qualified)
        data = memoryview(buffer)[: found.consumed]
        breaks = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10) + base
        opened = [int(starts[cut]) + base for cut in cuts]
        self.assembler.feed(data, base, starts + base, breaks, opened)
        return starts + base

    def _plain(self, data: bytes, base: int) -> None:
        """Bytes without elements: before the array, or behind it."""
        nothing = np.empty(0, dtype=np.int64)
        breaks = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10) + base
        self.assembler.feed(memoryview(data), base, nothing, breaks, [])

    def _skip_opening(self) -> int:
        """Where the first element may begin."""
        head = self._file.pread(MAX_ARRAY_GAP, 0)
        text = head.removeprefix(BOM).lstrip(WHITE_SPACE)
        if not text.startswith(b"["):
            raise self._refused("no array begins here", len(head) - len(text))
        begin = len(head) - len(text) + 1
        self._plain(head[:begin], 0)
        return begin

    def _finish(self, base: int) -> Integers:
        end = base
        while True:
            data = self._file.pread(MIB, base)
            if not data:
                break
            if rest := data.lstrip(WHITE_SPACE):
                raise self._refused("text behind the array", base + len(data) - len(rest))
            self._plain(data, base)
            base += len(data)
            if base - end > MAX_ARRAY_GAP:
                raise self._refused(f"more than {MAX_ARRAY_GAP} bytes behind the array", end)
        self.bytes = base
        self.assembler.finish(base)
        return np.array([base], dtype=np.int64)
