"""The row index of a line or array file: assembled from a scan, on disk, and mapped.

Of a row only its *start* is stored, eight bytes; one more holds the end of the file. A row's bytes
are what stands between its start and the next one's, without the line break and blank lines (or
comma and white space) behind it: the bytes themselves say where it ends. So two numbers of the
index find a row, without a search, and a parser may be given the whole stretch.

A `BlockEntry` is one line of the table of blocks: byte span, rows, lines and the xxh3-128 of the
span. `Blocks` is that table as it grows, 64 bytes a line: a file may have a million of them, so
they are packed, not objects. The `Assembler` is fed portions of a scan in order and knows nothing
of how rows were found.

An index is a sealed directory: ``starts.bin``, ``table.bin`` (the table of blocks, then one xxh3-64
per page of starts) and the summary ``index.json`` (what it is, counts, the checksum of the table).
It is a function of kind and content, so its key is made of the content's digest alone: the same
data as .jsonl, .jsonl.gz and .jsonl.zst, under any name, has one.

Opening reads json and table; starts are mapped when the first row is wanted (a plan of blocks never
wants one), and a page of them is checked when it is first touched. On network file systems, where
a map can end the process, pages are read instead.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import CorruptionError
from tokenmill.files import is_network
from tokenmill.files.sealed import JsonForm, SealedKind
from tokenmill.fingerprint import canonical, checksum, key, key_of_pieces
from tokenmill.source.cut import Integers
from tokenmill.source.limits import INDEX_FORMAT, STARTS_PER_PAGE
from tokenmill.source.shelf import Shelf

_KIND = SealedKind(
    "row index", "index.json", JsonForm("index", "check"), ("table.bin", "starts.bin"),
    remedy="open with rehash=True to have it made again",
)  # fmt: skip
_PAGE = 8 * STARTS_PER_PAGE  # bytes

BLOCK_TABLE = np.dtype(
    [
        ("offset", "<i8"),
        ("length", "<i8"),
        ("first_row", "<i8"),
        ("rows", "<i8"),
        ("first_line", "<i8"),
        ("lines", "<i8"),
        ("digest", "u1", (16,)),
    ]
)
_LINE = struct.Struct("<6q16s")  # one line of `BLOCK_TABLE`
_DIGESTS = 4096  # digests written out at once


class BlockEntry(NamedTuple):
    """One block of a file: where it is, what it counts, what it contains."""

    offset: int
    length: int
    first_row: int
    rows: int
    first_line: int  # 1 + line breaks before the block
    lines: int  # line formats: lines that start in it; arrays: line breaks in it
    digest: str


@dataclass
class Blocks:
    """The table of blocks as it grows, packed."""

    packed: bytearray = field(default_factory=bytearray)

    def append(self, entry: BlockEntry) -> None:
        self.packed += _LINE.pack(*entry[:6], bytes.fromhex(entry.digest))

    def __len__(self) -> int:
        return len(self.packed) // _LINE.size

    def digests(self) -> Iterator[list[str]]:
        """The blocks' digests in order, some thousands at a time."""
        table = np.frombuffer(bytes(self.packed), dtype=BLOCK_TABLE)["digest"]
        for first in range(0, len(table), _DIGESTS):
            digits = table[first : first + _DIGESTS].tobytes().hex()
            yield [digits[at : at + 32] for at in range(0, len(digits), 32)]


