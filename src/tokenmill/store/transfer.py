"""Copy stores: `push` to a URL, `copy_store` to a directory (``--out``), `pull` into the cache.

A portable store is a directory that contains its slices and tokenizer. Slices are verified while
they are read. The manifest is written last, so readers see no store or a complete one. An
interrupted copy continues where it stopped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill._core.artifact import files_below, publish_files, quarantine
from tokenmill._core.fingerprint import canonical, checksum
from tokenmill._core.paths import cache_root, checked_path, default_cache_dir, local_target
from tokenmill._core.publish import Staging, copy_or_link, publish_directory, writing_errors
from tokenmill._core.remote import RemoteObject, filesystem, is_remote, protocol_of
from tokenmill._core.remote_path import BlockCache, RemotePath, as_remote
from tokenmill.errors import (
    CacheError,
    CorruptionError,
    NonDeterminismError,
    SourceError,
    SourceMissing,
    TokenmillError,
    UsageError,
)
from tokenmill.store import layout as names
from tokenmill.store.access import PIECE_BYTES, ChecksummedFile, open_checksummed
from tokenmill.store.commit import Placement, commit_store, state_json
from tokenmill.store.layout import MANIFEST, CacheLayout, StoreLayout, image_name
from tokenmill.store.manifest import Document, encode_manifest, read_manifest, with_digest
from tokenmill.store.prefetch import prefetch_map
from tokenmill.store.record import Media
from tokenmill.store.remote import CONTENTS, RemoteStore
from tokenmill.store.sidecars import KIND, Sidecar
from tokenmill.store.slices import read_record
from tokenmill.store.store import Store, open_store

MAX_COPIES = 4  # files or slices copied at the same time


@dataclass
class TransferResult:
    """Counts of one copy; ``skipped`` files were at the destination before."""

    path: str
    rows: int
    bytes: int = 0
    files: int = 0
    skipped: int = 0

    def add(self, size: int, *, skipped: bool = False) -> None:
        self.bytes += size
        self.files += 1
        self.skipped += skipped


@dataclass(frozen=True)
class StoreFile:
    name: str  # path below the store's directory
    content: bytes | Path | ChecksummedFile
    advisory: bool = False  # an existing file is never replaced

    @property
    def path(self) -> Path | None:
        content = self.content
        path = content.path if isinstance(content, ChecksummedFile) else content
        return path if isinstance(path, Path) else None

    @property
    def size(self) -> int:
        if isinstance(self.content, ChecksummedFile):
            return self.content.record.size
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def pieces(self) -> Iterator[bytes | memoryview]:
        if isinstance(self.content, bytes):
            yield self.content
        elif isinstance(self.content, ChecksummedFile):
            yield from self.content.pieces()
        else:
            with open(self.content, "rb") as file:
                yield from iter(lambda: file.read(PIECE_BYTES), b"")


Part = list[StoreFile]  # copied in this order
Job = Callable[[], Part]
Put = Callable[[Part], list[bool]]  # returns whether each file existed


def _copy(jobs: Iterable[Job], put: Put, result: TransferResult) -> None:
    def run(job: Job) -> list[tuple[int, bool]]:
        part = job()
        return [(file.size, existed) for file, existed in zip(part, put(part), strict=True)]

    for counts in prefetch_map(run, jobs, batch=1, threads=MAX_COPIES):
        for size, existed in counts:
            result.add(size, skipped=existed)


# Files of a store


def _slice_jobs(store: Store) -> Iterator[Job]:
    # A dict, because a store may contain one slice several times.
    keys = {entry["key"].tobytes().hex(): entry["record"].tobytes().hex() for entry in store.table}
    return (partial(_slice_files, store, key, digest) for key, digest in keys.items())


def _slice_files(store: Store, key: str, digest: str) -> Part:
    files = store.layout.slice(key)
    record, _ = read_record(files, digest)
    tokens = open_checksummed(files.tokens, record.token_file, mapped=False, check=True)
    meta = open_checksummed(files.meta, record.meta_file, mapped=False, check=True)
    own = record.encode() if as_remote(files.record) is not None else files.record
    contents = ((files.tokens, tokens), (files.meta, meta), (files.record, own))
    return [StoreFile(f"slices/{key[:2]}/{path.name}", content) for path, content in contents]


def _image_file(store: Store, sizes: list[int], media: Media) -> Part:
    data = store.image(media)
    sizes.append(len(data))
    return [StoreFile(image_name(media.digest), data)]


def _model_files(store: Store) -> Part:
    models = {"tokenizer": store.tokenizer_path, "processor": store.processor_path}
    return [
        StoreFile(f"{kind}/{name}", path)
        for kind, root in models.items()
        if root is not None
        for name, path in files_below(root)
    ]


def _portable_files(store: Store) -> tuple[Document, bytes]:
    state = b"".join(state_json(store.layout.file(names.TABLE), store.key, "slices"))
    return {**store.manifest["files"], names.STATE: _file_entry(state)}, state


def _copy_portable(
    store: Store, put: Put, result: TransferResult, *, embed_media: bool, list_models: bool
) -> None:
    """Copy every file of a portable store, the manifest last.

    ``list_models`` adds `CONTENTS`, for servers that cannot list files.
    """
    files, state = _portable_files(store)
    embeds = embed_media or "media" in store.manifest
    own = [StoreFile(name, state if name == names.STATE else store.path / name) for name in files]
    if (store.path / names.PROOF).is_file():
        own.append(StoreFile(names.PROOF, store.path / names.PROOF, advisory=True))
    sizes: list[int] = []

    def jobs() -> Iterator[Job]:
        yield from _slice_jobs(store)
        for file in [*_model_files(store), *own]:
            yield partial(list, [file])
        if embeds:
            for media in store.distinct_media():
                yield partial(_image_file, store, sizes, media)

    _copy(jobs(), put, result)
    if list_models:
        models = {file.name: b"".join(file.pieces()) for file in _model_files(store)}
        entries = {name: _file_entry(data) for name, data in models.items()}
        listing = canonical({"key": store.key, "files": entries}) + b"\n"
        _copy([lambda: [StoreFile(CONTENTS, listing)]], put, result)
    media = {"media": {"images": len(sizes), "bytes": sum(sizes)}} if embeds else {}
    manifest = encode_manifest(with_digest(store.manifest, files=files, **media))
    _copy([lambda: [StoreFile(names.MANIFEST, manifest)]], put, result)


def _file_entry(data: bytes) -> Document:
    return {"size": len(data), "checksum": checksum(data)}


# To a directory


def _stage(staging: Staging, part: Part) -> list[bool]:
    for file in part:
        target = staging.path / file.name
        staging.make(target.parent)
        with writing_errors(target):
            if file.path is None:
                staging.write(file.name, file.pieces())
            else:
                copy_or_link(file.path, target, file.pieces)
    return [False] * len(part)


def copy_store(store: Store, target: Path, *, embed_media: bool = False) -> Path:
    """Make a self-contained copy of a store and return the target.

    The target must be missing, empty, or a copy of this store. The copy is published with one
    rename; sidecars follow. Images that the store contains are always copied.
    """
    return Path(_copy_to_directory(store, target, embed_media).path)


def _copy_to_directory(store: Store, target: Path, embed_media: bool) -> TransferResult:
    target = target.absolute()
    result = TransferResult(str(target), len(store))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        _require_copy(store.key, target)
        for _, path in files_below(target):
            result.add(path.stat().st_size, skipped=True)
    else:
        with writing_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with Staging(target.parent, beside=target) as staging:
            for name in ("slices", "tokenizer"):  # also if they are empty
                staging.make(staging.path / name)
            put = partial(_stage, staging)
            _copy_portable(store, put, result, embed_media=embed_media, list_models=False)
            with writing_errors(target):
                if not publish_directory(staging.path, target):
                    _require_copy(store.key, target)
    for sidecar in store.sidecars:
        if copy_sidecar(sidecar, StoreLayout(target)):
            result.add(sidecar.bytes)
    return result


def check_target(target: Path, key_of: Callable[[], str]) -> None:
    """Raise if `copy_store` could not write a store, whose key is needed only sometimes."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        _require_copy("" if not (target / MANIFEST).exists() else key_of(), target)
        return
    parent = next(place for place in target.absolute().parents if os.path.lexists(place))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise CacheError(f"cannot be written: {parent} is no writable directory", path=target)


