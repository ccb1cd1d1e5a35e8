"""Read published files, mapped or range by range, with block checksums.

On network file systems a mapped file that vanishes ends the process with SIGBUS; there every access
is a `pread`, which can raise.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import xxhash

from tokenmill._core import sealed
from tokenmill._core.remote_path import RemotePath, as_remote
from tokenmill.errors import CorruptionError
from tokenmill.store.layout import SIDECAR_VALUES
from tokenmill.store.record import BLOCK_BYTES, FileRecord

PIECE_BYTES = 8 << 20  # read at once from a file that is read whole

REMEDY = "`tokenmill prepare --force-recache` rebuilds it"
ATTACH_AGAIN = "attach the same values again: the damaged ones then go to quarantine"


def remedy(path: Path | RemotePath) -> str:
    if as_remote(path) is not None:
        return "push the store there again"
    return ATTACH_AGAIN if path.name == SIDECAR_VALUES else REMEDY


def reading_errors(path: Path | RemotePath) -> AbstractContextManager[None]:
    """Translate an OSError met while reading a file of a store or slice."""
    return sealed.reading_errors(path, remedy(path))


class ByteFile:
    def __init__(self, path: Path, *, mapped: bool) -> None:
        self.path = path
        self._descriptor = -1
        with reading_errors(path):
            # Published files are never symlinks; following one could lead out of the cache.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self.size = os.fstat(self._descriptor).st_size
            self._view: memoryview | None = None
            if mapped:
                whole = self.size and mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
                self._view = memoryview(whole or b"")
                os.close(self._descriptor)
                self._descriptor = -1

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at the interpreter's end this module may be emptied before its last file.
        if self._descriptor >= 0:
            close(self._descriptor)

    def view(self, start: int, length: int) -> memoryview:
        if self._view is not None:
            return self._view[start : start + length]
        pieces: list[bytes] = []
        while length > 0:
            with reading_errors(self.path):
                piece = os.pread(self._descriptor, length, start)
            if not piece:
                raise CorruptionError(
                    f"ends early: {length} bytes missing", path=self.path, offset=start
                )
            pieces.append(piece)
            start += len(piece)
            length -= len(piece)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def require_size(path: Path | RemotePath, actual: int, expected: int) -> None:
    sealed.require_size(path, actual, expected, remedy(path))


def require_checksum(path: Path | RemotePath, actual: str, expected: str) -> None:
    sealed.require_checksum(path, actual, expected, remedy(path))


class GuardedFile:
    """A published file whose blocks are checked on first touch, unless ``check`` is false.

    `clean` is true once every block was checked; then `view` checks nothing.
    """

    def __init__(self, path: Path, record: FileRecord, *, mapped: bool, check: bool) -> None:
        self.path = path
        self.record = record
        self._bytes = ByteFile(path, mapped=mapped)
        require_size(path, self._bytes.size, record.size)
        blocks = self._require_checksums()
        self._unchecked = bytearray(b"\1" * blocks) if check else bytearray()
        self.clean = not any(self._unchecked)

    def _require_checksums(self) -> int:
        stated, blocks = len(self.record.blocks), -(-self.record.size // BLOCK_BYTES)
        if stated != blocks:
            raise CorruptionError(
                f"record has {stated} block checksums, expected {blocks}", path=self.path
            )
        return blocks

    def view(self, start: int, length: int) -> memoryview:
        if not self.clean:
            self.check(start, length)
        return self._bytes.view(start, length)

    def _load(self, start: int, stop: int) -> memoryview:
        return self._bytes.view(start, stop - start)

    def read_blocks(self, start: int, length: int) -> memoryview:
        """Bytes of a range; whole blocks are read at once and checked."""
        if length <= 0:
            return memoryview(b"")
        first, last = start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES
        begin = first * BLOCK_BYTES
        data = self._load(begin, min((last + 1) * BLOCK_BYTES, self.record.size))
        for block in range(first, last + 1):
            at = block * BLOCK_BYTES - begin
            self.require_block(block, data[at : at + BLOCK_BYTES])
        return data[start - begin : start - begin + length]

    def buffer(self, name: str) -> tuple[int, int]:
        """Position and size of a named buffer."""
        try:
            start, length = self.record.buffers[name]
        except KeyError:
            raise CorruptionError(f"record knows no buffer {name!r}", path=self.path) from None
        if start < 0 or length < 0 or start + length > self.record.size:
            raise CorruptionError(
                f"buffer {name!r} lies at {start}+{length}, outside of {self.record.size} bytes",
                path=self.path,
            )
        return start, length

    def unchecked_view(self, start: int, length: int) -> memoryview:
        """Bytes of a range; the caller uses `check` before reading them."""
        return self._bytes.view(start, length)

    def check(self, start: int, length: int) -> None:
        """Check the blocks of a range that were not checked before."""
        if self.clean or length <= 0:
            return
        for block in range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1):
            if self._unchecked[block]:
                at = block * BLOCK_BYTES
                size = min(BLOCK_BYTES, self.record.size - at)
                self.require_block(block, self._bytes.view(at, size))
                self._unchecked[block] = 0
                self.clean = not any(self._unchecked)

    def require_block(self, block: int, data: memoryview) -> None:
        actual, expected = xxhash.xxh3_64_hexdigest(data), self.record.blocks[block]
        if actual != expected:
            raise CorruptionError(
                f"block {block} has checksum {actual}, expected {expected}; {remedy(self.path)}",
                path=self.path,
                offset=block * BLOCK_BYTES,
            )

    def pieces(self) -> Iterator[memoryview]:
        """Read the whole file; every block is checked, again if need be."""
        for start in range(0, self.record.size, PIECE_BYTES):
            yield self.read_blocks(start, min(PIECE_BYTES, self.record.size - start))

    def check_all(self) -> int:
        return sum(map(len, self.pieces()))


def open_guarded(path: Path, record: FileRecord, *, mapped: bool, check: bool) -> GuardedFile:
    remote = as_remote(path)
    if remote is None:
        return GuardedFile(path, record, mapped=mapped, check=check)
    from tokenmill.store.remote import RemoteGuardedFile

    return RemoteGuardedFile(remote, record, check=check)