class Assembler:
    """Counts, hashes and cuts what a scan finds.

    Attributes:
        blocks: The finished blocks, in order; complete after `finish`.
        rows: Rows seen.
    """

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.rows = 0
        self._offset = 0  # of the open block
        self._first_row = 0
        self._first_line = 1
        self._lines = 0
        self._hash = xxhash.xxh3_128()

    def feed(
        self,
        data: memoryview,
        base: int,
        starts: Integers,
        marks: Integers,
        cuts: Sequence[int],
    ) -> None:
        """Take the next portion of the file.

        Args:
            data: The portion's bytes; every byte of the file is fed once.
            base: Offset of the portion.
            starts: Offset of each row that starts here, ascending.
            marks: Offsets that count as lines: line starts, or line breaks for arrays.
            cuts: Offsets at which a block opens.
        """
        self.rows += len(starts)
        before = self.rows - len(starts)
        position, mark = base, 0
        for cut in cuts:
            self._hash.update(data[position - base : cut - base])
            marks_before = int(np.searchsorted(marks, cut))
            self._lines += marks_before - mark
            self._close(cut, before + int(np.searchsorted(starts, cut)))
            position, mark = cut, marks_before
        self._hash.update(data[position - base :])
        self._lines += len(marks) - mark

    def finish(self, end: int) -> None:
        """The file ends here: close the last block."""
        self._close(end, self.rows)

    def _close(self, end: int, rows: int) -> None:
        self.blocks.append(
            BlockEntry(
                offset=self._offset,
                length=end - self._offset,
                first_row=self._first_row,
                rows=rows - self._first_row,
                first_line=self._first_line,
                lines=self._lines,
                digest=self._hash.hexdigest(),
            )
        )
        self._offset, self._first_row = end, rows
        self._first_line += self._lines
        self._lines = 0
        self._hash = xxhash.xxh3_128()


def content_digest(kind: str, blocks: Blocks) -> str:
    """The digest of a file's (decompressed) content: its kind and its blocks'.

    It is the key of ``{"blocks": [digest, …], "kind": kind}``, made without holding all of them.
    """
    return key_of_pieces(_content_document(kind, blocks))


def _content_document(kind: str, blocks: Blocks) -> Iterator[bytes]:
    before = b'{"blocks":['
    for digests in blocks.digests():
        yield before + canonical(digests)[1:-1]
        before = b","
    yield (b"" if len(blocks) else before) + b'],"kind":' + canonical(kind) + b"}"


def index_key(kind: str, digest: str) -> str:
    """The name of the index of a content."""
    return key({"what": "row index", "format": INDEX_FORMAT, "kind": kind, "digest": digest})


class IndexDocument(msgspec.Struct, frozen=True, kw_only=True):
    """index.json."""

    format: int
    kind: str
    bytes: int
    rows: int
    blocks: int
    digest: str
    table: str  # checksum of table.bin


def write_index(shelf: Shelf, kind: str, scan: Any, *, repair: bool = False) -> IndexDocument:
    """Run a scan and publish its index.

    Args:
        shelf: Where to.
        kind: "lines" or "array".
        scan: Has ``starts()``, ``assembler`` and ``bytes``, as `LineScan`.
        repair: Check an index that is there already, and replace it if it is corrupt.
    """
    assembler: Assembler = scan.assembler
    checks = array("Q")
    with _KIND.stage(shelf.root) as draft:
        draft.write("starts.bin", _paged(scan.starts(), checks))
        table = assembler.blocks.packed + np.array(checks, dtype="<u8").tobytes()
        document = IndexDocument(
            format=INDEX_FORMAT,
            kind=kind,
            bytes=scan.bytes,
            rows=assembler.rows,
            blocks=len(assembler.blocks),
            digest=content_digest(kind, assembler.blocks),
            table=checksum(table),
        )
        draft.write("table.bin", table)
        place = shelf.place(index_key(kind, document.digest))
        is_whole = partial(_is_whole, place) if repair else None
        draft.publish(place, msgspec.to_builtins(document), is_whole=is_whole)
    return document


def _is_whole(place: Path) -> bool:
    try:
        Index(place).check_all()
    except CorruptionError:
        return False
    return True


def _paged(starts: Iterator[Integers], checks: array[int]) -> Iterator[bytes]:
    """The starts' bytes in whole pages, noting each page's checksum."""
    held = bytearray()
    for portion in starts:
        held += portion.astype("<i8", copy=False).tobytes()
        whole = len(held) - len(held) % _PAGE
        if whole:
            yield from _checked(bytes(held[:whole]), checks)
            del held[:whole]
    if held:
        yield from _checked(bytes(held), checks)


