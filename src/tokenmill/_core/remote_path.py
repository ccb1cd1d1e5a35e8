"""A URL used like a path (`RemotePath`), and a disk cache of what is read from it."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenmill._core.process import ProcessLock
from tokenmill._core.remote import RemoteObject, shown
from tokenmill.errors import TokenmillError, UsageError

MOST_BYTES = 8 << 30
KEPT_SHARE = 0.8  # of the bound is left after making room, so that it is not made for every block
_VARIABLE = "TOKENMILL_BLOCK_CACHE_BYTES"


def _most_bytes() -> int:
    stated = os.environ.get(_VARIABLE) or MOST_BYTES
    try:
        return max(0, int(stated))
    except ValueError:
        raise UsageError(f"{_VARIABLE} is {stated!r}; it is a number of bytes") from None


class BlockCache:
    """The ``blocks/`` directory of one cache: small files named by their content.

    Readers check what they take. Files may vanish at any time, and a full or read-only disk keeps
    nothing. Beyond ``TOKENMILL_BLOCK_CACHE_BYTES`` (0: keep nothing) the longest unused ones go.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "blocks"
        self._most = _most_bytes()
        self._known: int | None = None  # bytes, as of the last look plus what was put since
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[type[BlockCache], tuple[Path]]:
        return BlockCache, (self.root,)

    def place(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def get(self, name: str) -> bytes | None:
        path = self.place(name)
        try:
            data = path.read_bytes()
            os.utime(path)  # used now: others go first
        except OSError:
            return None
        return data

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.put_pieces(name, (data,))

    def put_pieces(self, name: str, pieces: Iterable[bytes | memoryview]) -> Path | None:
        """Keep a file that comes in pieces; None when it could not be kept."""
        if not self._most:
            return None
        path = self.place(name)
        unique = path.with_name(f".{os.getpid()}-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(unique, "wb") as file:
                size = sum(map(file.write, pieces))
            os.replace(unique, path)
            self._account(size)
        except TokenmillError:
            raise  # of the pieces: some of them are OSErrors, too
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                unique.unlink(missing_ok=True)
        return path

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self.place(name).unlink()

    def _account(self, size: int) -> None:
        with self._lock:
            if self._known is None:
                self._known = sum(status.st_size for _, status in self._all())
            else:
                self._known += size
            if self._known > self._most:
                self._known = self._make_room()

    def _all(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for directory, _, names in os.walk(self.directory):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(OSError):
                    found.append((path, path.stat()))
        return found

    def _make_room(self) -> int:
        """Remove the least recently used files; return the bytes that are left."""
        files = sorted(self._all(), key=lambda one: one[1].st_mtime_ns)
        left = sum(status.st_size for _, status in files)
        for path, status in files:
            if left <= KEPT_SHARE * self._most:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                left -= status.st_size
        return left


class RemotePath:
    """A directory or file by URL, with the part of `Path` that reading a store needs."""

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
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({shown(self.url)!r})"

    @functools.cached_property
    def object(self) -> RemoteObject:
        return RemoteObject(self.url)

    def read_bytes(self) -> bytes:
        return self.object.read()

    def fetch(self, start: int, stop: int) -> bytes:
        return self.object.fetch(start, stop)

    def read_kept(self, name: str, is_it: Callable[[bytes], bool]) -> bytes:
        """Return all bytes; the block cache keeps them as ``name``, which states their digest."""
        kept = self.blocks.get(name)
        if kept is not None:
            if is_it(kept):
                return kept
            self.blocks.drop(name)
        data = self.read_bytes()
        if is_it(data):
            self.blocks.put(name, data)
        return data


def as_remote(path: object) -> RemotePath | None:
    return path if isinstance(path, RemotePath) else None
