"""Stores on the move: `push` one to a place elsewhere, `pull` one from there.

A pushed store is what ``--out`` makes, file by file under a URL: slices and tokenizer beneath it,
the manifest last. Without a manifest there is no store, so a reader sees none or a whole one, and a
push that was cut short is simply run again: files that are there and equal (by size and checksum)
are passed over, what an interrupted upload left of a file is replaced, and anything else that is in
the way is refused, never overwritten.

A pull brings slices into the local cache one by one, each checked block by block before it is
published, so it too goes on where it stopped; then it commits the store under its own key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.errors import (
    CacheError,
    CorruptionError,
    NonDeterminismError,
    SourceMissing,
    UsageError,
)
from tokenmill.files import Staging, default_cache_dir
from tokenmill.files.blocks import BlockCache
from tokenmill.files.remote import is_remote, protocol_of
from tokenmill.files.remote_path import RemotePath
from tokenmill.files.sealed import publish_files, quarantine
from tokenmill.files.upload import Upload, Uploader
from tokenmill.fingerprint import canonical, checksum
from tokenmill.store import layout as names
from tokenmill.store.access import GuardedFile, reading_errors
from tokenmill.store.ahead import ahead
from tokenmill.store.commit import Placement, commit_store, state_json
from tokenmill.store.copies import carry, copy_store, files_below, model_files
from tokenmill.store.embedded import counted, distinct_pictures, place_of
from tokenmill.store.layout import CacheLayout, SliceFiles, StoreLayout
from tokenmill.store.manifest import encode_manifest, read_manifest, with_files
from tokenmill.store.record import FileRecord, Media
from tokenmill.store.remote import CONTENTS, RemoteStore
from tokenmill.store.slices import read_record
from tokenmill.store.store import Store, open_store

AT_ONCE = 4  # files on their way at the same time


@dataclass
class Travelled:
    """What a push or pull came to.

    Attributes:
        path: Where the store now is.
        rows: Its rows.
        bytes: Bytes of all its files there.
        files: How many files it has.
        skipped: How many of them were there already.
    """

    path: str
    rows: int
    bytes: int = 0
    files: int = 0
    skipped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, size: int, *, skipped: bool) -> None:
        with self._lock:
            self.bytes += size
            self.files += 1
            self.skipped += skipped

    def document(self) -> dict[str, Any]:
        """The object that the command line prints."""
        members = ("path", "rows", "bytes", "files", "skipped")
        return {name: getattr(self, name) for name in members}


def push(store: Store, target: str, *, embed_media: bool = False) -> Travelled:
    """Copy a store to a place elsewhere.

    Args:
        store: A store of this machine.
        target: URL of the directory that is to be the store; a path makes a copy as ``--out`` does.
        embed_media: As for `copy_store`.

    Raises:
        CacheError: Something else is there, or it cannot be written.
        NonDeterminismError: A store of the same key is there, with other bytes.
    """
    if isinstance(store, RemoteStore):
        raise UsageError("lies elsewhere itself: pull it first", path=store.path)
    if not is_remote(target):
        return _copied(store, Path(target), embed_media)
    if protocol_of(target) in ("http", "https"):
        raise UsageError("an HTTP server cannot be pushed to", path=target)
    place = RemotePath(target, BlockCache(default_cache_dir()))
    manifest, state = _portable(store)
    embed_media = embed_media or "media" in store.manifest
    if embed_media:
        # Read twice, so that what the manifest counts is known before anything is sent.
        sizes = [len(store.picture(one)) for one in distinct_pictures(store)]
        manifest = with_files(manifest, manifest["files"], counted(sizes))
    _require_room(place, manifest)
    done = Travelled(str(place), len(store))
    uploader = Uploader(place.url)

    def send(one: Upload) -> None:
        done.add(one.size, skipped=uploader.send(one))

    _all_at_once(send, _contents(store, state, embed_media))
    # In this order: a manifest says that everything else is there.
    send(Upload(CONTENTS, _listing(store)))
    send(Upload(names.MANIFEST, encode_manifest(manifest)))
    return done


def _copied(store: Store, target: Path, embed_media: bool) -> Travelled:
    path = copy_store(store, target, embed_media=embed_media)
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return Travelled(str(path), len(store), sum(sizes), len(sizes))


def _portable(store: Store) -> tuple[dict[str, Any], bytes]:
    """Manifest and state.json of the store as a directory that stands alone."""
    layout, old = store.layout, store.manifest
    if layout.is_self_contained:
        return old, layout.file(names.STATE).read_bytes()
    state = b"".join(state_json(layout.file(names.TABLE), store.key, "slices"))
    stated = {"size": len(state), "checksum": checksum(state)}
    files = {**old["files"], names.STATE: stated}
    return with_files(old, files), state


def _require_room(place: RemotePath, manifest: dict[str, Any]) -> None:
    """Refuse a target that is another store."""
    try:
        found = read_manifest(StoreLayout(place))  # type: ignore[arg-type]
    except SourceMissing:
        return
    except CorruptionError as error:
        raise CacheError(
            f"there is a manifest, but not a whole one ({error.message}); name another target, or "
            "remove it",
            path=place,
        ) from error
    if found["key"] != manifest["key"]:
        raise CacheError(
            f"holds store {found['key'][:12]}, not {manifest['key'][:12]}; name another target",
            path=place,
        )
    if found["digest"] != manifest["digest"]:
        raise NonDeterminismError(
            f"the store there has digest {found['digest']}, this one {manifest['digest']}, under "
            "the same key; what is there stays",
            path=place,
        )


def _contents(store: Store, state: bytes, embed_media: bool) -> Iterator[Upload]:
    """Every file of a portable store but the two that come last."""
    seen: set[str] = set()
    for at, key in enumerate(store.slice_keys()):
        if key not in seen:  # equal stretches of a source are one slice
            seen.add(key)
            store.slice_at(at).check_all()  # damage must not travel
            files = store.layout.slice(key)
            for path in (files.tokens, files.meta, files.record):
                yield Upload(f"slices/{key[:2]}/{path.name}", path)
    for name, path in model_files(store):
        yield Upload(name, path)
    for media in distinct_pictures(store) if embed_media else ():
        yield Upload(place_of(media.digest), store.picture(media))
    for name in store.manifest["files"]:
        if name != names.STATE:
            yield Upload(name, store.path / name)
    yield Upload(names.STATE, state)
    if (store.path / names.PROOF).is_file():
        # Advisory, and of another day in every run: whichever proof is there stays.
        yield Upload(names.PROOF, store.path / names.PROOF, any_content=True)


def _listing(store: Store) -> bytes:
    files = {}
    for name, path in model_files(store):
        data = path.read_bytes()
        files[name] = {"size": len(data), "checksum": checksum(data)}
    return canonical({"key": store.key, "files": files}) + b"\n"


def _all_at_once(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Do all, a few at a time; the first error ends it, when those under way are done."""
    for _ in ahead(work, items, batch=1, threads=AT_ONCE):
        pass


