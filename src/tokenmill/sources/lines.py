"""Read the rows of one indexed file, or of its seekable copy, by number.

The *stretch* of a row is all bytes up to the start of the next row: the row, its line break and
blank lines. The stat of an open file is compared when a page of the index (8,192 rows) is first
used, after each batch, and before a row is reported as bad. If only the times differ, the blocks
concerned are hashed, because a touched file is not a changed file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tokenmill._core.origin import Origin
from tokenmill.errors import RowError, SourceChanged
from tokenmill.sources.block import Block, Part, Value
from tokenmill.sources.bytefile import (
    FileEntry,
    LocalFile,
    Signature,
    SourceBytes,
    bound_open_files,
    digest_of,
)
from tokenmill.sources.index import BlockEntry, Index, IndexCache, Integers
from tokenmill.sources.limits import (
    COALESCE_GAP,
    COALESCE_MAX,
    LARGE_ROW,
    MAX_ROW,
    STARTS_PER_PAGE,
    STREAM_BYTES,
)
from tokenmill.sources.parse import PARSING, SHALLOW, attempt, decode, over_limit, parse, parse_many

_STREAM_ROWS = 1 << 14  # rows located at once
_LINE_STEP = 1 << 16  # bytes of a long line read at once
PAGE_SHIFT = STARTS_PER_PAGE.bit_length() - 1


class LineHandle:
    """An open file or copy with its index, shared by threads and forked processes.

    `Rows` uses `fd`, `starts` and `checked` directly for short rows of a local file.
    """

    def __init__(self, file: SourceBytes, index: Index) -> None:
        self.file = file
        self.index = index
        self.starts = index.starts
        self.checked = bytearray(index.pages)  # 1 for each verified page of `starts`
        self.fd = file.fd if isinstance(file, LocalFile) else -1
        self._touched: Signature | None = None  # a signature with other times, and ...
        self._unchanged: set[int] = set()  # ... the blocks verified under it

    def stretch(self, row: int) -> tuple[int, int]:
        if not self.checked[row >> PAGE_SHIFT]:
            self._check_page(row >> PAGE_SHIFT)
        return self.starts[row], self.starts[row + 1]

    def stretches(self, rows: Integers) -> tuple[Integers, Integers]:
        for page in np.unique(rows >> PAGE_SHIFT).tolist():
            if not self.checked[page]:
                self._check_page(page)
        return self.index.locate(rows)

    def _check_page(self, page: int) -> None:
        self.index.check_page(page)
        first = page << PAGE_SHIFT
        self.require_unchanged(range(first, min(first + STARTS_PER_PAGE, self.index.document.rows)))
        self.checked[page] = 1

    def require_unchanged(self, rows: Sequence[int] | Integers) -> None:
        """Raise `SourceChanged` if the blocks of these rows changed since they were indexed."""
        if not isinstance(self.file, LocalFile):
            return  # copies verify their frames, remote objects each range
        signature = self.file.now()
        if signature == self.file.signature:
            return
        if signature.size != self.file.signature.size:
            self.file.check()
        if signature != self._touched:
            self._touched, self._unchanged = signature, set()
        numbers = np.searchsorted(np.asarray(self.index.first_rows), rows, side="right") - 1
        for number in set(numbers.tolist()) - self._unchanged:
            block = self.index.block(number)
            if digest_of(self.file, block.offset, block.length) != block.digest:
                raise SourceChanged(
                    f"bytes {block.offset} to {block.offset + block.length} changed since the file "
                    "was indexed; open it again",
                    path=self.file.path,
                    offset=block.offset,
                )
            self._unchanged.add(number)

    def span(self, row: int) -> tuple[int, int]:
        start, stop = self.stretch(row)
        if stop - start > LARGE_ROW:
            return start, _end_of_line(self.file, start, stop)
        return start, start + len(_line_of(self.pread(start, stop)))

    def pread(self, start: int, stop: int) -> bytes:
        data = self.file.pread(stop - start, start)
        if len(data) != stop - start:
            raise SourceChanged("the file became shorter", path=self.file.path, offset=start)
        return data


class LineReader:
    """The rows of one line or array file, opened on first use."""

    columns: Sequence[str] = ()  # only tables have them

    def __init__(self, entry: FileEntry, index_cache: IndexCache, number: int = 0) -> None:
        self.entry = entry
        self.number = number
        self.rows = entry.rows
        self._index_cache = index_cache
        self._handle: LineHandle | None = None

    def open_file(self) -> SourceBytes:
        if self.entry.copy:
            from tokenmill.sources.copy import CopyFile

            return CopyFile(self._index_cache.path(self.entry.copy), self.entry.path)
        return self.entry.open()

    def _open_index(self) -> Index:
        return Index(self._index_cache.path(self.entry.index))

    def open(self) -> LineHandle:
        handle = self._handle
        if handle is None:
            handle = self._handle = LineHandle(self.open_file(), self._open_index())
            bound_open_files(self)
        return handle

    def close(self) -> None:
        self._handle = None

    # --- one row ---------------------------------------------------------------------------

    def value(self, row: int) -> dict[str, Any]:
        handle = self._handle or self.open()
        start, stop = handle.stretch(row)
        if stop - start <= SHALLOW:
            try:
                # The parser ignores line breaks and blank lines as white space.
                return decode(handle.file.pread(stop - start, start))
            except PARSING:
                pass  # raised below, with the origin
        raw = self.raw(row)
        try:
            return parse(raw)
        except RowError as error:
            raise self._located(row, error) from error

    def raw(self, row: int) -> bytes:
        handle = self._handle or self.open()
        start, stop = handle.stretch(row)
        if stop - start <= LARGE_ROW:
            return _line_of(handle.pread(start, stop))
        stop = handle.span(row)[1]
        if stop - start > MAX_ROW:
            raise self._located(row, RowError(over_limit(stop - start), reason="limit"))
        return handle.pread(start, stop)

    def origin(self, row: int, value: dict[str, Any] | None = None) -> Origin:
        start, stop = self.open().span(row)
        return Origin(self.entry.path, row, self._line(row, start), start, stop - start)

    def _line(self, row: int, offset: int) -> int | None:
        """Return the line of a row; None in an array, where lines are those of the copy."""
        if self.entry.kind == "array":
            return None
        handle = self.open()
        block = handle.index.block(bisect_right(handle.index.first_rows, row) - 1)
        if block.lines == block.rows:
            return block.first_line + row - block.first_row
        # The block has blank lines. Counting line breaks avoids storing a number per row.
        line, position = block.first_line, block.offset
        while position < offset:
            data = handle.pread(position, min(offset, position + STREAM_BYTES))
            line += data.count(b"\n")
            position += len(data)
        return line

    def _located(self, row: int, error: RowError) -> RowError:
        """Return the error with its origin; `SourceChanged` if the file changed."""
        handle = self.open()
        handle.require_unchanged([row])
        offset = handle.stretch(row)[0]
        return RowError(
            error.message,
            reason=error.reason,
            path=self.entry.path,
            row=row,
            line=self._line(row, offset),
            offset=offset,
        )

    # --- many rows -------------------------------------------------------------------------

    def values(self, rows: Sequence[int] | Integers) -> list[Value]:
        """Return rows or their errors in the given order; neighbours are read together."""
        values = parse_many(self._texts(np.asarray(rows, dtype=np.int64)) if len(rows) else [])
        if RowError in set(map(type, values)):
            for position, value in enumerate(values):
                if isinstance(value, RowError):
                    values[position] = attempt(self.value, int(rows[position]))
        return values

    def _texts(self, rows: Integers) -> list[bytes]:
        """Return the stretch of each row; empty for a large row, which is read alone."""
        handle = self.open()
        order = np.argsort(rows, kind="stable")
        starts, stops = handle.stretches(rows[order])
        small = np.flatnonzero(stops - starts <= LARGE_ROW)
        starts, stops, positions = starts[small], stops[small], order[small].tolist()
        texts = [b""] * len(rows)
        for first, last, begin, end in coalesce(starts, stops):
            data = handle.pread(begin, end)
            froms = (starts[first:last] - begin).tolist()
            tos = (stops[first:last] - begin).tolist()
            for position, a, b in zip(positions[first:last], froms, tos, strict=True):
                texts[position] = data[a:b]
        handle.require_unchanged(rows)
        return texts

    def stream(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        while first < last:
            end = min(last, first + _STREAM_ROWS)
            starts, stops = self.open().stretches(np.arange(first, end))
            while len(starts):
                count = max(1, int(np.searchsorted(stops, starts[0] + STREAM_BYTES)))
                yield first, self.values(np.arange(first, first + count))
                starts, stops = starts[count:], stops[count:]
                first += count

    # --- blocks ----------------------------------------------------------------------------

    def source_file(self) -> FileEntry:
        return self.entry

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield the blocks of a part; the first and last are cut to its rows."""
        # The index is not kept open: a plan visits thousands of files.
        index = self._handle.index if self._handle else self._open_index()
        is_complete = part.first == 0 and part.last == self.rows
        number = bisect_right(index.first_rows, part.first) - 1 if not is_complete else 0
        entry = self.entry
        copy = str(self._index_cache.path(entry.copy)) if entry.copy else ""
        for block in index.blocks_from(number):
            if block.first_row >= part.last and not is_complete:
                return
            first = max(part.first, block.first_row)
            last = min(part.last, block.first_row + block.rows)
            if block.rows and last - first < block.rows:
                block = self._cut(block, first, last)
            yield Block(
                file=self.number,
                path=entry.path,
                kind=entry.kind,
                first_row=block.first_row,
                rows=block.rows,
                first_line=None if entry.kind == "array" else block.first_line,
                offset=block.offset,
                length=block.length,
                digest=block.digest,
                location=entry.location,
                copy=copy,
                signature=entry.signature,
                is_stable=entry.is_stable,
                version=entry.version,
            )

    def _cut(self, block: BlockEntry, first: int, last: int) -> BlockEntry:
        handle = self.open()
        offset, line = block.offset, block.first_line
        if first > block.first_row:
            offset = handle.stretch(first)[0]
            line = self._line(first, offset) or 0
        end = block.offset + block.length
        if last < block.first_row + block.rows:
            end = handle.stretch(last)[0]
        digest = digest_of(self.open_file(), offset, end - offset)
        return BlockEntry(offset, end - offset, first, last - first, line, 0, digest)


