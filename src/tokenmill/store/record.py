"""The commit record of a slice: a JSON document that is published after both of its files.

It contains the position of every buffer, so readers do not parse Arrow. It contains no path, time
or host, so two builders of one key write the same bytes. ``content`` is a digest of the values,
equal also where two versions of Arrow write different headers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from tokenmill._core.fingerprint import canonical_of_parsed
from tokenmill._core.origin import Origin
from tokenmill.errors import CorruptionError
from tokenmill.store.layout import FORMAT, SliceFiles

BLOCK_BYTES = 1 << 20  # per checksum; small, because a random row checks a whole block

# Fixed-width columns of the meta file; -1 and NaN mean "none".
META_COLUMNS = {
    "row_in_slice": "int32",
    "part": "int32",
    "line_in_slice": "int64",
    "offset_in_slice": "int64",
    "raw_length": "int64",
    "digest": "uint64",
    "length": "int32",
    "trained": "int32",
}
GROUP_COLUMNS = {
    "label": "int8",
    "score": "float64",
    "margin": "float64",
    "prompt_tokens": "int32",
}
MEDIA_COLUMNS = {"images": "int32", "patches": "int32"}
FIXED_COLUMNS = {**META_COLUMNS, **GROUP_COLUMNS, **MEDIA_COLUMNS}

# Columns of lists or texts of the meta file.
MASK_RUNS = "mask_runs"  # the tokens at which each row's mask changes
WEIGHT_RUNS, RUN_WEIGHTS = "weight_runs", "run_weights"  # see `columns.WeightRuns`
MEDIA = "media"  # JSON text of each row's images, see `Media`
EXTRA = "extra."  # prefix of the names of extra columns

GROUP_KINDS = ("preference", "kto", "ranked", "single")  # single: a row without a group
GROUP_COUNTS = (*GROUP_KINDS, "scores", "margins")  # the last two: groups that have them

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding untrusted bytes."""


def count_groups(counts: dict[str, int]) -> int:
    return sum(counts[kind] for kind in GROUP_KINDS)


def role_type(roles: int) -> str:
    """Return the smallest dtype for role numbers."""
    return "int8" if roles <= 1 << 7 else "int16" if roles <= 1 << 15 else "int32"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """One image of a row.

    Attributes:
        kind: ``image``.
        reference: A path, ``archive::member`` or a URL, as in the row; ``#/keys/to/it`` for an
            image inside the row.
        digest: Digest of its bytes.
        width: In pixels, after the EXIF orientation.
        height: In pixels, after the EXIF orientation.
        start: Its first token.
        count: Number of its tokens.
        grid: Frames, rows and columns of patches, if the model uses them.
        origin: The source row.
    """

    kind: str
    reference: str
    digest: str
    width: int
    height: int
    start: int
    count: int
    grid: tuple[int, ...] | None
    origin: Origin | None = None


_media = msgspec.json.Decoder(list[Media])


def decode_media(text: memoryview | bytes, origin: Origin | None) -> list[Media]:
    """Decode the images of one row and set their origin."""
    return [msgspec.structs.replace(one, origin=origin) for one in _media.decode(text)]


class RejectedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that is not in the token file; positions are relative to the slice."""

    row: int
    part: int
    line: int
    offset: int
    length: int
    reason: str
    detail: str


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    blocks: tuple[str, ...]  # xxh3-64 of each block of `BLOCK_BYTES`, as 16 hex digits
    buffers: dict[str, tuple[int, int]]  # name → (position, bytes)


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The commit record; ``groups`` has the `GROUP_COUNTS`."""

    format: int
    slice: str
    content: str
    source_rows: int
    rows_in: int
    rows: int
    tokens: int
    trained: int
    longest: int  # tokens of the longest row
    roles: tuple[str, ...]
    extra: tuple[str, ...]
    rejected: tuple[RejectedRow, ...]
    token_file: FileRecord
    meta_file: FileRecord
    groups: dict[str, int] | None = None
    checksum: str = ""  # of the record without this field; `encode` computes it

    @property
    def has_weights(self) -> bool:
        return f"{WEIGHT_RUNS}.offsets" in self.meta_file.buffers

    @property
    def has_media(self) -> bool:
        return f"{MEDIA}.offsets" in self.meta_file.buffers

    @property
    def units(self) -> int:
        """Number of groups if there are any, else of rows."""
        return self.rows if self.groups is None else count_groups(self.groups)

    def encode(self) -> bytes:
        # All fields have plain types, so their values need no check.
        without_checksum = msgspec.structs.replace(self, checksum="")
        checksum = xxhash.xxh3_128_hexdigest(canonical_of_parsed(without_checksum))
        return (
            canonical_of_parsed(msgspec.structs.replace(without_checksum, checksum=checksum))
            + b"\n"
        )


_decoder = msgspec.json.Decoder(CommitRecord)
_probe = msgspec.json.Decoder(dict[str, Any])


def decode_record(data: bytes, files: SliceFiles) -> CommitRecord:
    """Decode a commit record; raise for another format, another slice or wrong counts."""
    try:
        record = _decoder.decode(data)
    except UNREADABLE as error:
        with contextlib.suppress(*UNREADABLE):
            require_format(_probe.decode(data).get("format"), files.record)
        raise CorruptionError(f"not a commit record: {error}", path=files.record) from error
    require_format(record.format, files.record)
    if record.slice != files.key:
        raise CorruptionError(
            f"record of slice {record.slice}, expected {files.key}", path=files.record
        )
    if record.groups is not None and set(record.groups) != set(GROUP_COUNTS):
        raise CorruptionError(f"groups must have {', '.join(GROUP_COUNTS)}", path=files.record)
    if record.rows_in != record.units + len(record.rejected):
        raise CorruptionError(
            f"{record.rows_in} rows in, {record.units} accepted, {len(record.rejected)} rejected",
            path=files.record,
        )
    offsets = 4 * (record.rows + 1)
    token_sizes: dict[str, int | None] = {
        "input_ids.offsets": offsets,
        "input_ids.values": 4 * record.tokens,
        "loss_mask.offsets": offsets,
        "loss_mask.values": record.tokens,
    }
    _check_buffers(record.token_file, token_sizes, files)
    _check_buffers(record.meta_file, _meta_sizes(record), files)
    return record


def _meta_sizes(record: CommitRecord) -> dict[str, int | None]:
    """Return the bytes of every buffer of the meta file; None where they vary."""
    fixed = dict(META_COLUMNS)
    lists = [MASK_RUNS, "turn_ends", "turn_roles", *(EXTRA + name for name in record.extra)]
    if record.groups is not None:
        fixed |= GROUP_COLUMNS
    if record.has_weights:
        lists += [WEIGHT_RUNS, RUN_WEIGHTS]
    if record.has_media:
        fixed |= MEDIA_COLUMNS
        lists.append(MEDIA)
    sizes: dict[str, int | None] = {
        name: np.dtype(kind).itemsize * record.rows for name, kind in fixed.items()
    }
    for name in lists:
        sizes |= {f"{name}.offsets": 4 * (record.rows + 1), f"{name}.values": None}
    return sizes


def _check_buffers(file: FileRecord, sizes: dict[str, int | None], files: SliceFiles) -> None:
    if set(file.buffers) != set(sizes):
        raise CorruptionError("does not list the buffers of its files", path=files.record)
    for name, expected in sizes.items():
        actual = file.buffers[name][1]
        if expected is not None and actual != expected:
            raise CorruptionError(
                f"buffer {name!r} has {actual} bytes, expected {expected}", path=files.record
            )


def require_format(version: Any, path: Path) -> None:
    if version != FORMAT:
        raise CorruptionError(
            f"written in format {version!r}, this version reads format {FORMAT}; prepare it again",
            path=path,
        )
