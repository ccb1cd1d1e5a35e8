"""The commit record: what makes two files a slice.

A slice is a token file and a meta file; the *commit record* is the small JSON document that is
published after both and says what they must be: counts, role names, rejected rows, sizes, a
checksum for every block and the position of every buffer. A reader needs nothing else to map a
slice: it never parses Arrow. The record holds no path, no time and no host, so two builders of one
key write the same bytes; its own digest stands in the table of every store that uses the slice.

The *content* digest is taken over the values (not over the files), so that two builders whose
Arrow libraries write another header are still seen to agree.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.errors import CorruptionError, TokenmillError
from tokenmill.fingerprint import canonical_of_parsed
from tokenmill.origin import Origin
from tokenmill.store.layout import FORMAT, SliceFiles

BLOCK_BYTES = 1 << 20
"""Bytes guarded by one checksum: small enough that a random row checks little on first touch."""


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
"""Fixed-width columns of the meta file and their types; -1 stands for "has none"."""


GROUP_COLUMNS = {
    "label": "int8",
    "score": "float64",
    "margin": "float64",
    "prompt_tokens": "int32",
}
"""Further columns of a slice that has groups; -1 and NaN stand for "has none"."""

GROUP_KINDS = ("preference", "kto", "ranked", "single")
"""Kinds of groups; ``single`` is an ordinary row in a slice, or a store, that has groups."""

GROUP_COUNTS = (*GROUP_KINDS, "scores", "margins")
"""What is counted of groups: those of each kind, and those that have scores or a margin."""


def count_groups(counts: dict[str, int]) -> int:
    """How many groups there are of all kinds."""
    return sum(counts[kind] for kind in GROUP_KINDS)


def role_type(roles: int) -> str:
    """Type of role numbers in a slice with some roles: int8, wider only where it must be."""
    return "int8" if roles <= 1 << 7 else "int16" if roles <= 1 << 15 else "int32"


MASK_RUNS = "mask_runs"
"""Column of the tokens at which each row's mask changes."""


WEIGHT_RUNS, RUN_WEIGHTS = "weight_runs", "run_weights"
"""Columns of the tokens at which each row's weight changes, and what it is from there on; only
slices in which a trained token weighs other than 1 have them, see `runs`."""


MEDIA = "media"
"""Column of what is known of each row's pictures, as JSON text; see `Media`."""

MEDIA_COLUMNS = {"pictures": "int32", "patches": "int32"}
"""Further columns of a slice that has rows with pictures: how many, and what they cost a model."""


class Media(msgspec.Struct, frozen=True, array_like=True):
    """One picture of a row.

    Attributes:
        kind: ``image``.
        reference: Where it is: a path, ``archive::member`` or an address, as the row says it, or
            ``#/keys/to/it`` of a picture within the row.
        digest: Of its bytes.
        width: In pixels, as the processor sees it: its orientation applied.
        height: Likewise.
        start: Its first token.
        count: How many tokens stand for it, with whatever the processor puts around them.
        grid: Frames, rows and columns of patches, where the model is told.
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
    """What a slice keeps of the pictures of one row, which is all of them but the origin."""
    return [msgspec.structs.replace(one, origin=origin) for one in _media.decode(text)]


CARRIED = "carried."
"""Prefix of a carried column's name in the meta file, so that it cannot hide one of ours."""


_TOKEN_BUFFERS = {
    f"{column}{part}" for column in ("input_ids", "loss_mask") for part in (".offsets", ".values")
}
_TOKEN_OFFSETS = ("input_ids.offsets", "loss_mask.offsets")
_META_WIDTHS = {name: 4 if kind.endswith("32") else 8 for name, kind in META_COLUMNS.items()}
_LISTS = (MASK_RUNS, "turn_ends", "turn_roles")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding bytes that nobody of us wrote can raise; the last one where they nest too deep."""


class RejectedRow(msgspec.Struct, frozen=True, array_like=True):
    """One row that is not in the token file, and why; positions count from the slice's start."""

    row: int
    part: int
    line: int
    offset: int
    length: int
    reason: str
    detail: str


