"""Rows of one indexed file, by number.

A `LineReader` joins a file (or its seekable copy) with its `Index`. It is made from a `FileEntry`
and opens nothing until a row is wanted; the `pool` closes it when too many are open. Any thread
and any forked process may use it: reads carry their offset, and what is open is replaced whole,
never changed.

While rows are read, the file's stat is looked at again every 50 µs (see `opened`). Another size or
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
from tokenmill.source.bytefile import ByteFile
from tokenmill.source.cut import Integers
from tokenmill.source.entry import FileEntry, SourceFile
from tokenmill.source.index import Index
from tokenmill.source.limits import (
    COALESCE_GAP,
    COALESCE_MAX,
    LARGE_ROW,
    MAX_ROW,
    STREAM_BYTES,
)
from tokenmill.source.opened import Hot, OpenLines
from tokenmill.source.parse import over_limit, parse
from tokenmill.source.reader import Part, Value
from tokenmill.source.shelf import Shelf
from tokenmill.source.spans import coalesce

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
        return self.entry.open()

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
        hot = (self._opened or self._open()).hot
        if hot is not None:
            value = hot.value(row)
            if value is not None:
                return value
        raw = self.raw(row)
        try:
            return parse(raw)
        except RowError as error:
            raise self.explain(row, error) from error

    def hot(self) -> Hot | None:
        """The open file's short way to ordinary rows."""
        return (self._opened or self._open()).hot

    def raw(self, row: int) -> bytes:
        """The bytes of one row."""
        opened = self._opened or self._open()
        opened.look_again(row)
        start, stop = opened.stretch(row)
        if stop - start <= LARGE_ROW:
            return opened.trimmed(row, opened.pread(start, stop))
        offset, length = opened.locate(row)
        if length > MAX_ROW:
            raise self.explain(row, RowError(over_limit(length), reason="limit"))
        return opened.pread(offset, offset + length)

    def origin(self, row: int) -> Origin:
        """Where one row is."""
        opened = self._opened or self._open()
        opened.look_again(row)
        offset, length = opened.locate(row)
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
                raise SourceChanged("the file became shorter", path=self.entry.path)
            line += data.count(b"\n")
            position += len(data)
        return line

    def explain(self, row: int, error: RowError) -> RowError:
        """The same error with its place, after making sure that it is the row's own fault."""
        opened = self._opened or self._open()
        opened.look_again(row)
        offset, _ = opened.stretch(row)
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
        opened = self._opened or self._open()
        wanted = np.asarray(rows, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        wanted = wanted[order]
        starts, stops = opened.index.locate(wanted)
        found: list[bytes | RowError] = [b""] * len(rows)
        places = order.tolist()
        large = np.flatnonzero(stops - starts > LARGE_ROW)
        for number in large.tolist():
            found[places[number]] = self._raw_or_error(int(wanted[number]))
        if len(large):
            rest = np.flatnonzero(stops - starts <= LARGE_ROW)
            wanted, starts, stops = wanted[rest], starts[rest], stops[rest]
            places = order[rest].tolist()
        for first, last, begin, end in coalesce(starts, stops, COALESCE_GAP, COALESCE_MAX):
            opened.look_again(int(wanted[first]))
            data = opened.pread(begin, end)
            if last - first == 1:
                found[places[first]] = data
                continue
            opened.look_again(int(wanted[last - 1]))
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
        """Many parsed rows in the given order."""
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
        opened = self._opened or self._open()
        opened.look_again(rows[0])
        opened.look_again(rows[-1])
        data = opened.pread(begin, end)
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
        opened = self._opened or self._open()
        try:
            # Trimming what is trimmed already would cut an element's own bracket off.
            whole = opened.stretch(row)[1] - opened.stretch(row)[0] <= LARGE_ROW
            return parse(opened.trimmed(row, stretch) if whole else stretch)
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
        return (self._opened or self._open()).stretch(row)[0]

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
