"""Read slices: numpy arrays over the buffers of mapped files.

Opening a slice checks the digest of its commit record and the sizes of both files. The checksum of
a block is checked before the first row in it is returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from numpy.typing import NDArray

from tokenmill._core.artifact import quarantine
from tokenmill._core.origin import Origin
from tokenmill._core.paths import require_bounded
from tokenmill._core.remote_path import as_remote
from tokenmill.errors import CorruptionError
from tokenmill.store import layout as names
from tokenmill.store.access import (
    ByteFile,
    ChecksummedFile,
    open_checksummed,
    reading_errors,
    require_size,
)
from tokenmill.store.columns import GroupColumns, MediaColumns, count_within, firsts_of
from tokenmill.store.layout import CacheLayout, SliceFiles
from tokenmill.store.record import (
    EXTRA,
    FIXED_COLUMNS,
    GROUP_COLUMNS,
    MASK_RUNS,
    MEDIA,
    MEDIA_COLUMNS,
    RUN_WEIGHTS,
    UNREADABLE,
    WEIGHT_RUNS,
    CommitRecord,
    Media,
    decode_media,
    decode_record,
    role_type,
)


def read_record(files: SliceFiles, expected: str | None = None) -> tuple[CommitRecord, str]:
    """Read a slice's commit record and its digest, which must be ``expected`` if given."""
    files.require_inside()
    remote = as_remote(files.record)
    if remote is None:
        file = ByteFile(files.record, mapped=False)
        require_bounded(files.record, file.size)
        data = bytes(file.view(0, file.size))
    else:
        with reading_errors(files.record):
            data = remote.read_cached(
                f"{expected}.record", lambda found: xxhash.xxh3_128_hexdigest(found) == expected
            )
    digest = xxhash.xxh3_128_hexdigest(data)
    if expected is not None and digest != expected:
        raise CorruptionError(
            f"commit record has digest {digest}, the store expects {expected}", path=files.record
        )
    record = decode_record(data, files)
    # Without a digest from a store's table, the bytes must be the canonical encoding, which
    # contains their checksum.
    if expected is None and record.encode() != data:
        raise CorruptionError(
            "has valid fields, but not the bytes that were written", path=files.record
        )
    return record, digest


class SliceCounts(NamedTuple):
    record: CommitRecord
    digest: str  # of the record's bytes
    columns: dict[str, NDArray[Any]]  # of `layout.ARRAYS`; ends count from the slice's beginning

    def columns_after(self, rows: int, runs: int, weight_runs: int) -> dict[str, NDArray[Any]]:
        """Return the columns in a store, after rows and runs of other slices."""
        return {
            **self.columns,
            names.GROUP_ENDS: self.columns[names.GROUP_ENDS] + rows,
            names.MASK_RUN_ENDS: self.columns[names.MASK_RUN_ENDS] + runs,
            names.WEIGHT_RUN_ENDS: self.columns[names.WEIGHT_RUN_ENDS] + weight_runs,
        }


def read_counts(files: SliceFiles, expected: str | None = None) -> SliceCounts:
    """Read the counts of a slice's rows and check them against its record, without tokens."""
    record, digest = read_record(files, expected)
    _check_size(files.tokens, record.token_file.size)
    meta = open_checksummed(files.meta, record.meta_file, mapped=False, check=True)
    rows = record.rows
    buffers = ["length", "trained", f"{MASK_RUNS}.offsets", f"{MASK_RUNS}.values"]
    if record.groups is not None:
        buffers.append("part")
    if record.has_weights:
        buffers += [f"{WEIGHT_RUNS}.offsets", f"{WEIGHT_RUNS}.values", f"{RUN_WEIGHTS}.values"]
    if record.has_media:
        buffers += MEDIA_COLUMNS
    positions = {name: meta.buffer(name) for name in buffers}
    # The buffers are adjacent, so one read is enough.
    begin = min((at for at, size in positions.values() if size), default=0)
    end = max(at + size for at, size in positions.values())
    data = meta.read_blocks(begin, end - begin)

    def values(name: str, kind: str = "<i4") -> NDArray[Any]:
        if name not in positions:
            return np.zeros(rows if name in MEDIA_COLUMNS else 0, kind)
        at, size = positions[name]
        at = max(at - begin, 0)
        return np.frombuffer(data[at : at + size], kind)

    run_starts = values(f"{MASK_RUNS}.offsets")
    weight_starts = values(f"{WEIGHT_RUNS}.offsets") if record.has_weights else 0 * run_starts
    groups = np.arange(1, rows + 1) if record.groups is None else _group_ends(values("part"))
    columns: dict[str, NDArray[Any]] = {
        names.LENGTHS: values("length"),
        names.TRAINED: values("trained"),
        names.MASK_RUNS: values(f"{MASK_RUNS}.values"),
        names.MASK_RUN_ENDS: run_starts[1:].astype(np.int64),
        names.GROUP_ENDS: groups,
        names.WEIGHT_RUNS: values(f"{WEIGHT_RUNS}.values"),
        names.RUN_WEIGHTS: values(f"{RUN_WEIGHTS}.values", "<f4"),
        names.WEIGHT_RUN_ENDS: weight_starts[1:].astype(np.int64),
        names.IMAGES: values("images"),
        names.PATCHES: values("patches"),
    }
    fault = _fault(record, columns, run_starts.astype(np.int64), weight_starts)
    if fault:
        raise CorruptionError(f"{fault} do not match its rows", path=files.meta)
    columns[names.FIRST_TRAINED] = firsts_of(columns[names.MASK_RUNS], run_starts)
    return SliceCounts(record, digest, columns)


