"""Two small pure helpers about byte spans: which reads to join, and where a row ends.

`coalesce` plans reads: spans in ascending order are joined into one read while the bytes between
them are fewer than a seek is worth and the read stays bounded. `end_of_line` and
`end_of_element` find the end of a row whose gap was too long for its index entry: the next
newline, or the last byte of an element before its comma or the array's bracket.
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
    offsets: Integers, lengths: Integers, max_gap: int, max_bytes: int
) -> Iterator[tuple[int, int, int, int]]:
    """Join neighbouring spans into reads.

    Args:
        offsets: Where each span begins, ascending; spans may be equal but do not overlap else.
        lengths: Bytes of each span.
        max_gap: Bytes between two spans that are read rather than skipped.
        max_bytes: A read is not made longer than this by joining.

    Yields:
        (first span, behind the last span, offset of the read, end of the read).
    """
    ends = offsets + lengths
    far = np.flatnonzero(offsets[1:] - ends[:-1] > max_gap) + 1
    bounds = [0, *far.tolist(), len(offsets)]
    begins, stops = offsets.tolist(), ends.tolist()
    for first, behind in pairwise(bounds):
        while first < behind:
            last = behind
            if stops[behind - 1] - begins[first] > max_bytes:
                fits = int(np.searchsorted(ends, begins[first] + max_bytes, side="right"))
                last = min(max(fits, first + 1), behind)
            yield first, last, begins[first], stops[last - 1]
            first = last


def end_of_line(file: ByteFile, offset: int, limit: int) -> int:
    """Offset behind a line that is followed by a long gap: blank lines, which must not be read.

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


def end_of_element(file: ByteFile, offset: int, limit: int, closes_array: bool) -> int:
    """Offset behind an array's element that is followed by a long gap.

    Args:
        file: The bytes.
        offset: Where the element starts.
        limit: Where the next element, or the end of the block, is.
        closes_array: Whether the bracket follows it, and not a comma.
    """
    text = file.pread(limit - offset, offset).rstrip(WHITE_SPACE)
    return offset + len(text.removesuffix(b"]" if closes_array else b",").rstrip(WHITE_SPACE))
