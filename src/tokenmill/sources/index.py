"""The row index of a line file, and the cache of indexes.

An index is a directory with ``starts.bin`` (the offset of each row and the end of the file, eight
bytes each), ``table.bin`` (the blocks, then one xxh3-64 per page of starts) and ``index.json``. Its
key is the digest of the content: .jsonl, .gz and .zst of the same lines share an index.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill._core.artifact import ArtifactKind
from tokenmill._core.fingerprint import checksum, key
from tokenmill._core.paths import is_network, require_inside
from tokenmill._core.process import has_process_directory, process_directory
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.sources.limits import INDEX_FORMAT, STARTS_PER_PAGE

Integers = npt.NDArray[np.int64]
T = TypeVar("T")
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_NOTE = ArtifactKind("note", "note.json")
_KIND = ArtifactKind("row index", "index.json", ("table.bin", "starts.bin"))
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
_LINE = struct.Struct("<6q16s")  # one record of `BLOCK_TABLE`


class IndexCache:
    """The ``rows/`` directory of one cache: indexes, seekable copies and notes.

    A *note* is cached metadata of a file: it maps the file's state to its index. If the cache is
    not writable, a private directory of the process is used instead (`private_index_cache`).
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        if not (len(key) == 40 and set(key) <= set("0123456789abcdef")):
            raise CorruptionError(f"not a key: {key[:60]!r}", path=self.root)
        path = self.root / "rows" / key
        require_inside(path, self.root)
        return path

    def has(self, key: str) -> bool:
        return self.path(key).is_dir()

    def note(self, key: str) -> dict[str, Any] | None:
        note: dict[str, Any] | None = _NOTE.open_or_none(self.path(key), self.root)
        return note

    def write_note(self, key: str, note: dict[str, Any]) -> None:
        _NOTE.write(self.root, self.path(key), note)


def private_index_cache() -> IndexCache:
    return IndexCache(process_directory())


def existing_private_index_cache() -> IndexCache | None:
    return private_index_cache() if has_process_directory() else None


def in_writable(cache: IndexCache, write: Callable[[IndexCache], T]) -> T:
    """Write to a cache, or to a private one if this user may not write the cache."""
    try:
        return write(cache)
    except CacheError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in _FORBIDDEN):
            raise
    return write(private_index_cache())


class BlockEntry(NamedTuple):
    offset: int
    length: int
    first_row: int
    rows: int
    first_line: int  # 1 + line breaks before the block
    lines: int  # lines that start in the block
    digest: str


class Assembler:
    """Collect the blocks of a scanned file; `blocks` is complete after `finish`."""

    def __init__(self) -> None:
        self.blocks: list[BlockEntry] = []
        self.rows = 0
        self._offset = 0  # of the current block
        self._first_row = 0
        self._first_line = 1
        self._lines = 0
        self._hash = xxhash.xxh3_128()

    def feed(
        self, data: memoryview, base: int, starts: Integers, lines: Integers, cuts: Sequence[int]
    ) -> None:
        """Add the next portion of the file, which starts at ``base``.

        ``starts``, ``lines`` and ``cuts`` are the ascending file offsets of the rows, lines
        (including blank ones) and blocks that start in the portion.
        """
        before = self.rows
        self.rows += len(starts)
        position, line = base, 0
        for cut in cuts:
            self._hash.update(data[position - base : cut - base])
            lines_before = int(np.searchsorted(lines, cut))
            self._lines += lines_before - line
            self._close(cut, before + int(np.searchsorted(starts, cut)))
            position, line = cut, lines_before
        self._hash.update(data[position - base :])
        self._lines += len(lines) - line

    def finish(self, end: int) -> None:
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


def index_key(digest: str) -> str:
    return key({"what": "row index", "format": INDEX_FORMAT, "digest": digest})


