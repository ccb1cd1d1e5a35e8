"""Write sidecars: all values at once (`Store.attach`) or while they are computed (`attach`).

A `SidecarWriter` takes the values of any rows, in any number of processes, and publishes them as
*parts*: row numbers and their values. When no row is missing, the parts are merged. Several
processes that do so produce the same bytes. ``tokenmill cache gc`` then removes the parts.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill._core import fingerprint
from tokenmill._core.sealed import Draft, SealedKind, map_array, reading_errors
from tokenmill.errors import CacheError, CorruptionError, NonDeterminismError, UsageError
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
CHUNK_VALUES = 1 << 20  # of an array that are converted at once: 4 MiB
WINDOW_ROWS = 1 << 16  # rows merged from parts at once, at most
WINDOW_VALUES = 1 << 21  # and about this many values of them
HELD_BYTES = 64 << 20  # that a writer holds before it publishes a part
FLUSH_SECONDS = 60.0  # of work that a killed writer loses at most

ROW_NUMBERS = "rows.bin"
PART = SealedKind(
    "part of a sidecar",
    "part.json",
    (ROW_NUMBERS, SIDECAR_VALUES),
    "remove its directory: its rows are then missing and computed again",
)


# Values as they are given


class _Converter:
    """Convert values to float32; refuse what float32 cannot hold."""

    def __init__(self, row_of: Callable[[int], int]) -> None:
        self._row_of = row_of  # the row of the value at a position
        self.taken = 0

    def __call__(self, given: npt.ArrayLike) -> Float32:
        array = _as_array(given)
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        wrong = np.isnan(values) | (np.isinf(values) & ~np.isinf(array))
        if wrong.any():
            place = int(wrong.argmax())
            raise UsageError(
                f"the value of row {self._row_of(self.taken + place)} is {array[place]!r}: a "
                "sidecar holds numbers that float32 can hold, and no NaN; leave such rows out of "
                "the view or give them a number of your own"
            )
        self.taken += values.size
        return values


def _as_array(given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # the last one: a tensor with a gradient
        raise UsageError(
            f"values of a sidecar are numbers in float32, not {type(given).__name__} ({error})"
        ) from error
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values of a sidecar are numbers in float32, not {array.dtype}")
    if array.ndim > 1:
        raise UsageError(
            f"values of a sidecar come one behind the other, not in shape {array.shape}"
        )
    return array.reshape(-1)


def _row_by_row(
    values: Sequence[npt.ArrayLike], rows: Sequence[int] | Int64, lengths: Any, convert: _Converter
) -> Iterator[Float32]:
    if len(values) != len(rows):
        raise UsageError(f"{len(values)} arrays of values for {len(rows)} rows")
    for row, length, given in zip(rows, lengths, values, strict=True):
        piece = convert(given)
        if piece.size != length:
            raise UsageError(f"{piece.size} values for row {row}, which has {length} tokens")
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
        whole: Any = values  # also a memory map or a tensor: sliced, so that it stays there
        if whole.ndim != 1:
            whole = _as_array(whole)  # a single value; refused otherwise
        values = (whole[at : at + CHUNK_VALUES] for at in range(0, len(whole), CHUNK_VALUES))
    elif not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        raise UsageError(f"values are arrays or an iterable of them, not {type(values).__name__}")
    pieces: Iterable[Any] = values
    for given in pieces:
        piece = convert(given)
        end = convert.taken
        if end > expected:
            raise _wrong_count(end, expected, per, " or more")
        if per == "token" and not is_array and end < expected:
            row = starts.row_at(end)
            if starts.start(row) != end:
                raise UsageError(
                    f"an array of {piece.size} values ends at token {end}, within row {row}: "
                    "give whole rows"
                )
        yield piece
    if convert.taken != expected:
        raise _wrong_count(convert.taken, expected, per)


def _wrong_count(given: int, expected: int, per: Per, suffix: str = "") -> UsageError:
    return UsageError(f"{given}{suffix} values for a store of {expected} {per}s")


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


def attach_values(store: Store, name: str, values: Values, *, made_by: str, per: str) -> Sidecar:
    identity, kind = Identity(store.key, name, made_by), check_per(per)
    return _publish_values(store, identity, kind, _in_order(values, kind, store))


def _publish_values(
    store: Store, identity: Identity, per: Per, pieces: Iterable[Float32]
) -> Sidecar:
    """Publish values in row order; an intact published sidecar must have the same ones."""
    found = _intact(store, identity)
    if found is not None:
        if found.per != per or not _are_values_of(found, pieces):
            raise _other_values(found)
        return found
    with _staged(store, KIND, identity.key) as (place, draft):
        path = draft.write(SIDECAR_VALUES, (piece.astype("<f4").data for piece in pieces))
        checksum = draft.checksums[SIDECAR_VALUES]
        ours = _record(identity, per, len(store), map_array(path, "<f4"), checksum)
        draft.publish(place, ours, is_whole=lambda: _intact(store, identity) is not None)
    published = find(store, identity)
    if published is None:
        raise CacheError("was removed as soon as it was attached", path=place)
    if (published.per, published.record.checksum) != (per, checksum):
        raise _other_values(published)
    return published


def _intact(store: Store, identity: Identity) -> Sidecar | None:
    try:
        found = find(store, identity)
        if found is not None:
            found.check_all()
    except CorruptionError:
        return None
    return found


def _are_values_of(found: Sidecar, pieces: Iterable[Float32]) -> bool:
    first, same = 0, True
    for piece in pieces:  # to the end, because one that cannot be a value is another error
        same = same and found.stretch(first, piece.size).tobytes() == piece.tobytes()
        first += piece.size
    return same


def _other_values(found: Sidecar) -> NonDeterminismError:
    return NonDeterminismError(
        f"{found.name!r} made by {found.made_by!r} is attached per {found.per} with other values; "
        "what is there stays: say in made_by what is different",
        path=found.path,
    )


@contextlib.contextmanager
def _staged(store: Store, kind: SealedKind, name: str) -> Iterator[tuple[Path, Draft]]:
    refusal: CacheError | None = None
    with contextlib.ExitStack() as stack:
        for home in sidecar_dirs(store):
            place = home.directory / name
            beside = None if home.in_cache else place
            try:
                draft = stack.enter_context(kind.stage(home.root, beside=beside))
            except CacheError as error:
                refusal = refusal or error
                continue
            yield place, draft
            return
    assert refusal is not None
    raise refusal


# Values of some rows, and parts


class _PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: dict[str, Any]
    rows: int
    values: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class _RowValues:
    """Values of some rows, those of one row after those of the other."""

    rows: Int64
    lengths: Int64
    values: Float32

    @cached_property
    def starts(self) -> Int64:
        starts: Int64 = np.cumsum(self.lengths) - self.lengths
        return starts

    def take(self, places: Int64) -> _RowValues:
        lengths = self.lengths[places]
        begin = np.cumsum(lengths) - lengths
        taken = np.repeat(self.starts[places] - begin, lengths) + np.arange(lengths.sum())
        return _RowValues(self.rows[places], lengths, self.values[taken])


class _Part:
    """A published part; its row numbers ascend."""

    def __init__(self, place: Path, home: SidecarDir, document: dict[str, Any]) -> None:
        self.sealed = PART.admit(place, home.root)
        self.record = self.sealed.convert(_PartRecord)
        self.sealed.require_document(document)

    def rows(self) -> Int64:
        return self._array(ROW_NUMBERS, "<i8", self.record.rows)

    def values(self) -> Float32:
        return self._array(SIDECAR_VALUES, "<f4", self.record.values)

    def _array(self, name: str, dtype: str, count: int) -> npt.NDArray[Any]:
        return self.sealed.array(name, dtype, count, self.record.checksums.get(name, ""))

    def read(self, first: int, count: int) -> Float32:
        """Some of its values, unchecked; no file stays open, because there may be many parts."""
        path = self.sealed.directory / SIDECAR_VALUES
        with reading_errors(path, PART.remedy):
            return np.fromfile(path, "<f4", count, offset=first * BYTES)


class SidecarWriter:
    """Takes values of rows in any order; leaving it publishes them, see `attach`.

    Attributes:
        sidecar: The published sidecar; None while rows are missing.
    """

    def __init__(
        self, store: Store, name: str, *, made_by: str, per: str, flush_seconds: float
    ) -> None:
        self._store = store
        self.identity = Identity(store.key, name, made_by)
        self.per = check_per(per)
        self._document = {**self.identity.document, "per": self.per}
        self._parts_name = f"{self.identity.key}.parts"
        self._flush_seconds = flush_seconds
        self._parts: dict[Path, _Part] = {}
        self._written = np.zeros(len(store), dtype=np.bool_)  # in a published part
        self._held: list[_RowValues] = []
        self._held_bytes = 0
        self._flushed = time.monotonic()
        self.sidecar: Sidecar | None = None
        self._look()

    @property
    def missing(self) -> Int64:
        """Numbers of the rows that no process has written, ascending."""
        self._look()
        if self.sidecar is not None:
            return np.zeros(0, dtype=np.int64)
        written = self._written.copy()
        for held in self._held:
            written[held.rows] = True
        return np.flatnonzero(~written)

    def share(self, rank: int, world_size: int) -> Int64:
        """The missing rows of one of several processes, whenever each of them looks."""
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank}; it is from 0 to {world_size - 1}")
        missing = self.missing
        mine: Int64 = missing[missing % world_size == rank]
        return mine

    def write(self, rows: SupportsIndex | slice | Iterable[SupportsIndex], values: Values) -> None:
        """Take the values of some rows, given by number, slice or numbers in any order.

        Per token, several rows have a list with one array for each, or all values one after the
        other.
        """
        held = self._converted(self._numbers(rows), values)
        self._held.append(held)
        self._held_bytes += held.rows.nbytes + held.values.nbytes
        due = time.monotonic() - self._flushed >= self._flush_seconds
        if due or self._held_bytes >= HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Publish what was taken as a part; a row written before must have the same values."""
        held, self._held, self._held_bytes = self._held, [], 0
        self._flushed = time.monotonic()
        if not held:
            return
        self._look()
        rows, values = (
            np.concatenate([getattr(one, name) for one in held]) for name in ("rows", "values")
        )
        fresh = self._unwritten(self._ascending(self._of(rows, values)))
        if fresh.rows.size:
            self._publish_part(fresh)
            self._look()

    def publish(self) -> Sidecar:
        """Merge all parts and publish the sidecar; no row may be missing."""
        self.flush()
        missing = self.missing
        if missing.size:
            raise UsageError(
                f"{missing.size} of {len(self._store)} rows are missing, the first is row "
                f"{missing[0]}: write them first"
            )
        if self.sidecar is None:
            self.sidecar = _publish_values(self._store, self.identity, self.per, self._merged())
        return self.sidecar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()  # also after an error: what was computed is right
        if kind is None and not self.missing.size:
            self.publish()

    def _numbers(self, rows: SupportsIndex | slice | Iterable[SupportsIndex]) -> Int64:
        size = len(self._store)
        if isinstance(rows, slice):
            return np.arange(*rows.indices(size), dtype=np.int64)
        try:
            return row_numbers(rows if isinstance(rows, Iterable) else [rows], size)
        except IndexError as error:
            raise UsageError(f"no {error} rows") from error

    def _lengths(self, rows: Int64) -> Int64:
        if self.per == "row":
            return np.ones(rows.size, dtype=np.int64)
        return np.asarray(self._store.lengths[rows], dtype=np.int64)

    def _of(self, rows: Int64, values: Float32) -> _RowValues:
        return _RowValues(rows, self._lengths(rows), values)

    def _converted(self, rows: Int64, values: Values) -> _RowValues:
        lengths = self._lengths(rows)
        convert = _Converter(
            lambda place: rows[np.searchsorted(np.cumsum(lengths), place, side="right")]
        )
        if not isinstance(values, list | tuple) or not any(map(np.ndim, values)):
            found = convert(values)  # type: ignore[arg-type]
            if found.size != lengths.sum():
                raise UsageError(
                    f"{found.size} values for {rows.size} rows, which have {lengths.sum()} "
                    f"{self.per}s"
                )
            return _RowValues(rows, lengths, found)
        pieces = list(_row_by_row(values, rows, lengths, convert))
        return _RowValues(rows, lengths, np.concatenate(pieces))

    def _look(self) -> None:
        if self.sidecar is not None:
            return
        self.sidecar = find(self._store, self.identity)
        if self.sidecar is not None:
            if self.sidecar.per != self.per:
                raise NonDeterminismError(
                    f"attached per {self.sidecar.per}, not per {self.per}", path=self.sidecar.path
                )
            return
        for home in sidecar_dirs(self._store):
            for place in listed(home.directory / self._parts_name):
                if place not in self._parts:
                    part = _Part(place, home, self._document)
                    self._written[self._rows_of(part)] = True
                    self._parts[place] = part

    def _rows_of(self, part: _Part) -> Int64:
        rows = part.rows()
        inside = not rows.size or (rows[0] >= 0 and rows[-1] < len(self._store))
        fits = inside and bool((np.diff(rows) > 0).all())
        if not fits or self._lengths(rows).sum() != part.record.values:
            raise part.sealed.refusal("its rows are not rows of this store", ROW_NUMBERS)
        return rows

    def _ascending(self, given: _RowValues) -> _RowValues:
        order = np.argsort(given.rows, kind="stable")
        again = np.flatnonzero(np.diff(given.rows[order]) == 0)
        self._require_equal(given.take(order[again]), given.take(order[again + 1]))
        return given.take(np.delete(order, again))

    def _unwritten(self, given: _RowValues) -> _RowValues:
        """Without the rows that are published; the values given for those must be the same."""
        if self.sidecar is not None:
            found = self.sidecar.batch(given.rows.tolist())
            known = found if isinstance(found, np.ndarray) else np.concatenate(found)
            self._require_equal(_RowValues(given.rows, given.lengths, known), given)
            return given.take(np.zeros(0, dtype=np.int64))
        written = self._written[given.rows]
        for part in self._parts.values() if written.any() else ():
            rows = part.rows()
            common = np.flatnonzero(np.isin(given.rows, rows, assume_unique=True))
            if common.size:
                places = np.searchsorted(rows, given.rows[common])
                known_rows = self._of(rows, part.values()).take(places)
                self._require_equal(known_rows, given.take(common))
        return given.take(np.flatnonzero(~written))

    def _require_equal(self, known: _RowValues, given: _RowValues) -> None:
        unequal = np.flatnonzero(known.values.view("<u4") != given.values.view("<u4"))
        if unequal.size:
            place = int(unequal[0])
            row = np.searchsorted(known.starts + known.lengths, place, side="right")
            raise NonDeterminismError(
                f"row {known.rows[row]} was written before with other values "
                f"({known.values[place]}, now {given.values[place]}); what is there stays: compute "
                "only the missing rows, or say in made_by what is different",
                path=sidecar_dirs(self._store)[0].directory / self._parts_name,
            )

    def _publish_part(self, part: _RowValues) -> None:
        data = (part.rows.astype("<i8").tobytes(), part.values.astype("<f4").tobytes())
        name = fingerprint.key_of_pieces(data)  # of its content: equal parts are one
        with _staged(self._store, PART, f"{self._parts_name}/{name}") as (place, draft):
            draft.write(ROW_NUMBERS, data[0])
            draft.write(SIDECAR_VALUES, data[1])
            record = _PartRecord(self._document, part.rows.size, part.values.size, draft.checksums)
            draft.publish(place, record)

    def _merged(self) -> Iterator[Float32]:
        parts = [(part, np.array(part.rows())) for part in self._parts.values()]
        next_values = [0] * len(parts)
        for part, _ in parts:
            part.values()  # compares the checksum, once
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
                places = own - first
                # Two that wrote a row at the same time did not see each other's part.
                twice = np.flatnonzero(written[places])
                self._require_equal(window.take(places[twice]), given.take(twice))
                written[places] = True
                spread = np.repeat(window.starts[places] - given.starts, given.lengths)
                window.values[spread + np.arange(count)] = given.values
            assert written.all()
            yield window.values
            first += rows.size


