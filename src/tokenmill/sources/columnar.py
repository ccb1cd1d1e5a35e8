"""Rows and blocks of one Parquet or Arrow file, decoded without a copy.

The content digest is a hash of the whole file. Before a block is returned, the file is compared
with its state at planning time: by stat or version, and by digest where these prove nothing.
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
from tokenmill.errors import RowError, SourceError
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
from tokenmill.sources.index import IndexCache, in_writable
from tokenmill.sources.limits import INDEX_FORMAT, MAX_DECODED
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
    RowForm(table.schema, found.path)  # raises for a column without JSON form
    return {"kind": found.family, "rows": table.rows, "bytes": file.size, "spans": spans}


def content_digest(file: SourceBytes, kind: str) -> str:
    content = digest_of(file, 0, file.size)
    file.check()
    return key({"kind": kind, "bytes": file.size, "content": content})


def range_digest(content: str, first: int, last: int) -> str:
    return checksum(canonical({"content": content, "first": first, "last": last}))


class ColumnReader:
    def __init__(self, entry: FileEntry, index_cache: IndexCache, number: int = 0) -> None:
        self.entry = entry
        self.rows = entry.rows
        self.number = number
        self._index_cache = index_cache
        self._opened: DecodedRows | None = None
        self._digest = entry.digest
        self._is_stable = entry.is_stable  # whether an equal signature proves the digest

    def close(self) -> None:
        self._opened = None

    def _open(self) -> DecodedRows:
        self._check()
        opened = self._opened = _decoded_rows(self.entry)
        bound_open_files(self)
        return opened

    def _check(self) -> None:
        if not self.entry.is_remote:  # remote reads compare the version of each range
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
            self._check()  # a changed file raises SourceChanged instead
            raise

    def values(self, rows: Sequence[int]) -> list[Value]:
        """Return rows in the given order; each group is decoded at most once."""
        values: list[Any] = [None] * len(rows)
        self._check()  # before and after mapped pages are read
        for position in sorted(range(len(rows)), key=rows.__getitem__):
            values[position] = self._decoded(rows[position])
        self._check()
        return values

    @property
    def columns(self) -> Sequence[str]:
        names: Sequence[str] = (self._opened or self._open()).table.schema.names
        return names

    # --- one row ---------------------------------------------------------------------------

    def value(self, row: int) -> dict[str, Any]:
        if self._opened:
            self._check()  # before and after mapped pages are read
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
            self._check()  # a changed file raises SourceChanged instead
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
        """Return the content digest, computed once per state of the file."""
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
        note = None if entry.is_remote and not entry.is_stable else self._index_cache.note(name)
        if note is not None:
            self._digest, self._is_stable = str(note["digest"]), True
            return self._digest
        file = entry.open()
        self._digest = content_digest(file, entry.kind)
        self._is_stable = entry.is_stable or is_stable(file)
        if self._is_stable:
            note = {"digest": self._digest}
            in_writable(self._index_cache, lambda cache: cache.write_note(name, note))
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
                is_stable=self._is_stable,
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


def is_stable(file: SourceBytes) -> bool:
    return isinstance(file, LocalFile) and file.signature.is_stable(file.opened_ns)


# --- blocks in a worker -----------------------------------------------------------------------

_last: list[tuple[int, tuple[Any, ...], DecodedRows]] = []
"""Process, file state and rows of the last block, removed while in use. A worker mostly gets the
blocks of a file in order, so each group is decoded once."""


def _rows_of(block: Block) -> DecodedRows:
    try:
        process, state, rows = _last.pop()
    except IndexError:
        process = 0
    if process == os.getpid() and state == _state(block):
        return rows
    return _decoded_rows(block, block.spans_row, RecentValues(0))


def _state(block: Block) -> tuple[Any, ...]:
    # Includes the digest, because an edit within one clock tick does not change the signature.
    return (block.location, *block.signature, block.version, block.spans, block.content)


_proven: dict[str, tuple[Any, ...]] = {}
"""Location of a file whose stat or version proves nothing → its state when it was hashed."""


def _open_unchanged(block: Block) -> LocalFile | RemoteFile:
    file = block.open()
    file.path = block.path
    state = (block.signature, block.version, block.content)
    if block.is_stable or _proven.get(block.location) == state:
        return file
    if content_digest(file, block.kind) != block.content:
        raise changed(block)
    # Remembered, so that a worker hashes the file once and not before every block. A recent
    # timestamp is not remembered: it will prove the content a moment later. A timestamp in the
    # future never will, so it is.
    if (
        not isinstance(file, LocalFile)
        or is_stable(file)
        or file.signature.is_in_future(file.opened_ns)
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
        values: list[Value] = []
        raw: list[bytes] = []
        size = 0
        for _, part in rows.batches(first, last):
            values += part
            for value in part:
                raw.append(b"" if isinstance(value, RowError) else encode(value))
                size += len(raw[-1])
            if size > MAX_DECODED:
                raise SourceError(
                    f"{block.length} encoded bytes expand to more than {MAX_DECODED} bytes of rows;"
                    " write the file without dictionaries (use_dictionary=False in pyarrow)",
                    path=block.path,
                    row=first,
                )
    finally:
        if isinstance(file, LocalFile):
            file.check()  # a changed file raises SourceChanged instead of a decoding error
    _last[:] = [(os.getpid(), _state(block), rows)]
    unknown = np.full(len(raw), -1, dtype=np.int64)
    lengths = np.array([len(data) for data in raw], dtype=np.int64)
    return BlockRows(raw, values, unknown, unknown.copy(), lengths, rows.table.schema.names)
