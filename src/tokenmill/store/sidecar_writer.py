"""Attaching numbers to rows while they are computed: in any order, by any number of processes.

A `SidecarWriter` takes the values of any rows. What it took becomes a *part*, a sealed directory of
row numbers and their values, every minute or so and when the writer is left. Parts are published
like everything else, so a process that is killed loses what it had not flushed and nothing more,
and all processes that share the cache see each other's parts. `SidecarWriter.missing` says which
rows nobody has written. Whoever finds that none is puts the parts together, a window of rows at a
time, and publishes the sidecar; several who find it at once make the same bytes. The parts of a
published sidecar are for ``tokenmill cache gc``.

Two processes that give a row different values disagree about what made them: the second is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.errors import NonDeterminismError, UsageError
from tokenmill.files.sealed import JsonForm, Sealed, SealedKind, reading_errors
from tokenmill.store.attach import Converter, Values, publish_values, stage_in_home
from tokenmill.store.layout import SIDECAR_VALUES
from tokenmill.store.sidecars import (
    BYTES,
    Float32,
    Home,
    Identity,
    Int64,
    Sidecar,
    check_per,
    find,
    homes,
    listed,
)
from tokenmill.store.store import Store

ROW_NUMBERS = "rows.bin"
WINDOW_ROWS = 1 << 16  # at most, put together from parts at once
WINDOW_VALUES = 1 << 21  # and about this many values of them
HELD_BYTES = 64 << 20  # that a writer holds before it publishes a part
FLUSH_SECONDS = 60.0
"""How much work a killed writer loses at most, in time. It decides nothing about the result."""

PART = SealedKind(
    "part of a sidecar",
    "part.json",
    JsonForm(record="part", seal="checksum", end=b"\n"),
    (ROW_NUMBERS, SIDECAR_VALUES),
    "remove its directory: its rows are then missing and computed again",
)


class _PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the summary of a part says."""

    document: dict[str, Any]
    rows: int
    values: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class RowValues:
    """Values of some rows, those of one row behind those of the other."""

    rows: Int64
    lengths: Int64
    values: Float32

    @cached_property
    def starts(self) -> Int64:
        """Where each row's values begin."""
        starts: Int64 = np.cumsum(self.lengths) - self.lengths
        return starts

    def take(self, places: Int64) -> RowValues:
        """Some of the rows, in the order asked for."""
        lengths = self.lengths[places]
        begin = np.cumsum(lengths) - lengths
        taken = np.repeat(self.starts[places] - begin, lengths) + np.arange(lengths.sum())
        return RowValues(self.rows[places], lengths, self.values[taken])

    def difference(self, other: RowValues) -> tuple[int, float, float] | None:
        """The first row whose values are not bit for bit the same, and one of each."""
        unequal = np.flatnonzero(self.values.view("<u4") != other.values.view("<u4"))
        if not unequal.size:
            return None
        place = int(unequal[0])
        row = int(np.searchsorted(self.starts + self.lengths, place, side="right"))
        return int(self.rows[row]), float(self.values[place]), float(other.values[place])


@dataclass(frozen=True)
class _PublishedPart:
    """A published part; its row numbers ascend."""

    sealed: Sealed
    record: _PartRecord

    @classmethod
    def admit(cls, place: Path, home: Home, document: dict[str, Any]) -> _PublishedPart:
        sealed = PART.admit(place, home.root)
        part = cls(sealed, sealed.convert(_PartRecord))
        sealed.require_document(document)
        return part

    def rows(self) -> Int64:
        """Its row numbers, mapped."""
        return self._array(ROW_NUMBERS, "<i8", self.record.rows)

    def values(self) -> Float32:
        """All its values, mapped."""
        return self._array(SIDECAR_VALUES, "<f4", self.record.values)

    def _array(self, name: str, dtype: str, count: int) -> npt.NDArray[Any]:
        return self.sealed.array(name, dtype, count, self.record.checksums.get(name, ""))

    def read(self, first: int, count: int) -> Float32:
        """Some of its values, which were compared with their checksum before; no file stays open.

        A job of days leaves more parts than a process may have files.
        """
        if not count:
            return np.zeros(0, dtype=np.float32)
        path = self.sealed.directory / SIDECAR_VALUES
        with reading_errors(path, PART.remedy):
            return np.fromfile(path, "<f4", count, offset=first * BYTES)


