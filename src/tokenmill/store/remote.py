"""Remote stores, read row by row over the network.

Opening fetches the manifest and the table of slices. Reading a row fetches its blocks into the
local block cache, which is bounded and keyed by content. Every block is checked when loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash

from tokenmill._core import ranged
from tokenmill._core.artifact import publish_files
from tokenmill._core.fingerprint import checksum
from tokenmill._core.paths import cache_root, is_network
from tokenmill._core.process import process_directory
from tokenmill._core.publish import Staging
from tokenmill._core.ranged import WINDOW
from tokenmill._core.remote import protocol_of
from tokenmill._core.remote_path import BlockCache, RemotePath
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import layout as names
from tokenmill.store.access import ChecksummedFile, reading_errors, require_checksum, require_size
from tokenmill.store.layout import CacheLayout
from tokenmill.store.manifest import Document, FileEntry, check_file
from tokenmill.store.record import BLOCK_BYTES, UNREADABLE, FileRecord
from tokenmill.store.store import Store

_STREAMS = 4  # sequential readers of one file: ids, mask, and two columns
CONTENTS = "contents.json"  # tokenizer and processor files, for servers that cannot list


class _Contents(msgspec.Struct, frozen=True):
    key: str
    files: dict[str, FileEntry]


class RemoteStore(Store):
    """A store at a URL; fetched blocks are cached in ``cache_dir``."""

    def __init__(
        self,
        path: str,
        verify: str = "lazy",
        *,
        paths: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **media: Any,
    ) -> None:
        if protocol_of(path) in ("http", "https") and "?" in path:
            raise UsageError(
                "the URL of a store may not have a query, because a store is a directory", path=path
            )
        self._cache_dir = cache_dir
        super().__init__(path, verify, paths=paths, **media)
        self._options["cache_dir"] = cache_dir

    def _locate(self, path: str | os.PathLike[str]) -> Path:
        root = cache_root(self._cache_dir)
        self._mapped, self._maps_own = False, not is_network(root)
        # `RemotePath` has the methods of `Path` that `StoreLayout` uses.
        return cast(Path, RemotePath(str(path), BlockCache(root)))

    @property
    def remote(self) -> RemotePath:
        return cast(RemotePath, self.path)

    def _check_own_files(self) -> None:
        self._own_file(names.TABLE)

    def _own_file(self, name: str) -> Path:
        entry = self.manifest["files"][name]
        return fetch_file(self.remote / name, entry, check=self.checks_blocks)

    def _check_own(self, name: str, entry: Document) -> int:
        return sum(map(len, _checked_pieces(self.remote / name, entry)))

    @property
    def tokenizer_path(self) -> Path:
        return _fetch_model(self.remote, "tokenizer", self.manifest["tokenizer"]["identity"])

    @property
    def processor_path(self) -> Path | None:
        key = self.processor_key
        return _fetch_model(self.remote, "processor", key) if key else None


def _fetch_model(store: RemotePath, kind: str, key: str) -> Path:
    """Return the local copy of a tokenizer or processor; fetch it if needed."""
    target: Path = getattr(CacheLayout(store.blocks.root), kind)(key)
    if target.is_dir():
        return target
    listing = store / CONTENTS
    try:
        with reading_errors(listing):
            contents = msgspec.json.decode(listing.read_bytes(), type=_Contents)
    except UNREADABLE as error:
        raise CorruptionError(f"not a list of files: {error}", path=listing) from error
    files = {}
    for name, entry in contents.files.items():
        parts = name.split("/")
        known = parts[0] in ("tokenizer", "processor")
        if not known or ".." in parts or "" in parts or "\\" in name:
            raise CorruptionError(f"lists an invalid file name {name!r}", path=listing)
        if parts[0] != kind:
            continue
        with reading_errors(listing):
            data = (store / name).read_bytes()
        require_checksum(store / name, checksum(data), entry.checksum)
        files["/".join(parts[1:])] = data
    publish_files(store.blocks.root, target, files)
    return target


def fetch_file(path: RemotePath, entry: Document, *, check: bool) -> Path:
    """Return a local copy of a file, named by its checksum."""
    name = f"{entry['checksum']}.{path.name}"
    local = path.blocks.path(name)
    if local.is_file():
        try:
            check_file(local, entry, content=check)
            return local
        except CorruptionError:
            path.blocks.drop(name)
    cached = path.blocks.put_pieces(name, _checked_pieces(path, entry))
    if cached is not None:
        return cached
    # The cache cannot be written: use a directory that is removed with this process.
    root = process_directory()
    if not (root / name).exists():
        with Staging(root) as staging:
            staging.publish(staging.write(name, _checked_pieces(path, entry)), root / name)
    return root / name


def _checked_pieces(path: RemotePath, entry: Document) -> Iterator[bytes]:
    """Yield the bytes of a file; raise at the end if the checksum differs."""
    size, hasher = entry["size"], xxhash.xxh3_128()
    with reading_errors(path):
        require_size(path, path.object.look().size, size)
        for start in range(0, size, WINDOW):
            piece = path.fetch(start, min(start + WINDOW, size))
            hasher.update(piece)
            yield piece
    require_checksum(path, hasher.hexdigest(), entry["checksum"])


class RemoteChecksummedFile(ChecksummedFile):
    """A slice's remote file: blocks are fetched on demand and checked when loaded."""

    def __init__(self, path: RemotePath, record: FileRecord, *, check: bool) -> None:
        self.path = cast(Path, path)
        self.record = record
        self._remote = path
        self._skip_checks = not check
        self.verified = True  # `view` checks blocks itself
        self._require_checksums()
        self._after: dict[int, int] = {}  # block after a request → number of blocks requested

    def view(self, start: int, length: int) -> memoryview:
        if length <= 0:
            return memoryview(b"")
        first, last = start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES
        base = first * BLOCK_BYTES
        if first == last:
            return self._block(first, 1)[start - base : start - base + length]
        blocks = [self._block(number, last + 1 - number) for number in range(first, last + 1)]
        return memoryview(b"".join(blocks))[start - base : start - base + length]

    unchecked_view = view

    def check(self, start: int, length: int) -> None:
        pass  # every block is checked when it is loaded

    def _name(self, block: int) -> str:
        return f"{self._remote.name}.{block}.{self.record.blocks[block]}"

    def _block(self, number: int, count: int) -> memoryview:
        name = self._name(number)
        recent: memoryview | None = ranged.recent.get((self._skip_checks, name))
        if recent is not None:
            return recent
        cached = self._remote.blocks.get(name)
        if cached is not None:
            if self._skip_checks or xxhash.xxh3_64_hexdigest(cached) == self.record.blocks[number]:
                view = memoryview(cached)
                ranged.recent.put((self._skip_checks, name), view)
                return view
            self._remote.blocks.drop(name)
        return self._fetched(number, count)

    def _fetched(self, number: int, needed: int) -> memoryview:
        """Fetch a block and those after it, twice as many as the last sequential request."""
        count = min(2 * self._after.pop(number, 0), WINDOW // BLOCK_BYTES)
        count = min(max(count, needed, 1), len(self.record.blocks) - number)
        start = number * BLOCK_BYTES
        view = self._load(start, min(start + count * BLOCK_BYTES, self.record.size))
        for index in range(count - 1, -1, -1):
            block = view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            if not self._skip_checks:
                self.require_block(number + index, block)
            name = self._name(number + index)
            self._remote.blocks.put(name, block)
            ranged.recent.put((self._skip_checks, name), block)
        self._after[number + count] = count
        while len(self._after) > _STREAMS:
            self._after.pop(next(iter(self._after)))
        return view[:BLOCK_BYTES]

    def _load(self, start: int, stop: int) -> memoryview:
        with reading_errors(self.path):
            return memoryview(self._remote.fetch(start, stop))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the whole remote file, without caches; check every block."""
        with reading_errors(self.path):
            actual = self._remote.object.look().size
        require_size(self.path, actual, self.record.size)
        yield from super().pieces()
