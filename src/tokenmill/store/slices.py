"""Read slices: arrays placed on the buffers of mapped files.

`SliceReader` opens a slice by its commit record and never parses Arrow. Opening checks the record's
digest and both sizes; a block's checksum is checked before the first row that touches it is
returned. The meta file (origins, turns, extra columns) is opened on first use.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill.errors import CorruptionError
from tokenmill.files.remote_path import as_remote
from tokenmill.files.sealed import quarantine
from tokenmill.origin import Origin
from tokenmill.store import layout as names
from tokenmill.store.access import (
    GuardedFile,
    open_bytes,
    open_guarded,
    reading_errors,
    require_size,
)
from tokenmill.store.columns import GroupColumns, MediaColumns, WeightRuns, count_within, firsts_of
from tokenmill.store.layout import CacheLayout, SliceFiles
from tokenmill.store.record import (
    CARRIED,
    GROUP_COLUMNS,
    MASK_RUNS,
    MEDIA,
    MEDIA_COLUMNS,
    META_COLUMNS,
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
    data = _record_bytes(files, expected)
    digest = xxhash.xxh3_128_hexdigest(data)
    if expected is not None and digest != expected:
        raise CorruptionError(
            f"commit record has digest {digest}, the store expects {expected}", path=files.record
        )
    record = decode_record(data, files)
    # A store's table vouches for the bytes; without one they must be those that were written.
    if expected is None and record.encode() != data:
        raise CorruptionError(
            "the right members, but not the bytes that were written", path=files.record
        )
    return record, digest


def _record_bytes(files: SliceFiles, expected: str | None) -> bytes:
    remote = as_remote(files.record)
    if remote is None:
        file = open_bytes(files.record, mapped=False)
        return bytes(file.view(0, file.size))
    with reading_errors(files.record):
        return remote.read_kept(
            f"{expected}.record", lambda data: xxhash.xxh3_128_hexdigest(data) == expected
        )


class RowCounts(NamedTuple):
    """What a store holds of the rows of one slice.

    Attributes:
        record: The slice's commit record.
        digest: Of the record's bytes.
        lengths: Tokens of every row.
        trained: Trained tokens of every row.
        runs: The tokens at which each row's mask changes.
        run_starts: Where each row's begin; one more entry than rows.
        group_ends: One past the last row of every group; without groups, of every row.
        media: Of every row, the numbers of `MEDIA_COLUMNS`.
    """

    record: CommitRecord
    digest: str
    lengths: NDArray[np.int32]
    trained: NDArray[np.int32]
    runs: NDArray[np.int32]
    run_starts: NDArray[np.int64]
    group_ends: NDArray[np.int64]
    weights: WeightRuns
    media: dict[str, NDArray[np.int32]]

    def store_columns(self, rows: int, runs: int, weight_runs: int) -> dict[str, NDArray[Any]]:
        """The arrays of a store for this slice, after so many rows and runs of other slices."""
        return {
            names.LENGTHS: self.lengths,
            names.TRAINED: self.trained,
            names.FIRST_TRAINED: firsts_of(self.runs, self.run_starts),
            names.MASK_RUNS: self.runs,
            names.MASK_RUN_ENDS: self.run_starts[1:] + runs,
            names.GROUP_ENDS: self.group_ends + rows,
            names.WEIGHT_RUNS: self.weights.places,
            names.RUN_WEIGHTS: self.weights.weights,
            names.WEIGHT_RUN_ENDS: self.weights.bounds[1:] + weight_runs,
            names.PICTURES: self.media["pictures"],
            names.PATCHES: self.media["patches"],
        }


def read_counts(files: SliceFiles, expected: str | None = None) -> RowCounts:
    """Read the counts of a slice's rows and check them against its record; no token is read."""
    record, digest = read_record(files, expected)
    _check_size(files.tokens, record.token_file.size)
    meta = open_guarded(files.meta, record.meta_file, mapped=False, check=True)
    rows = record.rows
    column, starts = 4 * rows, 4 * (rows + 1)
    sizes: dict[str, int | None] = {"length": column, "trained": column}
    sizes |= {f"{MASK_RUNS}.offsets": starts, f"{MASK_RUNS}.values": None}
    if record.groups is not None:
        sizes["part"] = column
    if record.has_weights:
        lists = (f"{WEIGHT_RUNS}.values", f"{RUN_WEIGHTS}.values")
        sizes |= {f"{WEIGHT_RUNS}.offsets": starts, **dict.fromkeys(lists)}
    if record.has_media:
        sizes |= dict.fromkeys(MEDIA_COLUMNS, column)
    places = {
        name: meta.buffer(name) if size is None else _sized(meta, name, size)
        for name, size in sizes.items()
    }
    # One read for all of them: they are neighbours.
    begin = min((at for at, size in places.values() if size), default=0)
    end = max(at + size for at, size in places.values())
    data = meta.read_blocks(begin, end - begin)

    def values(name: str, kind: str = "<i4") -> NDArray[Any]:
        at, size = places[name]
        at = max(at - begin, 0)
        return np.frombuffer(bytes(data[at : at + size]), kind)

    weights = WeightRuns(
        np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(rows + 1, np.int64)
    )
    if record.has_weights:
        weights = WeightRuns(
            values(f"{WEIGHT_RUNS}.values"),
            values(f"{RUN_WEIGHTS}.values", "<f4"),
            values(f"{WEIGHT_RUNS}.offsets").astype(np.int64),
        )
    counts = RowCounts(
        record,
        digest,
        values("length"),
        values("trained"),
        values(f"{MASK_RUNS}.values"),
        values(f"{MASK_RUNS}.offsets").astype(np.int64),
        np.arange(1, rows + 1) if record.groups is None else _group_ends(values("part")),
        weights,
        {
            name: values(name) if record.has_media else np.zeros(rows, np.int32)
            for name in MEDIA_COLUMNS
        },
    )
    fault = _fault(counts)
    if fault:
        raise CorruptionError(f"{fault} are not those of its rows", path=files.meta)
    return counts


