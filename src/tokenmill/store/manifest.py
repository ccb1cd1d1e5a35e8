"""The manifest, which names everything in a store, and ``slices.bin``, the table of its slices."""

from __future__ import annotations

import os
import struct
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.remote_path import as_remote
from tokenmill._core.sealed import require_file
from tokenmill.errors import CorruptionError, SourceMissing, UsageError
from tokenmill.store import layout as names
from tokenmill.store.access import REMEDY, ByteFile, reading_errors, require_checksum
from tokenmill.store.layout import StoreLayout, check_key
from tokenmill.store.record import GROUP_COUNTS, UNREADABLE, count_groups, require_format

MAGIC = b"TOKMILL\0"
VERSION = 1
HEADER_BYTES = 64  # keeps the rows aligned for any member, with room for what a later version adds

SLICE_ROW = np.dtype(  # one slice of a store: 96 bytes
    [
        ("key", "u1", 20),
        ("record", "u1", 16),  # xxh3-128 of the commit record's bytes
        ("source", "<u4"),  # index into the manifest's sources
        ("rows", "<u4"),  # rows served
        ("rejected", "<u4"),  # rows rejected, so that a search for them skips most slices
        ("first_row", "<i8"),  # number of its first row in the store
        ("source_row", "<i8"),  # number, within the source, of its first source row
        ("line", "<i8"),  # physical line of its first byte, from 1; 0 when the format has none
        ("offset", "<i8"),  # byte offset in the decompressed source; -1 when it has none
        ("tokens", "<i8"),
        ("trained", "<i8"),
    ]
)

STRETCH = 8192  # rows read at once by whoever passes over the whole table

PACKED_ROW = struct.Struct("<20s16s3I6q")  # `SLICE_ROW`, for writing one


def header(count: int) -> bytes:
    packed = struct.pack("<8sIIQ", MAGIC, VERSION, SLICE_ROW.itemsize, count)
    return packed.ljust(HEADER_BYTES, b"\0")


def count_rows(size: int) -> int:
    return (size - HEADER_BYTES) // SLICE_ROW.itemsize


def read_stretches(path: Path) -> Iterator[bytes]:
    """Yield a table's header, then its rows some thousands at a time.

    Touching a mapped table from end to end would make all of it resident.
    """
    with reading_errors(path), open(path, "rb") as file:
        yield file.read(HEADER_BYTES)
        while piece := file.read(STRETCH * SLICE_ROW.itemsize):
            if len(piece) % SLICE_ROW.itemsize:
                raise CorruptionError("ends within a row", path=path)
            yield piece


def load_table(file: ByteFile) -> NDArray[np.void]:
    """View a table in place; check header and size."""
    count = max(count_rows(file.size), 0)
    size = count * SLICE_ROW.itemsize
    if file.size != HEADER_BYTES + size or file.view(0, HEADER_BYTES) != header(count):
        raise CorruptionError(
            f"not the table of {count} slices in version {VERSION} that {file.size} bytes hold",
            path=file.path,
            offset=0,
        )
    return np.frombuffer(file.view(HEADER_BYTES, size), SLICE_ROW)


Document = dict[str, Any]


def make_manifest(
    document: Document, totals: Document, tokenizer: Document, files: dict[str, Document]
) -> Document:
    return with_digest({
        "format": names.FORMAT,
        "key": fingerprint.key(document),
        "document": document,
        "totals": totals,
        "tokenizer": tokenizer,
        "files": files,
    })  # fmt: skip


def with_digest(manifest: Document, **changes: Any) -> Document:
    """Return the manifest with other members, and the digest of all of them."""
    changed = {**manifest, **changes}
    changed.pop("digest", None)
    return {**changed, "digest": fingerprint.key_of_parsed(changed)}


def encode_manifest(manifest: Document) -> bytes:
    """Return the canonical bytes: equal manifests are equal files."""
    return fingerprint.canonical(manifest) + b"\n"


def read_manifest(layout: StoreLayout) -> Document:
    path = layout.manifest
    layout.require_inside(path)
    try:
        with reading_errors(path):
            data = path.read_bytes()
    except CorruptionError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise _not_a_store(layout.directory) from error
        raise
    try:
        manifest = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE as error:
        raise CorruptionError(f"not a manifest: {error}", path=path) from error
    require_format(manifest.get("format"), path)
    _check_digest(manifest, path)
    _check_members(manifest, path)
    if data != fingerprint.canonical_of_parsed(manifest) + b"\n":
        raise CorruptionError("the right members, but not the bytes that were written", path=path)
    return manifest


def _not_a_store(directory: Path) -> UsageError | SourceMissing:
    if as_remote(directory) is not None or not os.path.lexists(directory):
        return SourceMissing(
            "no such store; `tokenmill prepare` makes one and prints its path", path=directory
        )
    return UsageError(
        "not a tokenmill store (it has no manifest.json); "
        "give the path that `tokenmill prepare` printed",
        path=directory,
    )


