"""Remote stores, read row by row over the network.

Opening fetches the manifest and the table of slices; a row fetches the blocks it touches into the
local block cache, which is bounded and keyed by content. Every block is checked when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash

from tokenmill._core import ranged
from tokenmill._core.fingerprint import checksum
from tokenmill._core.paths import default_cache_dir, is_network
from tokenmill._core.process import process_directory
from tokenmill._core.publish import Staging
from tokenmill._core.ranged import WINDOW
from tokenmill._core.remote import protocol_of
from tokenmill._core.remote_path import BlockCache, RemotePath
from tokenmill._core.sealed import publish_files
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import layout as names
from tokenmill.store.access import GuardedFile, reading_errors, require_checksum, require_size
from tokenmill.store.layout import CacheLayout
from tokenmill.store.manifest import Document, StatedFile, check_file
from tokenmill.store.record import BLOCK_BYTES, UNREADABLE, FileRecord
from tokenmill.store.store import Store

_STREAMS = 4  # readers that may go on side by side in one file: ids, mask, and two columns
CONTENTS = "contents.json"  # the tokenizer's and processor's files, for places that cannot list


class _Contents(msgspec.Struct, frozen=True):
    key: str
    files: dict[str, StatedFile]


class RemoteStore(Store):
    """A store whose directory is a URL; ``cache_dir`` keeps what is fetched."""

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
                "a store's URL has no query: it is a directory of many files", path=path
            )
        self._cache_dir = cache_dir
        super().__init__(path, verify, paths=paths, **media)
        self._options["cache_dir"] = cache_dir

    def _locate(self, path: str | os.PathLike[str]) -> Path:
        root = Path(self._cache_dir or default_cache_dir()).absolute()
        self._mapped, self._maps_own = False, not is_network(root)
        # It speaks the part of `Path` that reading a store needs, so that there is one layout.
        return cast(Path, RemotePath(str(path), BlockCache(root)))

    @property
    def remote(self) -> RemotePath:
        return cast(RemotePath, self.path)

    def _check_own_files(self) -> None:
        self._own_file(names.TABLE)

    def _own_file(self, name: str) -> Path:
        stated = self.manifest["files"][name]
        return fetch_file(self.remote / name, stated, check=self.checks_blocks)

    def _check_own(self, name: str, stated: Document) -> int:
        return sum(map(len, _checked_pieces(self.remote / name, stated)))

    @property
    def tokenizer_path(self) -> Path:
        cache = CacheLayout(self.remote.blocks.root)
        target = cache.tokenizer(self.manifest["tokenizer"]["identity"])
        return _fetch_model(self.remote, "tokenizer", target)

    @property
    def processor_path(self) -> Path | None:
        if not self.processor_key:
            return None
        target = CacheLayout(self.remote.blocks.root).processor(self.processor_key)
        return _fetch_model(self.remote, "processor", target)


def _fetch_model(store: RemotePath, kind: str, target: Path) -> Path:
    """Return the local copy of a tokenizer or processor; fetch it first if need be."""
    if target.is_dir():
        return target
    listing = store / CONTENTS
    try:
        with reading_errors(listing):
            found = msgspec.json.decode(listing.read_bytes(), type=_Contents)
    except UNREADABLE as error:
        raise CorruptionError(f"not a list of files: {error}", path=listing) from error
    files = {}
    for name, stated in found.files.items():
        parts = name.split("/")
        known = parts[0] in ("tokenizer", "processor")
        if not known or ".." in parts or "" in parts or "\\" in name:
            raise CorruptionError(f"names the file {name!r}", path=listing)
        if parts[0] != kind:
            continue
        with reading_errors(listing):
            data = (store / name).read_bytes()
        require_checksum(store / name, checksum(data), stated.checksum)
        files["/".join(parts[1:])] = data
    publish_files(store.blocks.root, target, files)
    return target


def fetch_file(path: RemotePath, stated: Document, *, check: bool) -> Path:
    """Return a local copy of a file, named by its checksum."""
    name = f"{stated['checksum']}.{path.name}"
    local = path.blocks.place(name)
    if local.is_file():
        try:
            check_file(local, stated, content=check)
            return local
        except CorruptionError:
            path.blocks.drop(name)
    kept = path.blocks.put_pieces(name, _checked_pieces(path, stated))
    if kept is not None:
        return kept
    # The disk keeps nothing: a file of this process alone, which ends with it.
    root = process_directory()
    if not (root / name).exists():
        with Staging(root) as staging:
            staging.publish(staging.write(name, _checked_pieces(path, stated)), root / name)
    return root / name


def _checked_pieces(path: RemotePath, stated: Document) -> Iterator[bytes]:
    """Yield the bytes of a file; raise at the end if they are not those stated."""
    size, hasher = stated["size"], xxhash.xxh3_128()
    with reading_errors(path):
        require_size(path, path.object.look().size, size)
        for start in range(0, size, WINDOW):
            piece = path.fetch(start, min(start + WINDOW, size))
            hasher.update(piece)
            yield piece
    require_checksum(path, hasher.hexdigest(), stated["checksum"])


class RemoteGuardedFile(GuardedFile):
    """A slice's remote file: blocks are fetched on demand and checked when loaded."""

    def __init__(self, path: RemotePath, record: FileRecord, *, check: bool) -> None:
        self.path = cast(Path, path)
        self.record = record
        self._remote = path
        self._trusted = not check
        self.clean = True  # `view` itself hands out nothing unchecked
        self._require_checksums()
        self._after: dict[int, int] = {}  # block behind a request → blocks of that request

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

    def _block(self, number: int, wanted: int) -> memoryview:
        name = self._name(number)
        found: memoryview | None = ranged.recent.get((self._trusted, name))
        if found is not None:
            return found
        kept = self._remote.blocks.get(name)
        if kept is not None:
            if self._trusted or xxhash.xxh3_64_hexdigest(kept) == self.record.blocks[number]:
                view = memoryview(kept)
                ranged.recent.put((self._trusted, name), view)
                return view
            self._remote.blocks.drop(name)
        return self._fetched(number, wanted)

    def _fetched(self, number: int, wanted: int) -> memoryview:
        """Fetch blocks, more of them the longer somebody reads on."""
        count = min(2 * self._after.pop(number, 0), WINDOW // BLOCK_BYTES)
        count = min(max(count, wanted, 1), len(self.record.blocks) - number)
        start = number * BLOCK_BYTES
        view = self._load(start, min(start + count * BLOCK_BYTES, self.record.size))
        for index in range(count - 1, -1, -1):
            block = view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            if not self._trusted:
                self.require_block(number + index, block)
            name = self._name(number + index)
            self._remote.blocks.put(name, block)
            ranged.recent.put((self._trusted, name), block)
        self._after[number + count] = count
        while len(self._after) > _STREAMS:
            self._after.pop(next(iter(self._after)))
        return view[:BLOCK_BYTES]

    def _load(self, start: int, stop: int) -> memoryview:
        with reading_errors(self.path):
            return memoryview(self._remote.fetch(start, stop))

    def pieces(self) -> Iterator[memoryview]:
        """Read the whole remote file, past every cache; every block is checked."""
        with reading_errors(self.path):
            actual = self._remote.object.look().size
        require_size(self.path, actual, self.record.size)
        yield from super().pieces()
