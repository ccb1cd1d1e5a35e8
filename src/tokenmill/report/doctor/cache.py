"""The cache: may it be written, on which file system does it lie, is there room for the plan?

`examine` calls these with the cache's root and the sources to be prepared; each answers `Check`
values. Writing is tried, not asked for: permission bits say nothing of read-only mounts, quotas or
NFS. A file system's *kind* decides how stores are read there: mapped on local disks, by pread on
network and FUSE file systems, where a mapped file that vanishes would kill its reader. The *plan*
is an upper estimate from the bytes of the sources: int32 ids and int8 masks of one token per two
and a half bytes, which is more tokens than real text gives.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenmill.errors import TokenmillError
from tokenmill.files import Staging, filesystem_kind, is_network
from tokenmill.report.doctor.checks import Check, fail, note, ok, warning
from tokenmill.source import open_rows

STORE_PER_SOURCE = 2.0  # bytes of a store per byte of source: 5 bytes for each 2.5 bytes of text
ROW_BYTES = 128  # per row beside its tokens: index, origin, lengths, turns
LITTLE = 1 << 30  # bytes free without a plan
FEW_INODES = 10_000
GIB = 1 << 30


def writable(root: Path) -> Check:
    """Whether something can be written, by writing it."""
    existed = root.exists()
    try:
        with Staging(root) as staging:
            staging.write("doctor", b"a file of the doctor's")
    except TokenmillError as error:
        remedy = (
            "choose another: --cache-dir or TOKENMILL_CACHE_DIR (finished stores stay readable)"
        )
        return fail("cache", f"{root}: {error.message}", remedy)
    if not existed:
        return ok("cache", f"{root} can be written (it was made just now)")
    return ok("cache", f"{root} can be written")


def file_system(root: Path) -> Check:
    """The kind of file system, and how stores are read there."""
    kind = filesystem_kind(_nearest(root))
    if is_network(_nearest(root)):
        return note(
            "file system",
            f"{kind}: a network file system; stores are read with pread, never mapped",
            "safe as it is; for quicker single rows put the cache on a local disk",
        )
    if kind == "unknown":
        remedy = "if it is a network file system, copy stores to a local disk before training"
        return note("file system", "unknown kind, taken for local: stores are mapped", remedy)
    if kind == "tmpfs":
        remedy = "the cache takes memory and is gone after a restart: choose a disk"
        return warning("file system", "tmpfs: stores are mapped from memory", remedy)
    return ok("file system", f"{kind}: local; stores are mapped")


def room(root: Path, sources: Sequence[str], *, can_write: bool) -> Iterator[Check]:
    """Free space and inodes, against the plan where sources are given."""
    place = _nearest(root)
    free = shutil.disk_usage(place).free
    inodes = os.statvfs(place)
    if inodes.f_files > 0 and inodes.f_favail < FEW_INODES:
        remedy = "remove small files from this disk, or choose another --cache-dir"
        yield warning("inodes", f"{inodes.f_favail:,} left", remedy)
    if not sources:
        yield _compared(free, None, "")
    elif not can_write:
        remedy = "see the cache: rows are indexed there"
        yield note("sources", "not looked at: the cache cannot be written", remedy)
        yield _compared(free, None, "")
    else:
        yield from _against(root, free, sources)


def _against(root: Path, free: int, sources: Sequence[str]) -> Iterator[Check]:
    try:
        rows = open_rows(list(sources), cache_dir=root)
        size = sum(file.bytes for file in rows.files)
    except TokenmillError as error:
        yield fail("sources", str(error), "name files that are there and can be read")
        yield _compared(free, None, "")
        return
    files = len(rows.files)
    yield ok("sources", f"{len(rows):,} rows in {files:,} files, {_size(size)} of text")
    need = int(size * STORE_PER_SOURCE) + len(rows) * ROW_BYTES
    yield _compared(free, need, f"a store of these rows needs at most about {_size(need)}")


def _compared(free: int, need: int | None, why: str) -> Check:
    shown = f"{_size(free)} free" + (f"; {why}" if why else "")
    if need is not None and free < need:
        remedy = "make room (tokenmill cache gc), or choose another --cache-dir"
        return fail("space", shown, remedy)
    if free < (LITTLE if need is None else 2 * need):
        return warning("space", shown, "it may suffice; tokenmill cache gc removes what is unused")
    return ok("space", shown)


def _nearest(path: Path) -> Path:
    """The path, or what exists above it."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _size(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / (1 << 20):,.1f} MiB"