def _require_copy(key: str, target: Path) -> None:
    try:
        existing = Store(target)
    except TokenmillError as error:
        raise UsageError(
            "exists and is not a copy of this store; choose another directory", path=target
        ) from error
    if existing.key != key:
        raise UsageError(
            f"contains store {existing.key[:12]}, not {key[:12]}; choose another directory",
            path=target,
        )


def copy_sidecar(sidecar: Sidecar, store: StoreLayout) -> bool:
    """Copy a sidecar to another copy of its store; return False if it exists there."""
    target, cache = store.sidecars / sidecar.path.name, store.cache_root
    if target.exists():
        return False
    sidecar.check_all()
    with Staging(cache or store.directory, beside=None if cache else target) as staging:
        staged = staging.path / "sidecar"
        staging.make(staged)
        staging.make(target.parent)
        with writing_errors(target):
            for name in (KIND.summary, *KIND.files):
                copy_or_link(sidecar.path / name, staged / name)
            return publish_directory(staged, target)


# To a URL


class _Url:
    """The directory at a URL, listed once.

    Existing and uploaded files are compared by size and MD5: the server's, else that of the file
    read back. A truncated file, left by an interrupted upload, is replaced. Other content raises
    `CacheError`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        remote = RemoteObject(url)
        self._fs, self._root = remote.retrying(lambda: filesystem(url), None)
        self._listing = remote.retrying(self._list, None)

    def _list(self) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            infos: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {name.lstrip("/"): info for name, info in infos.items()}

    def send(self, file: StoreFile) -> bool:
        """Upload a file unless it exists; return whether it existed."""
        path = f"{self._root}/{file.name}"
        remote = RemoteObject(f"{self._url}/{file.name}")
        info = self._listing.get(path.lstrip("/"))
        md5 = _md5(file.pieces())
        if info is not None:
            if file.advisory or _is_same(remote, info, file.size, md5):
                return True
            if not _is_beginning(remote, int(info["size"]), file):
                raise CacheError(
                    "exists with other bytes; choose another target, or remove it",
                    path=remote.path,
                )
        try:
            remote.retrying(lambda: self._put(path, file), None)
            info = remote.retrying(lambda: self._info(path), None)
        except SourceError as error:
            if isinstance(error.__context__, NotImplementedError):
                raise UsageError("this file system is read-only", path=remote.path) from error
            raise CacheError(
                error.message.replace("be read", "be written", 1), path=error.path
            ) from error
        if not _is_same(remote, info, file.size, md5):
            raise CacheError(
                "contains other bytes than were written; push again",
                path=remote.path,
            )
        return False

    def _put(self, path: str, file: StoreFile) -> None:
        if file.path is None:
            self._fs.pipe_file(path, b"".join(file.pieces()))
        else:
            self._fs.put_file(str(file.path), path)

    def _info(self, path: str) -> dict[str, Any]:
        self._fs.invalidate_cache(self._fs._parent(path))
        info: dict[str, Any] = self._fs.info(path)
        return info


def _md5(pieces: Iterable[bytes | memoryview]) -> str:
    hasher = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _is_same(remote: RemoteObject, info: dict[str, Any], size: int, md5: str) -> bool:
    if int(info["size"]) != size:
        return False
    stated = [str(info.get(name, "")).strip('"') for name in ("ETag", "etag", "content_md5")]
    with contextlib.suppress(ValueError):
        stated.append(base64.b64decode(str(info.get("md5Hash", ""))).hex())
    starts = range(0, size, PIECE_BYTES)
    return md5 in stated or md5 == _md5(
        remote.fetch(start, min(start + PIECE_BYTES, size)) for start in starts
    )


def _is_beginning(remote: RemoteObject, size: int, file: StoreFile) -> bool:
    """Return whether an object is a truncated copy of the file."""
    if size >= file.size:
        return False
    start = 0
    for piece in file.pieces():
        stop = min(start + len(piece), size)
        if start >= stop:
            break
        if remote.fetch(start, stop) != piece[: stop - start]:
            return False
        start = stop
    return True


def push(
    store: Store | str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    embed_media: bool = False,
) -> TransferResult:
    """Copy a store to any URL that fsspec can write, or to a directory.

    Args:
        store: A local store, or its path.
        target: URL or directory of the copy, for `open_store` and `pull`.
        embed_media: Copy the images of its rows, each once.

    Raises:
        CacheError: The target contains something else, or cannot be written.
        NonDeterminismError: The target contains a store of the same key with other bytes.
    """
    store = store if isinstance(store, Store) else open_store(checked_path("store", store))
    target = checked_path("target", target)
    if isinstance(store, RemoteStore):
        raise UsageError("a remote store cannot be pushed; pull it first", path=store.path)
    if not is_remote(target):
        return _copy_to_directory(store, Path(target), embed_media)
    if protocol_of(target) in ("http", "https"):
        raise UsageError("push cannot write to HTTP", path=target)
    remote = RemotePath(target, BlockCache(default_cache_dir()))
    _require_free(remote, store)
    result = TransferResult(str(remote), len(store))
    url = _Url(remote.url)

    def put(part: Part) -> list[bool]:
        return [url.send(file) for file in part]

    _copy_portable(store, put, result, embed_media=embed_media, list_models=True)
    return result


def _require_free(target: RemotePath, store: Store) -> None:
    try:
        existing = read_manifest(StoreLayout(target))  # type: ignore[arg-type]
    except SourceMissing:
        return
    except CorruptionError as error:
        raise CacheError(
            f"contains a damaged manifest ({error.message}); choose another target, or remove it",
            path=target,
        ) from error
    if existing["key"] != store.key:
        raise CacheError(
            f"contains store {existing['key'][:12]}, not {store.key[:12]}; choose another target",
            path=target,
        )
    if existing["files"] != _portable_files(store)[0]:
        raise NonDeterminismError(
            f"contains a store of this key with other files (digest {existing['digest']}); "
            "it is unchanged",
            path=target,
        )


# To the local cache


def _put_in_cache(cache: CacheLayout, part: Part) -> list[bool]:
    """Publish a slice or an image unless it exists."""
    targets = []
    for file in part:
        kind, _, rest = file.name.partition("/")
        targets.append(cache.root / ("images" if kind == "media" else kind) / rest)
    exists = targets[-1].exists()  # the last file of a slice is its commit record
    if exists and len(part) > 1:
        _require_same_record(cache, part[-1])
    if not exists:
        with Staging(cache.root) as staging:
            for file, target in zip(part, targets, strict=True):
                _publish(staging, file, target)
    return [exists] * len(part)


def _require_same_record(cache: CacheLayout, file: StoreFile) -> None:
    files = cache.slice(Path(file.name).stem)
    expected, (_, digest) = checksum(b"".join(file.pieces())), read_record(files)
    if digest != expected:
        raise NonDeterminismError(
            f"the cached slice has record {digest}, the remote one {expected}; the cache is "
            "unchanged",
            path=files.record,
        )


def _publish(staging: Staging, file: StoreFile, target: Path) -> None:
    staged = staging.write(target.name, file.pieces())
    if staging.publish(staged, target) or not isinstance(file.content, ChecksummedFile):
        return
    try:  # the file is another builder's, or its slice lost its record
        ChecksummedFile(target, file.content.record, mapped=False, check=True).check_all()
    except CorruptionError:
        quarantine(staging.root, target)
        staging.publish(staged, target)


def pull(
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    embed_media: bool = False,
) -> Store:
    """Copy a store from a URL into the local cache, every block checked.

    Args:
        source: URL or directory of the store.
        out: Also make a self-contained copy in this directory, and open that.
        cache_dir: None: the default cache directory.
        embed_media: With ``out``: copy the images of its rows, each once.

    Raises:
        CorruptionError: The remote store is damaged.
        NonDeterminismError: The cache contains other bytes under the same key.
    """
    return Store(copy_from(source, out=out, cache_dir=cache_dir, embed_media=embed_media).path)


def copy_from(
    source: Any, *, out: Any = None, cache_dir: Any = None, embed_media: bool = False
) -> TransferResult:
    """Like `pull`, but return the counts of the copy."""
    cache = CacheLayout(cache_root(cache_dir))
    store = open_store(checked_path("source", source), cache_dir=cache.root)
    out = None if out is None else local_target("out", out)
    result = TransferResult("", len(store))
    put = partial(_put_in_cache, cache)
    _copy(_slice_jobs(store), put, result)
    _copy_models(store, cache, result)
    if "media" in store.manifest:
        images = (partial(_image_file, store, [], media) for media in store.distinct_media())
        _copy(images, put, result)
    layout = commit_store(
        cache, store.manifest["document"], _placements(store), store.manifest["tokenizer"],
        store.proof,
    )  # fmt: skip
    pulled = Store(layout.directory, paths=[str(path) for path in store.sources])
    for sidecar in store.sidecars:
        result.add(sidecar.bytes, skipped=not copy_sidecar(sidecar, layout))
    for entry in pulled.manifest["files"].values():
        result.add(entry["size"])
    embed_media = embed_media or "media" in store.manifest
    copied = None if out is None else copy_store(pulled, Path(out), embed_media=embed_media)
    result.path = str(copied or pulled.path)
    return result


def _placements(store: Store) -> Iterator[Placement]:
    for entry in store.table:
        line, offset = int(entry["line"]), int(entry["offset"])
        yield Placement(
            key=entry["key"].tobytes().hex(),
            source=int(entry["source"]),
            source_row=int(entry["source_row"]),
            line=line or None,
            offset=None if offset < 0 else offset,
        )


def _copy_models(store: Store, cache: CacheLayout, result: TransferResult) -> None:
    tokenizer = cache.tokenizer(store.manifest["tokenizer"]["identity"])
    processor = cache.processor(store.processor_key)
    for path, target in ((store.tokenizer_path, tokenizer), (store.processor_path, processor)):
        if path is None:
            continue
        if not target.is_dir():
            files = {name: one.read_bytes() for name, one in files_below(path)}
            publish_files(cache.root, target, files)
        for _, one in files_below(target):
            result.add(one.stat().st_size)
