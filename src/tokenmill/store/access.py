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

from tokenmill._core import artifact
from tokenmill._core.remote_path import RemotePath, as_remote
from tokenmill.errors import CorruptionError
from tokenmill.store.layout import SIDECAR_VALUES
from tokenmill.store.record import BLOCK_BYTES, FileRecord

PIECE_BYTES = 8 << 20  # bytes per read of a whole file

REMEDY = "`tokenmill prepare --force-recache` rebuilds it"
REBUILD_SLICE = "`tokenmill prepare` rebuilds slices that `cache gc` removed"
ATTACH_AGAIN = "attach the same values again, which quarantines the damaged ones"


def remedy(path: Path | RemotePath) -> str:
    if as_remote(path) is not None:
        return "push the store there again"
    return ATTACH_AGAIN if path.name == SIDECAR_VALUES else REMEDY


def reading_errors(path: Path | RemotePath) -> AbstractContextManager[None]:
    """Translate an OSError while reading a file of a store or slice."""
    in_slices = as_remote(path) is None and path.parent.parent.name == "slices"
    return artifact.reading_errors(path, remedy(path), REBUILD_SLICE if in_slices else None)


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
        # `os.close` is bound early: at exit, Python may clear this module before its last file.
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
    artifact.require_size(path, actual, expected, remedy(path))


def require_checksum(path: Path | RemotePath, actual: str, expected: str) -> None:
    artifact.require_checksum(path, actual, expected, remedy(path))


class ChecksummedFile:
    """A published file whose blocks are checked on first access, unless ``check`` is false.

    `verified` is true once every block was checked; then `view` checks nothing.
    """

    def __init__(self, path: Path, record: FileRecord, *, mapped: bool, check: bool) -> None:
        self.path = path
        self.record = record
        self._bytes = ByteFile(path, mapped=mapped)
        require_size(path, self._bytes.size, record.size)
        blocks = self._require_checksums()
        self._unchecked = bytearray(b"\1" * blocks) if check else bytearray()
        self.verified = not any(self._unchecked)

    def _require_checksums(self) -> int:
        recorded, blocks = len(self.record.blocks), -(-self.record.size // BLOCK_BYTES)
        if recorded != blocks:
            raise CorruptionError(
                f"record has {recorded} block checksums, expected {blocks}", path=self.path
            )
        return blocks

    def view(self, start: int, length: int) -> memoryview:
        if not self.verified:
            self.check(start, length)
        return self._bytes.view(start, length)

    def _load(self, start: int, stop: int) -> memoryview:
        return self._bytes.view(start, stop - start)

    def read_blocks(self, start: int, length: int) -> memoryview:
        """Return the bytes of a range; read whole blocks and check them."""
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
        """Return position and size of a buffer."""
        try:
            start, length = self.record.buffers[name]
        except KeyError:
            raise CorruptionError(f"record has no buffer {name!r}", path=self.path) from None
        if start < 0 or length < 0 or start + length > self.record.size:
            raise CorruptionError(
                f"buffer {name!r} is at {start}+{length}, the file has {self.record.size} bytes",
                path=self.path,
            )
        return start, length

    def unchecked_view(self, start: int, length: int) -> memoryview:
        """Return the bytes of a range; the caller must `check` them first."""
        return self._bytes.view(start, length)

    def check(self, start: int, length: int) -> None:
        """Check the unchecked blocks of a range."""
        if self.verified or length <= 0:
            return
        for block in range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1):
            if self._unchecked[block]:
                at = block * BLOCK_BYTES
                size = min(BLOCK_BYTES, self.record.size - at)
                self.require_block(block, self._bytes.view(at, size))
                self._unchecked[block] = 0
                self.verified = not any(self._unchecked)

    def require_block(self, block: int, data: memoryview) -> None:
        actual, expected = xxhash.xxh3_64_hexdigest(data), self.record.blocks[block]
        if actual != expected:
            raise CorruptionError(
                f"block {block} has checksum {actual}, expected {expected}; {remedy(self.path)}",
                path=self.path,
                offset=block * BLOCK_BYTES,
            )

    def pieces(self) -> Iterator[memoryview]:
        """Yield the whole file; check every block, also those checked before."""
        for start in range(0, self.record.size, PIECE_BYTES):
            yield self.read_blocks(start, min(PIECE_BYTES, self.record.size - start))

    def check_all(self) -> int:
        return sum(map(len, self.pieces()))


def open_checksummed(
    path: Path, record: FileRecord, *, mapped: bool, check: bool
) -> ChecksummedFile:
    remote = as_remote(path)
    if remote is None:
        return ChecksummedFile(path, record, mapped=mapped, check=check)
    from tokenmill.store.remote import RemoteChecksummedFile

    return RemoteChecksummedFile(remote, record, check=check)
