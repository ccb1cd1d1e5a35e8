"""List a cache, and remove unused files from it.

`collect` works in two calls: the first marks unused paths (with the time, under ``gc/``), a later
one removes those that were marked at least ``grace_s`` ago and are still unused. Readers of an
open store can finish meanwhile, and a builder that uses a marked slice keeps it.

Unused are: stores that are old or named by the caller, slices and sidecars of no other store,
parts of complete sidecars, files of rollouts and in-memory rows without a store, staging
directories of dead processes, and quarantined files. A mistake costs a rebuild, never a wrong row.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenmill._core.publish import Staging, sync_directory, writing_errors
from tokenmill.errors import IN_MEMORY_DIRECTORY, TokenmillError, UsageError, public_path
from tokenmill.store.access import ByteFile
from tokenmill.store.layout import OTHER_STORES, TABLE, CacheLayout, is_key
from tokenmill.store.manifest import load_table, read_manifest
from tokenmill.store.named import names_in
from tokenmill.store.store import Store

PARTS = (
    "slices", "notes", "stores", "sidecars", "tokenizers", "processors", "images", "rollouts",
    IN_MEMORY_DIRECTORY, "rows", "blocks", "names", "staging", "quarantine",
)  # fmt: skip

MARKS = "gc/marks.json"
GRACE_S = 24 * 3600.0  # a running job opens every slice of its store within this time


@dataclass
class Collection:
    marked: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0


def survey(root: Path) -> dict[str, Any]:
    """Return the object that ``tokenmill cache list --json`` prints."""
    layout = CacheLayout(root)
    entries, names = [], list(names_in(root))
    for path in _directories(layout.stores):  # another process may remove one at any time
        entry: dict[str, Any] = {"key": path.name, "path": str(path), "bytes": _size(path)}
        try:
            manifest = read_manifest(layout.store(path.name))
            totals = manifest["totals"]
            entry |= {name: totals[name] for name in ("rows", "tokens", "trained_tokens", "slices")}
            entry["made"] = path.stat().st_mtime
            entry["names"] = [name for name, key in names if key == path.name]
            store = Store(path, "off")
            entry["sources"] = [public_path(source or "?") for source in store.sources]
            entry["tokenizer"] = store.proof.get("tokenizer")
            entry["bytes"] += sum(
                _size(file)
                for slice_key in store.slice_keys()
                for file in _paths(layout, f"slices/{slice_key}")
            )
            entry["sidecars"] = [
                {"name": one.name, "producer": one.producer, "per": one.per, "bytes": one.bytes}
                for one in store.sidecars
            ]
        except (TokenmillError, FileNotFoundError) as error:
            if not path.exists():
                continue
            entry["error"] = str(error)
        entries.append(entry)
    entries.sort(key=lambda entry: entry.get("made", 0.0))
    sizes = {name: _size(root / name) for name in PARTS}
    return {"entries": entries, "bytes": sum(sizes.values()), "parts": sizes}


def collect(
    root: Path,
    *,
    grace_s: float = GRACE_S,
    older_than_s: float | None = None,
    stores: Iterable[str] = (),
    dry_run: bool = False,
    now: float | None = None,
) -> Collection:
    """Mark unused paths, and remove those that were marked at least ``grace_s`` ago.

    Stores built more than ``older_than_s`` ago, and those in ``stores``, count as unused.
    """
    layout = CacheLayout(root)
    now = time.time() if now is None else now
    expired = _expired_stores(layout, older_than_s, set(stores), now)
    needed = _needed_slices(layout, expired)
    unused = {f"stores/{key}" for key in expired}
    for directory in _directories(layout.slices):
        keys = {path.name.partition(".")[0] for path in _entries(directory)}
        unused |= {f"slices/{key}" for key in keys - needed}
    unused |= set(_unused_sidecars(layout, expired))
    unused |= set(_unused_sources(layout, expired, now - grace_s))
    unused |= {f"staging/{path.name}" for path in _dead_staging(root)}
    unused |= {f"quarantine/{path.name}" for path in _entries(layout.quarantine)}
    marks = _read_marks(root)
    done = Collection()
    due = sorted(name for name in unused if name in marks and now - marks[name] >= grace_s)
    done.marked = sorted(unused - set(marks))
    sizes = {name: sum(_size(path) for path in _paths(layout, name)) for name in due}
    reused = set() if dry_run else _hide_slices(layout, due, expired)
    done.removed = [name for name in due if name not in reused]
    done.freed_bytes = sum(sizes[name] for name in done.removed)
    if not dry_run:
        for name in done.removed:
            _remove(layout, name)
        waiting = {name: at for name, at in marks.items() if name in unused and name not in due}
        _write_marks(root, waiting | dict.fromkeys(done.marked, now))
    return done


def _expired_stores(
    layout: CacheLayout, older_than_s: float | None, named: set[str], now: float
) -> set[str]:
    present = {path.name: modified for path, modified in _mtimes(_directories(layout.stores))}
    unknown = named - set(present)
    if unknown:
        raise UsageError(f"no such store: {', '.join(sorted(unknown))}", path=layout.stores)
    if older_than_s is not None:
        named = named | {key for key, modified in present.items() if now - modified > older_than_s}
    return named


def _needed_slices(layout: CacheLayout, expired: set[str]) -> set[str]:
    stores = [path for path in _directories(layout.stores) if path.name not in expired]
    # An unreadable table stops the collection, because that store's slices are unknown.
    keys: set[str] = set()
    for path in stores:
        with _unless_removed(path):
            table = load_table(ByteFile(path / TABLE, mapped=False))
            keys.update(key.tobytes().hex() for key in table["key"])
    return keys


def _unused_sidecars(layout: CacheLayout, expired: set[str]) -> Iterator[str]:
    others = layout.sidecars / OTHER_STORES
    for store in [*_directories(layout.sidecars), *_directories(others)]:
        if store == others:
            continue
        in_cache = store.parent == layout.sidecars
        name = store.relative_to(layout.root).as_posix()
        # Sidecars of stores outside the cache stay: those stores may still exist.
        if in_cache and (store.name in expired or not layout.store(store.name).directory.is_dir()):
            yield name
            continue
        for parts in _directories(store):
            key, dot, _ = parts.name.partition(".")
            if dot and is_key(key) and (store / key).is_dir():
                yield f"{name}/{parts.name}"


def _unused_sources(layout: CacheLayout, expired: set[str], since: float) -> Iterator[str]:
    """Old files written for rollouts and in-memory rows that are no store's source."""
    old = [
        path
        for kind in ("rollouts", IN_MEMORY_DIRECTORY)
        for path, at in _mtimes(_entries(layout.root / kind))
        if at < since
    ]
    if not old:
        return
    stores = [path for path in _directories(layout.stores) if path.name not in expired]
    needed = set()
    for path in stores:
        with _unless_removed(path):
            for source in filter(None, Store(path, "off").sources):
                needed |= {Path(source).name, Path(source).parent.name}
    for path in old:
        if path.name not in needed:
            yield path.relative_to(layout.root).as_posix()


