"""Read a remote object like a file: any offset, any thread, few requests.

All files of the process share a cache of recent blocks. Sequential reads fetch windows that double
up to 8 MiB; then the next window is prefetched. Long reads are not cached.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import threading
from collections.abc import Hashable
from typing import Any

from tokenmill._core.process import RecentValues
from tokenmill._core.remote import RemoteObject, Version, require_version
from tokenmill.errors import TokenmillError

BLOCK = 256 << 10  # bytes of one cached block, and of the request for a single row
WINDOW = 8 << 20  # bytes of the largest request
DIRECT = 4 << 20  # bytes; a longer read is not cached
RECENT_BYTES = 64 << 20  # bytes of blocks cached per process

recent = RecentValues(RECENT_BYTES)  # shared by all files and remote stores of this process

_serials = itertools.count()


class _Prefetch(threading.Thread):
    """Fetch a window while the previous one is read."""

    def __init__(self, file: RemoteFile, first: int, count: int) -> None:
        super().__init__(daemon=True, name="tokenmill-prefetch")
        self.first = first
        self.count = count
        self.pid = os.getpid()
        self.data: bytes | None = None
        self._file = file
        self.start()

    def run(self) -> None:
        # The reader repeats a failed request and gets the error.
        with contextlib.suppress(TokenmillError, RuntimeError):
            self.data = self._file.fetch_blocks(self.first, self.count)


class RemoteFile:
    """Bytes by offset of one version of an object: ``expected``, or the current one."""

    def __init__(self, url: str, expected: Version | None = None, *, shared: bool = True) -> None:
        self._object = RemoteObject(url)
        self.url = url
        self.path = self._object.path
        self.version = expected if expected is not None else self._object.look()
        self.size = self.version.size
        # Files share cached blocks only if an equal version proves equal bytes.
        shared = shared and self.version.is_stable
        self._key: Hashable = (url, self.version) if shared else next(_serials)
        self._next_block = -1  # after the last window
        self._window_blocks = 1  # length of the last window
        self._prefetch: _Prefetch | None = None

    def pread(self, length: int, offset: int) -> bytes:
        stop = min(offset + length, self.size)
        if offset >= stop:
            return b""
        if stop - offset >= DIRECT:
            return self._long(offset, stop)
        first, last = offset // BLOCK, (stop - 1) // BLOCK
        if first == last:
            return bytes(self._block(first, 1)[offset - first * BLOCK : stop - first * BLOCK])
        parts = [self._block(number, last + 1 - number) for number in range(first, last + 1)]
        parts[-1] = parts[-1][: stop - last * BLOCK]
        parts[0] = parts[0][offset - first * BLOCK :]
        return b"".join(parts)

    def check(self) -> None:
        require_version(self._object.look(), self.version, self.path, None)

    def _long(self, start: int, stop: int) -> bytes:
        pieces = [
            self._object.fetch(at, min(at + WINDOW, stop), self.version)
            for at in range(start, stop, WINDOW)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fetch_blocks(self, first: int, count: int) -> bytes:
        stop = min((first + count) * BLOCK, self.size)
        return self._object.fetch(first * BLOCK, stop, self.version)

    def _block(self, number: int, needed: int) -> memoryview:
        """Return one block; a request fetches at least ``needed`` blocks, up to the end."""
        cached: memoryview | None = recent.get((self._key, number))
        if cached is not None:
            return cached
        prefetch, self._prefetch = self._prefetch, None
        data = None
        if prefetch is not None and prefetch.pid == os.getpid() and prefetch.first == number:
            prefetch.join()
            data, count = prefetch.data, prefetch.count
        if data is None:
            is_sequential = number == self._next_block
            count = min(2 * self._window_blocks, WINDOW // BLOCK) if is_sequential else 1
            count = min(max(count, needed), -(-self.size // BLOCK) - number)
            data = self.fetch_blocks(number, count)
        self._next_block, self._window_blocks = number + count, count
        view = memoryview(data)
        for index in range(count - 1, -1, -1):  # the first block last: it is needed first
            recent.put((self._key, number + index), view[index * BLOCK : (index + 1) * BLOCK])
        if count >= WINDOW // BLOCK and self._next_block * BLOCK < self.size:
            left = -(-self.size // BLOCK) - self._next_block
            self._prefetch = _Prefetch(self, self._next_block, min(count, left))
        return view[:BLOCK]


class RangedStream(io.RawIOBase):
    """A remote file as a stream."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        data = self._file.pread(self._file.size if size < 0 else size, self._position)
        self._position += len(data)
        return data

    def readinto(self, target: Any) -> int:
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)
