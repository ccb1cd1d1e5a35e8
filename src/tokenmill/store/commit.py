"""Commit a store: publish a directory that lists published slices, with one rename.

Only the counts of slices are read. If a store of the same key exists, it is compared, and moved to
quarantine if it is damaged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill._core.artifact import quarantine
from tokenmill._core.fingerprint import key as fingerprint_key
from tokenmill._core.publish import NewFile, Staging, write_file, writing_errors
from tokenmill.errors import CorruptionError, NonDeterminismError, UsageError
from tokenmill.store import layout as names
from tokenmill.store.layout import CacheLayout, StoreLayout
from tokenmill.store.manifest import (
    PACKED_ROW,
    SLICE_ROW,
    Document,
    check_file,
    count_rows,
    encode_manifest,
    header,
    make_manifest,
    read_batches,
    read_manifest,
)
from tokenmill.store.prefetch import prefetch_map
from tokenmill.store.record import CommitRecord
from tokenmill.store.slices import SliceCounts, read_counts, read_record

_PIECE = 1 << 20  # bytes of a file read at once
_SLICES_PER_TASK = 4  # a slice of very short rows has a hundred thousand of them

MAX_SHARDS = 50_000  # in state.json: `datasets` maps each, and Linux allows 65,000 maps


@dataclass(frozen=True)
class Placement:
    key: str
    source: int
    source_row: int
    line: int | None
    offset: int | None


class _Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def add(self, counts: SliceCounts) -> None:
        record = counts.record
        self.counts.update(
            source_rows=record.source_rows,
            rows_in=record.rows_in,
            rows=record.rows,
            tokens=record.tokens,
            trained_tokens=record.trained,
            slices=1,
            runs=len(counts.columns[names.MASK_RUNS]),
            weight_runs=len(counts.columns[names.WEIGHT_RUNS]),
            images=int(counts.columns[names.IMAGES].sum()) if record.has_media else 0,
            ungrouped=record.rows if record.groups is None else 0,
        )
        self.rejected.update(row.reason for row in record.rejected)
        self.groups.update(record.groups or {})  # zeros are added too: they mean "has groups"

    def totals(self) -> Document:
        numbers = ("source_rows", "rows_in", "rows", "tokens", "trained_tokens", "slices")
        totals: Document = {name: self[name] for name in numbers}
        totals["rejected"] = dict(sorted(self.rejected.items()))
        if self.groups:
            single = self.groups["single"] + self["ungrouped"]
            totals["groups"] = {**self.groups, "single": single}
        if self["images"]:
            totals["images"] = self["images"]
        return totals


def commit_store(
    cache: CacheLayout,
    document: Document,
    placements: Iterable[Placement],
    tokenizer: Mapping[str, Any],
    proof: Mapping[str, Any],
) -> StoreLayout:
    """Publish a store of published slices; return it, or an equal one that was there before.

    ``placements`` are all slices in order; ``tokenizer`` has the identity, pad and eos ids.
    """
    store = cache.store(fingerprint_key(document))
    with writing_errors(store.directory), Staging(cache.root) as staging:
        staged = staging.path / "store"
        staging.write("store/" + names.PROOF, json.dumps(proof, indent=1).encode() + b"\n")
        tally, files = _write_columns(cache, placements, staged)
        state = state_json(staged / names.TABLE, store.directory.name)
        files[names.STATE] = _file_entry(write_file(staged / names.STATE, state))
        files[names.DATASET_INFO] = _file_entry(
            write_file(staged / names.DATASET_INFO, _DATASET_INFO)
        )
        manifest = make_manifest(document, tally.totals(), dict(tokenizer), files)
        staging.write("store/" + names.MANIFEST, encode_manifest(manifest))
        for _ in range(2):
            if staging.publish(staged, store.directory) or _is_equal(cache, store, manifest):
                return store
            quarantine(cache.root, store.directory)
    raise CorruptionError("corrupt again right after it was replaced", path=store.manifest)


def _is_equal(cache: CacheLayout, store: StoreLayout, ours: Document) -> bool:
    """Return whether the published store equals ours; False if it is damaged.

    A store whose table does not match the published slices counts as damaged.
    """
    try:
        published = read_manifest(store)
        for name, entry in published["files"].items():
            check_file(store.file(name), entry, content=True)
        if published["digest"] == ours["digest"]:
            return True
        # A slice may have been replaced, or lost and rebuilt by another version. Then the
        # published store cannot be read any more.
        for row in _table_rows(store.file(names.TABLE)):
            files = cache.slice(row["key"].tobytes().hex())
            read_record(files, row["record"].tobytes().hex())
    except (CorruptionError, UsageError):  # UsageError: there is no manifest
        return False
    raise NonDeterminismError(
        f"the published manifest has digest {published['digest']}, this build made "
        f"{ours['digest']} from the same inputs; the published store is unchanged",
        path=store.manifest,
    )


def _file_entry(file: NewFile) -> Document:
    return {"size": file.size, "checksum": file.checksum}


def _write_columns(
    cache: CacheLayout, placements: Iterable[Placement], staged: Path
) -> tuple[_Tally, dict[str, Document]]:
    tally = _Tally()
    body = staged / "table.part"
    with NewFile(body) as table, ExitStack() as opened:
        columns = {name: opened.enter_context(NewFile(staged / name)) for name in names.ARRAYS}

        def read(placement: Placement) -> tuple[Placement, SliceCounts]:
            return placement, read_counts(cache.slice(placement.key))

        for placement, counts in prefetch_map(read, placements, batch=_SLICES_PER_TASK):
            arrays = counts.columns_after(tally["rows"], tally["runs"], tally["weight_runs"])
            for name, values in arrays.items():
                if len(values):
                    columns[name].write(values.astype(names.ARRAYS[name], copy=False).data)
            table.write(_table_row(placement, counts.record, counts.digest, tally["rows"]))
            tally.add(counts)
    with open(body, "rb") as rows:
        pieces = chain([header(tally["slices"])], iter(lambda: rows.read(_PIECE), b""))
        columns[names.TABLE] = write_file(staged / names.TABLE, pieces)
    body.unlink()
    # Stores without groups, weights or images have no files for them.
    unneeded = [] if tally.groups else list(names.GROUP_FILES)
    unneeded += [] if tally["weight_runs"] else names.WEIGHT_FILES
    unneeded += [] if tally["images"] else names.MEDIA_FILES
    for name in unneeded:
        del columns[name]
        (staged / name).unlink()
    return tally, {name: _file_entry(column) for name, column in columns.items()}


def _table_row(placement: Placement, record: CommitRecord, digest: str, first_row: int) -> bytes:
    return PACKED_ROW.pack(
        bytes.fromhex(placement.key),
        bytes.fromhex(digest),
        placement.source,
        record.rows,
        len(record.rejected),
        first_row,
        placement.source_row,
        placement.line or 0,
        -1 if placement.offset is None else placement.offset,
        record.tokens,
        record.trained,
    )


# Without features, every version of `datasets` takes the types from the Arrow schema.
_DATASET_INFO = b"{}\n"


def _table_rows(table_path: Path) -> Iterator[np.void]:
    pieces = read_batches(table_path)
    next(pieces)  # the header
    for piece in pieces:
        yield from np.frombuffer(piece, SLICE_ROW)


def state_json(table_path: Path, key: str, slices: str = "../../slices") -> Iterator[bytes]:
    """Yield ``state.json`` for `datasets.load_from_disk`, in pieces because it may be long."""
    count = count_rows(table_path.stat().st_size)
    yield b'{"_data_files": ['
    if count > MAX_SHARDS:
        # `datasets` fails to open this file name and shows it.
        advice = f"{count} slices are too many for load_from_disk - use tokenmill export"
        yield json.dumps({"filename": advice}).encode()
    else:
        served = (row["key"].tobytes().hex() for row in _table_rows(table_path) if row["rows"])
        for number, shard in enumerate(served):
            comma = ", " if number else ""
            yield f'{comma}{{"filename": "{slices}/{shard[:2]}/{shard}.arrow"}}'.encode()
    yield b"], " + json.dumps(datasets_state(key)).encode()[1:] + b"\n"


def datasets_state(key: str) -> Document:
    return {
        "_fingerprint": key[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
