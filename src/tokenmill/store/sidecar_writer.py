"""Write sidecars: all at once (`Store.attach`) or in parts (`Store.attach_writer`).

Any number of processes can write values of any rows. A `SidecarWriter` publishes them as *parts*:
row numbers and their values. When no row is missing, the parts are merged; all processes that do
so produce the same bytes. ``tokenmill cache gc`` then removes the parts.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill._core import fingerprint
from tokenmill._core.artifact import ArtifactKind, ArtifactWriter, map_array, reading_errors
from tokenmill.errors import (
    MAX_INT32,
    CacheError,
    CorruptionError,
    NonDeterminismError,
    UsageError,
    check_integer,
)
from tokenmill.store.columns import row_numbers
from tokenmill.store.layout import SIDECAR_VALUES
from tokenmill.store.record import BLOCK_BYTES
from tokenmill.store.sidecars import (
    BYTES,
    KIND,
    Float32,
    Identity,
    Int64,
    Per,
    Record,
    RowStarts,
    Sidecar,
    SidecarDir,
    check_per,
    find,
    listed,
    sidecar_dirs,
)
from tokenmill.store.store import Store

Values = npt.ArrayLike | Iterable[npt.ArrayLike]

BLOCK_VALUES = BLOCK_BYTES // BYTES
CHUNK_VALUES = 1 << 20  # converted at once: 4 MiB
WINDOW_ROWS = 1 << 16  # rows merged from parts at once, at most
WINDOW_VALUES = 1 << 21  # values merged from parts at once, about
MAX_BUFFER_BYTES = 64 << 20  # of a writer, before it publishes a part
FLUSH_S = 60.0  # a killed writer loses at most this much work

ROW_NUMBERS = "rows.bin"
PART = ArtifactKind(
    "part of a sidecar",
    "part.json",
    (ROW_NUMBERS, SIDECAR_VALUES),
    "remove its directory, so that its rows are computed again",
)


# Conversion of values


class _Converter:
    """Convert values to float32; raise for NaN and for values out of its range."""

    def __init__(self, row_of: Callable[[int], int]) -> None:
        self._row_of = row_of  # the row of the value at a position
        self.converted = 0

    def __call__(self, given: npt.ArrayLike) -> Float32:
        array = _as_array(given)
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        wrong = np.isnan(values) | (np.isinf(values) & ~np.isinf(array))
        if wrong.any():
            first = int(wrong.argmax())
            raise UsageError(
                f"the value of row {self._row_of(self.converted + first)} is {array[first]!r}; "
                "values must be float32 numbers and not NaN: replace it by a number"
            )
        self.converted += values.size
        return values


def _as_array(given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor with gradient
        raise UsageError(
            f"values must be float32 numbers, got {type(given).__name__} ({error})"
        ) from error
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values must be float32 numbers, got {array.dtype}")
    if array.ndim > 1:
        raise UsageError(f"values must have one dimension, got shape {array.shape}")
    return array.reshape(-1)


def _row_by_row(
    values: Sequence[npt.ArrayLike], rows: Sequence[int] | Int64, lengths: Any, convert: _Converter
) -> Iterator[Float32]:
    if len(values) != len(rows):
        raise UsageError(f"got {len(values)} arrays of values for {len(rows)} rows")
    for row, length, given in zip(rows, lengths, values, strict=True):
        piece = convert(given)
        if piece.size != length:
            raise UsageError(f"got {piece.size} values for row {row}, which has {length} tokens")
        yield piece


def _in_order(values: Values, per: Per, store: Store) -> Iterator[Float32]:
    starts = RowStarts(store.lengths)
    expected = len(store) if per == "row" else starts.total
    convert = _Converter(int if per == "row" else starts.row_at)
    if isinstance(values, list | tuple):
        if per == "token":
            yield from _row_by_row(values, range(len(store)), store.lengths, convert)
            return
        if not any(map(np.ndim, values[:1])):
            values = _as_array(values)
    is_array = hasattr(values, "ndim") and hasattr(values, "shape")
    if is_array:
        array: Any = values  # sliced, because it may be a memory map or on a device
        if array.ndim != 1:
            array = _as_array(array)  # accepts a single value
        values = (array[at : at + CHUNK_VALUES] for at in range(0, len(array), CHUNK_VALUES))
    elif not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        raise UsageError(
            f"values must be arrays or an iterable of them, got {type(values).__name__}"
        )
    pieces: Iterable[Any] = values
    for given in pieces:
        piece = convert(given)
        end = convert.converted
        if end > expected:
            raise _wrong_count(end, expected, per, " or more")
        if per == "token" and not is_array and end < expected:
            row = starts.row_at(end)
            if starts.start(row) != end:
                raise UsageError(
                    f"an array of {piece.size} values ends at token {end}, inside row {row}: "
                    "pass the values of whole rows"
                )
        yield piece
    if convert.converted != expected:
        raise _wrong_count(convert.converted, expected, per)


def _wrong_count(given: int, expected: int, per: Per, suffix: str = "") -> UsageError:
    return UsageError(f"got {given}{suffix} values for a store of {expected} {per}s")


# A whole sidecar


def _record(identity: Identity, per: Per, rows: int, values: Float32, checksum: str) -> Record:
    blocks, sums, low, high, infinite = [], [], math.inf, -math.inf, 0
    for first in range(0, values.size, BLOCK_VALUES):
        block = values[first : first + BLOCK_VALUES]
        blocks.append(xxhash.xxh3_64_hexdigest(block.data))
        finite = block[np.isfinite(block)]
        infinite += block.size - finite.size
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            sums.append(float(finite.sum(dtype=np.float64)))
    return Record(
        document=identity.document,
        per=per,
        rows=rows,
        values=values.size,
        checksum=checksum,
        blocks=tuple(blocks),
        low=low if sums else None,
        high=high if sums else None,
        mean=math.fsum(sums) / (values.size - infinite) if sums else None,
        infinite=infinite,
    )


def attach_values(store: Store, name: str, values: Values, *, producer: str, per: str) -> Sidecar:
    identity, kind = Identity(store.key, name, producer), check_per(per, name)
    return _publish_values(store, identity, kind, _in_order(values, kind, store))


def _publish_values(
    store: Store, identity: Identity, per: Per, pieces: Iterable[Float32]
) -> Sidecar:
    """Publish values in row order; return an existing sidecar if it has the same values."""
    existing = _intact(store, identity)
    if existing is not None:
        if existing.per != per or not _has_values(existing, pieces):
            raise _conflict(existing)
        return existing
    with _staged(store, KIND, identity.key) as (target, writer):
        path = writer.write(SIDECAR_VALUES, (piece.astype("<f4").data for piece in pieces))
        checksum = writer.checksums[SIDECAR_VALUES]
        record = _record(identity, per, len(store), map_array(path, "<f4"), checksum)
        writer.publish(target, record, is_intact=lambda: _intact(store, identity) is not None)
    published = find(store, identity)
    if published is None:
        raise CacheError("was removed right after it was attached", path=target)
    if (published.per, published.record.checksum) != (per, checksum):
        raise _conflict(published)
    return published


def _intact(store: Store, identity: Identity) -> Sidecar | None:
    try:
        sidecar = find(store, identity)
        if sidecar is not None:
            sidecar.check_all()
    except CorruptionError:
        return None
    return sidecar


def _has_values(sidecar: Sidecar, pieces: Iterable[Float32]) -> bool:
    first, same = 0, True
    for piece in pieces:  # also after a difference, because an invalid value is another error
        same = same and sidecar.read(first, piece.size).tobytes() == piece.tobytes()
        first += piece.size
    return same


def _conflict(sidecar: Sidecar) -> NonDeterminismError:
    return NonDeterminismError(
        f"{sidecar.name!r} by {sidecar.producer!r} is attached per {sidecar.per} with other values,"
        " which are unchanged; use another producer",
        path=sidecar.path,
    )


@contextlib.contextmanager
def _staged(store: Store, kind: ArtifactKind, name: str) -> Iterator[tuple[Path, ArtifactWriter]]:
    first_error: CacheError | None = None
    with contextlib.ExitStack() as stack:
        for location in sidecar_dirs(store):
            target = location.directory / name
            beside = None if location.in_cache else target
            try:
                writer = stack.enter_context(kind.stage(location.root, beside=beside))
            except CacheError as error:
                first_error = first_error or error
                continue
            yield target, writer
            return
    assert first_error is not None
    raise first_error


# Values of some rows, and parts


class _PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: dict[str, Any]
    rows: int
    values: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class _RowValues:
    """Values of some rows, concatenated."""

    rows: Int64
    lengths: Int64
    values: Float32

    @cached_property
    def starts(self) -> Int64:
        starts: Int64 = np.cumsum(self.lengths) - self.lengths
        return starts

    def take(self, indices: Int64) -> _RowValues:
        lengths = self.lengths[indices]
        begin = np.cumsum(lengths) - lengths
        positions = np.repeat(self.starts[indices] - begin, lengths) + np.arange(lengths.sum())
        return _RowValues(self.rows[indices], lengths, self.values[positions])


class _Part:
    """A published part; its row numbers are sorted."""

    def __init__(self, path: Path, location: SidecarDir, document: dict[str, Any]) -> None:
        self.artifact = PART.open(path, location.root)
        self.record = self.artifact.convert(_PartRecord)
        self.artifact.require_document(document)

    def rows(self) -> Int64:
        return self._array(ROW_NUMBERS, "<i8", self.record.rows)

    def values(self) -> Float32:
        return self._array(SIDECAR_VALUES, "<f4", self.record.values)

    def _array(self, name: str, dtype: str, count: int) -> npt.NDArray[Any]:
        return self.artifact.array(name, dtype, count, self.record.checksums.get(name, ""))

    def read(self, first: int, count: int) -> Float32:
        """Read values unchecked; no file stays open, because there may be many parts."""
        path = self.artifact.directory / SIDECAR_VALUES
        with reading_errors(path, PART.remedy):
            return np.fromfile(path, "<f4", count, offset=first * BYTES)


class SidecarWriter:
    """Writes values of rows in any order; see `Store.attach_writer`.

    Attributes:
        sidecar: The published sidecar; None while rows are missing.
    """

    def __init__(self, store: Store, name: str, *, producer: str, per: str = "row") -> None:
        self._store = store
        self.identity = Identity(store.key, name, producer)
        self.per = check_per(per, name)
        self._document = {**self.identity.document, "per": self.per}
        self._parts_name = f"{self.identity.key}.parts"
        self._parts: dict[Path, _Part] = {}
        self._written = np.zeros(len(store), dtype=np.bool_)  # in a published part
        self._buffer: list[_RowValues] = []
        self._buffer_bytes = 0
        self._flushed = time.monotonic()
        self.sidecar: Sidecar | None = None
        self._refresh()

    @property
    def missing(self) -> Int64:
        """Sorted numbers of the rows that no process has written."""
        self._refresh()
        if self.sidecar is not None:
            return np.zeros(0, dtype=np.int64)
        written = self._written.copy()
        for values in self._buffer:
            written[values.rows] = True
        return np.flatnonzero(~written)

    def share(self, rank: int, world_size: int) -> Int64:
        """Return the missing rows that this rank shall compute; those of two ranks are disjoint."""
        world_size = check_integer("world_size", world_size, 1, MAX_INT32)
        rank = check_integer("rank", rank, 0, world_size - 1)
        missing = self.missing
        own: Int64 = missing[missing % world_size == rank]
        return own

    def write(self, rows: SupportsIndex | slice | Iterable[SupportsIndex], values: Values) -> None:
        """Write the values of some rows: a number, a slice, or numbers in any order.

        Per token, ``values`` is a list with one array for each row, or all values concatenated.
        """
        converted = self._converted(self._numbers(rows), values)
        self._buffer.append(converted)
        self._buffer_bytes += converted.rows.nbytes + converted.values.nbytes
        due = time.monotonic() - self._flushed >= FLUSH_S
        if due or self._buffer_bytes >= MAX_BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Publish buffered values as a part; raise if a row was written with other values."""
        buffer, self._buffer, self._buffer_bytes = self._buffer, [], 0
        self._flushed = time.monotonic()
        if not buffer:
            return
        self._refresh()
        rows, values = (
            np.concatenate([getattr(one, name) for one in buffer]) for name in ("rows", "values")
        )
        fresh = self._unwritten(self._sorted(self._of(rows, values)))
        if fresh.rows.size:
            self._publish_part(fresh)
            self._refresh()

    def publish(self) -> Sidecar:
        """Merge all parts and publish the sidecar; raise if a row is missing."""
        self.flush()
        missing = self.missing
        if missing.size:
            raise UsageError(
                f"{missing.size} of {len(self._store)} rows are missing, first row {missing[0]}; "
                "write them before publish()"
            )
        if self.sidecar is None:
            self.sidecar = _publish_values(self._store, self.identity, self.per, self._merged())
        return self.sidecar

    def __enter__(self) -> SidecarWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()  # also after an error, to keep the computed values
        if kind is None and not self.missing.size:
            self.publish()

    def _numbers(self, rows: SupportsIndex | slice | Iterable[SupportsIndex]) -> Int64:
        size = len(self._store)
        if isinstance(rows, slice):
            return np.arange(*rows.indices(size), dtype=np.int64)
        try:
            return row_numbers(rows if isinstance(rows, Iterable) else [rows], size)
        except IndexError as error:
            raise UsageError(str(error)) from error

    def _lengths(self, rows: Int64) -> Int64:
        if self.per == "row":
            return np.ones(rows.size, dtype=np.int64)
        return np.asarray(self._store.lengths[rows], dtype=np.int64)

    def _of(self, rows: Int64, values: Float32) -> _RowValues:
        return _RowValues(rows, self._lengths(rows), values)

    def _converted(self, rows: Int64, values: Values) -> _RowValues:
        lengths = self._lengths(rows)
        convert = _Converter(
            lambda number: rows[np.searchsorted(np.cumsum(lengths), number, side="right")]
        )
        if not isinstance(values, list | tuple) or not any(map(np.ndim, values)):
            converted = convert(values)  # type: ignore[arg-type]
            if converted.size != lengths.sum():
                raise UsageError(
                    f"got {converted.size} values for {rows.size} rows, which have {lengths.sum()} "
                    f"{self.per}s"
                )
            return _RowValues(rows, lengths, converted)
        pieces = list(_row_by_row(values, rows, lengths, convert))
        return _RowValues(rows, lengths, np.concatenate(pieces))

    def _refresh(self) -> None:
        if self.sidecar is not None:
            return
        self.sidecar = find(self._store, self.identity)
        if self.sidecar is not None:
            if self.sidecar.per != self.per:
                raise NonDeterminismError(
                    f"attached per {self.sidecar.per}, not per {self.per}", path=self.sidecar.path
                )
            return
        for location in sidecar_dirs(self._store):
            for path in listed(location.directory / self._parts_name):
                if path not in self._parts:
                    part = _Part(path, location, self._document)
                    self._written[self._rows_of(part)] = True
                    self._parts[path] = part

    def _rows_of(self, part: _Part) -> Int64:
        rows = part.rows()
        inside = not rows.size or (rows[0] >= 0 and rows[-1] < len(self._store))
        fits = inside and bool((np.diff(rows) > 0).all())
        if not fits or self._lengths(rows).sum() != part.record.values:
            raise part.artifact.corruption_error("its rows are not rows of this store", ROW_NUMBERS)
        return rows

    def _sorted(self, values: _RowValues) -> _RowValues:
        order = np.argsort(values.rows, kind="stable")
        repeated = np.flatnonzero(np.diff(values.rows[order]) == 0)
        self._require_equal(values.take(order[repeated]), values.take(order[repeated + 1]))
        return values.take(np.delete(order, repeated))

    def _unwritten(self, given: _RowValues) -> _RowValues:
        """Return the rows that are not published; raise if values of the others differ."""
        if self.sidecar is not None:
            published = self.sidecar.batch(given.rows.tolist())
            known = published if isinstance(published, np.ndarray) else np.concatenate(published)
            self._require_equal(_RowValues(given.rows, given.lengths, known), given)
            return given.take(np.zeros(0, dtype=np.int64))
        written = self._written[given.rows]
        for part in self._parts.values() if written.any() else ():
            rows = part.rows()
            common = np.flatnonzero(np.isin(given.rows, rows, assume_unique=True))
            if common.size:
                indices = np.searchsorted(rows, given.rows[common])
                known_rows = self._of(rows, part.values()).take(indices)
                self._require_equal(known_rows, given.take(common))
        return given.take(np.flatnonzero(~written))

    def _require_equal(self, known: _RowValues, given: _RowValues) -> None:
        unequal = np.flatnonzero(known.values.view("<u4") != given.values.view("<u4"))
        if unequal.size:
            first = int(unequal[0])
            row = np.searchsorted(known.starts + known.lengths, first, side="right")
            raise NonDeterminismError(
                f"row {known.rows[row]} was written before with other values "
                f"({known.values[first]}, now {given.values[first]}), which are unchanged; compute "
                "only the missing rows, or use another producer",
                path=sidecar_dirs(self._store)[0].directory / self._parts_name,
            )

    def _publish_part(self, part: _RowValues) -> None:
        data = (part.rows.astype("<i8").tobytes(), part.values.astype("<f4").tobytes())
        name = fingerprint.key_of_pieces(data)
        with _staged(self._store, PART, f"{self._parts_name}/{name}") as (target, writer):
            writer.write(ROW_NUMBERS, data[0])
            writer.write(SIDECAR_VALUES, data[1])
            record = _PartRecord(self._document, part.rows.size, part.values.size, writer.checksums)
            writer.publish(target, record)

    def _merged(self) -> Iterator[Float32]:
        parts = [(part, np.array(part.rows())) for part in self._parts.values()]
        next_values = [0] * len(parts)
        for part, _ in parts:
            part.values()  # checks the checksum
        first = 0
        while first < len(self._store):
            rows = np.arange(first, min(first + WINDOW_ROWS, len(self._store)))
            ends = np.cumsum(self._lengths(rows))
            rows = rows[: max(1, int(np.searchsorted(ends, WINDOW_VALUES, side="right")))]
            window = self._of(rows, np.empty(ends[rows.size - 1], dtype=np.float32))
            written = np.zeros(rows.size, dtype=np.bool_)
            for number, (part, all_rows) in enumerate(parts):
                own = all_rows[slice(*np.searchsorted(all_rows, [first, first + rows.size]))]
                count = int(self._lengths(own).sum())
                given = self._of(own, part.read(next_values[number], count))
                next_values[number] += count
                indices = own - first
                # Two processes may have written a row at the same time.
                repeated = np.flatnonzero(written[indices])
                self._require_equal(window.take(indices[repeated]), given.take(repeated))
                written[indices] = True
                spread = np.repeat(window.starts[indices] - given.starts, given.lengths)
                window.values[spread + np.arange(count)] = given.values
            assert written.all()
            yield window.values
            first += rows.size


def unfinished(store: Store) -> Iterator[SidecarWriter]:
    """Yield a writer for every sidecar that has parts, but not all rows."""
    for location in sidecar_dirs(store):
        for parts in listed(location.directory, suffix=".parts"):
            for path in listed(parts)[:1]:
                document = PART.open(path, location.root).convert(_PartRecord).document
                name, producer, per = (document.get(it, "") for it in ("name", "producer", "per"))
                if find(store, Identity(store.key, name, producer)) is None:
                    yield SidecarWriter(store, name, producer=producer, per=per)