def _dead_staging(root: Path) -> Iterator[Path]:
    here = socket.gethostname()
    for path in _directories(root / "staging"):
        host, _, rest = path.name.rpartition("-")[0].rpartition("-")
        if host == here and rest.isdigit() and not Path(f"/proc/{rest}").exists():
            yield path


def _hide_slices(layout: CacheLayout, due: list[str], expired: set[str]) -> set[str]:
    """Hide the records of slices; restore and return those that a new store uses.

    A builder publishes a store and then checks its slices. This function hides slices and then
    reads all stores. So at least one of the two notices the other.
    """
    keys = [name.partition("/")[2] for name in due if name.startswith("slices/")]
    with Staging(layout.root) as staging:
        for key in keys:
            # `suppress` is inside, so that a missing file is not translated to an error first.
            with writing_errors(layout.slices), contextlib.suppress(FileNotFoundError):
                os.rename(layout.slice(key).record, staging.path / key)
        needed = _needed_slices(layout, expired).intersection(keys) if keys else set()
        for key in needed:
            if (staging.path / key).exists():
                staging.publish(staging.path / key, layout.slice(key).record)
    return {f"slices/{key}" for key in needed}


def _paths(layout: CacheLayout, name: str) -> list[Path]:
    kind, _, rest = name.partition("/")
    if kind != "slices":
        return [layout.root / kind / rest]
    files = layout.slice(rest)
    return [files.record, files.tokens, files.meta, layout.notes(rest)]


def _remove(layout: CacheLayout, name: str) -> None:
    paths = _paths(layout, name)
    if name.startswith("slices/") and paths[0].exists():
        return  # the record was hidden, so another process has built the slice again
    for path in paths:
        with writing_errors(path):
            if path.is_dir() and not path.is_symlink():
                _remove_directory(layout.root, path)
            else:
                path.unlink(missing_ok=True)


def _remove_directory(root: Path, path: Path) -> None:
    """Rename a directory, then remove it, so that no reader opens half a store."""
    with Staging(root) as staging:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, staging.path / "gone")
        sync_directory(path.parent)
        shutil.rmtree(staging.path / "gone", ignore_errors=True)


def _read_marks(root: Path) -> dict[str, float]:
    try:
        return msgspec.json.decode((root / MARKS).read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}  # lost marks only mean that the grace period starts again


def _write_marks(root: Path, marks: dict[str, float]) -> None:
    path = root / MARKS
    with Staging(root) as staging:
        staging.replace(staging.write("marks.json", msgspec.json.encode(marks)), path)


@contextlib.contextmanager
def _unless_removed(store: Path) -> Iterator[None]:
    """Ignore errors of reading a store that another process removed meanwhile."""
    try:
        yield
    except (TokenmillError, FileNotFoundError):
        if store.exists():
            raise


def _mtimes(paths: list[Path]) -> Iterator[tuple[Path, float]]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat().st_mtime


def _directories(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.is_dir() and not entry.is_symlink()]


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(map(_size, _entries(path)))
    try:
        return path.lstat().st_size
    except OSError:
        return 0
