"""Rows of one indexed file, by number.

A `LineReader` joins a file (or its seekable copy) with its `Index`. It is made from a `FileEntry`
and opens nothing until a row is wanted; the `pool` closes it when too many are open. Any thread
and any forked process may use it: reads carry their offset, and what is open is replaced whole,
never changed.

While rows are read, the file's stat is looked at again every 20 µs (see `opened`). Another size or
a vanished name is `SourceChanged`. Only other times (a touch, a chmod, a new hard link, or an edit
in place) have the row's block hashed again: the content decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tokenmill.errors import RowError, SourceChanged
from tokenmill.origin import Origin
from tokenmill.source import pool
from tokenmill.source.assemble import BlockEntry
from tokenmill.source.block import Block, digest_of
from tokenmill.source.bytefile import ByteFile, LocalFile
from tokenmill.source.cut import Integers
from tokenmill.source.entry import FileEntry, SourceFile
from tokenmill.source.index import Index
from tokenmill.source.limits import (
    COALESCE_GAP,
    COALESCE_MAX,
    ENTRIES_PER_PAGE,
    MAX_ROW,
    STREAM_BYTES,
)
from tokenmill.source.opened import OpenLines
from tokenmill.source.parse import over_limit, parse
from tokenmill.source.reader import Part, Value
from tokenmill.source.shelf import Shelf
from tokenmill.source.spans import coalesce

_PAGE_SHIFT = ENTRIES_PER_PAGE.bit_length() - 1
_STREAM_ROWS = 1 << 14  # rows located at once


class LineReader:
    """Random access to the rows of one line or array file.

    Args:
        entry: The file.
        shelf: Where its index is.
        number: Its position among the files of the source.
    """

    def __init__(self, entry: FileEntry, shelf: Shelf, number: int = 0) -> None:
        self.entry = entry
        self.number = number
        self.rows = entry.rows
        self._shelf = shelf
        self._index: Index | None = None
        self._opened: OpenLines | None = None

    @property
    def index(self) -> Index:
        """The file's index, opened on first use."""
        if self._index is None:
            self._index = Index(self._shelf.place(self.entry.index))
        return self._index

    def open_file(self) -> ByteFile:
        """The file's bytes; a compressed file is read through its copy."""
        if self.entry.copy:
            from tokenmill.source.copy import CopyFile

            return CopyFile(self._shelf.place(self.entry.copy), self.entry.path)
        return LocalFile(self.entry.location, self.entry.expected)

    def _open(self) -> OpenLines:
        opened = OpenLines(self.open_file(), self.index)
        self._opened = opened
        pool.opened(self)
        return opened

    def close(self) -> None:
        """Let go of descriptors and maps; the next access opens them again."""
        self._opened = None
        self._index = None

    # --- one row ---------------------------------------------------------------------------

    def value(self, row: int) -> dict[str, Any]:
        """Parse one row."""
        value = (self._opened or self._open()).value(row)
        if value is not None:
            return value
        raw = self.raw(row)
        try:
            return parse(raw)
        except RowError as error:
            raise self.explain(row, error) from error

    def raw(self, row: int) -> bytes:
        """The bytes of one row."""
        opened = self._opened or self._open()
        opened.look_again(row)
        offset, length = opened.locate(row)
        if length > MAX_ROW:
            raise self.explain(row, RowError(over_limit(length), reason="limit"))
        return self._pread(opened, offset, length)

    def _pread(self, opened: OpenLines, offset: int, length: int) -> bytes:
        data = opened.file.pread(length, offset)
        if len(data) != length:
            raise self._shorter(offset)
        return data

    def _shorter(self, offset: int) -> SourceChanged:
        return SourceChanged("the file became shorter", path=self.entry.path, offset=offset)

    def span(self, row: int) -> tuple[int, int]:
        """Offset and length of one row."""
        return (self._opened or self._open()).locate(row)

    def origin(self, row: int) -> Origin:
        """Where one row is."""
        offset, length = self.span(row)
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
        opened = self._opened or self._open()
        line, position = block.first_line, block.offset
        while position < offset:
            data = opened.file.pread(min(offset - position, STREAM_BYTES), position)
            if not data:
                raise self._shorter(position)
            line += data.count(b"\n")
            position += len(data)
        return line

    def explain(self, row: int, error: RowError) -> RowError:
        """The same error with its place, after making sure that it is the row's own fault."""
        opened = self._opened or self._open()
        opened.look_again(row)
        offset, _ = opened.locate(row)
        return RowError(
            error.message,
            reason=error.reason,
            path=self.entry.path,
            row=row,
            line=self.line(row, offset),
            offset=offset,
        )

    # --- many rows -------------------------------------------------------------------------

    def raws(self, rows: Sequence[int]) -> list[bytes | RowError]:
        """The bytes of many rows in the given order, neighbours read together."""
        if not len(rows):
            return []
        opened = self._opened or self._open()
        wanted = np.asarray(rows, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        wanted = wanted[order]
        offsets, lengths = opened.index.locate(wanted)
        for place in np.flatnonzero(lengths < 0).tolist():  # long gaps
            lengths[place] = opened.locate(int(wanted[place]))[1]
        found: list[bytes | RowError] = [b""] * len(rows)
        for place in np.flatnonzero(lengths > MAX_ROW).tolist():
            row = int(wanted[place])
            error = RowError(over_limit(int(lengths[place])), reason="limit")
            found[int(order[place])] = self.explain(row, error)
            lengths[place] = 0
        places, sizes = order.tolist(), lengths.tolist()
        for first, last, start, stop in coalesce(offsets, lengths, COALESCE_GAP, COALESCE_MAX):
            opened.look_again(int(wanted[first]))
            data = self._pread(opened, start, stop - start)
            if last - first == 1:
                if data:
                    found[places[first]] = data
                continue
            opened.look_again(int(wanted[last - 1]))
            for number, offset in enumerate((offsets[first:last] - start).tolist(), first):
                if sizes[number]:
                    found[places[number]] = data[offset : offset + sizes[number]]
        return found

    def raw_stream(self, first: int, last: int) -> Iterator[tuple[int, list[bytes | RowError]]]:
        """The bytes of the rows ``first:last`` in order, a portion at a time."""
        index = self.index
        while first < last:
            upto = min(last, first + _STREAM_ROWS)
            offsets, lengths = index.locate(np.arange(first, upto))
            while len(offsets):
                count = max(1, int(np.searchsorted(offsets, offsets[0] + STREAM_BYTES)))
                yield first, self._portion(first, offsets[:count], lengths[:count])
                offsets, lengths = offsets[count:], lengths[count:]
                first += count

    def _portion(self, first: int, offsets: Integers, lengths: Integers) -> list[bytes | RowError]:
        opened = self._opened or self._open()
        opened.look_again(first)
        opened.look_again(first + len(offsets) - 1)
        start, stop = int(offsets[0]), int(offsets[-1] + lengths[-1])
        if int(lengths.min()) < 0 or stop - start > 2 * STREAM_BYTES:
            return self.raws(range(first, first + len(offsets)))
        data = opened.file.pread(stop - start, start)
        if len(data) != stop - start:
            raise self._shorter(start)
        begins = offsets - start
        ends = begins + lengths
        return [data[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]

    def values(self, rows: Sequence[int]) -> list[Value]:
        """Many parsed rows in the given order."""
        return [self._parsed(row, raw) for row, raw in zip(rows, self.raws(rows), strict=True)]

    def stream(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        """The parsed rows ``first:last`` in order."""
        for begin, raws in self.raw_stream(first, last):
            try:
                yield begin, [parse(raw) for raw in raws]  # type: ignore[arg-type]
            except (RowError, TypeError):
                yield begin, [self._parsed(row, raw) for row, raw in enumerate(raws, begin)]

    def _parsed(self, row: int, raw: bytes | RowError) -> Value:
        if isinstance(raw, RowError):
            return raw
        try:
            return parse(raw)
        except RowError as error:
            placed = self.explain(row, error)
            placed.__cause__ = error
            return placed

    # --- blocks ----------------------------------------------------------------------------

    def source_file(self) -> SourceFile:
        """What is known about the file."""
        entry = self.entry
        return SourceFile(entry.path, entry.kind, entry.bytes, entry.rows, entry.digest)

    def blocks(self, part: Part) -> Iterator[Block]:
        """The blocks of a run of rows; those at its ends may be cut down to its rows."""
        index = self.index
        whole = part.first == 0 and part.last == self.rows
        number = bisect_right(index.first_rows, part.first) - 1 if not whole else 0
        while number < len(index.table) and (whole or index.first_rows[number] < part.last):
            block = index.block(number)
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
                copy=str(self._shelf.place(self.entry.copy)) if self.entry.copy else "",
                signature=self.entry.signature,
                settled=self.entry.settled,
            )
            number += 1

    def _cut_down(self, block: BlockEntry, first: int, last: int) -> BlockEntry:
        """The rows ``first:last`` of a block as a block with a digest of its own."""
        offset, line = block.offset, block.first_line
        if first > block.first_row:
            offset = self.span(first)[0]
            line = self.line(first, offset)
        end = block.offset + block.length
        if last < block.first_row + block.rows:
            end = self.span(last)[0]
        digest = digest_of(self.open_file(), offset, end - offset)
        return BlockEntry(offset, end - offset, first, last - first, line, 0, digest)
