"""Rows of one indexed line or array file, by number.

Comes in: a `FileEntry`, whose index `open` found or made. Goes out, to `Rows`: bytes, dicts
and origins by row number, and the blocks of a run of rows. A `LineReader` opens nothing until a row
is wanted, and closes when too many files are open. What it has open is a `LineHandle`: the
file (or its seekable copy) with its `Index`; of that, `FastLines` is what ``rows[i]`` needs for an
ordinary row and nothing else. Any thread and any forked process may use them: reads carry their
offset, and what is open is replaced whole, never changed.

Of a row the index knows the start alone. The bytes up to the next row's start are its *stretch*,
and say themselves where the row ends.

While rows are read, the file's stat is looked at again every 50 µs. Another size or a vanished name
is `SourceChanged`. Only other times (a touch, a chmod, a new hard link, or an edit in place) have
the row's block hashed again: the content decides.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np

from tokenmill.errors import RowError, SourceChanged
from tokenmill.origin import Origin
from tokenmill.source.block import Block, Part, Value
from tokenmill.source.bytefile import (
    LocalFile,
    Signature,
    SourceBytes,
    bound_open_files,
    digest_of,
)
from tokenmill.source.cut import Integers
from tokenmill.source.entry import FileEntry, SourceFile
from tokenmill.source.index import BlockEntry, Index
from tokenmill.source.limits import (
    COALESCE_GAP,
    COALESCE_MAX,
    LARGE_ROW,
    MAX_ROW,
    RECHECK_SECONDS,
    STARTS_PER_PAGE,
    STREAM_BYTES,
)
from tokenmill.source.parse import PARSING, SHALLOW, decode, over_limit, parse
from tokenmill.source.scan import WHITE_SPACE
from tokenmill.source.shelf import Shelf

_STREAM_ROWS = 1 << 14  # rows located at once
_LINE_STEP = 1 << 16  # bytes of a long line read at once
PAGE_SHIFT = STARTS_PER_PAGE.bit_length() - 1


class FastLines:
    """What a single row needs, for `value` here and for the same lines inside ``Rows``."""

    __slots__ = ("_ctime_ns", "_file", "believed_until", "checked", "fd", "starts")

    def __init__(self, file: LocalFile, index: Index) -> None:
        self.fd = file.fd
        self.starts = index.starts
        self.checked = index.checked
        self.believed_until = 0.0
        self._ctime_ns = file.signature.ctime_ns
        self._file = file  # keeps the descriptor open

    def is_unchanged(self, now: float) -> bool:
        """Look at the file's stat; every change of content, size or name changes the ctime."""
        if os.fstat(self.fd).st_ctime_ns != self._ctime_ns:
            return False
        self.believed_until = now + RECHECK_SECONDS
        return True

    def value(self, row: int) -> dict[str, Any] | None:
        """One parsed row; None when anything about it needs care."""
        now = monotonic()
        if now > self.believed_until and not self.is_unchanged(now):
            return None
        if not self.checked[row >> PAGE_SHIFT]:
            return None
        # Up to the next row: line breaks and blank lines are white space to the parser, and a
        # stretch that ends early because the file was cut is no JSON.
        start = self.starts[row]
        length = self.starts[row + 1] - start
        if length > SHALLOW:
            return None
        try:
            return decode(os.pread(self.fd, length, start))
        except PARSING:
            return None


