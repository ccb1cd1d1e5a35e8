"""Write slices: encode columns as Arrow and publish the files.

Two builders of one slice both succeed: the second adopts the published files if their bytes, or
their values under another Arrow header, are equal. Other values for one key raise
`NonDeterminismError`. Damaged files, and those that `replace_slice` replaces, go to quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from tokenmill._core.artifact import quarantine
from tokenmill._core.fingerprint import block_checksums
from tokenmill._core.publish import Staging
from tokenmill.errors import NonDeterminismError
from tokenmill.store.access import reading_errors
from tokenmill.store.columns import SliceColumns
from tokenmill.store.layout import FORMAT, CacheLayout
from tokenmill.store.record import (
    BLOCK_BYTES,
    EXTRA,
    GROUP_COLUMNS,
    MASK_RUNS,
    MEDIA,
    MEDIA_COLUMNS,
    META_COLUMNS,
    RUN_WEIGHTS,
    WEIGHT_RUNS,
    CommitRecord,
    FileRecord,
)
from tokenmill.store.slices import read_record

_OWN_METADATA = b"tokenmill"
_WRITE = pa.ipc.IpcWriteOptions(compression=None, use_threads=False)


@dataclass(frozen=True)
class EncodedSlice:
    record: CommitRecord
    tokens: pa.Buffer
    meta: pa.Buffer


def encode_slice(key: str, columns: SliceColumns) -> EncodedSlice:
    content = columns.content()
    groups = columns.groups
    token_batch = {
        "input_ids": _lists(columns.starts, columns.ids, pa.int32()),
        "loss_mask": _lists(columns.starts, columns.mask.view("i1"), pa.int8()),
    }
    tokens, token_record = _encode(token_batch, key, content)
    meta, meta_record = _encode(_meta_batch(columns), key, content)
    record = CommitRecord(
        format=FORMAT,
        slice=key,
        content=content,
        source_rows=columns.source_rows,
        rows_in=columns.rows_in,
        rows=len(columns.row),
        tokens=len(columns.ids),
        trained=int(columns.trained.sum(dtype=np.int64)),
        longest=columns.longest,
        roles=columns.roles,
        extra=tuple(columns.extra),
        rejected=tuple(columns.rejected),
        token_file=token_record,
        meta_file=meta_record,
        groups=None if groups is None else groups.counts(columns.part),
    )
    return EncodedSlice(record, tokens, meta)


def _plain(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    # `pa.array` would import pandas, which takes a quarter second per worker.
    numbers = np.ascontiguousarray(values, number_type(kind))
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _lists(
    starts: np.ndarray[Any, Any], values: np.ndarray[Any, Any], kind: pa.DataType
) -> pa.Array:
    return pa.ListArray.from_arrays(_plain(starts, pa.int32()), _plain(values, kind))


def number_type(kind: pa.DataType) -> np.dtype[Any]:
    # `to_pandas_dtype` imports pandas in older versions of pyarrow.
    letter = (
        "f" if pa.types.is_floating(kind) else "u" if pa.types.is_unsigned_integer(kind) else "i"
    )
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def _meta_batch(columns: SliceColumns) -> dict[str, pa.Array]:
    fixed: dict[str, np.ndarray[Any, Any]] = {
        "row_in_slice": columns.row,
        "part": columns.part,
        "line_in_slice": columns.line,
        "offset_in_slice": columns.offset,
        "raw_length": columns.raw_length,
        "digest": columns.digest,
        "length": columns.lengths,
        "trained": columns.trained,
    }
    batch = {
        name: _plain(fixed[name], pa.type_for_alias(kind)) for name, kind in META_COLUMNS.items()
    }
    if columns.groups is not None:
        for name, kind in GROUP_COLUMNS.items():
            batch[name] = _plain(getattr(columns.groups, name), pa.type_for_alias(kind))
    if columns.media is not None:
        for name, kind in MEDIA_COLUMNS.items():
            batch[name] = _plain(getattr(columns.media, name), pa.type_for_alias(kind))
        batch[MEDIA] = pa.array(columns.media.detail, pa.string())
    runs, run_starts = columns.mask_runs
    batch[MASK_RUNS] = _lists(run_starts, runs, pa.int32())
    if columns.weight_runs is not None:
        places, weights, bounds = columns.weight_runs
        batch[WEIGHT_RUNS] = _lists(bounds, places, pa.int32())
        batch[RUN_WEIGHTS] = _lists(bounds, weights, pa.float32())
    role_kind = pa.type_for_alias(columns.turn_roles.dtype.name)
    batch["turn_ends"] = _lists(columns.turn_starts, columns.turn_ends, pa.int32())
    batch["turn_roles"] = _lists(columns.turn_starts, columns.turn_roles, role_kind)
    for name, texts in columns.extra.items():
        batch[EXTRA + name] = pa.array(texts, pa.string())
    return batch


def _encode(batch: dict[str, pa.Array], key: str, content: str) -> tuple[pa.Buffer, FileRecord]:
    own = f'{{"format":{FORMAT},"slice":"{key}","content":"{content}"}}'.encode()
    schema = pa.schema(
        [pa.field(name, array.type, nullable=True) for name, array in batch.items()],
        metadata={_OWN_METADATA: own},
    )
    rows = pa.record_batch(list(batch.values()), schema=schema)
    size = pa.MockOutputStream()
    _write_stream(size, rows)
    data = pa.allocate_buffer(size.size())  # a growing buffer would be copied
    _write_stream(pa.FixedSizeBufferWriter(data), rows)
    return data, _described(data)


def _write_stream(sink: pa.NativeFile, rows: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, rows.schema, options=_WRITE) as writer:
        writer.write_batch(rows)


def _described(data: pa.Buffer) -> FileRecord:
    blocks = tuple(block_checksums(memoryview(data), BLOCK_BYTES))
    return FileRecord(size=data.size, blocks=blocks, buffers=_positions(data))


def _positions(data: pa.Buffer) -> dict[str, tuple[int, int]]:
    batch = pa.ipc.open_stream(data).read_next_batch()
    positions = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for label, buffer, size in _buffers(column):
            at = buffer.address - data.address if buffer is not None and size else 0
            positions[name + label] = (at, size)
    return positions


def _buffers(column: pa.Array) -> list[tuple[str, pa.Buffer | None, int]]:
    """Return name suffix, buffer and size without padding of a column's buffers."""
    rows = len(column)
    first = column.buffers()[1]
    if pa.types.is_list(column.type):
        values = column.values.buffers()[1]
        size = column.values.type.bit_width // 8 * len(column.values)
    elif pa.types.is_string(column.type):
        values = column.buffers()[2]
        size = int(np.frombuffer(first, np.int32, rows + 1)[-1])
    else:
        return [("", first, column.type.bit_width // 8 * rows)]
    return [(".offsets", first, 4 * (rows + 1)), (".values", values, size)]


def publish_slice(layout: CacheLayout, encoded: EncodedSlice) -> CommitRecord:
    """Publish a slice; return its published commit record."""
    files = layout.slice(encoded.record.slice)
    record = encoded.record
    adopted: list[FileRecord] = []
    with Staging(layout.root) as staging:
        tokens = staging.write("tokens", memoryview(encoded.tokens))
        # Both files are in one directory: syncing it after the second makes both durable.
        if not staging.publish(tokens, files.tokens, durable=False):
            adopted.append(_adopt(layout, files.tokens, encoded, encoded.tokens, staging, tokens))
            record = replace(record, token_file=adopted[-1])
        meta = staging.write("meta", memoryview(encoded.meta))
        if not staging.publish(meta, files.meta):
            adopted.append(_adopt(layout, files.meta, encoded, encoded.meta, staging, meta))
            record = replace(record, meta_file=adopted[-1])
        data = staging.write("record", record.encode())
        if not staging.publish(data, files.record):
            published, _ = read_record(files)
            if published.content == record.content:
                return published
            if len(adopted) < 2:
                raise _conflict(files.record, published.content, record.content)
            quarantine(layout.root, files.record)  # both published files equal ours
            staging.publish(data, files.record)
    return record


def replace_slice(layout: CacheLayout, encoded: EncodedSlice) -> tuple[CommitRecord, bool]:
    """Publish a slice; quarantine a published slice of this key with other content.

    Use it only if the other content was shown to be wrong. Returns the published commit record,
    and whether another was replaced.
    """
    try:
        return publish_slice(layout, encoded), False
    except NonDeterminismError:
        files = layout.slice(encoded.record.slice)
        # The record is last: after a crash, a record without files is repaired, but files without
        # a record would block a rebuild.
        for path in (files.tokens, files.meta, files.record):
            quarantine(layout.root, path)
        return publish_slice(layout, encoded), True


def _adopt(
    layout: CacheLayout,
    published: Path,
    encoded: EncodedSlice,
    ours: pa.Buffer,
    staging: Staging,
    staged: Path,
) -> FileRecord:
    """Describe a file that another builder published first."""
    with reading_errors(published):
        data = pa.py_buffer(published.read_bytes())
    if data.equals(ours):
        return _described(data)
    content = _content_in_header(data)
    same_values = _same_values(data, ours)
    if content == encoded.record.content and same_values:
        return _described(data)
    if content is not None and content != encoded.record.content and not same_values:
        raise _conflict(published, content, encoded.record.content)
    # Header and values contradict each other, so the published file is damaged.
    quarantine(layout.root, published)
    if not staging.publish(staged, published):
        return _adopt(layout, published, encoded, ours, staging, staged)
    return _described(ours)


def _content_in_header(data: pa.Buffer) -> str | None:
    try:
        own = pa.ipc.open_stream(data).schema.metadata[_OWN_METADATA]
        return str(own, "ascii").split('"content":"')[1].split('"')[0]
    except (pa.ArrowInvalid, KeyError, TypeError, IndexError, OSError, UnicodeError):
        return None


def _same_values(data: pa.Buffer, ours: pa.Buffer) -> bool:
    try:
        published = pa.ipc.open_stream(data).read_all()
        published.validate(full=True)
    except (pa.ArrowInvalid, OSError):
        return False
    return bool(published.equals(pa.ipc.open_stream(ours).read_all()))


def _conflict(path: Path, published: str, ours: str) -> NonDeterminismError:
    return NonDeterminismError(
        f"the published content is {published}, this build made {ours} from the same inputs; "
        "the published slice is unchanged. Please report this with the recipe",
        path=path,
    )
