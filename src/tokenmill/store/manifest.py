"""The manifest: the one document that names everything in a store.

It holds the format, the key, the whole *key document* (recipe, tokenizer identity, sources by
content: what the key was computed from), totals, and a digest for each of the store's other files
and for itself. It names no path, no host and no time; those are in ``proof.json``, which is
advisory. Opening a store compares the key with its document and every digest with its file, so a
store that was edited, mixed up with another or cut short is refused before a row is served.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import fingerprint
from tokenmill.errors import CorruptionError, SourceMissing, UsageError
from tokenmill.files.remote_path import as_remote
from tokenmill.store.access import reading_errors
from tokenmill.store.layout import CHECKED_FILES, FORMAT, MASK_FILES, StoreLayout, check_key
from tokenmill.store.record import UNREADABLE

Document = dict[str, Any]

TOTALS = ("source_rows", "rows_in", "rows", "tokens", "trained_tokens", "slices")


def make_manifest(
    document: Document,
    totals: Document,
    tokenizer: Document,
    files: dict[str, Document],
) -> Document:
    """Compose a manifest and sign it with its own digest."""
    manifest = {
        "format": FORMAT,
        "key": fingerprint.key(document),
        "document": document,
        "totals": totals,
        "tokenizer": tokenizer,
        "files": files,
    }
    return {**manifest, "digest": fingerprint.key(manifest)}


def without_masks(manifest: Document) -> Document:
    """The manifest as an earlier version wrote it, which knew no `MASK_FILES`."""
    files = {name: stated for name, stated in manifest["files"].items() if name not in MASK_FILES}
    return make_manifest(manifest["document"], manifest["totals"], manifest["tokenizer"], files)


def encode_manifest(manifest: Document) -> bytes:
    """The bytes on disk: canonical, so that equal manifests are equal files."""
    return fingerprint.canonical(manifest) + b"\n"


def read_manifest(layout: StoreLayout) -> Document:
    """Read and check a manifest (not the files it names)."""
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
    stated = manifest.get("format")
    if stated != FORMAT:
        raise CorruptionError(
            f"written as format {stated!r}, this version reads format {FORMAT}; prepare it again",
            path=path,
        )
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
    stated = manifest.get("digest")
    unsigned = {name: value for name, value in manifest.items() if name != "digest"}
    actual = fingerprint.key_of_parsed(unsigned)
    if stated != actual:
        raise CorruptionError(f"digest is {actual}, expected {stated}", path=path)
    key = fingerprint.key_of_parsed(manifest.get("document"))
    if manifest.get("key") != key:
        raise CorruptionError(
            f"the key document has key {key}, expected {manifest.get('key')}", path=path
        )


def _check_members(manifest: Document, path: Path) -> None:
    """The digest guards against accidents; a hand-made manifest must still be well formed."""
    check_key(manifest["key"], path)
    document = manifest["document"]
    if not isinstance(document, dict) or not isinstance(document.get("sources"), list):
        raise CorruptionError("its key document names no sources", path=path)
    totals, tokenizer, files = (manifest.get(m) for m in ("totals", "tokenizer", "files"))
    if not isinstance(totals, dict) or not all(_is_count(totals.get(name)) for name in TOTALS):
        raise CorruptionError(f"totals must be the counts {', '.join(TOTALS)}", path=path)
    rejected = totals.get("rejected")
    if not isinstance(rejected, dict) or not all(map(_is_count, rejected.values())):
        raise CorruptionError("totals must count rejected rows by reason", path=path)
    if not isinstance(tokenizer, dict) or not all(
        tokenizer.get(name) is None or _is_count(tokenizer[name]) for name in ("pad_id", "eos_id")
    ):
        raise CorruptionError("says nothing of its tokenizer, or no token ids", path=path)
    check_key(tokenizer.get("identity", ""), path)
    if not isinstance(files, dict) or set(files) - set(MASK_FILES) != set(CHECKED_FILES):
        raise CorruptionError(f"must name the files {', '.join(CHECKED_FILES)}", path=path)
    if len(files) not in (len(CHECKED_FILES), len(CHECKED_FILES) + len(MASK_FILES)):
        raise CorruptionError(f"must name all of {', '.join(MASK_FILES)}, or none", path=path)
    for name, stated in files.items():
        if not isinstance(stated, dict) or not (
            _is_count(stated.get("size")) and isinstance(stated.get("checksum"), str)
        ):
            raise CorruptionError(f"states no size or checksum of {name}", path=path)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
