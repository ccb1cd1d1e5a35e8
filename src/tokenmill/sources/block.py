"""Blocks of rows: the units of work that a build distributes to its workers.

A block has its byte span (or row range) and the digest of these bytes, so any process can read it
without an index. Positions in `BlockRows` are relative to the block, so that equal blocks in
different files give equal results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import xxhash

from tokenmill.errors import RowError, SourceChanged
from tokenmill.sources.bytefile import LocalFile, SeenFile, SourceBytes, digest_of
from tokenmill.sources.index import Integers
from tokenmill.sources.limits import MAX_ROW
from tokenmill.sources.parse import over_limit, parse_many
from tokenmill.sources.scan import BLANK, BOM

Value = dict[str, Any] | RowError
PORTION = 16  # rows parsed at once: few enough to stay in the CPU cache


class Part(NamedTuple):
    """The rows ``first:last`` of a file."""

    file: int
    first: int
    last: int


class Block(SeenFile, frozen=True, kw_only=True):
    file: int  # position in ``rows.files``
    first_row: int  # within the file
    rows: int  # 0 if the block has only blank lines
    first_line: int | None  # first line, from 1; None for arrays and columnar files
    offset: int | None  # in the decompressed file; None for columnar files
    length: int  # bytes; for columnar files an estimate of the decoded size
    digest: str  # xxh3-128 of the bytes in hex; for columnar files of content and row range
    copy: str = ""  # directory of the seekable copy that is read instead of the file
    content: str = ""  # digest of the whole file, for columnar files
    spans_row: int = 0  # first row of the first span's batch


@dataclass(frozen=True, slots=True)
class BlockRows:
    raw: list[bytes]  # bytes of each row; empty for a row over the limit
    values: Sequence[Value]  # a dict, or a RowError with its origin
    line: Integers  # within the block, from 0; -1 if the format has none
    offset: Integers  # within the block; -1 if the format has none
    length: Integers  # bytes of each row
    columns: Sequence[str] = ()  # of a table, whose null values the rows do not have


class ParsedRows(Sequence[Value]):
    """The rows of a block, parsed on access and not kept: dicts take ten times the memory.

    `seconds` is the time spent parsing so far.
    """

    def __init__(self, block: Block, raw: list[bytes], line: Integers, offset: Integers) -> None:
        self.seconds = 0.0
        self._block = block
        self._raw = raw
        self._line = line
        self._offset = offset

    def __len__(self) -> int:
        return len(self._raw)

    def __iter__(self) -> Iterator[Value]:
        for first in range(0, len(self._raw), PORTION):
            yield from self[first : first + PORTION]

    @overload
    def __getitem__(self, number: int) -> Value: ...
    @overload
    def __getitem__(self, number: slice) -> list[Value]: ...
    def __getitem__(self, number: int | slice) -> Value | list[Value]:
        if not isinstance(number, slice):
            number = range(len(self))[number]
            return self[number : number + 1][0]
        start = time.perf_counter()
        values = parse_many(self._raw[number])
        for position, value in enumerate(values):
            if isinstance(value, RowError):
                row = range(len(self))[number][position]
                line, offset = int(self._line[row]), int(self._offset[row])
                values[position] = _with_origin(self._block, row, line, offset, value)
        self.seconds += time.perf_counter() - start
        return values


def read_block(block: Block) -> BlockRows:
    """Read and parse a block; `SourceChanged` if the file no longer holds these bytes."""
    if block.kind in ("parquet", "arrow"):
        from tokenmill.sources.columnar import read_columnar_block

        return read_columnar_block(block)
    file = _open(block)
    offset = block.offset or 0
    if block.length > 2 * MAX_ROW:
        return _over_limit(block, file, offset)
    data = file.pread(block.length, offset)
    if xxhash.xxh3_128_hexdigest(data) != block.digest:
        raise changed(block)
    raw, lines, starts = _split_lines(data, offset)
    if block.first_line is None:
        lines = np.full(len(raw), -1, np.int64)
    lengths = np.fromiter(map(len, raw), np.int64, len(raw))
    values: Sequence[Value] = ParsedRows(block, raw, lines, starts)
    if len(raw) and int(lengths.max()) > MAX_ROW:
        values = list(values)  # a row over the limit is rejected, and its bytes are dropped
        for number in np.flatnonzero(lengths > MAX_ROW).tolist():
            raw[number] = b""
    return BlockRows(raw, values, lines, starts, lengths)


def _with_origin(block: Block, number: int, line: int, start: int, error: RowError) -> RowError:
    located = RowError(
        error.message,
        reason=error.reason,
        path=block.path,
        row=block.first_row + number,
        line=None if block.first_line is None else block.first_line + line,
        offset=None if block.offset is None else block.offset + start,
    )
    located.__cause__ = error.__cause__
    return located


def _open(block: Block) -> SourceBytes:
    if block.copy:
        from pathlib import Path

        from tokenmill.sources.copy import CopyFile

        return CopyFile(Path(block.copy), block.path)
    if block.is_remote:
        return block.open_remote()
    # The digest decides, not the stat: a touched file with the same bytes is unchanged.
    return LocalFile(block.location)


def changed(block: Block) -> SourceChanged:
    return SourceChanged(
        "the file changed since it was opened; run the command again",
        path=block.path,
        row=block.first_row,
        line=block.first_line,
        offset=block.offset,
    )


def _split_lines(data: bytes, offset: int) -> tuple[list[bytes], Integers, Integers]:
    rows = data.split(b"\n")
    starts = np.zeros(len(rows), np.int64)
    np.cumsum(np.fromiter(map(len, rows[:-1]), np.int64, len(rows) - 1) + 1, out=starts[1:])
    if offset == 0 and data.startswith(BOM):
        rows[0] = rows[0][len(BOM) :]
        starts[0] += len(BOM)
    is_row = np.ones(len(rows), bool)
    candidates = [n for n, row in enumerate(rows) if not row or row[0] in BLANK or row[-1] in BLANK]
    for line in candidates:
        row = rows[line]
        if not row.strip(BLANK):
            is_row[line] = False
        elif line < len(rows) - 1:  # the last line has no line break, so its \r is content
            rows[line] = row.removesuffix(b"\r")
    lines = np.flatnonzero(is_row)
    if len(lines) < len(rows):
        rows = [rows[line] for line in lines.tolist()]
    return rows, lines, starts[lines]


def _over_limit(block: Block, file: SourceBytes, offset: int) -> BlockRows:
    """Check a block of one row over the limit without loading it."""
    if digest_of(file, offset, block.length) != block.digest:
        raise changed(block)
    empty = np.empty(0, dtype=np.int64)
    if not block.rows:
        return BlockRows([], [], empty, empty, empty)
    head = file.pread(len(BOM), offset)
    start = len(BOM) if offset == 0 and head == BOM else 0
    tail = file.pread(2, offset + block.length - 2)
    end = block.length - (2 if tail == b"\r\n" else tail.endswith(b"\n"))
    error = RowError(over_limit(end - start), reason="limit")
    return BlockRows(
        [b""],
        [_with_origin(block, 0, 0, start, error)],
        np.array([0], dtype=np.int64),
        np.array([start], dtype=np.int64),
        np.array([end - start], dtype=np.int64),
    )