def _group_ends(part: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where groups end; empty unless each begins with part 0 and the others count on from there."""
    firsts = np.flatnonzero(part == 0)
    ends = np.append(firsts[1:], [len(part)] * bool(len(part))).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    counted = np.arange(len(part)) - np.repeat(ends - sizes, sizes)
    return ends if np.array_equal(part, counted) else ends[:0]


def _fault(
    record: CommitRecord,
    columns: dict[str, NDArray[Any]],
    run_starts: NDArray[np.int64],
    weight_starts: NDArray[np.int32],
) -> str:
    """Return what contradicts the record; empty if nothing does."""
    lengths, trained = (columns[name].astype(np.int64) for name in (names.LENGTHS, names.TRAINED))
    counts = lengths.sum(), trained.sum()
    if counts != (record.tokens, record.trained):
        return f"{counts[0]} tokens, {counts[1]} of them trained,"
    if record.groups is not None and len(columns[names.GROUP_ENDS]) != record.units:
        return "groups"
    runs, stops = columns[names.MASK_RUNS], np.maximum(lengths, 0)
    if not _are_bounds(run_starts, len(runs)) or not np.array_equal(
        count_within(runs, run_starts[:-1], run_starts[1:], np.zeros_like(stops), stops), trained
    ):
        return "the runs of its masks"
    if record.has_weights:
        weights = len(columns[names.WEIGHT_RUNS])
        if weights != len(columns[names.RUN_WEIGHTS]) or not _are_bounds(weight_starts, weights):
            return "the runs of its weights"
    return ""


def _are_bounds(starts: NDArray[Any], count: int) -> bool:
    return bool(starts[0] == 0 and starts[-1] == count and (np.diff(starts) >= 0).all())


class SliceReader:
    """One open slice; ``expected`` is the digest of its commit record, or None."""

    def __init__(
        self, files: SliceFiles, expected: str | None, *, mapped: bool, check: bool
    ) -> None:
        self.files = files
        self.record, self.record_digest = read_record(files, expected)
        self._check = check
        self._mapped = mapped
        self.tokens = open_checksummed(
            files.tokens, self.record.token_file, mapped=mapped, check=check
        )
        # The meta file is opened on demand, but a slice needs both files.
        _check_size(files.meta, self.record.meta_file.size)
        rows = self.record.rows
        at, size = self.tokens.buffer("input_ids.offsets")
        self.starts = self.tokens.view(at, size).cast("i")
        """First token of each row in the slice."""
        self._ids_at, ids_size = self.tokens.buffer("input_ids.values")
        self._mask_at, mask_size = self.tokens.buffer("loss_mask.values")
        self.ids: NDArray[np.int32] | None = None
        self.mask: NDArray[np.uint8] | None = None
        if mapped:
            unchecked = self.tokens.unchecked_view
            self.ids = np.frombuffer(unchecked(self._ids_at, ids_size), np.int32)
            self.mask = np.frombuffer(unchecked(self._mask_at, mask_size), np.uint8)
        if self.starts[0] != 0 or self.starts[rows] != self.record.tokens:
            raise CorruptionError(
                f"row offsets run from {self.starts[0]} to {self.starts[rows]}, expected 0 to "
                f"{self.record.tokens}",
                path=files.tokens,
                offset=at,
            )

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        start, stop = self.starts[number], self.starts[number + 1]
        if not self.tokens.verified:
            self.tokens.check(self._ids_at + 4 * start, 4 * (stop - start))
            self.tokens.check(self._mask_at + start, stop - start)
        if self.ids is not None and self.mask is not None:
            return self.ids[start:stop], self.mask[start:stop]
        ids = self.tokens.view(self._ids_at + 4 * start, 4 * (stop - start))
        mask = self.tokens.view(self._mask_at + start, stop - start)
        return np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8)

    def all_tokens(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return ids and mask of all rows, concatenated and checked."""
        ids = self.tokens.view(self._ids_at, 4 * self.record.tokens)
        mask = self.tokens.view(self._mask_at, self.record.tokens)
        return np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8)

    @cached_property
    def meta(self) -> ChecksummedFile:
        return open_checksummed(
            self.files.meta, self.record.meta_file, mapped=self._mapped, check=self._check
        )

    def column(self, name: str) -> np.ndarray[Any, Any]:
        dtype, rows = np.dtype(FIXED_COLUMNS[name]), self.record.rows
        if name in GROUP_COLUMNS and self.record.groups is None:
            return np.full(rows, np.nan if dtype.kind == "f" else -1, dtype)
        if name in MEDIA_COLUMNS and not self.record.has_media:
            return np.zeros(rows, dtype)
        return self._buffer(name, dtype)

    def _buffer(self, name: str, dtype: npt.DTypeLike) -> NDArray[Any]:
        return np.frombuffer(self.meta.view(*self.meta.buffer(name)), dtype)

    def group_columns(self) -> GroupColumns:
        return GroupColumns(**{name: self.column(name) for name in GROUP_COLUMNS})

    def turns(self, number: int) -> list[tuple[str, int, int]]:
        ends = self._of_row("turn_ends", "<i4", number).tolist()
        roles = self._of_row("turn_roles", role_type(len(self.record.roles)), number).tolist()
        names = (self.record.roles[role] for role in roles)
        return list(zip(names, [0, *ends[:-1]], ends, strict=True)) if ends else []

    def all_turns(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.signedinteger[Any]]]:
        """Return turn ends of all rows, the index of each row's first, and role numbers."""
        return (
            self._buffer("turn_ends.values", "<i4"),
            self._buffer("turn_ends.offsets", "<i4"),
            self._buffer("turn_roles.values", role_type(len(self.record.roles))),
        )

    def weight_runs(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return positions and weights of one row's `WeightRuns`."""
        if not self.record.has_weights:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        positions = self._of_row(WEIGHT_RUNS, "<i4", number)
        return positions, self._of_row(RUN_WEIGHTS, "<f4", number)

    def media(self, number: int, origin: Origin | None) -> list[Media]:
        if not self.record.has_media:
            return []
        with self._decoding("media"):
            return decode_media(self._text(MEDIA, number), origin)

    def media_columns(self) -> MediaColumns | None:
        if not self.record.has_media:
            return None
        return MediaColumns(self._texts(MEDIA), self.column("images"), self.column("patches"))

    def extra(self, number: int) -> dict[str, Any]:
        with self._decoding("extra"):
            return {
                name: msgspec.json.decode(self._text(EXTRA + name, number))
                for name in self.record.extra
            }

    @contextlib.contextmanager
    def _decoding(self, columns: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            message = f"the JSON in its {columns} columns cannot be read: {error}"
            raise CorruptionError(message, path=self.files.meta) from error

    def extra_json(self, number: int) -> dict[str, str]:
        return {name: str(self._text(EXTRA + name, number), "utf-8") for name in self.record.extra}

    def extra_texts(self, name: str) -> list[str]:
        return self._texts(EXTRA + name)

    def _texts(self, name: str) -> list[str]:
        return [str(self._text(name, row), "utf-8") for row in range(self.record.rows)]

    def _text(self, name: str, number: int) -> memoryview:
        return self._of_row(name, "u1", number).data

    def _of_row(self, name: str, kind: str, number: int) -> NDArray[Any]:
        """Return one row's values of a column of lists or texts."""
        bounds = self.meta.view(*self.meta.buffer(f"{name}.offsets")).cast("i")
        first, last, width = bounds[number], bounds[number + 1], np.dtype(kind).itemsize
        at, _ = self.meta.buffer(f"{name}.values")
        return np.frombuffer(self.meta.view(at + width * first, width * (last - first)), kind)

    def check_all(self) -> int:
        return self.tokens.check_all() + self.meta.check_all()


def _check_size(path: Path, expected: int) -> None:
    if as_remote(path) is not None:
        return  # that would be another request; reading the file checks its size
    with reading_errors(path):
        actual = path.stat().st_size
    require_size(path, actual, expected)


def quarantine_slice(layout: CacheLayout, key: str) -> None:
    files = layout.slice(key)
    # The record is first: without it, no reader finds the slice.
    for path in (files.record, files.tokens, files.meta):
        quarantine(layout.root, path)


def quarantine_of(layout: CacheLayout, damaged: str | None) -> bool:
    """Quarantine the slice or tokenizer of a damaged file; return False for other files."""
    if damaged is None:
        return False
    path = Path(damaged)
    if layout.slices in path.parents:
        quarantine_slice(layout, path.name.partition(".")[0])
        return True
    if layout.tokenizers in path.parents:
        quarantine(layout.root, layout.tokenizers / path.relative_to(layout.tokenizers).parts[0])
        return True
    return False


def slice_is_intact(files: SliceFiles) -> bool:
    try:
        SliceReader(files, None, mapped=False, check=False).check_all()
    except CorruptionError:
        return False
    return True