class SidecarWriter:
    """Takes values of rows in any order; see the module.

    Use it as a context: leaving it flushes, and publishes the sidecar if no row is missing.

    Args:
        store: The store.
        name: What batches and filters will call the values.
        made_by: What computes them.
        per: ``row`` or ``token``.
        flush_seconds: How often what was taken becomes a part.

    Attributes:
        identity: Which values these are.
        per: ``row`` or ``token``.
        sidecar: The published sidecar; None while rows are missing.
    """

    def __init__(
        self, store: Store, name: str, *, made_by: str, per: str, flush_seconds: float
    ) -> None:
        self._store = store
        self.identity = Identity(store.key, name, made_by)
        self.per = check_per(per)
        self._document = {**self.identity.document, "per": self.per}
        self._flush_seconds = flush_seconds
        self._parts: dict[Path, _PublishedPart] = {}
        self._there = np.zeros(len(store), dtype=np.bool_)  # in a published part
        self._held: list[RowValues] = []
        self._held_bytes = 0
        self._flushed = time.monotonic()
        self.sidecar: Sidecar | None = None
        self._look()

    @property
    def missing(self) -> Int64:
        """Numbers of the rows that nobody has written, ascending: look before computing on."""
        self._look()
        if self.sidecar is not None:
            return np.zeros(0, dtype=np.int64)
        there = self._there.copy()
        for held in self._held:
            there[held.rows] = True
        return np.flatnonzero(~there)

    def share(self, rank: int, world_size: int) -> Int64:
        """The missing rows that one of several processes computes.

        By row number, so that the shares fit together whenever each process looks: a plain
        ``missing[rank::world_size]`` of processes that look at different times leaves rows to
        nobody.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank}; it is from 0 to {world_size - 1}")
        missing = self.missing
        mine: Int64 = missing[missing % world_size == rank]
        return mine

    def write(self, rows: SupportsIndex | slice | Iterable[SupportsIndex], values: Values) -> None:
        """Take the values of some rows.

        Args:
            rows: A row number, a slice, or numbers in any order.
            values: One per row; per token, for several rows, a list with one array for each, or all
                of them one behind the other.
        """
        held = self._taken(self._numbers(rows), values)
        self._held.append(held)
        self._held_bytes += held.rows.nbytes + held.values.nbytes
        due = time.monotonic() - self._flushed >= self._flush_seconds
        if due or self._held_bytes >= HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Publish what was taken as a part, so that it survives this process.

        Raises:
            NonDeterminismError: A row was written before, with other values.
        """
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
        """Put all parts together and publish the sidecar.

        Raises:
            UsageError: Rows are missing.
            NonDeterminismError: A row was written twice, with different values.
        """
        self.flush()
        missing = self.missing
        if missing.size:
            raise UsageError(
                f"{missing.size} of {len(self._store)} rows are missing, the first is row "
                f"{missing[0]}: write them first"
            )
        if self.sidecar is None:
            pieces = self._assembled()
            self.sidecar = publish_values(self._store, self.identity, self.per, pieces)
        return self.sidecar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()  # also behind an error: what was computed is right
        if kind is None and not self.missing.size:
            self.publish()

    # What is given

    def _numbers(self, rows: SupportsIndex | slice | Iterable[SupportsIndex]) -> Int64:
        size = len(self._store)
        if isinstance(rows, slice):
            return np.arange(*rows.indices(size), dtype=np.int64)
        listed = list(rows) if isinstance(rows, Iterable) else [rows]
        numbers = np.asarray([row.__index__() for row in listed], dtype=np.int64)
        wrong = (numbers < -size) | (numbers >= size)
        if wrong.any():
            raise UsageError(f"row {int(numbers[wrong][0])} of a store of {size} rows")
        return np.where(numbers < 0, numbers + size, numbers)

    def _lengths(self, rows: Int64) -> Int64:
        """How many values each of some rows has."""
        if self.per == "row":
            return np.ones(rows.size, dtype=np.int64)
        return np.asarray(self._store.lengths[rows], dtype=np.int64)

    def _of(self, rows: Int64, values: Float32) -> RowValues:
        return RowValues(rows, self._lengths(rows), values)

    def _taken(self, rows: Int64, values: Values) -> RowValues:
        lengths = self._lengths(rows)
        convert = Converter(
            lambda place: f"row {rows[np.searchsorted(np.cumsum(lengths), place, side='right')]}"
        )
        if not isinstance(values, list | tuple) or not any(map(np.ndim, values)):
            found = convert(values)  # type: ignore[arg-type]
            if found.size != lengths.sum():
                raise UsageError(
                    f"{found.size} values for {rows.size} rows, which have {lengths.sum()} "
                    f"{self.per}s"
                )
            return RowValues(rows, lengths, found)
        if len(values) != rows.size:
            raise UsageError(f"{len(values)} arrays of values for {rows.size} rows")
        pieces = []
        for row, length, given in zip(rows.tolist(), lengths.tolist(), values, strict=True):
            pieces.append(convert(given))
            if pieces[-1].size != length:
                raise UsageError(
                    f"{pieces[-1].size} values for row {row}, which has {length} {self.per}s"
                )
        return RowValues(rows, lengths, np.concatenate(pieces))

    # Parts

    def _look(self) -> None:
        """Take notice of what was published since the last look."""
        if self.sidecar is not None:
            return
        self.sidecar = find(self._store, self.identity)
        if self.sidecar is not None:
            if self.sidecar.per != self.per:
                raise NonDeterminismError(
                    f"attached per {self.sidecar.per}, not per {self.per}", path=self.sidecar.path
                )
            return
        for home in homes(self._store):
            for place in listed(home.parts(self.identity.key)):
                if place not in self._parts:
                    part = _PublishedPart.admit(place, home, self._document)
                    self._there[self._rows_of(part)] = True
                    self._parts[place] = part

    def _rows_of(self, part: _PublishedPart) -> Int64:
        rows = part.rows()
        inside = not rows.size or (rows[0] >= 0 and rows[-1] < len(self._store))
        fits = inside and bool((np.diff(rows) > 0).all())
        if not fits or self._lengths(rows).sum() != part.record.values:
            raise part.sealed.refusal("its rows are not rows of this store", ROW_NUMBERS)
        return rows

    def _ascending(self, given: RowValues) -> RowValues:
        """In the order of the rows, each once."""
        order = np.argsort(given.rows, kind="stable")
        again = np.flatnonzero(np.diff(given.rows[order]) == 0)
        self._require_equal(given.take(order[again]), given.take(order[again + 1]))
        return given.take(np.delete(order, again))

    def _unwritten(self, given: RowValues) -> RowValues:
        """Without the rows that are published; what is given of those must be the same."""
        if self.sidecar is not None:
            there = self.sidecar.batch(given.rows.tolist())
            known = there if isinstance(there, np.ndarray) else np.concatenate(there)
            self._require_equal(RowValues(given.rows, given.lengths, known), given)
            return given.take(np.zeros(0, dtype=np.int64))
        written = self._there[given.rows]
        for part in self._parts.values() if written.any() else ():
            rows = part.rows()
            common = np.flatnonzero(np.isin(given.rows, rows, assume_unique=True))
            if common.size:
                written_there = self._of(rows, part.values())
                places = np.searchsorted(rows, given.rows[common])
                self._require_equal(written_there.take(places), given.take(common))
        return given.take(np.flatnonzero(~written))

    def _require_equal(self, there: RowValues, given: RowValues) -> None:
        """Refuse values of rows that were written before and are not these."""
        difference = there.difference(given)
        if difference is not None:
            row, before, now = difference
            raise NonDeterminismError(
                f"row {row} was written before with other values ({before!r}, now {now!r}); what "
                "is there stays: compute only the missing rows, or say in made_by what is "
                "different",
                path=homes(self._store)[0].parts(self.identity.key),
            )

    def _publish_part(self, part: RowValues) -> None:
        data = (part.rows.astype("<i8").tobytes(), part.values.astype("<f4").tobytes())
        # Named by its content: the same part again is no other one.
        key = fingerprint.key_of_pieces(data)

        def target(home: Home) -> Path:
            return home.parts(self.identity.key) / key

        with contextlib.ExitStack() as stack:
            home, draft = stage_in_home(stack, self._store, PART, target)
            draft.write(ROW_NUMBERS, data[0])
            draft.write(SIDECAR_VALUES, data[1])
            rows, values = part.rows.size, part.values.size
            record = _PartRecord(self._document, rows, values, draft.checksums)
            draft.publish(target(home), record)

    def _assembled(self) -> Iterator[Float32]:
        """The values of all rows, in their order, a window of rows at a time."""
        cursors = [_PartWalk(part, self._of) for part in self._parts.values()]
        first = 0
        while first < len(self._store):
            rows = np.arange(first, min(first + WINDOW_ROWS, len(self._store)))
            ends = np.cumsum(self._lengths(rows))
            rows = rows[: max(1, int(np.searchsorted(ends, WINDOW_VALUES, side="right")))]
            window = self._of(rows, np.empty(ends[rows.size - 1], dtype=np.float32))
            there = np.zeros(rows.size, dtype=np.bool_)
            for cursor in cursors:
                part = cursor.take(first + rows.size)
                places = part.rows - first
                # Two that wrote a row at the same time did not see each other's part.
                twice = np.flatnonzero(there[places])
                self._require_equal(window.take(places[twice]), part.take(twice))
                there[places] = True
                spread = np.repeat(window.starts[places] - part.starts, part.lengths)
                window.values[spread + np.arange(part.values.size)] = part.values
            assert there.all()
            yield window.values
            first += rows.size


class _PartWalk:
    """Goes through a part in the order of its rows, whose numbers it holds."""

    def __init__(self, part: _PublishedPart, of: Callable[[Int64, Float32], RowValues]) -> None:
        self._part = part
        self._of = of
        self._rows = np.array(part.rows())
        part.values()  # compared with its checksum, once
        self._place = self._value = 0

    def take(self, stop: int) -> RowValues:
        """The rows before one, from where it stands."""
        until = int(np.searchsorted(self._rows, stop))
        bare = self._of(self._rows[self._place : until], np.zeros(0, dtype=np.float32))
        count = int(bare.lengths.sum())
        values = self._part.read(self._value, count)
        self._place, self._value = until, self._value + count
        return RowValues(bare.rows, bare.lengths, values)


def unfinished(store: Store) -> Iterator[SidecarWriter]:
    """A writer for every sidecar of which there are parts, but not all rows."""
    for home in homes(store):
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