class LineHandle:
    """An open line or array file, or its copy; arrays and copies have no `fast` way."""

    def __init__(self, file: SourceBytes, index: Index) -> None:
        self.file = file
        self.index = index
        self.is_lines = index.document.kind == "lines"
        self.fast: FastLines | None = None
        if self.is_lines and isinstance(file, LocalFile):
            self.fast = FastLines(file, index)
        self._believed_until = 0.0
        self._verified: set[int] = set()  # blocks found good ...
        self._verified_under: Signature | None = None  # ... while the file had this signature

    def stretch(self, row: int) -> tuple[int, int]:
        """Where a row starts, and where the next one does."""
        index = self.index
        if not index.checked[row >> PAGE_SHIFT]:
            index.check_page(row >> PAGE_SHIFT)
        return index.starts[row], index.starts[row + 1]

    def locate(self, row: int) -> tuple[int, int]:
        start, stop = self.stretch(row)
        if stop - start > LARGE_ROW and self.is_lines:
            return start, end_of_line(self.file, start, stop) - start
        return start, len(self.trimmed(row, self.pread(start, stop)))

    def trimmed(self, row: int, stretch: bytes) -> bytes:
        """The row itself, of the bytes up to the next one."""
        if self.is_lines:
            return line_of(stretch)
        return element_of(stretch, row + 1 == self.index.document.rows)

    def pread(self, start: int, stop: int) -> bytes:
        """Bytes that must be there."""
        data = self.file.pread(stop - start, start)
        if len(data) != stop - start:
            raise SourceChanged("the file became shorter", path=self.file.path, offset=start)
        return data

    def look_again(self, row: int) -> None:
        """See whether the file is still what was indexed; the row's block decides if need be.

        Raises:
            SourceChanged: It is not.
        """
        if not isinstance(self.file, LocalFile):
            return  # a copy checks its own frames, a remote object each of its ranges
        now = monotonic()
        if now < self._believed_until:
            return
        seen = self.file.now()
        if seen == self.file.signature:
            self._believed_until = now + RECHECK_SECONDS
            return
        if seen.size != self.file.signature.size:
            self.file.check()
        # The times changed, not the size: from now on every block is looked at before it is read.
        if seen != self._verified_under:
            self._verified, self._verified_under = set(), seen
        number = bisect_right(self.index.first_rows, row) - 1
        if number not in self._verified:
            self._verify(number)
            self._verified.add(number)

    def _verify(self, number: int) -> None:
        block = self.index.block(number)
        if digest_of(self.file, block.offset, block.length) != block.digest:
            raise SourceChanged(
                f"bytes {block.offset} to {block.offset + block.length} are not what was indexed; "
                "open the file again",
                path=self.file.path,
                offset=block.offset,
            )


