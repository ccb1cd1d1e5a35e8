"""The commit record: the JSON document, published last, that makes two files a slice.

It states the position of every buffer, so a reader never parses Arrow. It holds no path, time or
host: two builders of one key write the same bytes. *Content* is a digest of the values, equal for
builders whose Arrow libraries write different headers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill._core.fingerprint import canonical_of_parsed
from tokenmill._core.origin import Origin
from tokenmill.errors import CorruptionError
from tokenmill.store.layout import FORMAT, SliceFiles

BLOCK_BYTES = 1 << 20  # of one checksum: a random row checks little on first touch

# Fixed-width columns of the meta file; -1 and NaN stand for "none".
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
MEDIA_COLUMNS = {"pictures": "int32", "patches": "int32"}
FIXED_COLUMNS = {**META_COLUMNS, **GROUP_COLUMNS, **MEDIA_COLUMNS}

# Columns of lists or texts of the meta file.
MASK_RUNS = "mask_runs"  # the tokens at which each row's mask changes
WEIGHT_RUNS, RUN_WEIGHTS = "weight_runs", "run_weights"  # see `columns.WeightRuns`
MEDIA = "media"  # JSON text of each row's images, see `Media`
CARRIED = "carried."  # prefix of the names of extra columns

GROUP_KINDS = ("preference", "kto", "ranked", "single")  # single: an ordinary row beside groups
GROUP_COUNTS = (*GROUP_KINDS, "scores", "margins")  # groups of each kind, and with scores, a margin

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding foreign bytes can raise."""


def count_groups(counts: dict[str, int]) -> int:
    return sum(counts[kind] for kind in GROUP_KINDS)


def role_type(roles: int) -> str:
    """Type of role numbers: int8, or wider where there are more roles."""
    return "int8" if roles <= 1 << 7 else "int16" if roles <= 1 << 15 else "int32"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """One image of a row.

    Attributes:
        kind: ``image``.
        reference: A path, ``archive::member`` or a URL, as the row gives it, or ``#/keys/to/it``
            within the row.
        digest: Of its bytes.
        width: In pixels, after the EXIF orientation.
        height: Likewise.
        start: Its first token.
        count: Number of tokens that stand for it.
        grid: Frames, rows and columns of patches, where the model uses them.
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
    """Decode the stored images of one row, which lack the origin."""
    return [msgspec.structs.replace(one, origin=origin) for one in _media.decode(text)]


class RejectedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that is not in the token file; positions count from the slice's start."""

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
    """The document published last; ``groups`` counts as `GROUP_COUNTS` says."""

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
    carried: tuple[str, ...]
    rejected: tuple[RejectedRow, ...]
    token_file: FileRecord
    meta_file: FileRecord
    groups: dict[str, int] | None = None

    @property
    def has_weights(self) -> bool:
        """Whether a trained token weighs other than 1."""
        return f"{WEIGHT_RUNS}.offsets" in self.meta_file.buffers

    @property
    def has_media(self) -> bool:
        return f"{MEDIA}.offsets" in self.meta_file.buffers

    @property
    def units(self) -> int:
        """Groups where there are any, else rows."""
        return self.rows if self.groups is None else count_groups(self.groups)

    def encode(self) -> bytes:
        # Its fields are typed, all of them plain: there is nothing to look for in it.
        return canonical_of_parsed(self) + b"\n"


_decoder = msgspec.json.Decoder(CommitRecord)
_probe = msgspec.json.Decoder(dict[str, Any])


def decode_record(data: bytes, files: SliceFiles) -> CommitRecord:
    """Read a commit record; refuse another format, another slice or inconsistent counts."""
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
        raise CorruptionError(f"must count {', '.join(GROUP_COUNTS)} of groups", path=files.record)
    if record.rows_in != record.units + len(record.rejected):
        raise CorruptionError(
            f"{record.rows_in} rows in, but {record.units} kept + {len(record.rejected)} rejected",
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
    """Bytes of every buffer of the meta file; None where the record does not determine them."""
    fixed = dict(META_COLUMNS)
    lists = [MASK_RUNS, "turn_ends", "turn_roles", *(CARRIED + name for name in record.carried)]
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


def _check_buffers(stated: FileRecord, sizes: dict[str, int | None], files: SliceFiles) -> None:
    if set(stated.buffers) != set(sizes):
        raise CorruptionError("does not name the buffers of its files", path=files.record)
    for name, expected in sizes.items():
        actual = stated.buffers[name][1]
        if expected is not None and actual != expected:
            raise CorruptionError(
                f"buffer {name!r} has {actual} bytes, expected {expected}", path=files.record
            )


def require_format(stated: Any, path: Path) -> None:
    if stated != FORMAT:
        raise CorruptionError(
            f"written as format {stated!r}, this version reads format {FORMAT}; prepare it again",
            path=path,
        )