def pull(
    source: str,
    cache_dir: Path | None = None,
    out: Path | None = None,
    *,
    embed_media: bool = False,
) -> Travelled:
    """Bring a store into the local cache.

    Args:
        source: Its URL, or a directory.
        cache_dir: The cache; None: the user's own.
        out: Also make a self-contained copy here, which is then what is returned.
        embed_media: As for `copy_store`, for that copy.

    Raises:
        CorruptionError: What lies there is not what was written.
        NonDeterminismError: The cache holds other bytes under the same key.
    """
    cache = CacheLayout(Path(cache_dir or default_cache_dir()).absolute())
    store = open_store(source, cache_dir=cache.root)
    done = Travelled("", len(store))
    keys = {entry["key"].tobytes().hex(): entry["record"].tobytes().hex() for entry in store.table}

    def take(one: tuple[str, str]) -> None:
        _take_slice(store, cache, *one, done)

    _all_at_once(take, keys.items())
    _take_models(store, cache, done)
    if "media" in store.manifest:
        _all_at_once(lambda one: _take_picture(store, cache, one, done), distinct_pictures(store))
        embed_media = True
    layout = commit_store(
        cache, store.manifest["document"], _placements(store), store.manifest["tokenizer"],
        store.proof,
    )  # fmt: skip
    found = Store(layout.directory, paths=[str(path) for path in store.sources])
    for sidecar in store.sidecars:
        done.add(sidecar.bytes, skipped=not carry(sidecar, layout))
    for stated in found.manifest["files"].values():
        done.add(stated["size"], skipped=False)
    copied = None if out is None else copy_store(found, out, embed_media=embed_media)
    done.path = str(copied or found.path)
    return done