class LineReader:
    """Random access to the rows of one line or array file."""

    def __init__(self, entry: FileEntry, shelf: Shelf, number: int = 0) -> None:
        self.entry = entry
        self.number = number
        self.rows = entry.rows
        self._shelf = shelf
        self._index: Index | None = None
        self._handle: LineHandle | None = None

    @property
    def index(self) -> Index:
        """The file's index, opened on first use."""
        if self._index is None:
            self._index = Index(self._shelf.place(self.entry.index))
        return self._index

    def open_file(self) -> SourceBytes:
        """The file's bytes; a compressed file is read through its copy."""
        if self.entry.copy:
            from tokenmill.source.copy import CopyFile

            return CopyFile(self._shelf.place(self.entry.copy), self.entry.path)
        return self.entry.open()

    def _open(self) -> LineHandle:
        handle = LineHandle(self.open_file(), self.index)
        self._handle = handle
        bound_open_files(self)
        return handle

    def close(self) -> None:
        """Let go of descriptors and maps; the next access opens them again."""
        self._handle = None
        self._index = None

    # --- one row ---------------------------------------------------------------------------

    def value(self, row: int) -> dict[str, Any]:
        fast = (self._handle or self._open()).fast
        if fast is not None:
            value = fast.value(row)
            if value is not None:
                return value
        raw = self.raw(row)
        try:
            return parse(raw)
        except RowError as error:
            raise self.explain(row, error) from error

    def fast(self) -> FastLines | None:
        """The open file's short way to ordinary rows."""
        return (self._handle or self._open()).fast

    def raw(self, row: int) -> bytes:
        handle = self._handle or self._open()
        handle.look_again(row)
        start, stop = handle.stretch(row)
        if stop - start <= LARGE_ROW:
            return handle.trimmed(row, handle.pread(start, stop))
        offset, length = handle.locate(row)
        if length > MAX_ROW:
            raise self.explain(row, RowError(over_limit(length), reason="limit"))
        return handle.pread(offset, offset + length)

    def origin(self, row: int, value: dict[str, Any] | None = None) -> Origin:
        handle = self._handle or self._open()
        handle.look_again(row)
        offset, length = handle.locate(row)
        return Origin(self.entry.path, row, self.line(row, offset), offset, length)

    def line(self, row: int, offset: int) -> int:
        """The physical line of one row."""
        index = self.index
        number = bisect_right(index.first_rows, row) - 1
        block = index.block(number)
        if self.entry.kind == "lines" and block.lines == block.rows:
            return block.first_line + row - block.first_row
        # Blank lines (or an array's layout) in this block: count line breaks, in a few
        # milliseconds, rather than store a number per row.
        handle = self._handle or self._open()
        line, position = block.first_line, block.offset
        while position < offset:
            data = handle.file.pread(min(offset - position, STREAM_BYTES), position)
            if not data:
                raise SourceChanged("the file became shorter", path=self.entry.path)
            line += data.count(b"\n")
            position += len(data)
        return line

    def explain(self, row: int, error: RowError) -> RowError:
        """The same error with its place, after making sure that it is the row's own fault."""
        handle = self._handle or self._open()
        handle.look_again(row)
        offset, _ = handle.stretch(row)
        return RowError(
            error.message,
            reason=error.reason,
            path=self.entry.path,
            row=row,
            line=self.line(row, offset),
            offset=offset,
        )

    # --- many rows -------------------------------------------------------------------------

    def _stretches(self, rows: Sequence[int]) -> list[bytes | RowError]:
        """What stands from each row to the next, in the given order, neighbours read together."""
        handle = self._handle or self._open()
        wanted = np.asarray(rows, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        wanted = wanted[order]
        starts, stops = handle.index.locate(wanted)
        found: list[bytes | RowError] = [b""] * len(rows)
        places = order.tolist()
        large = np.flatnonzero(stops - starts > LARGE_ROW)
        for number in large.tolist():
            found[places[number]] = self._raw_or_error(int(wanted[number]))
        if len(large):
            rest = np.flatnonzero(stops - starts <= LARGE_ROW)
            wanted, starts, stops = wanted[rest], starts[rest], stops[rest]
            places = order[rest].tolist()
        for first, last, begin, end in coalesce(starts, stops):
            handle.look_again(int(wanted[first]))
            data = handle.pread(begin, end)
            if last - first == 1:
                found[places[first]] = data
                continue
            handle.look_again(int(wanted[last - 1]))
            froms = (starts[first:last] - begin).tolist()
            tos = (stops[first:last] - begin).tolist()
            for place, a, b in zip(places[first:last], froms, tos, strict=True):
                found[place] = data[a:b]
        return found

    def _raw_or_error(self, row: int) -> bytes | RowError:
        try:
            return self.raw(row)
        except RowError as error:
            return error

    def values(self, rows: Sequence[int]) -> list[Value]:
        if not len(rows):
            return []
        return self._parsed(rows, self._stretches(rows))

    def stream(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        """The parsed rows ``first:last`` in order, a portion at a time."""
        index = self.index
        while first < last:
            upto = min(last, first + _STREAM_ROWS)
            starts, stops = index.locate(np.arange(first, upto))
            while len(starts):
                count = max(1, int(np.searchsorted(stops, starts[0] + STREAM_BYTES)))
                rows = range(first, first + count)
                yield first, self._parsed(rows, self._portion(rows, starts[:count], stops[:count]))
                starts, stops = starts[count:], stops[count:]
                first += count

    def _portion(self, rows: range, starts: Integers, stops: Integers) -> list[bytes | RowError]:
        begin, end = int(starts[0]), int(stops[-1])
        if end - begin > LARGE_ROW:
            return self._stretches(rows)
        handle = self._handle or self._open()
        handle.look_again(rows[0])
        handle.look_again(rows[-1])
        data = handle.pread(begin, end)
        froms, tos = (starts - begin).tolist(), (stops - begin).tolist()
        return [data[a:b] for a, b in zip(froms, tos, strict=True)]

    def _parsed(self, rows: Sequence[int], stretches: list[bytes | RowError]) -> list[Value]:
        if self.entry.kind == "lines":
            try:
                # What stands behind a line is white space to the parser.
                return [parse(stretch) for stretch in stretches]  # type: ignore[arg-type]
            except (RowError, TypeError):
                pass
        return [self._outcome(row, text) for row, text in zip(rows, stretches, strict=True)]

    def _outcome(self, row: int, stretch: bytes | RowError) -> Value:
        if isinstance(stretch, RowError):
            return stretch
        handle = self._handle or self._open()
        try:
            # Trimming what is trimmed already would cut an element's own bracket off.
            whole = handle.stretch(row)[1] - handle.stretch(row)[0] <= LARGE_ROW
            return parse(handle.trimmed(row, stretch) if whole else stretch)
        except RowError as error:
            placed = self.explain(row, error)
            placed.__cause__ = error
            return placed

    # --- blocks ----------------------------------------------------------------------------

    def source_file(self) -> SourceFile:
        entry = self.entry
        return SourceFile(entry.path, entry.kind, entry.bytes, entry.rows, entry.digest)

    def blocks(self, part: Part) -> Iterator[Block]:
        """The blocks of a run of rows; those at its ends may be cut down to its rows."""
        # Not kept: a plan walks thousands of files, and must not hold all their tables at once.
        index = self._index or Index(self._shelf.place(self.entry.index))
        whole = part.first == 0 and part.last == self.rows
        number = bisect_right(index.first_rows, part.first) - 1 if not whole else 0
        copy = str(self._shelf.place(self.entry.copy)) if self.entry.copy else ""
        for block in index.blocks_from(number):
            if block.first_row >= part.last and not whole:
                return
            first = max(part.first, block.first_row)
            last = min(part.last, block.first_row + block.rows)
            if block.rows and not (first == block.first_row and last - first == block.rows):
                block = self._cut_down(block, first, last)
            yield Block(
                file=self.number,
                path=self.entry.path,
                kind=self.entry.kind,
                first_row=block.first_row,
                rows=block.rows,
                first_line=block.first_line,
                offset=block.offset,
                length=block.length,
                digest=block.digest,
                location=self.entry.location,
                copy=copy,
                signature=self.entry.signature,
                settled=self.entry.settled,
                version=self.entry.version,
            )

    def _start(self, row: int) -> int:
        return (self._handle or self._open()).stretch(row)[0]

    def _cut_down(self, block: BlockEntry, first: int, last: int) -> BlockEntry:
        """The rows ``first:last`` of a block as a block with a digest of its own."""
        offset, line = block.offset, block.first_line
        if first > block.first_row:
            offset = self._start(first)
            line = self.line(first, offset)
        end = block.offset + block.length
        if last < block.first_row + block.rows:
            end = self._start(last)
        digest = digest_of(self.open_file(), offset, end - offset)
        return BlockEntry(offset, end - offset, first, last - first, line, 0, digest)


# --- which bytes are the row ----------------------------------------------------------------------


def coalesce(starts: Integers, stops: Integers) -> Iterator[tuple[int, int, int, int]]:
    """Join neighbouring spans into reads.

    Args:
        starts: Where each span begins, ascending; spans may be equal but do not overlap else.
        stops: Where each span ends.

    Yields:
        (first span, behind the last span, offset of the read, end of the read).
    """
    far = np.flatnonzero(starts[1:] - stops[:-1] > COALESCE_GAP) + 1
    bounds = [0, *far.tolist(), len(starts)]
    begins, ends = starts.tolist(), stops.tolist()
    for first, behind in pairwise(bounds):
        while first < behind:
            last = behind
            if ends[behind - 1] - begins[first] > COALESCE_MAX:
                fits = int(np.searchsorted(stops, begins[first] + COALESCE_MAX, side="right"))
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


def end_of_line(file: SourceBytes, offset: int, limit: int) -> int:
    """Offset behind a line of any length, whatever stands behind it.

    Args:
        file: The bytes.
        offset: Where the line's row starts.
        limit: Where the next row, or the end of the block, is.
    """
    position, before = offset, b""
    while position < limit:
        data = file.pread(min(_LINE_STEP, limit - position), position)
        if not data:
            break
        found = data.find(b"\n")
        if found >= 0:
            return position + found - (before + data[:found]).endswith(b"\r")
        before = data[-1:]
        position += len(data)
    return position