def coalesce(starts: Integers, stops: Integers) -> Iterator[tuple[int, int, int, int]]:
    """Join ascending spans into reads; yield first span, end span, start and stop of each read."""
    far = np.flatnonzero(starts[1:] - stops[:-1] > COALESCE_GAP) + 1
    bounds = [0, *far.tolist(), len(starts)]
    begins, ends = starts.tolist(), stops.tolist()
    for first, end in pairwise(bounds):
        while first < end:
            last = end
            if ends[end - 1] - begins[first] > COALESCE_MAX:
                fits = int(np.searchsorted(stops, begins[first] + COALESCE_MAX, side="right"))
                last = min(max(fits, first + 1), end)
            yield first, last, begins[first], ends[last - 1]
            first = last


def _line_of(stretch: bytes) -> bytes:
    end = stretch.find(b"\n")
    if end < 0:
        return stretch
    return stretch[: end - 1] if stretch[end - 1 : end] == b"\r" else stretch[:end]


def _end_of_line(file: SourceBytes, offset: int, limit: int) -> int:
    """Return the end of the line that starts at ``offset``, at most ``limit``."""
    position, before = offset, b""
    while position < limit:
        data = file.pread(min(_LINE_STEP, limit - position), position)
        if not data:
            break
        end = data.find(b"\n")
        if end >= 0:
            return position + end - (before + data[:end]).endswith(b"\r")
        before = data[-1:]
        position += len(data)
    return position
