"""The row index of a line or array file, on disk and mapped.

A sealed directory: ``starts.bin`` (eight bytes per row, see `assemble`), ``table.bin`` (the table
of blocks, then one xxh3-64 per page of starts) and the summary ``index.json`` (what it is, counts,
the checksum of the table). The index is a function of kind and content, so its key is made of the
content's digest alone: the same data as .jsonl, .jsonl.gz and .jsonl.zst, under any name, has one.

Opening reads json and table; starts are mapped when the first row is wanted (a plan of blocks never
wants one), and a page of them is checked when it is first touched. On network file systems, where
a map can end the process, pages are read instead.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import CorruptionError
from tokenmill.files import is_network
from tokenmill.files.sealed import JsonForm, SealedKind
from tokenmill.fingerprint import canonical, checksum, key, key_of_pieces
from tokenmill.source.assemble import (
    BLOCK_TABLE,
    Assembler,
    BlockEntry,
    Blocks,
)
from tokenmill.source.cut import Integers
from tokenmill.source.limits import INDEX_FORMAT, STARTS_PER_PAGE
from tokenmill.source.shelf import Shelf

_KIND = SealedKind(
    "row index", "index.json", JsonForm("index", "check"), ("table.bin", "starts.bin"),
    remedy="open with rehash=True to have it made again",
)  # fmt: skip
_PAGE = 8 * STARTS_PER_PAGE  # bytes
_NUMBERS = (BLOCK_TABLE.names or ())[:-1]  # all columns but the digest
_UNPACKED = 512  # blocks unpacked at once: alone they would take ten times as long


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

    Args:
        directory: ``rows/<key>``.

    Attributes:
        document: Its index.json.
        table: The table of blocks.
        first_rows: First row of each block, as plain integers.
        checked: One byte per page: whether it was found good.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sealed = sealed = _KIND.admit(directory)
        self.document = document = sealed.convert(IndexDocument)
        table = sealed.read("table.bin", document.table)
        sealed.require("starts.bin", size=8 * (document.rows + 1))
        self.table = np.frombuffer(table, BLOCK_TABLE, document.blocks)
        self._checks = np.frombuffer(table, "<u8", offset=document.blocks * BLOCK_TABLE.itemsize)
        # Of a memory view, because that gives Python's integers without making a list of them.
        self.first_rows = np.ascontiguousarray(self.table["first_row"]).data
        self.checked = bytearray(len(self._checks))

    @cached_property
    def starts(self) -> memoryview | PreadStarts:
        """The starts of all rows and the file's end: mapped, or an object that reads them."""
        try:
            return self._map(8 * (self.document.rows + 1))
        except OSError as error:
            raise self._sealed.refusal(f"cannot be read: {error}", "starts.bin") from error

    def _map(self, size: int) -> memoryview | PreadStarts:
        path = self.directory / "starts.bin"
        if size <= _PAGE or is_network(path):
            # Small ones are not worth a descriptor; network ones must not be mapped.
            if size <= _PAGE:
                return memoryview(path.read_bytes()).cast("q")
            return PreadStarts(path)
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
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
        """One line of the table of blocks."""
        return next(self.blocks_from(number))

    def blocks_from(self, number: int) -> Iterator[BlockEntry]:
        """The lines of the table of blocks from one on, unpacked some hundreds at a time."""
        stop = number + 1
        while number < len(self.table):
            lines = self.table[number:stop]
            columns = [lines[name].tolist() for name in _NUMBERS]
            digits = lines["digest"].tobytes().hex()
            for at, numbers in enumerate(zip(*columns, strict=True)):
                yield BlockEntry._make((*numbers, digits[32 * at : 32 * at + 32]))
            number, stop = stop, stop + _UNPACKED

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
    """Starts read on demand: what a map offers, for file systems where maps are unsafe.

    Args:
        path: starts.bin.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    def __getitem__(self, wanted: Any) -> Any:
        if isinstance(wanted, slice):
            length = 8 * (wanted.stop - wanted.start)
            return memoryview(os.pread(self._fd, length, 8 * wanted.start)).cast("q")
        return int.from_bytes(os.pread(self._fd, 8, 8 * wanted), "little")
