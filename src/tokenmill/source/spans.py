"""Two small pure helpers about byte spans: which reads to join, and where a row ends.

`coalesce` plans reads: spans in ascending order are joined into one read while the bytes between
them are fewer than a seek is worth and the read stays bounded. `end_of_line` and
`end_of_element` find the end of a row whose gap was too long for its index entry: the next
newline, or the last byte of an element before its comma or the array's bracket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmill.source.bytefile import ByteFile

_STEP = 1 << 16  # bytes
WHITE_SPACE = b" \t\r\n"  # JSON's


def coalesce(
    spans: Sequence[tuple[int, int]], max_gap: int, max_bytes: int
) -> Iterator[tuple[int, int, int, int]]:
    """Join neighbouring spans into reads.

    Args:
        spans: (offset, length), ascending by offset; equal and overlapping ones are fine.
        max_gap: Bytes between two spans that are read rather than skipped.
        max_bytes: A read is not made longer than this by joining.

    Yields:
        (first span, behind the last span, offset of the read, end of the read).
    """
    first = 0
    while first < len(spans):
        start = spans[first][0]
        stop = start + spans[first][1]
        last = first + 1
        while last < len(spans):
            offset, length = spans[last]
            reach = max(stop, offset + length)
            if offset - stop > max_gap or reach - start > max_bytes:
                break
            stop, last = reach, last + 1
        yield first, last, start, stop
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
