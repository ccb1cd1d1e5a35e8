"""A URL used like a path (`RemotePath`), and a disk cache of blocks read from it."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenmill._core.process import ProcessLock
from tokenmill._core.remote import RemoteObject
from tokenmill.errors import TokenmillError, UsageError, shown

DEFAULT_MAX_BYTES = 8 << 30
LEFT_SHARE = 0.8  # of the bound, left by an eviction, so that not every block causes another one
_VARIABLE = "TOKENMILL_BLOCK_CACHE_BYTES"


def _max_bytes() -> int:
    value = os.environ.get(_VARIABLE) or DEFAULT_MAX_BYTES
    try:
        return max(0, int(value))
    except ValueError:
        raise UsageError(f"{_VARIABLE} must be a number of bytes, got {value!r}") from None


class BlockCache:
    """The ``blocks/`` directory of one cache: small files named by their content.

    Readers verify the bytes. Files may vanish at any time, and on a full or read-only disk nothing
    is cached. Over ``TOKENMILL_BLOCK_CACHE_BYTES`` (0 disables the cache), the least recently used
    files are removed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "blocks"
        self._max_bytes = _max_bytes()
        self._bytes: int | None = None  # on disk when last counted, plus files added since
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[type[BlockCache], tuple[Path]]:
        return BlockCache, (self.root,)

    def path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def get(self, name: str) -> bytes | None:
        path = self.path(name)
        try:
            data = path.read_bytes()
            os.utime(path)  # marks it as recently used
        except OSError:
            return None
        return data

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.put_pieces(name, (data,))

    def put_pieces(self, name: str, pieces: Iterable[bytes | memoryview]) -> Path | None:
        """Add a file that comes in pieces; return None if it could not be written."""
        if not self._max_bytes:
            return None
        path = self.path(name)
        unique = path.with_name(f".{os.getpid()}-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(unique, "wb") as file:
                size = sum(map(file.write, pieces))
            os.replace(unique, path)
            self._add_bytes(size)
        except TokenmillError:
            raise  # raised by the pieces; some TokenmillErrors are OSErrors
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                unique.unlink(missing_ok=True)
        return path

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self.path(name).unlink()

    def _add_bytes(self, size: int) -> None:
        with self._lock:
            if self._bytes is None:
                self._bytes = sum(status.st_size for _, status in self._all())
            else:
                self._bytes += size
            if self._bytes > self._max_bytes:
                self._bytes = self._evict()

    def _all(self) -> list[tuple[Path, os.stat_result]]:
        files = []
        for directory, _, names in os.walk(self.directory):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(OSError):
                    files.append((path, path.stat()))
        return files

    def _evict(self) -> int:
        """Remove the least recently used files; return the bytes that are left."""
        files = sorted(self._all(), key=lambda one: one[1].st_mtime_ns)
        left = sum(status.st_size for _, status in files)
        for path, status in files:
            if left <= LEFT_SHARE * self._max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                left -= status.st_size
        return left


class RemotePath:
    """A directory or file by URL, with the methods of `Path` that reading a store needs."""

    def __init__(self, url: str, blocks: BlockCache) -> None:
        self.url = url.rstrip("/")
        self.blocks = blocks

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.blocks)

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0], self.blocks)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __fspath__(self) -> str:
        return shown(self.url)

    def __str__(self) -> str:
        return shown(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({shown(self.url)!r})"

    @functools.cached_property
    def object(self) -> RemoteObject:
        return RemoteObject(self.url)

    def read_bytes(self) -> bytes:
        return self.object.read()

    def fetch(self, start: int, stop: int) -> bytes:
        return self.object.fetch(start, stop)

    def read_cached(self, name: str, is_valid: Callable[[bytes], bool]) -> bytes:
        """Return all bytes through the block cache, where ``name`` contains their digest."""
        cached = self.blocks.get(name)
        if cached is not None:
            if is_valid(cached):
                return cached
            self.blocks.drop(name)
        data = self.read_bytes()
        if is_valid(data):
            self.blocks.put(name, data)
        return data


def as_remote(path: object) -> RemotePath | None:
    return path if isinstance(path, RemotePath) else None