def _checked(data: bytes, checks: array[int]) -> Iterator[bytes]:
    checks.extend(
        xxhash.xxh3_64_intdigest(data[start : start + _PAGE])
        for start in range(0, len(data), _PAGE)
    )
    yield data


class Index:
    """An opened index.

    Attributes:
        first_rows: First row of each block, as plain integers.
        checked: One byte per page of starts: whether it was found good.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sealed = sealed = _KIND.admit(directory)
        self.document = document = sealed.convert(IndexDocument)
        table = sealed.read("table.bin", document.table)
        sealed.require("starts.bin", size=8 * (document.rows + 1))
        lines = np.frombuffer(table, BLOCK_TABLE, document.blocks)
        self._table = memoryview(table)[: lines.nbytes]
        self._checks = np.frombuffer(table, "<u8", offset=lines.nbytes)
        # Of a memory view, because that gives Python's integers without making a list of them.
        self.first_rows = np.ascontiguousarray(lines["first_row"]).data
        self.checked = bytearray(len(self._checks))

    @cached_property
    def starts(self) -> memoryview | PreadStarts:
        """The starts of all rows and the file's end: mapped, or an object that reads them."""
        path, size = self.directory / "starts.bin", 8 * (self.document.rows + 1)
        try:
            if size <= _PAGE:
                return memoryview(path.read_bytes()).cast("q")  # not worth a descriptor
            if is_network(path):
                return PreadStarts(path)
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._sealed.refusal(f"cannot be read: {error}", "starts.bin") from error
        return memoryview(mapped).cast("q")

    def check_page(self, page: int) -> None:
        """Check a page of starts and the next, which a page's last row looks into."""
        for number in range(page, min(page + 2, len(self.checked))):
            data = self.starts[number * STARTS_PER_PAGE : (number + 1) * STARTS_PER_PAGE]
            found = xxhash.xxh3_64_intdigest(data)
            if found != self._checks[number]:
                message = f"page {number} has checksum {found}, expected {self._checks[number]}"
                raise self._sealed.refusal(message, "starts.bin")
        self.checked[page] = 1  # only now: a page is good together with the one it looks into

    def check_all(self) -> None:
        """Check every page, not only those touched."""
        for page in range(len(self.checked)):
            self.check_page(page)

    def block(self, number: int) -> BlockEntry:
        return next(self.blocks_from(number))

    def blocks_from(self, number: int) -> Iterator[BlockEntry]:
        """The lines of the table of blocks from one on."""
        for *numbers, digest in _LINE.iter_unpack(self._table[number * _LINE.size :]):
            yield BlockEntry._make((*numbers, digest.hex()))

    def locate(self, rows: Integers) -> tuple[Integers, Integers]:
        """Where each of some ascending rows starts, and where its successor does."""
        if not len(rows):
            return rows, rows
        for page in np.unique(rows // STARTS_PER_PAGE).tolist():
            if not self.checked[page]:
                self.check_page(page)
        if isinstance(self.starts, PreadStarts):
            pairs = [(self.starts[row], self.starts[row + 1]) for row in rows.tolist()]
            both = np.array(pairs, dtype=np.int64)
            return both[:, 0].copy(), both[:, 1].copy()
        starts = np.frombuffer(self.starts, dtype=np.int64)
        return starts[rows], starts[rows + 1]


class PreadStarts:
    """Starts read on demand: what a map offers, for file systems where maps are unsafe."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    def __getitem__(self, wanted: Any) -> Any:
        if isinstance(wanted, slice):
            length = 8 * (wanted.stop - wanted.start)
            return memoryview(os.pread(self._fd, length, 8 * wanted.start)).cast("q")
        return int.from_bytes(os.pread(self._fd, 8, 8 * wanted), "little")