class FileRecord(msgspec.Struct, frozen=True):
    """What one file of the slice must be.

    Attributes:
        size: Bytes.
        blocks: xxh3-64 of each block of `BLOCK_BYTES`, as 16 hex digits.
        buffers: Name of a buffer → (position, bytes).
    """

    size: int
    blocks: tuple[str, ...]
    buffers: dict[str, tuple[int, int]]


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The document published last; see the module.

    ``longest`` is the length of the longest row. Where the slice has groups, ``groups`` says how
    many of each of `GROUP_COUNTS`.
    """

    format: int
    slice: str
    content: str
    source_rows: int
    rows_in: int
    rows: int
    tokens: int
    trained: int
    longest: int
    roles: tuple[str, ...]
    carried: tuple[str, ...]
    rejected: tuple[RejectedRow, ...]
    token_file: FileRecord
    meta_file: FileRecord
    groups: dict[str, int] | None = None

    @property
    def has_weights(self) -> bool:
        """Whether a trained token of it weighs other than 1."""
        return f"{WEIGHT_RUNS}.offsets" in self.meta_file.buffers

    @property
    def has_media(self) -> bool:
        """Whether it has rows with pictures."""
        return f"{MEDIA}.offsets" in self.meta_file.buffers

    @property
    def units(self) -> int:
        """What the account counts: groups where there are any, else rows."""
        return self.rows if self.groups is None else count_groups(self.groups)

    def encode(self) -> bytes:
        """The bytes on disk."""
        # Its fields are typed, all of them plain: there is nothing to look for in it.
        return canonical_of_parsed(self) + b"\n"


_decoder = msgspec.json.Decoder(CommitRecord)
_probe = msgspec.json.Decoder(dict[str, Any])


def decode_record(data: bytes, files: SliceFiles) -> CommitRecord:
    """Read a commit record, refusing another format, another slice and inconsistent counts."""
    try:
        record = _decoder.decode(data)
    except UNREADABLE as error:
        raise _refusal(data, files, error) from error
    if record.format != FORMAT:
        raise _other_format(record.format, files)
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
    if set(record.token_file.buffers) != _TOKEN_BUFFERS or not _names_meta_buffers(record):
        raise CorruptionError("does not name the buffers of its files", path=files.record)
    _require_sizes(record, files)
    return record


def _require_sizes(record: CommitRecord, files: SliceFiles) -> None:
    """Refuse a record whose buffers are not as large as its counts ask for."""
    tokens, rows = record.token_file.buffers, record.rows
    sizes = [
        *((name, tokens[name][1], 4 * (rows + 1)) for name in _TOKEN_OFFSETS),
        ("input_ids.values", tokens["input_ids.values"][1], 4 * record.tokens),
        ("loss_mask.values", tokens["loss_mask.values"][1], record.tokens),
        *((name, record.meta_file.buffers[name][1], w * rows) for name, w in _META_WIDTHS.items()),
    ]
    for name, stated, expected in sizes:
        if stated != expected:
            raise CorruptionError(
                f"buffer {name!r} has {stated} bytes, expected {expected}", path=files.record
            )


def _names_meta_buffers(record: CommitRecord) -> bool:
    lists = (*_LISTS, *(CARRIED + name for name in record.carried))
    if record.has_weights:
        lists = (*lists, WEIGHT_RUNS, RUN_WEIGHTS)
    if record.has_media:
        lists = (*lists, MEDIA)
    wanted = {*META_COLUMNS, *(name + part for name in lists for part in (".offsets", ".values"))}
    if record.groups is not None:
        wanted |= set(GROUP_COLUMNS)
    if record.has_media:
        wanted |= set(MEDIA_COLUMNS)
    return set(record.meta_file.buffers) == wanted


def _refusal(data: bytes, files: SliceFiles, error: Exception) -> TokenmillError:
    try:
        stated = _probe.decode(data).get("format")
    except UNREADABLE:
        return CorruptionError(f"not a commit record: {error}", path=files.record)
    if stated != FORMAT:
        return _other_format(stated, files)
    return CorruptionError(f"not a commit record: {error}", path=files.record)


def _other_format(stated: Any, files: SliceFiles) -> CorruptionError:
    return CorruptionError(
        f"written as format {stated!r}, this version reads format {FORMAT}; prepare it again",
        path=files.record,
    )