def unfinished(store: Store) -> Iterator[SidecarWriter]:
    """A writer for every sidecar of which there are parts, but not all rows."""
    for home in sidecar_dirs(store):
        for parts in listed(home.directory, suffix=".parts"):
            for place in listed(parts)[:1]:
                document = PART.admit(place, home.root).convert(_PartRecord).document
                name, made_by, per = (document.get(it, "") for it in ("name", "made_by", "per"))
                if find(store, Identity(store.key, name, made_by)) is None:
                    yield attach(store, name, made_by=made_by, per=per)


def attach(
    store: Store,
    name: str,
    *,
    made_by: str,
    per: str = "row",
    flush_seconds: float = FLUSH_SECONDS,
) -> SidecarWriter:
    """Attach numbers to rows while they are computed: in any order, by any number of processes.

        with tm.attach(store, "ref_logps", made_by=digest, per="token") as writer:
            for row in writer.share(rank, world_size):
                writer.write(row, log_probabilities(store[row].input_ids))

    A run that was killed is simply started again: what it had flushed is no longer missing. Where
    the sidecar is published already nothing is missing, so nothing is computed.

    Args:
        store: An open store.
        name: What batches and filters will call the values.
        made_by: What computes them: a digest of the model, or a text.
        per: ``row`` or ``token``.
        flush_seconds: How often what was written is published as a part.
    """
    if not isinstance(store, Store):
        raise UsageError(f"values are attached to a store, not to a {type(store).__name__}")
    return SidecarWriter(store, name, made_by=made_by, per=per, flush_seconds=flush_seconds)
