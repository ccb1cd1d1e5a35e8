"""Source files: bytes by offset, and the state of a file when it was read.

Every read passes its offset, so threads and forked processes share a file without a lock.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import ref

import msgspec
import xxhash

from tokenmill._core.process import ProcessLock
from tokenmill._core.ranged import RemoteFile
from tokenmill._core.remote import Version, is_remote
from tokenmill.errors import SourceChanged, SourceError, SourceMissing, UsageError
from tokenmill.sources.limits import MIB, OPEN_FILES, RACY_COARSE_NS, RACY_NS


class SourceBytes(Protocol):
    """Bytes by offset; `check` raises `SourceChanged` if the file changed since it was opened."""

    path: str
    size: int

    def pread(self, length: int, offset: int) -> bytes:
        """Return ``length`` bytes from ``offset``; fewer only at the end."""
        ...

    def check(self) -> None: ...


class Signature(NamedTuple):
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_stable(self, now_ns: int) -> bool:
        """Whether any write after ``now_ns``, when reading began, changes the signature.

        A file can be written twice within one clock tick of its file system (git calls this racy).
        """
        coarse = self.mtime_ns % 1_000_000 == 0 and self.ctime_ns % 1_000_000 == 0
        margin = RACY_COARSE_NS if coarse else RACY_NS
        return max(self.mtime_ns, self.ctime_ns) + margin < now_ns

    def is_in_future(self, now_ns: int) -> bool:
        """Whether a timestamp is ahead of this machine's clock."""
        return max(self.mtime_ns, self.ctime_ns) > now_ns + RACY_COARSE_NS


class LocalFile:
    """A local file, read with pread; `SourceChanged` if its signature is not ``expected``."""

    def __init__(self, path: str, expected: Signature | None = None) -> None:
        self.path = path
        self.fd = -1
        self.opened_ns = time.time_ns()
        try:
            # Non-blocking, so that opening a named pipe fails below instead of hanging.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        except FileNotFoundError as error:
            if expected is not None:
                raise SourceChanged("the file was removed", path=path) from error
            raise SourceMissing("no such file", path=path) from error
        except OSError as error:
            raise SourceError(f"cannot be opened: {error.strerror}", path=path) from error
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                "not a regular file; rows need random access, so copy a pipe to a file first",
                path=path,
            )
        self.signature = Signature.of(status)
        self.size = status.st_size
        if expected is not None and self.signature != expected:
            raise SourceChanged(_difference(expected, self.signature), path=path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # A default argument, because module globals may be gone when the interpreter exits.
        if self.fd >= 0:
            close(self.fd)

    def pread(self, length: int, offset: int) -> bytes:
        try:
            data = os.pread(self.fd, length, offset)
            while len(data) < length:
                more = os.pread(self.fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise self._unreadable(error, offset) from error
        return data

    def read_into(self, target: memoryview, offset: int) -> int:
        """Read up to ``len(target)`` bytes; 0 only at the end."""
        try:
            return os.preadv(self.fd, [target], offset)
        except OSError as error:
            raise self._unreadable(error, offset) from error

    def _unreadable(self, error: OSError, offset: int) -> SourceError:
        return SourceError(f"cannot be read: {error.strerror}", path=self.path, offset=offset)

    def now(self) -> Signature:
        """Return the current signature; `SourceChanged` if the file was removed."""
        status = os.fstat(self.fd)
        if status.st_nlink == 0:
            raise SourceChanged("the file was removed or replaced", path=self.path)
        return Signature.of(status)

    def check(self) -> None:
        now = self.now()
        if now != self.signature:
            raise SourceChanged(_difference(self.signature, now), path=self.path)


def _difference(before: Signature, after: Signature) -> str:
    parts = [
        f"{name} was {old}, is {new}"
        for name, old, new in zip(before._fields, before, after, strict=True)
        if old != new
    ]
    return f"the file changed since it was indexed ({', '.join(parts)}); open it again"


def digest_of(file: SourceBytes, offset: int, length: int) -> str:
    """Return the xxh3-128 of a span, read in pieces."""
    hashed, done = xxhash.xxh3_128(), 0
    while done < length:
        data = file.pread(min(MIB, length - done), offset + done)
        if not data:
            raise SourceChanged("the file became shorter", path=file.path, offset=offset + done)
        hashed.update(data)
        done += len(data)
    return hashed.hexdigest()


# --- file states -----------------------------------------------------------------------------


class Span(NamedTuple):
    """The bytes of a record batch of a remote Arrow file; the first span is the schema."""

    rows: int
    bytes: int  # decoded
    start: int
    stop: int


class SeenFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # as the caller named it
    location: str  # absolute path or URL
    kind: str  # "lines", "array", "parquet" or "arrow"
    signature: tuple[int, int, int, int]  # stat when it was read; for remote files only the size
    is_stable: bool  # whether an equal signature or version proves equal bytes
    version: str = ""  # of a remote object
    spans: tuple[Span, ...] = ()  # of a remote Arrow file: the schema and record batches

    @property
    def is_remote(self) -> bool:
        return is_remote(self.location)

    def open(self) -> LocalFile | RemoteFile:
        """Open the file; `SourceChanged` if its state differs."""
        if self.is_remote:
            return self.open_remote()
        return LocalFile(self.location, Signature(*self.signature))

    def open_remote(self) -> RemoteFile:
        """Open a remote object; every read compares the version."""
        size = self.signature[0]
        file = RemoteFile(self.location, Version(size, self.version, self.is_stable))
        file.path = self.path
        return file


class FileEntry(SeenFile, frozen=True, kw_only=True, omit_defaults=True):
    """One file of an opened source. Workers receive it pickled, so they need not scan again."""

    rows: int
    bytes: int  # of the content, decompressed
    digest: str = ""  # of the decompressed content; for columnar files computed when needed
    index: str = ""  # key of the row index; empty for columnar files
    copy: str = ""  # key of the seekable copy of a compressed file or an array


# --- limit of open files ----------------------------------------------------------------------


class Closable(Protocol):
    def close(self) -> None: ...


_order: deque[ref[Closable]] = deque()
_lock = ProcessLock()


def bound_open_files(reader: Closable) -> None:
    """Register a reader that has opened its file; over the limit, the oldest readers close.

    A thread that is reading keeps its descriptor, which closes with its last reference.
    """
    with _lock:
        _order.append(ref(reader))
        while len(_order) > OPEN_FILES:
            oldest = _order.popleft()()
            if oldest is not None and oldest is not reader:
                oldest.close()
