"""Bytes by offset: what local files, copies and remote objects have in common.

A `SourceBytes` has a size, reads at an offset without a shared position (so threads and forked
processes need no lock), and can tell whether it is still what it was. A `Signature` is what a
stat says about a file; two equal ones mean "the same bytes" only when the file had come to rest
before it was read, which `settled` decides as git does for its index.

`LocalFile` is one descriptor, closed when the last user drops it. Objects elsewhere are read
through `tokenmill.files.ranged.RemoteFile`, which keeps the same promises by version.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import ref

import xxhash

from tokenmill.errors import SourceChanged, SourceError, SourceMissing, UsageError
from tokenmill.files import ProcessLock, is_remote
from tokenmill.source.limits import MIB, OPEN_FILES, RACY_COARSE_NS, RACY_NS


class SourceBytes(Protocol):
    """Anything that gives bytes by offset."""

    path: str
    size: int

    def pread(self, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes from ``offset``; fewer only at the end."""
        ...

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill a buffer from ``offset``; how many bytes were there."""
        ...

    def check(self) -> None:
        """Raise `SourceChanged` when this is no longer the file that was opened."""
        ...


class Signature(NamedTuple):
    """What tells one state of a file from another without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def settled(self, now_ns: int) -> bool:
        """Whether a later write would be bound to show in the signature.

        A file written within the clock tick of its own timestamps can be written again without
        a trace. ``now_ns`` is the time before its first byte was read.
        """
        coarse = self.mtime_ns % 1_000_000 == 0 and self.ctime_ns % 1_000_000 == 0
        margin = RACY_COARSE_NS if coarse else RACY_NS
        return max(self.mtime_ns, self.ctime_ns) + margin < now_ns

    def lies_ahead(self, now_ns: int) -> bool:
        """Whether a time is of a clock that is ahead of this one, or was set by hand."""
        return max(self.mtime_ns, self.ctime_ns) > now_ns + RACY_COARSE_NS


class LocalFile:
    """A file of this machine's file systems, read with pread.

    In another state than the expected one it is `SourceChanged`.
    """

    def __init__(self, path: str, expected: Signature | None = None) -> None:
        self.path = path
        self.fd = -1
        self.opened_ns = time.time_ns()
        try:
            # Not blocking: a pipe given by mistake must be refused, not waited for.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        except FileNotFoundError as error:
            if expected is not None:
                raise SourceChanged("the file is gone", path=path) from error
            raise SourceMissing("no such file", path=path) from error
        except OSError as error:
            raise SourceError(f"cannot be opened: {error.strerror}", path=path) from error
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("not a regular file: rows need random access", path=path)
        self.signature = Signature.of(status)
        self.size = status.st_size
        if expected is not None and self.signature != expected:
            raise SourceChanged(_difference(expected, self.signature), path=path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at the interpreter's end this module may be emptied before its last file.
        if self.fd >= 0:
            close(self.fd)

    def pread(self, length: int, offset: int) -> bytes:
        """Read; a short answer of the kernel is continued."""
        try:
            data = os.pread(self.fd, length, offset)
            while len(data) < length:
                more = os.pread(self.fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise SourceError(
                f"cannot be read: {error.strerror}", path=self.path, offset=offset
            ) from error
        return data

    def read_into(self, target: memoryview, offset: int) -> int:
        done = 0
        try:
            while done < len(target):
                step = os.preadv(self.fd, [target[done:]], offset + done)
                if step == 0:
                    break
                done += step
        except OSError as error:
            raise SourceError(
                f"cannot be read: {error.strerror}", path=self.path, offset=offset
            ) from error
        return done

    def now(self) -> Signature:
        """What the open file's stat says now; a file without a name counts as another."""
        status = os.fstat(self.fd)
        if status.st_nlink == 0:
            raise SourceChanged("the file was removed or replaced", path=self.path)
        return Signature.of(status)

    def check(self) -> None:
        """Compare the open file's stat with the one at opening."""
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


def location_of(path: str) -> str:
    """A source as any process finds it: a URL as it stands, a path made absolute."""
    return path if is_remote(path) else os.path.abspath(path)


def digest_of(file: SourceBytes, offset: int, length: int) -> str:
    """The digest of a span, read piece by piece."""
    hashed, done = xxhash.xxh3_128(), 0
    while done < length:
        data = file.pread(min(MIB, length - done), offset + done)
        if not data:
            raise SourceChanged("the file became shorter", path=file.path, offset=offset + done)
        hashed.update(data)
        done += len(data)
    return hashed.hexdigest()


# --- a bound on open files -----------------------------------------------------------------------


class Closable(Protocol):
    """A reader that can let go of its descriptors."""

    def close(self) -> None: ...


_order: deque[ref[Closable]] = deque()
_lock = ProcessLock()


def bound_open_files(reader: Closable) -> None:
    """A reader has opened its file; those that did so longest ago close theirs beyond the bound.

    A source may have thousands of files; descriptors must not grow with them. A thread that is just
    reading keeps what it holds until it is done: descriptors close when their last user lets go.
    """
    with _lock:
        _order.append(ref(reader))
        while len(_order) > OPEN_FILES:
            oldest = _order.popleft()()
            if oldest is not None and oldest is not reader:
                oldest.close()