def _group_ends(part: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where groups end; empty unless each begins with part 0 and the others count on from there."""
    firsts = np.flatnonzero(part == 0)
    ends = np.append(firsts[1:], [len(part)] * bool(len(part))).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    counted = np.arange(len(part)) - np.repeat(ends - sizes, sizes)
    return ends if np.array_equal(part, counted) else ends[:0]


def _fault(counts: RowCounts) -> str:
    """Return what contradicts the record or the rows; empty if nothing does."""
    record, weights = counts.record, counts.weights
    lengths, trained = counts.lengths.astype(np.int64), counts.trained.astype(np.int64)
    if (lengths.sum(), trained.sum()) != (record.tokens, record.trained):
        return f"{lengths.sum()} tokens, {trained.sum()} of them trained,"
    if record.groups is not None and len(counts.group_ends) != record.units:
        return "groups"
    starts, stops = counts.run_starts, np.maximum(lengths, 0)
    if not _are_bounds(starts, len(counts.runs)) or not np.array_equal(
        count_within(counts.runs, starts[:-1], starts[1:], np.zeros_like(stops), stops), trained
    ):
        return "the runs of its masks"
    if len(weights.places) != len(weights.weights) or not _are_bounds(
        weights.bounds, len(weights.places)
    ):
        return "the runs of its weights"
    return ""


def _are_bounds(starts: NDArray[np.int64], count: int) -> bool:
    return bool(starts[0] == 0 and starts[-1] == count and (np.diff(starts) >= 0).all())


def _sized(file: GuardedFile, name: str, expected: int) -> tuple[int, int]:
    at, size = file.buffer(name)
    if size != expected:
        raise CorruptionError(
            f"buffer {name!r} has {size} bytes, expected {expected}", path=file.path
        )
    return at, size


class SliceReader:
    """One open slice; ``expected`` is the digest of its commit record, None takes any."""

    def __init__(
        self, files: SliceFiles, expected: str | None, *, mapped: bool, check: bool
    ) -> None:
        self.files = files
        self.record, self.record_digest = read_record(files, expected)
        self._check = check
        self._mapped = mapped
        self.tokens = open_guarded(files.tokens, self.record.token_file, mapped=mapped, check=check)
        # The meta file is opened on demand, but a slice with a missing half is no slice.
        _check_size(files.meta, self.record.meta_file.size)
        rows = self.record.rows
        at, size = _sized(self.tokens, "input_ids.offsets", 4 * (rows + 1))
        self.starts = self.tokens.view(at, size).cast("i")
        """Where each row starts among the slice's tokens, as plain integers."""
        self._ids_at, ids_size = _sized(self.tokens, "input_ids.values", 4 * self.record.tokens)
        self._mask_at, mask_size = _sized(self.tokens, "loss_mask.values", self.record.tokens)
        self.ids: NDArray[np.int32] | None = None
        self.mask: NDArray[np.uint8] | None = None
        if mapped:
            ids = self.tokens.unchecked_view(self._ids_at, ids_size)
            self.ids = np.frombuffer(ids, np.int32)
            mask = self.tokens.unchecked_view(self._mask_at, mask_size)
            self.mask = np.frombuffer(mask, np.uint8)
        if self.starts[0] != 0 or self.starts[rows] != self.record.tokens:
            raise CorruptionError(
                f"row offsets run from {self.starts[0]} to {self.starts[rows]}, expected 0 to "
                f"{self.record.tokens}",
                path=files.tokens,
                offset=at,
            )

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        start, stop = self.starts[number], self.starts[number + 1]
        if not self.tokens.clean:
            self.tokens.check(self._ids_at + 4 * start, 4 * (stop - start))
            self.tokens.check(self._mask_at + start, stop - start)
        if self.ids is not None and self.mask is not None:
            return self.ids[start:stop], self.mask[start:stop]
        ids = self.tokens.view(self._ids_at + 4 * start, 4 * (stop - start))
        mask = self.tokens.view(self._mask_at + start, stop - start)
        return np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8)

    def all_tokens(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ids and mask of all rows, one after another, checked."""
        ids = self.tokens.view(self._ids_at, 4 * self.record.tokens)
        mask = self.tokens.view(self._mask_at, self.record.tokens)
        return np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8)

    @cached_property
    def meta(self) -> GuardedFile:
        return open_guarded(
            self.files.meta, self.record.meta_file, mapped=self._mapped, check=self._check
        )

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One fixed-width column of the meta file."""
        dtype = np.dtype({**META_COLUMNS, **GROUP_COLUMNS, **MEDIA_COLUMNS}[name])
        if name in GROUP_COLUMNS and self.record.groups is None:
            return np.full(self.record.rows, np.nan if dtype.kind == "f" else -1, dtype)
        place = _sized(self.meta, name, dtype.itemsize * self.record.rows)
        return np.frombuffer(self.meta.view(*place), dtype)

    def group_columns(self) -> GroupColumns:
        return GroupColumns(**{name: self.column(name) for name in GROUP_COLUMNS})

    def turns(self, number: int) -> list[tuple[str, int, int]]:
        """Role, start and end of each turn of one row."""
        first, last = self._bounds("turn_ends", number)
        ends = self._values("turn_ends", "<i4", first, last).tolist()
        kind = role_type(len(self.record.roles))
        roles = self._values("turn_roles", kind, first, last).tolist()
        turns, start = [], 0
        for end, role in zip(ends, roles, strict=True):
            turns.append((self.record.roles[role], start, end))
            start = end
        return turns

    def all_turns(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.signedinteger[Any]]]:
        """All rows' turn ends, where each row's begin (one more than rows), and role numbers."""
        roles = self.meta.view(*self.meta.buffer("turn_roles.values"))
        return (
            np.frombuffer(self.meta.view(*self.meta.buffer("turn_ends.values")), np.int32),
            np.frombuffer(self.meta.view(*self.meta.buffer("turn_ends.offsets")), np.int32),
            np.frombuffer(roles, role_type(len(self.record.roles))),
        )

    def weight_runs(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """One row's `WeightRuns`, without bounds."""
        if not self.record.has_weights:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        first, last = self._bounds(WEIGHT_RUNS, number)
        places = self._values(WEIGHT_RUNS, "<i4", first, last)
        return places, self._values(RUN_WEIGHTS, "<f4", first, last)

    def media(self, number: int, origin: Origin | None) -> list[Media]:
        if not self.record.has_media:
            return []
        try:
            return decode_media(self._text(MEDIA, number), origin)
        except UNREADABLE as error:
            raise CorruptionError(
                f"what it says of pictures cannot be read: {error}", path=self.files.meta
            ) from error

    def media_columns(self) -> MediaColumns | None:
        if not self.record.has_media:
            return None
        told = [str(self._text(MEDIA, row), "utf-8") for row in range(self.record.rows)]
        return MediaColumns(told, self.column("pictures"), self.column("patches"))

    def carried(self, number: int) -> dict[str, Any]:
        """The extra columns of one row, decoded."""
        try:
            return {
                name: msgspec.json.decode(self._text(CARRIED + name, number))
                for name in self.record.carried
            }
        except UNREADABLE as error:
            raise CorruptionError(
                f"a carried column is not JSON: {error}", path=self.files.meta
            ) from error

    def carried_json(self, number: int) -> dict[str, str]:
        """The extra columns of one row as the stored JSON text."""
        return {
            name: str(self._text(CARRIED + name, number), "utf-8") for name in self.record.carried
        }

    def carried_texts(self, name: str) -> list[str]:
        """One extra column of the whole slice as JSON text."""
        return [str(self._text(CARRIED + name, row), "utf-8") for row in range(self.record.rows)]

    def _text(self, name: str, number: int) -> memoryview:
        first, last = self._bounds(name, number)
        at, _ = self.meta.buffer(f"{name}.values")
        return self.meta.view(at + first, last - first)

    def _bounds(self, name: str, number: int) -> tuple[int, int]:
        """Where one row's values begin and end in a column of lists or texts."""
        bounds = self.meta.view(*self.meta.buffer(f"{name}.offsets")).cast("i")
        return bounds[number], bounds[number + 1]

    def _values(self, name: str, kind: str, first: int, last: int) -> NDArray[Any]:
        at, _ = self.meta.buffer(f"{name}.values")
        width = np.dtype(kind).itemsize
        return np.frombuffer(self.meta.view(at + width * first, width * (last - first)), kind)

    def check_all(self) -> int:
        """Check every block of both files; return the bytes read."""
        return self.tokens.check_all() + self.meta.check_all()


def _check_size(path: Path, expected: int) -> None:
    if as_remote(path) is not None:
        return  # a request of its own; whoever reads the file meets its size
    with reading_errors(path):
        actual = path.stat().st_size
    require_size(path, actual, expected)


def quarantine_slice(layout: CacheLayout, key: str) -> None:
    """Move a slice out of the way."""
    files = layout.slice(key)
    # The record first: without it the slice is gone for everybody, whatever happens next.
    for path in (files.record, files.tokens, files.meta):
        quarantine(layout.root, path)


def quarantine_of(layout: CacheLayout, broken: str | None) -> bool:
    """Move away what a damaged file belongs to; False when it cannot be rebuilt."""
    if broken is None:
        return False
    path = Path(broken)
    if layout.slices in path.parents:
        quarantine_slice(layout, path.name.partition(".")[0])
        return True
    if layout.tokenizers in path.parents:
        quarantine(layout.root, layout.tokenizers / path.relative_to(layout.tokenizers).parts[0])
        return True
    return False


def slice_is_intact(files: SliceFiles) -> bool:
    """Whether a committed slice passes every check."""
    try:
        SliceReader(files, None, mapped=False, check=False).check_all()
    except CorruptionError:
        return False
    return True
