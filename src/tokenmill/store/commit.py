"""Committing a store: many published slices become one directory, by one rename.

The caller hands over a *placement* for every slice of its plan, in order: which slice, of which
source, from which row, line and byte. This module reads each commit record, recounts the totals,
writes the table, the lengths and the trained counts as it goes (nothing is kept per slice but a
hundred bytes on their way to disk), then state and info files for `datasets.load_from_disk`, the
manifest over all of them and the advisory proof. The directory is staged whole and appears at once.
Where a store of this key is there already it is compared, and moved to quarantine if it is corrupt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.errors import CorruptionError, NonDeterminismError, UsageError
from tokenmill.files import Staging, write_file, writing_errors
from tokenmill.fingerprint import key as fingerprint_key
from tokenmill.store import layout as names
from tokenmill.store.access import open_bytes
from tokenmill.store.checks import check_file
from tokenmill.store.layout import CacheLayout, StoreLayout
from tokenmill.store.manifest import Document, encode_manifest, make_manifest, read_manifest
from tokenmill.store.quarantine import quarantine
from tokenmill.store.record import CommitRecord
from tokenmill.store.slices import SliceReader
from tokenmill.store.table import SLICE_ROW, header, load_table


@dataclass(frozen=True)
class Placement:
    """One slice's place in a store."""

    key: str
    source: int
    source_row: int
    line: int | None
    offset: int | None


@dataclass
class _Tally:
    """Running totals, and the checksum of each file as it is written."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    source_rows: int = 0
    rows_in: int = 0
    slices: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, record: CommitRecord) -> None:
        self.rows += record.rows
        self.tokens += record.tokens
        self.trained += record.trained
        self.source_rows += record.source_rows
        self.rows_in += record.rows_in
        self.slices += 1
        self.rejected.update(row.reason for row in record.rejected)

    def totals(self) -> Document:
        return {
            "source_rows": self.source_rows,
            "rows_in": self.rows_in,
            "rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained,
            "slices": self.slices,
            "rejected": dict(sorted(self.rejected.items())),
        }


def commit_store(
    cache: CacheLayout,
    document: Document,
    placements: Iterable[Placement],
    tokenizer: Mapping[str, Any],
    proof: Mapping[str, Any],
) -> StoreLayout:
    """Make a store of published slices.

    Args:
        cache: The cache that holds the slices.
        document: The key document; its fingerprint is the store's key.
        placements: Every slice of the plan, in order.
        tokenizer: What the manifest says of the tokenizer: identity, pad and eos ids.
        proof: What ``proof.json`` will say.

    Returns:
        The store that is now visible, ours or an equal one that came first.
    """
    store = cache.store(fingerprint_key(document))
    with writing_errors(store.directory), Staging(cache.root) as staging:
        staged = staging.path / "store"
        staging.write("store/" + names.PROOF, json.dumps(proof, indent=1).encode() + b"\n")
        tally = _write_columns(cache, placements, staged)
        staging.write(
            "store/" + names.STATE, state_json(staged / names.TABLE, store.directory.name)
        )
        staging.write("store/" + names.DATASET_INFO, _DATASET_INFO)
        files = {name: file_document(staged / name) for name in names.CHECKED_FILES}
        manifest = make_manifest(document, tally.totals(), dict(tokenizer), files)
        staging.write("store/" + names.MANIFEST, encode_manifest(manifest))
        if not staging.publish(staged, store.directory) and not _agrees(store, manifest):
            quarantine(cache, store.directory)
            if not staging.publish(staged, store.directory) and not _agrees(store, manifest):
                raise CorruptionError("corrupt again as soon as it was mended", path=store.manifest)
    return store


def _agrees(store: StoreLayout, ours: Document) -> bool:
    """Whether the published store is ours; False when its own files are not whole."""
    try:
        published = read_manifest(store)
        for name, stated in published["files"].items():
            check_file(store.file(name), stated, content=True)
    except (CorruptionError, UsageError):  # the latter: it has no manifest
        return False
    if published["digest"] != ours["digest"]:
        raise NonDeterminismError(
            f"the published manifest has digest {published['digest']}, this build made "
            f"{ours['digest']} from the same inputs; what is published stays",
            path=store.manifest,
        )
    return True


def file_document(path: Path) -> Document:
    """Size and checksum of a file, as a manifest states them."""
    hasher = xxhash.xxh3_128()
    size = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
            size += len(piece)
    return {"size": size, "checksum": hasher.hexdigest()}


def _write_columns(cache: CacheLayout, placements: Iterable[Placement], staged: Path) -> _Tally:
    """Write table, lengths and trained counts in one pass over the slices."""
    tally = _Tally()
    body, lengths, trained = (staged / f"{n}.part" for n in ("table", "lengths", "trained"))
    with (
        open(body, "wb") as table_file,
        open(lengths, "wb") as lengths_file,
        open(trained, "wb") as trained_file,
    ):
        for placement in placements:
            files = cache.slice(placement.key)
            reader = SliceReader(files, None, mapped=False, check=True)
            table_file.write(_table_row(placement, reader, tally).tobytes())
            lengths_file.write(reader.column("length").astype("<i4").tobytes())
            trained_file.write(reader.column("trained").astype("<i4").tobytes())
            tally.add(reader.record)
    write_file(staged / names.TABLE, _chain(header(tally.slices), body))
    write_file(staged / names.LENGTHS, _chain(b"", lengths))
    write_file(staged / names.TRAINED, _chain(b"", trained))
    for part in (body, lengths, trained):
        part.unlink()
    return tally


def _chain(head: bytes, path: Path) -> Iterator[bytes]:
    yield head
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def _table_row(placement: Placement, reader: SliceReader, tally: _Tally) -> np.ndarray[Any, Any]:
    record = reader.record
    row = np.zeros(1, SLICE_ROW)
    row["key"][0] = np.frombuffer(bytes.fromhex(placement.key), "u1")
    row["record"][0] = np.frombuffer(bytes.fromhex(reader.record_digest), "u1")
    row["source"] = placement.source
    row["rows"] = record.rows
    row["rejected"] = len(record.rejected)
    row["first_row"] = tally.rows
    row["source_row"] = placement.source_row
    row["line"] = placement.line or 0
    row["offset"] = -1 if placement.offset is None else placement.offset
    row["tokens"] = record.tokens
    row["trained"] = record.trained
    return row


# Without features, `datasets` takes the types from the Arrow schema: right in every version.
_DATASET_INFO = b"{}\n"


def state_json(table_path: Path, key: str, slices: str = "../../slices") -> Iterator[bytes]:
    """``state.json`` for `datasets.load_from_disk`, piece by piece: it may be long."""
    table = load_table(open_bytes(table_path, mapped=False))
    yield b'{"_data_files": ['
    first = True
    for row in table:
        if not row["rows"]:
            continue
        key = row["key"].tobytes().hex()
        comma = "" if first else ", "
        yield f'{comma}{{"filename": "{slices}/{key[:2]}/{key}.arrow"}}'.encode()
        first = False
    rest: Document = {
        "_fingerprint": key[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    yield b"], " + json.dumps(rest).encode()[1:] + b"\n"
