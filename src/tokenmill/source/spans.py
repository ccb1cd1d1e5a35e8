"""Small pure helpers about byte spans: which reads to join, and where a row ends.

`coalesce` plans reads: spans in ascending order are joined into one read while the bytes between
them are fewer than a seek is worth and the read stays bounded. The others take the *stretch* from
a row's start to the next row's and say which part of it is the row: `line_of`, `element_of`, and
`end_of_line` for lines that are too long to be held.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tokenmill.source.bytefile import ByteFile
from tokenmill.source.cut import Integers

_STEP = 1 << 16  # bytes
WHITE_SPACE = b" \t\r\n"  # JSON's


def coalesce(
    starts: Integers, stops: Integers, max_gap: int, max_bytes: int
) -> Iterator[tuple[int, int, int, int]]:
    """Join neighbouring spans into reads.

    Args:
        starts: Where each span begins, ascending; spans may be equal but do not overlap else.
        stops: Where each span ends.
        max_gap: Bytes between two spans that are read rather than skipped.
        max_bytes: A read is not made longer than this by joining.

    Yields:
        (first span, behind the last span, offset of the read, end of the read).
    """
    far = np.flatnonzero(starts[1:] - stops[:-1] > max_gap) + 1
    bounds = [0, *far.tolist(), len(starts)]
    begins, ends = starts.tolist(), stops.tolist()
    for first, behind in pairwise(bounds):
        while first < behind:
            last = behind
            if ends[behind - 1] - begins[first] > max_bytes:
                fits = int(np.searchsorted(stops, begins[first] + max_bytes, side="right"))
                last = min(max(fits, first + 1), behind)
            yield first, last, begins[first], ends[last - 1]
            first = last


def line_of(stretch: bytes) -> bytes:
    """The row at the beginning of a stretch that ends where the next row starts."""
    found = stretch.find(b"\n")
    if found < 0:
        return stretch
    return stretch[: found - 1] if stretch[found - 1 : found] == b"\r" else stretch[:found]


def element_of(stretch: bytes, closes_array: bool) -> bytes:
    """The element at the beginning of a stretch that ends where the next element starts.

    Args:
        stretch: Element, white space, comma (or the array's bracket), white space.
        closes_array: Whether it is the bracket.
    """
    text = stretch.rstrip(WHITE_SPACE)
    return text.removesuffix(b"]" if closes_array else b",").rstrip(WHITE_SPACE)


def end_of_line(file: ByteFile, offset: int, limit: int) -> int:
    """Offset behind a line of any length, whatever stands behind it.

    Args:
        file: The bytes.
        offset: Where the line's row starts.
        limit: Where the next row, or the end of the block, is.
    """
    position, before = offset, b""
    while position < limit:
        data = file.pread(min(_STEP, limit - position), position)
        if not data:
            break
        found = data.find(b"\n")
        if found >= 0:
            return position + found - (before + data[:found]).endswith(b"\r")
        before = data[-1:]
        position += len(data)
    return position
