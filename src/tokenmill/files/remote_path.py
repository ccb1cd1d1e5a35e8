"""A URL that can be used like a path.

A `RemotePath` is a directory or file elsewhere. It joins, has a name and a parent, and can be read
as a whole or by ranges, so that one layout describes a store wherever it lies. It carries the
`BlockCache` that keeps what is read of it. Whatever reads asks through a `RemoteObject`, with its
retries; what cannot be read is a `SourceError`, an OSError like those of a disk.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.files.blocks import BlockCache
from tokenmill.files.remote import RemoteObject, shown


class RemotePath:
    """A directory or file by URL; what is read of it is kept by ``blocks``."""

    def __init__(self, url: str, blocks: BlockCache) -> None:
        self.url = url.rstrip("/")
        self.blocks = blocks
        self._object: RemoteObject | None = None

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

    @property
    def object(self) -> RemoteObject:
        if self._object is None:
            self._object = RemoteObject(self.url)
        return self._object

    def read_bytes(self) -> bytes:
        return self.object.read()

    def fetch(self, start: int, stop: int) -> bytes:
        return self.object.fetch(start, stop)

    def read_kept(self, name: str, is_it: Callable[[bytes], bool]) -> bytes:
        """All of it, from the disk when it was read before.

        Args:
            name: What to keep it as: a name made of its content's digest.
            is_it: Whether bytes have that digest; what was fetched is kept only if so.
        """
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
    """The path as a remote one, if it is."""
    return path if isinstance(path, RemotePath) else None
