"""Read slices: arrays placed on the buffers of mapped files.

`SliceReader` opens a slice by its commit record and never parses Arrow. Opening checks the record's
digest and both sizes; a block's checksum is checked before the first row that touches it is
returned. The meta file (origins, turns, extra columns) is opened on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
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
from tokenmill.store.access import (
    GuardedFile,
    open_bytes,
    open_guarded,
    reading_errors,
    require_size,
)
from tokenmill.store.columns import GroupColumns, MediaColumns, WeightRuns, count_within
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
    """Read a slice's commit record and its digest.

    Args:
        files: Where the slice lies.
        expected: The digest that a store's table holds; None takes any.
    """
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
    """What the commit of a store needs of some slices, their rows one after another.

    Attributes:
        records: Commit record of each slice, and the record's digest.
        lengths: Tokens of every row, as stored.
        trained: Trained tokens of every row, as stored.
        runs: The tokens at which each row's mask changes.
        run_starts: Where each row's begin; one more entry than rows.
        group_ends: One past the last row of every group; where there are none, of every row.
        weights: How the weights of the rows run.
        media: Of every row, the numbers of `MEDIA_COLUMNS`.
    """

    records: list[tuple[CommitRecord, str]]
    lengths: bytes
    trained: bytes
    runs: NDArray[np.int32]
    run_starts: NDArray[np.int64]
    group_ends: NDArray[np.int64]
    weights: WeightRuns
    media: dict[str, NDArray[np.int32]]


def read_counts(slices: Sequence[SliceFiles]) -> RowCounts:
    """Records and rows' token counts of slices; their files' sizes and the counts are checked.

    No token is read: of a slice of eight megabytes this touches a few hundred kilobytes. Counts are
    checked together: numpy takes as long for the few of one slice as for those of a hundred.
    """
    each = [_read_counts(files) for files in slices]
    counts = _joined(each)
    if _fault(counts):
        for files, one in zip(slices, each, strict=True):
            if fault := _fault(one):
                raise CorruptionError(fault, path=files.meta)
    return counts


def _read_counts(files: SliceFiles) -> RowCounts:
    record, digest = read_record(files)
    _check_size(files.tokens, record.token_file.size)
    meta = GuardedFile(files.meta, record.meta_file, mapped=False, check=True)
    rows = record.rows
    places = [_sized(meta, name, 4 * rows) for name in ("length", "trained")]
    places.append(_sized(meta, f"{MASK_RUNS}.offsets", 4 * (rows + 1)))
    places.append(meta.buffer(f"{MASK_RUNS}.values"))
    begin = min((at for at, size in places if size), default=0)
    end = max(at + size for at, size in places)
    data = meta.read_blocks(begin, end - begin)
    lengths, trained, stored_starts, stored_runs = (
        bytes(data[max(at - begin, 0) : max(at - begin, 0) + size]) for at, size in places
    )
    runs = np.frombuffer(stored_runs, "<i4")
    run_starts = np.frombuffer(stored_starts, "<i4").astype(np.int64)
    if run_starts[0] != 0 or run_starts[-1] != len(runs):
        raise CorruptionError(_WRONG_RUNS, path=files.meta)
    group_ends = np.arange(1, rows + 1, dtype=np.int64)
    if record.groups is not None:
        group_ends = _group_ends(meta, record)
    weights = _weights(meta, record)
    media = {name: _media_column(meta, record, name) for name in MEDIA_COLUMNS}
    return RowCounts(
        [(record, digest)], lengths, trained, runs, run_starts, group_ends, weights, media
    )


def _media_column(meta: GuardedFile, record: CommitRecord, name: str) -> NDArray[np.int32]:
    if not record.has_media:
        return np.zeros(record.rows, np.int32)
    return np.frombuffer(meta.read_blocks(*_sized(meta, name, 4 * record.rows)), "<i4")


def _weights(meta: GuardedFile, record: CommitRecord) -> WeightRuns:
    """How the weights of a slice's rows run; none where all that is trained weighs 1."""
    if not record.has_weights:
        none = np.zeros(record.rows + 1, np.int64)
        return WeightRuns(np.zeros(0, np.int32), np.zeros(0, np.float32), none)
    at, size = meta.buffer(f"{WEIGHT_RUNS}.values")
    bounds = meta.read_blocks(*_sized(meta, f"{WEIGHT_RUNS}.offsets", 4 * (record.rows + 1)))
    weights = meta.read_blocks(*_sized(meta, f"{RUN_WEIGHTS}.values", size))
    found = WeightRuns(
        np.frombuffer(meta.read_blocks(at, size), "<i4"),
        np.frombuffer(weights, "<f4"),
        np.frombuffer(bounds, "<i4").astype(np.int64),
    )
    if found.bounds[0] != 0 or found.bounds[-1] != size // 4 or (np.diff(found.bounds) < 0).any():
        raise CorruptionError("the runs of its weights are not those of its rows", path=meta.path)
    return found


def _group_ends(meta: GuardedFile, record: CommitRecord) -> NDArray[np.int64]:
    """Where groups end; each begins with part 0, and the others count on from there."""
    part = np.frombuffer(meta.read_blocks(*_sized(meta, "part", 4 * record.rows)), "<i4")
    firsts = np.flatnonzero(part == 0)
    ends = np.append(firsts[1:], [record.rows] * bool(record.rows)).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    counted = np.arange(record.rows) - np.repeat(ends - sizes, sizes)
    if len(ends) != record.units or not np.array_equal(part, counted):
        raise CorruptionError("its rows are not those of whole groups", path=meta.path)
    return ends