def _placements(store: Store) -> Iterator[Placement]:
    for entry in store.table:
        line, offset = int(entry["line"]), int(entry["offset"])
        yield Placement(
            key=entry["key"].tobytes().hex(),
            source=int(entry["source"]),
            source_row=int(entry["source_row"]),
            line=line or None,
            offset=None if offset < 0 else offset,
            rows=int(entry["rows"]),
        )


def _take_slice(store: Store, cache: CacheLayout, key: str, expected: str, done: Travelled) -> None:
    """Publish one slice in the cache, unless it is there."""
    theirs, ours = store.layout.slice(key), cache.slice(key)
    if ours.record.exists():
        record, digest = read_record(ours)
        if digest != expected:
            raise NonDeterminismError(
                f"the cache's slice has record {digest}, the store to be pulled {expected}; what "
                "is there stays",
                path=ours.record,
            )
        done.add(record.token_file.size + record.meta_file.size, skipped=True)
        return
    record, _ = read_record(theirs, expected)
    with Staging(cache.root) as staging:
        staged = SliceFiles(staging.path, key)
        for source, copy, stated, target in (
            (theirs.tokens, staged.tokens, record.token_file, ours.tokens),
            (theirs.meta, staged.meta, record.meta_file, ours.meta),
        ):
            staging.write(copy.name, _pieces(source, stated.size))
            GuardedFile(copy, stated, mapped=False, check=True).check_all()
            if not staging.publish(copy, target):
                _require_same(cache, staging, copy, target, stated)
        staging.publish(staging.write(staged.record.name, record.encode()), ours.record)
    done.add(record.token_file.size + record.meta_file.size, skipped=False)


def _require_same(
    cache: CacheLayout, staging: Staging, copy: Path, target: Path, stated: FileRecord
) -> None:
    """Another builder's file, or one of a slice that lost its record, must be the same."""
    try:
        GuardedFile(target, stated, mapped=False, check=True).check_all()
    except CorruptionError:
        quarantine(cache.root, target)
        staging.publish(copy, target)


def _pieces(source: Path, size: int) -> Iterator[bytes]:
    """The bytes of a slice's file, wherever it lies."""
    step = 8 << 20
    if not isinstance(source, RemotePath):
        with reading_errors(source), open(source, "rb") as file:
            yield from iter(lambda: file.read(step), b"")
        return
    for start in range(0, size, step):
        with reading_errors(source):
            piece = source.fetch(start, min(start + step, size))
        yield piece


def _take_models(store: Store, cache: CacheLayout, done: Travelled) -> None:
    """Have tokenizer and processor in the cache; asking a store elsewhere for them does that."""
    tokenizer = cache.tokenizer(store.manifest["tokenizer"]["identity"])
    processor = cache.processor(store.processor_key)
    for path, target in ((store.tokenizer_path, tokenizer), (store.processor_path, processor)):
        if path is None:
            continue
        if not target.is_dir():
            files = {name: one.read_bytes() for name, one in files_below(path)}
            publish_files(cache.root, target, files)
        for _, one in files_below(target):
            done.add(one.stat().st_size, skipped=False)


def _take_picture(store: Store, cache: CacheLayout, media: Media, done: Travelled) -> None:
    target = cache.picture(media.digest)
    data = store.embedded_picture(media.digest)
    assert data is not None, "the manifest counts it"
    there = target.exists()
    if not there:
        with Staging(cache.root) as staging:
            staging.publish(staging.write("picture", data), target)
    done.add(len(data), skipped=there)
