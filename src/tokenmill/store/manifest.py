"""The manifest of a store, and ``slices.bin``, the table of its slices."""

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
from tokenmill._core.artifact import require_file
from tokenmill._core.paths import MAX_METADATA_BYTES, read_bounded
from tokenmill._core.remote_path import as_remote
from tokenmill.errors import CorruptionError, SourceMissing, UsageError
from tokenmill.store import layout as names
from tokenmill.store.access import REMEDY, ByteFile, reading_errors, require_checksum
from tokenmill.store.layout import StoreLayout, check_key
from tokenmill.store.record import GROUP_COUNTS, UNREADABLE, count_groups, require_format

MAGIC = b"TOKMILL\0"
VERSION = 1
HEADER_BYTES = 64  # aligns the rows, and leaves space for fields of a later version

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

BATCH = 8192  # rows per read of a whole table

PACKED_ROW = struct.Struct("<20s16s3I6q")  # `SLICE_ROW`, for writing one


def header(count: int) -> bytes:
    packed = struct.pack("<8sIIQ", MAGIC, VERSION, SLICE_ROW.itemsize, count)
    return packed.ljust(HEADER_BYTES, b"\0")


def count_rows(size: int) -> int:
    return (size - HEADER_BYTES) // SLICE_ROW.itemsize


def read_batches(path: Path) -> Iterator[bytes]:
    """Yield a table's header, then its rows in batches.

    Reading a mapped table completely would keep all of it in memory.
    """
    with reading_errors(path), open(path, "rb") as file:
        yield file.read(HEADER_BYTES)
        while piece := file.read(BATCH * SLICE_ROW.itemsize):
            if len(piece) % SLICE_ROW.itemsize:
                raise CorruptionError("ends within a row", path=path)
            yield piece


def load_table(file: ByteFile) -> NDArray[np.void]:
    """View a table in place; check header and size."""
    count = max(count_rows(file.size), 0)
    size = count * SLICE_ROW.itemsize
    if file.size != HEADER_BYTES + size or file.view(0, HEADER_BYTES) != header(count):
        raise CorruptionError(
            f"not a table of {count} slices in version {VERSION} ({file.size} bytes)",
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
    """Return the manifest with changed fields and a new digest."""
    changed = {**manifest, **changes}
    changed.pop("digest", None)
    return {**changed, "digest": fingerprint.key_of_parsed(changed)}


def encode_manifest(manifest: Document) -> bytes:
    """Return the canonical bytes: equal manifests are equal files."""
    data = fingerprint.canonical(manifest) + b"\n"
    if len(data) > MAX_METADATA_BYTES:
        raise UsageError(
            f"the manifest of this store would have {len(data)} bytes, more than the limit of"
            f" {MAX_METADATA_BYTES}; prepare fewer source files at once"
        )
    return data


def read_manifest(layout: StoreLayout) -> Document:
    path = layout.manifest
    layout.require_inside(path)
    try:
        with reading_errors(path):
            data = read_bounded(path)
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
        raise CorruptionError("has valid fields, but not the bytes that were written", path=path)
    return manifest


def _not_a_store(directory: Path) -> UsageError | SourceMissing:
    if as_remote(directory) is not None or not os.path.lexists(directory):
        return SourceMissing(
            "no such store; `tokenmill prepare` builds one and prints its path", path=directory
        )
    return UsageError(
        "not a tokenmill store, because it has no manifest.json; "
        "use the path that `tokenmill prepare` printed",
        path=directory,
    )


def _check_digest(manifest: Document, path: Path) -> None:
    expected, actual = manifest.get("digest"), with_digest(manifest)["digest"]
    if expected != actual:
        raise CorruptionError(f"digest is {actual}, expected {expected}", path=path)
    key = fingerprint.key_of_parsed(manifest.get("document"))
    if manifest.get("key") != key:
        raise CorruptionError(
            f"the key document has key {key}, expected {manifest.get('key')}", path=path
        )


Count = Annotated[int, msgspec.Meta(ge=0)]


class FileEntry(msgspec.Struct, frozen=True):
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
    pad_token_id: Count | None = None
    eos_token_id: Count | None = None


class _KeyDocument(msgspec.Struct):
    sources: list[Any]


class _Media(msgspec.Struct):
    images: Count
    bytes: Count


class _Manifest(msgspec.Struct):
    key: str
    document: _KeyDocument
    totals: _Totals
    tokenizer: _Tokenizer
    files: dict[str, FileEntry]
    media: _Media | None = None


def _check_members(manifest: Document, path: Path) -> None:
    """Raise if fields are malformed, which the digest of a hand-made manifest does not show."""
    try:
        parsed = msgspec.convert(manifest, _Manifest)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"not a manifest: {error}", path=path) from error
    check_key(parsed.key, path)
    check_key(parsed.tokenizer.identity, path)
    groups = parsed.totals.groups
    if groups is not None and set(groups) != set(GROUP_COUNTS):
        raise CorruptionError(f"groups must have {', '.join(GROUP_COUNTS)}", path=path)
    expected = {*names.CHECKED_FILES, *(names.GROUP_FILES if groups is not None else ())}
    expected |= set(names.WEIGHT_FILES) if names.WEIGHT_RUNS in parsed.files else set()
    expected |= set(names.MEDIA_FILES) if names.IMAGES in parsed.files else set()
    if set(parsed.files) != expected:
        raise CorruptionError(f"must list the files {', '.join(sorted(expected))}", path=path)


def units_out(totals: Document) -> int:
    """Return the number of groups if there are any, else of rows."""
    return count_groups(totals["groups"]) if "groups" in totals else int(totals["rows"])


def check_file(path: Path, entry: Document, *, content: bool) -> None:
    require_file(path, entry["size"], entry["checksum"] if content else None, REMEDY)


def check_table(manifest: Document, path: Path, *, content: bool) -> None:
    """Recount the totals, and hash the table if ``content``; compare both with the manifest."""
    totals, hasher = manifest["totals"], xxhash.xxh3_128()
    counts: Counter[str] = Counter()
    last_source = -1
    pieces = read_batches(path)
    hasher.update(next(pieces))
    for piece in pieces:
        if content:
            hasher.update(piece)
        batch = np.frombuffer(piece, SLICE_ROW)
        ends = counts["rows"] + np.cumsum(batch["rows"], dtype=np.int64)
        if not np.array_equal(batch["first_row"], ends - batch["rows"]):
            raise CorruptionError("row numbers of the slices are not consecutive", path=path)
        columns = ("rows", "tokens", "trained", "rejected")
        counts.update({name: int(batch[name].sum(dtype=np.int64)) for name in columns})
        counts["slices"] += len(batch)
        last_source = max(last_source, int(batch["source"].max()))
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
        raise CorruptionError(
            f"a slice has source {last_source}, the store has {len(sources)}", path=path
        )


class _Proof(msgspec.Struct):
    paths: list[str | None] = []
    notes: dict[str, dict[str, int]] = {}


def read_proof(path: Path) -> Document:
    """Return ``proof.json``; if it is damaged, warn and return an empty dict."""
    try:
        document = msgspec.json.decode(read_bounded(path), type=dict[str, Any])
        msgspec.convert(document, _Proof)
    except (OSError, CorruptionError, *UNREADABLE) as error:
        warnings.warn(f"{path}: cannot be read ({error}); rows are not affected", stacklevel=4)
        return {}
    return document
