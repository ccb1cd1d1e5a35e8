"""Writing a file so that it can be trusted: synced, closed with a check, its size compared.

`write_file` writes a whole file; `NewFile` is one that grows piece by piece while others do, and
`HashedFile` one that knows its checksum. All are for files that nobody sees yet (see `publish`).
A network file system may report lost data only when a file is closed, so a failing close counts.
`writing_errors` turns what the operating system says into a `CacheError` that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from tokenmill.errors import CacheError, TokenmillError

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free space or choose another cache_dir",
    errno.EDQUOT: "the disk quota is used up; free space or choose another cache_dir",
    errno.EROFS: "the file system is read-only; choose a writable cache_dir",
    errno.EACCES: "no permission to write here; choose another cache_dir",
    errno.EPERM: "no permission to write here; choose another cache_dir",
}
_GATHERED = 1 << 20  # bytes of small pieces that are written at once

Buffer = bytes | bytearray | memoryview


@contextlib.contextmanager
def writing_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate an OSError met while writing into a `CacheError` that says what to do."""
    try:
        yield
    except TokenmillError:
        raise  # from here, or from whoever makes the chunks: some of them are OSErrors too
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "nothing was published; run the command again")
        reason = error.strerror or str(error)
        raise CacheError(f"cannot write: {reason}; {remedy}", path=path) from error


def write_file(path: Path, chunks: Buffer | Iterable[Buffer]) -> int:
    """Write a new file, sync it, close it, and check that it has the size that was written."""
    if isinstance(chunks, bytes | bytearray | memoryview):
        chunks = (chunks,)
    with writing_errors(path), NewFile(path) as file:
        for chunk in chunks:
            file.write(chunk)
    return file.size


class NewFile:
    """A file written piece by piece; leaving it syncs, closes and compares its size.

    Small pieces are gathered: a million of eight bytes are a few writes.

    Args:
        path: Where; nothing may be there.

    Attributes:
        size: Bytes given so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._held = bytearray()
        self._descriptor = -1

    def __enter__(self) -> Self:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with writing_errors(self.path):
            self._descriptor = os.open(self.path, flags, 0o666)
        return self

    def write(self, piece: Buffer) -> None:
        """Add bytes at the end."""
        view = memoryview(piece).cast("B")
        self.size += len(view)
        if len(self._held) + len(view) < _GATHERED:
            self._held += view
            return
        self._flush()
        self._put(view)

    def _flush(self) -> None:
        held, self._held = self._held, bytearray()
        self._put(memoryview(held))

    def _put(self, view: memoryview) -> None:
        with writing_errors(self.path):
            while view:  # a short write is not an error, it is a beginning
                step = os.write(self._descriptor, view)
                if step == 0:
                    raise OSError(errno.EIO, "the file takes no more bytes")
                view = view[step:]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        with writing_errors(self.path):
            try:
                self._flush()
                os.fsync(self._descriptor)
            except BaseException:
                self._abandon()
                raise
            os.close(self._descriptor)
            size = os.stat(self.path).st_size
        if size != self.size:
            raise CacheError(f"wrote {self.size} bytes, but the file has {size}", path=self.path)

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class HashedFile(NewFile):
    """A file written piece by piece, and the checksum of what was given so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._hasher = xxhash.xxh3_128()

    def write(self, piece: Buffer) -> None:
        """Add bytes at the end."""
        self._hasher.update(piece)
        super().write(piece)

    @property
    def checksum(self) -> str:
        """As 32 hex digits."""
        return self._hasher.hexdigest()