def _joined(each: list[RowCounts]) -> RowCounts:
    """The counts of several slices as one."""
    firsts = accumulate((len(one.runs) for one in each), initial=0)
    starts = [one.run_starts[:-1] + first for one, first in zip(each, firsts, strict=False)]
    rows = accumulate((len(one.run_starts) - 1 for one in each), initial=0)
    ends = [one.group_ends + first for one, first in zip(each, rows, strict=False)]
    return RowCounts(
        [record for one in each for record in one.records],
        b"".join([one.lengths for one in each]),
        b"".join([one.trained for one in each]),
        np.concatenate([one.runs for one in each]),
        np.concatenate([*starts, [sum(len(one.runs) for one in each)]]),
        np.concatenate(ends),
        _joined_weights([one.weights for one in each]),
        {name: np.concatenate([one.media[name] for one in each]) for name in MEDIA_COLUMNS},
    )


def _joined_weights(each: list[WeightRuns]) -> WeightRuns:
    firsts = accumulate((len(one.places) for one in each), initial=0)
    bounds = [one.bounds[:-1] + first for one, first in zip(each, firsts, strict=False)]
    return WeightRuns(
        np.concatenate([one.places for one in each]),
        np.concatenate([one.weights for one in each]),
        np.concatenate([*bounds, [sum(len(one.places) for one in each)]]),
    )


_WRONG_RUNS = "the runs of its masks are not those of its rows"


def _fault(counts: RowCounts) -> str:
    """What is wrong with counts: each slice's must add up to its record, its runs to its rows."""
    records = [record for record, _ in counts.records]
    bounds = list(accumulate((record.rows for record in records), initial=0))
    lengths, trained = (
        np.frombuffer(stored, "<i4").astype(np.int64) for stored in (counts.lengths, counts.trained)
    )
    starts = counts.run_starts
    stops = np.maximum(lengths, 0)
    if (np.diff(starts) < 0).any() or not np.array_equal(
        count_within(counts.runs, starts[:-1], starts[1:], np.zeros_like(stops), stops), trained
    ):
        return _WRONG_RUNS
    for per_row, stated in (
        (lengths, [record.tokens for record in records]),
        (trained, [record.trained for record in records]),
    ):
        found = np.diff(np.cumsum(np.concatenate(([0], per_row)))[bounds]).tolist()
        if found != stated:
            return f"its rows count {found[0]} tokens, the record says {stated[0]}"
    return ""


def _sized(file: GuardedFile, name: str, expected: int) -> tuple[int, int]:
    at, size = file.buffer(name)
    if size != expected:
        raise CorruptionError(
            f"buffer {name!r} has {size} bytes, expected {expected}", path=file.path
        )
    return at, size


class SliceReader:
    """One slice, open.

    Args:
        files: Where it lies.
        expected: Digest of its commit record in the store's table; None takes any.
        mapped: Map the files, or read them range by range.
        check: Check block checksums on first touch.
    """

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
        """Ids and mask of one row, as views where the file is mapped."""
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
        """The meta file, opened on first use."""
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
        """What a slice with groups knows of its answers."""
        return GroupColumns(**{name: self.column(name) for name in GROUP_COLUMNS})

    def turns(self, number: int) -> list[tuple[str, int, int]]:
        """The turns of one row: role and first and last-plus-one token."""
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
        """Where the weight of one row changes and what it is from there on; see `WeightRuns`."""
        if not self.record.has_weights:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        first, last = self._bounds(WEIGHT_RUNS, number)
        places = self._values(WEIGHT_RUNS, "<i4", first, last)
        return places, self._values(RUN_WEIGHTS, "<f4", first, last)

    def media(self, number: int, origin: Origin | None) -> list[Media]:
        """The pictures of one row."""
        if not self.record.has_media:
            return []
        try:
            return decode_media(self._text(MEDIA, number), origin)
        except UNREADABLE as error:
            raise CorruptionError(
                f"what it says of pictures cannot be read: {error}", path=self.files.meta
            ) from error

    def media_columns(self) -> MediaColumns | None:
        """What is known of the pictures of all rows; None where no row has one."""
        if not self.record.has_media:
            return None
        told = [str(self._text(MEDIA, row), "utf-8") for row in range(self.record.rows)]
        return MediaColumns(told, self.column("pictures"), self.column("patches"))

    def carried(self, number: int) -> dict[str, Any]:
        """The carried columns of one row, decoded."""
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
        """The carried columns of one row, as the JSON text that is stored."""
        return {
            name: str(self._text(CARRIED + name, number), "utf-8") for name in self.record.carried
        }

    def carried_texts(self, name: str) -> list[str]:
        """One carried column of the whole slice, as JSON text."""
        return [str(self._text(CARRIED + name, row), "utf-8") for row in range(self.record.rows)]

    def _text(self, name: str, number: int) -> memoryview:
        first, last = self._bounds(name, number)
        at, _ = self.meta.buffer(f"{name}.values")
        return self.meta.view(at + first, last - first)

    def _bounds(self, name: str, number: int) -> tuple[int, int]:
        """Where one row's values begin and end in a column of lists or texts of the meta file."""
        bounds = self.meta.view(*self.meta.buffer(f"{name}.offsets")).cast("i")
        return bounds[number], bounds[number + 1]

    def _values(self, name: str, kind: str, first: int, last: int) -> NDArray[Any]:
        """Some values of a column of lists."""
        at, _ = self.meta.buffer(f"{name}.values")
        width = np.dtype(kind).itemsize
        return np.frombuffer(self.meta.view(at + width * first, width * (last - first)), kind)

    def check_all(self) -> int:
        """Check every block of both files; returns the bytes read."""
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
    """Move away what a broken file belongs to; False when it is nothing that can be rebuilt."""
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
