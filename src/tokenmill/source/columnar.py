"""Rows of one Parquet or Arrow file.

A `ColumnReader` streams and fetches batches straight from the file. Single rows (``rows[i]``,
``raw``, ``origin``) are decoded with the thousand around them. Once that has cost as much as
decoding a local file `COPY_AFTER` times, they come from an indexed copy: the file's rows as JSON
lines in a seekable copy, made once and shared by everybody with the same content. Rows that have no
JSON form stand in the copy as a line that begins with ``!`` and says why. A copy of a remote file,
which may be larger than the disk, is never made.

The content's digest is the hash of the whole file, taken when blocks or digests are wanted and
remembered under the file's stat; counting rows needs only the footer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from tokenmill.errors import CacheError, RowError, SourceError
from tokenmill.fingerprint import canonical, checksum, key
from tokenmill.origin import Origin
from tokenmill.source import pool
from tokenmill.source.block import Block
from tokenmill.source.bytefile import ByteFile, LocalFile, Signature, open_remote
from tokenmill.source.copy import CopyFile, write_copy
from tokenmill.source.entry import FileEntry, SourceFile, Span
from tokenmill.source.find import Found
from tokenmill.source.index import index_key, write_index
from tokenmill.source.jsonform import RowForm, encode
from tokenmill.source.limits import COPY_AFTER, INDEX_FORMAT, MIB
from tokenmill.source.lines import LineReader
from tokenmill.source.parse import parse
from tokenmill.source.reader import Part, Value
from tokenmill.source.scan import LineScan
from tokenmill.source.shelf import Shelf, is_forbidden, private_shelf
from tokenmill.source.tables import DecodedRows, ParquetTable, Table, open_table, plan_ranges

if TYPE_CHECKING:
    from tokenmill.files.ranged import RemoteFile

_BAD = b"!"


def describe_columnar(found: Found, file: LocalFile | RemoteFile) -> dict[str, Any]:
    """What a note says about a columnar file: counted from its footer or metadata."""
    spans: tuple[Span, ...] = ()
    if isinstance(file, LocalFile):
        table = open_table(found.family, file.path, found.path)
    else:
        if found.family == "arrow":
            from tokenmill.source.distant import walk_spans

            spans = walk_spans(file)
        table = distant_table(found.family, file, found.path, spans)
    RowForm(table.schema, found.path)  # a column without JSON form is refused at once
    return {"kind": found.family, "rows": table.rows, "bytes": file.size, "spans": spans}


def distant_table(
    kind: str, file: RemoteFile, path: str, spans: tuple[Span, ...], first_row: int = 0
) -> Table:
    """A remote file as a table; of an Arrow file the stated spans."""
    from tokenmill.source.distant import SpannedTable

    return (
        ParquetTable(file, path)
        if kind == "parquet"
        else SpannedTable(file, path, spans, first_row)
    )


def content_digest(file: ByteFile, kind: str) -> str:
    """The digest of a whole file."""
    hashed, offset = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(MIB))
    while size := file.read_into(buffer, offset):
        hashed.update(buffer[:size])
        offset += size
    file.check()
    return key({"kind": kind, "bytes": offset, "content": hashed.hexdigest()})


def range_digest(content: str, first: int, last: int) -> str:
    """The digest of a range of rows of a content."""
    return checksum(canonical({"content": content, "first": first, "last": last}))


class ColumnReader:
    """Access to the rows of one Parquet or Arrow file.

    Args:
        entry: The file.
        shelf: Where notes and copies are kept.
        number: Its position among the files of the source.
    """

    def __init__(self, entry: FileEntry, shelf: Shelf, number: int = 0) -> None:
        self.entry = entry
        self.rows = entry.rows
        self.number = number
        self._shelf = shelf
        self._opened: tuple[Table, RowForm] | None = None
        self._single: LineReader | None = None
        self._digest = entry.digest
        self._settled = entry.settled  # whether an equal signature proves the digest
        self._decoded: DecodedRows | None = None

    def close(self) -> None:
        """Let go of the file; the next access opens it again."""
        self._opened = None
        self._decoded = None

    def _open(self) -> tuple[Table, RowForm]:
        self._check()
        entry = self.entry
        if entry.is_remote:
            table = distant_table(entry.kind, _remote(entry), entry.path, entry.spans)
        else:
            table = open_table(entry.kind, entry.location, entry.path)
        opened = self._opened = (table, RowForm(table.schema, self.entry.path))
        pool.opened(self)
        return opened

    def _check(self) -> None:
        if not self.entry.is_remote:  # there, each range is compared as it comes
            check_signature(self.entry.location, self.entry.path, self.entry.expected)

    # --- many rows -------------------------------------------------------------------------

    def stream(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        """Rows in order, a batch at a time."""
        table, form = self._opened or self._open()
        self._check()
        try:
            for row, batch in table.batches(first, last):
                values = form.rows(batch, row)
                self._check()
                yield row, values
        except SourceError:
            self._check()  # changed rather than damaged?
            raise

    def values(self, rows: Sequence[int]) -> list[Value]:
        """Many rows in the given order; each group that holds one is decoded once."""
        if self._single is not None:
            return [self._restored(row) for row in rows]
        table, _ = self._opened or self._open()
        found: dict[int, Value] = {}
        wanted = sorted(set(rows))
        while wanted:
            group = bisect_right(table.starts, wanted[0]) - 1
            upto = bisect_right(wanted, table.starts[group + 1] - 1)
            chosen = set(wanted[:upto])
            for first, values in self.stream(wanted[0], wanted[upto - 1] + 1):
                found.update(
                    (row, value) for row, value in enumerate(values, first) if row in chosen
                )
            wanted = wanted[upto:]
        return [found[row] for row in rows]

    # --- one row ---------------------------------------------------------------------------

    def value(self, row: int) -> dict[str, Any]:
        """One row."""
        return parse(self.raw(row))

    def hot(self) -> None:
        """There is no short way: rows are found in a portion or a frame, not in the file."""

    def raw(self, row: int) -> bytes:
        """The canonical JSON of one row."""
        copy = self._copy()
        if copy is None:
            return self._decode(row)
        raw = copy.raw(row)
        if raw.startswith(_BAD):
            raise self._refusal(row, raw)
        return raw

    def origin(self, row: int) -> Origin:
        """Path, row and length: there are no lines or offsets in a columnar file."""
        try:
            length = len(self.raw(row))
        except RowError:
            length = 0
        return Origin(self.entry.path, row, None, None, length)

    def _decode(self, row: int) -> bytes:
        """One row, decoded with its neighbours."""
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = DecodedRows(*(self._opened or self._open()))
        try:
            raw = decoded.raw(row)
        except SourceError:
            self._check()  # changed rather than damaged?
            raise
        self._check()
        if isinstance(raw, RowError):
            raise raw
        return raw

    def _restored(self, row: int) -> Value:
        try:
            return self.value(row)
        except RowError as error:
            return error

    def _refusal(self, row: int, raw: bytes) -> RowError:
        reason, _, message = raw[len(_BAD) :].decode("utf-8").partition(" ")
        return RowError(msgspec.json.decode(message), reason=reason, path=self.entry.path, row=row)

    def _copy(self) -> LineReader | None:
        """The file's rows as an indexed copy, where there is one or it is cheaper to make one."""
        if self._single is not None or self.entry.is_remote:
            return self._single
        decoded = self._decoded
        if decoded is None:
            self._single = self._find_copy()
        elif decoded.decoded > COPY_AFTER * self.rows:
            try:
                self._single = self._make_copy(self._shelf)
            except CacheError as error:
                if not is_forbidden(error):
                    raise
                self._single = self._make_copy(private_shelf())
        return self._single

    def _find_copy(self) -> LineReader | None:
        """A copy that somebody made; nothing is hashed to find it."""
        digest = self._digest or self._remembered_digest()
        note = self._shelf.note(_copy_name(digest)) if digest else None
        if note is None or not (self._shelf.has(note["copy"]) and self._shelf.has(note["index"])):
            return None
        return self._through(note, self._shelf)

    def _make_copy(self, shelf: Shelf) -> LineReader:
        name = _copy_name(self.digest())
        note = shelf.note(name)
        if note is None or not (shelf.has(note["copy"]) and shelf.has(note["index"])):
            copy = write_copy(self._lines(), shelf)
            content = CopyFile(shelf.place(copy), self.entry.path)
            document = write_index(shelf, "lines", LineScan(content))
            note = {
                "copy": copy,
                "index": index_key("lines", document.digest),
                "rows": document.rows,
                "bytes": document.bytes,
            }
            self._check()
            shelf.write_note(name, note)
        return self._through(note, shelf)

    def _through(self, note: dict[str, Any], shelf: Shelf) -> LineReader:
        entry = msgspec.structs.replace(
            self.entry, kind="lines", copy=note["copy"], index=note["index"], bytes=note["bytes"]
        )
        return LineReader(entry, shelf, self.number)

    def _lines(self) -> Iterator[bytes]:
        for _, values in self.stream(0, self.rows):
            lines = [
                _BAD + value.reason.encode() + b" " + msgspec.json.encode(value.message)
                if isinstance(value, RowError)
                else encode(value)
                for value in values
            ]
            yield b"\n".join([*lines, b""])

    # --- blocks ----------------------------------------------------------------------------

    def digest(self) -> str:
        """The content's digest, computed once per state of the file."""
        if not self._digest:
            self._digest = self._remembered_digest() or self._hash()
        return self._digest

    def _digest_name(self) -> str:
        return key(
            {
                "what": "file hashed",
                "format": INDEX_FORMAT,
                "location": self.entry.location,
                "signature": [*self.entry.signature, *filter(None, [self.entry.version])],
            }
        )

    def _remembered_digest(self) -> str:
        """What the note says, which was written after the file had come to rest; else empty."""
        if self.entry.is_remote and not self.entry.settled:
            return ""
        note = self._shelf.note(self._digest_name())
        if note is None:
            return ""
        self._settled = True
        return str(note["digest"])

    def _hash(self) -> str:
        file = self.entry.open()
        digest = content_digest(file, self.entry.kind)
        self._settled = self.entry.settled or has_settled(file)
        if self._settled:
            try:
                self._shelf.write_note(self._digest_name(), {"digest": digest})
            except CacheError as error:
                if not is_forbidden(error):
                    raise
        return digest

    def source_file(self) -> SourceFile:
        """What is known about the file."""
        entry = self.entry
        return SourceFile(entry.path, entry.kind, entry.bytes, entry.rows, self.digest())

    def blocks(self, part: Part) -> Iterator[Block]:
        """Ranges of rows of bounded size."""
        table, _ = self._opened or self._open()
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
        """What a worker must know to read some rows of a remote Arrow file."""
        if not self.entry.spans:
            return {}
        low, high = bisect_right(table.starts, first) - 1, bisect_right(table.starts, last - 1)
        head, *spans = self.entry.spans
        return {"spans": (head, *spans[low:high]), "spans_row": table.starts[low]}


def has_settled(file: ByteFile) -> bool:
    """Whether a local file had come to rest before it was opened for the read that is over."""
    return isinstance(file, LocalFile) and file.signature.settled(file.opened_ns)


def _copy_name(content: str) -> str:
    return key({"what": "rows as lines", "format": INDEX_FORMAT, "content": content})


def check_signature(location: str, path: str, expected: Signature) -> None:
    """Raise `SourceChanged` when a file is not in the state it was opened in."""
    file = LocalFile(location, expected)
    file.path = path


def _remote(entry: FileEntry) -> RemoteFile:
    return open_remote(entry.location, entry.path, entry.expected, entry.version, entry.settled)