class IndexDocument(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    bytes: int
    rows: int
    blocks: int
    digest: str
    table: str  # checksum of table.bin


def write_index(index_cache: IndexCache, scan: Any, *, repair: bool = False) -> IndexDocument:
    """Run a `LineScan` and publish its index; ``repair`` replaces a damaged one."""
    assembler: Assembler = scan.assembler
    checks = array("Q")
    with _KIND.stage(index_cache.root) as writer:
        writer.write("starts.bin", _paged(scan.starts(), checks))
        blocks = assembler.blocks
        lines = [_LINE.pack(*block[:6], bytes.fromhex(block.digest)) for block in blocks]
        table = b"".join(lines) + np.array(checks, dtype="<u8").tobytes()
        document = IndexDocument(
            format=INDEX_FORMAT,
            bytes=scan.bytes,
            rows=assembler.rows,
            blocks=len(blocks),
            digest=key({"blocks": [block.digest for block in blocks]}),
            table=checksum(table),
        )
        writer.write("table.bin", table)
        path = index_cache.path(index_key(document.digest))
        is_intact = partial(_is_intact, path) if repair else None
        writer.publish(path, msgspec.to_builtins(document), is_intact=is_intact)
    return document


def _is_intact(path: Path) -> bool:
    try:
        index = Index(path)
        for page in range(index.pages):
            index.check_page(page)
    except CorruptionError:
        return False
    return True


def _paged(starts: Iterator[Integers], checks: array[int]) -> Iterator[bytes]:
    """Yield the starts as pages of bytes; append the checksum of each page to ``checks``."""
    buffer = bytearray()
    for portion in starts:
        buffer += portion.astype("<i8", copy=False).tobytes()
        while len(buffer) >= _PAGE:
            page = bytes(buffer[:_PAGE])
            checks.append(xxhash.xxh3_64_intdigest(page))
            yield page
            del buffer[:_PAGE]
    if buffer:
        checks.append(xxhash.xxh3_64_intdigest(buffer))
        yield bytes(buffer)


class Index:
    """An open index. `first_rows` has the first row of each block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._artifact = artifact = _KIND.open(directory)
        self.document = document = artifact.convert(IndexDocument)
        starts_size = 8 * (document.rows + 1)
        size = document.blocks * BLOCK_TABLE.itemsize + 8 * -(-starts_size // _PAGE)
        table = artifact.read("table.bin", size, document.table)
        artifact.require("starts.bin", size=starts_size)
        lines = np.frombuffer(table, BLOCK_TABLE, document.blocks)
        self._table = memoryview(table)[: lines.nbytes]
        self._checks = np.frombuffer(table, "<u8", offset=lines.nbytes)
        # A memory view returns Python integers without a list of them.
        self.first_rows = np.ascontiguousarray(lines["first_row"]).data
        self.pages = len(self._checks)

    @cached_property
    def starts(self) -> memoryview | PreadStarts:
        """Offsets of all rows and the end of the file."""
        path, size = self.directory / "starts.bin", 8 * (self.document.rows + 1)
        try:
            if size <= _PAGE:
                return memoryview(path.read_bytes()).cast("q")  # saves a file descriptor
            if is_network(path):
                return PreadStarts(path)
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._artifact.corruption_error(
                f"cannot be read: {error}", "starts.bin"
            ) from error
        return memoryview(mapped).cast("q")

    def check_page(self, page: int) -> None:
        """Check a page of starts and the next one, where the last row of the page ends."""
        for number in range(page, min(page + 2, self.pages)):
            data = self.starts[number * STARTS_PER_PAGE : (number + 1) * STARTS_PER_PAGE]
            actual = xxhash.xxh3_64_intdigest(data)
            if actual != self._checks[number]:
                message = f"page {number} has checksum {actual}, expected {self._checks[number]}"
                raise self._artifact.corruption_error(message, "starts.bin")

    def block(self, number: int) -> BlockEntry:
        return next(self.blocks_from(number))

    def blocks_from(self, number: int) -> Iterator[BlockEntry]:
        for *numbers, digest in _LINE.iter_unpack(self._table[number * _LINE.size :]):
            yield BlockEntry._make((*numbers, digest.hex()))

    def locate(self, rows: Integers) -> tuple[Integers, Integers]:
        """Return the offset of each row and of its next row, without checking pages."""
        if isinstance(self.starts, PreadStarts):
            pairs = [(self.starts[row], self.starts[row + 1]) for row in rows.tolist()]
            both = np.array(pairs, dtype=np.int64)
            return both[:, 0].copy(), both[:, 1].copy()
        starts = np.frombuffer(self.starts, dtype=np.int64)
        return starts[rows], starts[rows + 1]


class PreadStarts:
    """Starts read on demand, for file systems where mapping is unsafe."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            length = 8 * (index.stop - index.start)
            return memoryview(os.pread(self._fd, length, 8 * index.start)).cast("q")
        return int.from_bytes(os.pread(self._fd, 8, 8 * index), "little")