def _check_digest(manifest: Document, path: Path) -> None:
    stated, actual = manifest.get("digest"), with_digest(manifest)["digest"]
    if stated != actual:
        raise CorruptionError(f"digest is {actual}, expected {stated}", path=path)
    key = fingerprint.key_of_parsed(manifest.get("document"))
    if manifest.get("key") != key:
        raise CorruptionError(
            f"the key document has key {key}, expected {manifest.get('key')}", path=path
        )


Count = Annotated[int, msgspec.Meta(ge=0)]


class StatedFile(msgspec.Struct, frozen=True):
    size: Count
    checksum: str


class _Totals(msgspec.Struct):
    source_rows: Count
    rows_in: Count
    rows: Count
    tokens: Count
    trained_tokens: Count
    slices: Count
    rejected: dict[str, Count]
    groups: dict[str, Count] | None = None


class _Tokenizer(msgspec.Struct):
    identity: str
    pad_id: Count | None = None
    eos_id: Count | None = None


class _KeyDocument(msgspec.Struct):
    sources: list[Any]


class _Media(msgspec.Struct):
    pictures: Count
    bytes: Count


class _Manifest(msgspec.Struct):
    key: str
    document: _KeyDocument
    totals: _Totals
    tokenizer: _Tokenizer
    files: dict[str, StatedFile]
    media: _Media | None = None


def _check_members(manifest: Document, path: Path) -> None:
    """The digest guards against accidents; a hand-made manifest must still be well formed."""
    try:
        found = msgspec.convert(manifest, _Manifest)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"not a manifest: {error}", path=path) from error
    check_key(found.key, path)
    check_key(found.tokenizer.identity, path)
    groups = found.totals.groups
    if groups is not None and set(groups) != set(GROUP_COUNTS):
        raise CorruptionError(f"must count {', '.join(GROUP_COUNTS)} of groups", path=path)
    wanted = {*names.CHECKED_FILES, *(names.GROUP_FILES if groups is not None else ())}
    wanted |= set(names.WEIGHT_FILES) if names.WEIGHT_RUNS in found.files else set()
    wanted |= set(names.MEDIA_FILES) if names.PICTURES in found.files else set()
    if set(found.files) != wanted:
        raise CorruptionError(f"must name the files {', '.join(sorted(wanted))}", path=path)


def units_out(totals: Document) -> int:
    """Groups where there are any, else rows."""
    return count_groups(totals["groups"]) if "groups" in totals else int(totals["rows"])


def check_file(path: Path, stated: Document, *, content: bool) -> None:
    require_file(path, stated["size"], stated["checksum"] if content else None, REMEDY)


def check_table(manifest: Document, path: Path, *, content: bool) -> None:
    """Recount the totals, and hash the table if ``content``; compare both with the manifest."""
    totals, hasher = manifest["totals"], xxhash.xxh3_128()
    counts: Counter[str] = Counter()
    last_source = -1
    pieces = read_stretches(path)
    hasher.update(next(pieces))
    for piece in pieces:
        if content:
            hasher.update(piece)
        stretch = np.frombuffer(piece, SLICE_ROW)
        ends = counts["rows"] + np.cumsum(stretch["rows"], dtype=np.int64)
        if not np.array_equal(stretch["first_row"], ends - stretch["rows"]):
            raise CorruptionError("rows of the slices do not follow one another", path=path)
        columns = ("rows", "tokens", "trained", "rejected")
        counts.update({name: int(stretch[name].sum(dtype=np.int64)) for name in columns})
        counts["slices"] += len(stretch)
        last_source = max(last_source, int(stretch["source"].max()))
    if content:
        require_checksum(path, hasher.hexdigest(), manifest["files"][names.TABLE]["checksum"])
    expected = {
        "slices": totals["slices"],
        "rows": totals["rows"],
        "tokens": totals["tokens"],
        "trained": totals["trained_tokens"],
        "rejected": totals["rows_in"] - units_out(totals),
    }
    for name, number in expected.items():
        if counts[name] != number:
            raise CorruptionError(
                f"{counts[name]} {name} in the table, expected {number}", path=path
            )
    sources = manifest["document"].get("sources", [])
    if last_source >= len(sources):
        raise CorruptionError(f"a slice of source {last_source} of {len(sources)}", path=path)


class _Proof(msgspec.Struct):
    paths: list[str | None] = []
    notes: dict[str, dict[str, int]] = {}


def read_proof(path: Path) -> Document:
    """Read the advisory proof; a damaged one is a warning and empty."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        msgspec.convert(document, _Proof)
    except (OSError, *UNREADABLE) as error:
        warnings.warn(
            f"{path}: proof cannot be read ({error}); rows are not affected", stacklevel=4
        )
        return {}
    return document
