"""Rows and blocks of one Parquet or Arrow file, decoded in place.

The hash of the whole file names its content. Before rows of a block are returned, the file is
compared with the planned state: by stat or version, and by content where these prove nothing.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tokenmill._core.fingerprint import canonical, checksum, key
from tokenmill._core.origin import Origin
from tokenmill._core.process import RecentValues
from tokenmill._core.ranged import RemoteFile
from tokenmill.errors import CacheError, RowError, SourceError
from tokenmill.sources.block import Block, BlockRows, Part, Value, changed
from tokenmill.sources.bytefile import (
    FileEntry,
    LocalFile,
    SeenFile,
    SourceBytes,
    Span,
    bound_open_files,
    digest_of,
)
from tokenmill.sources.discover import Found
from tokenmill.sources.index import Shelf, is_forbidden
from tokenmill.sources.limits import INDEX_FORMAT
from tokenmill.sources.tables import (
    DecodedRows,
    RowForm,
    Table,
    encode,
    open_table,
    plan_ranges,
    walk_spans,
)


def describe_columnar(found: Found, file: LocalFile | RemoteFile) -> dict[str, Any]:
    spans: tuple[Span, ...] = ()
    if isinstance(file, LocalFile):
        table = open_table(found.family, file.path, found.path)
    else:
        spans = walk_spans(file) if found.family == "arrow" else ()
        table = open_table(found.family, file, found.path, spans)
    RowForm(table.schema, found.path)  # refuses a column without JSON form
    return {"kind": found.family, "rows": table.rows, "bytes": file.size, "spans": spans}


def content_digest(file: SourceBytes, kind: str) -> str:
    content = digest_of(file, 0, file.size)
    file.check()
    return key({"kind": kind, "bytes": file.size, "content": content})


def range_digest(content: str, first: int, last: int) -> str:
    return checksum(canonical({"content": content, "first": first, "last": last}))


class ColumnReader:
    def __init__(self, entry: FileEntry, shelf: Shelf, number: int = 0) -> None:
        self.entry = entry
        self.rows = entry.rows
        self.number = number
        self._shelf = shelf
        self._opened: DecodedRows | None = None
        self._digest = entry.digest
        self._settled = entry.settled  # whether an equal signature proves the digest

    def close(self) -> None:
        self._opened = None

    def _open(self) -> DecodedRows:
        self._check()
        opened = self._opened = _decoded_rows(self.entry)
        bound_open_files(self)
        return opened

    def _check(self) -> None:
        if not self.entry.is_remote:  # of a remote file, each range is compared
            self.entry.open()

    # --- many rows -------------------------------------------------------------------------

    def stream(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        opened = self._opened or self._open()
        self._check()
        try:
            once = DecodedRows(opened.table, opened.form, RecentValues(0))
            for row, values in once.batches(first, last):
                self._check()
                yield row, values
        except SourceError:
            self._check()  # changed rather than damaged?
            raise

    def values(self, rows: Sequence[int]) -> list[Value]:
        """Rows in the given order; each group is decoded at most once."""
        values: list[Any] = [None] * len(rows)
        self._check()  # before mapped pages are touched, and after
        for place in sorted(range(len(rows)), key=rows.__getitem__):
            values[place] = self._decoded(rows[place])
        self._check()
        return values

    # --- one row ---------------------------------------------------------------------------

    def value(self, row: int) -> dict[str, Any]:
        if self._opened:
            self._check()  # before mapped pages are touched, and after
        value = self._decoded(row)
        self._check()
        if isinstance(value, RowError):
            raise value
        return value

    def _decoded(self, row: int) -> Value:
        opened = self._opened or self._open()
        try:
            return opened.value(row)
        except SourceError:
            self._check()  # changed rather than damaged?
            raise

    def raw(self, row: int) -> bytes:
        return encode(self.value(row))

    def origin(self, row: int, value: dict[str, Any] | None = None) -> Origin:
        try:
            length = len(self.raw(row) if value is None else encode(value))
        except RowError:
            length = 0
        return Origin(self.entry.path, row, None, None, length)

    # --- blocks ----------------------------------------------------------------------------

    def digest(self) -> str:
        """The digest of the content, computed once per state of the file."""
        if self._digest:
            return self._digest
        entry = self.entry
        name = key(
            {
                "what": "file hashed",
                "format": INDEX_FORMAT,
                "location": entry.location,
                "signature": [*entry.signature, *filter(None, [entry.version])],
            }
        )
        note = None if entry.is_remote and not entry.settled else self._shelf.note(name)
        if note is not None:
            self._digest, self._settled = str(note["digest"]), True
            return self._digest
        file = entry.open()
        self._digest = content_digest(file, entry.kind)
        self._settled = entry.settled or has_settled(file)
        if self._settled:
            try:
                self._shelf.write_note(name, {"digest": self._digest})
            except CacheError as error:
                if not is_forbidden(error):
                    raise
        return self._digest

    def source_file(self) -> FileEntry:
        return msgspec.structs.replace(self.entry, digest=self.digest())

    def blocks(self, part: Part) -> Iterator[Block]:
        table = (self._opened or self._open()).table
        content = self.digest()
        for begin, end, size in plan_ranges(table.groups):
            first, last = max(begin, part.first), min(end, part.last)
            if first >= last:
                continue
            yield Block(
                file=self.number,
                path=self.entry.path,
                kind=self.entry.kind,
                first_row=first,
                rows=last - first,
                first_line=None,
                offset=None,
                length=size * (last - first) // (end - begin),
                digest=range_digest(content, first, last),
                location=self.entry.location,
                signature=self.entry.signature,
                settled=self._settled,
                content=content,
                version=self.entry.version,
                **self._spans_of(table, first, last),
            )

    def _spans_of(self, table: Table, first: int, last: int) -> dict[str, Any]:
        if not self.entry.spans:
            return {}
        low, high = bisect_right(table.starts, first) - 1, bisect_right(table.starts, last - 1)
        head, *spans = self.entry.spans
        return {"spans": (head, *spans[low:high]), "spans_row": table.starts[low]}


def _decoded_rows(
    file: SeenFile, first_row: int = 0, kept: RecentValues | None = None
) -> DecodedRows:
    source = file.open_remote() if file.is_remote else file.location
    table = open_table(file.kind, source, file.path, file.spans, first_row)
    return DecodedRows(table, RowForm(table.schema, file.path), kept)


def has_settled(file: SourceBytes) -> bool:
    return isinstance(file, LocalFile) and file.signature.settled(file.opened_ns)


# --- a worker's blocks ------------------------------------------------------------------------

_last: list[tuple[int, tuple[Any, ...], DecodedRows]] = []
"""Process, file state and rows of the block read last, removed while in use. A worker takes the
blocks of a file mostly in order, so each group is decoded once."""


def _rows_of(block: Block) -> DecodedRows:
    try:
        process, state, rows = _last.pop()
    except IndexError:
        process = 0
    if process == os.getpid() and state == _state(block):
        return rows
    return _decoded_rows(block, block.spans_row, RecentValues(0))


def _state(block: Block) -> tuple[Any, ...]:
    # With the content: an edit within one tick of the clock does not change the signature.
    return (block.location, *block.signature, block.version, block.spans, block.content)


_proven: dict[str, tuple[Any, ...]] = {}
"""Location of a file whose stat or version proves nothing → the state in which it was hashed."""


def _open_unchanged(block: Block) -> LocalFile | RemoteFile:
    file = block.open()
    file.path = block.path
    state = (block.signature, block.version, block.content)
    if block.settled or _proven.get(block.location) == state:
        return file
    if content_digest(file, block.kind) != block.content:
        raise changed(block)
    # Once per worker, not before every block. A fresh timestamp proves nothing yet, but will a
    # moment later; one that is ahead of this machine's clock never will.
    if (
        not isinstance(file, LocalFile)
        or has_settled(file)
        or file.signature.lies_ahead(file.opened_ns)
    ):
        _proven[block.location] = state
    return file


def read_columnar_block(block: Block) -> BlockRows:
    file = _open_unchanged(block)
    first, last = block.first_row, block.first_row + block.rows
    if range_digest(block.content, first, last) != block.digest:
        raise changed(block)
    rows = _rows_of(block)
    if last > rows.table.rows:
        raise changed(block)
    try:
        values = [value for _, part in rows.batches(first, last) for value in part]
    finally:
        if isinstance(file, LocalFile):
            file.check()  # changed rather than damaged? (remote ranges were compared)
    _last[:] = [(os.getpid(), _state(block), rows)]
    raw = [b"" if isinstance(value, RowError) else encode(value) for value in values]
    unknown = np.full(len(raw), -1, dtype=np.int64)
    lengths = np.array([len(data) for data in raw], dtype=np.int64)
    return BlockRows(raw, values, unknown, unknown.copy(), lengths)
