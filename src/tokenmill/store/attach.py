"""Attaching numbers to the rows of a store, all at once.

Comes in: an open store, a name, what made the values, and the values, as an array or in pieces.
They are brought to float32, compared with the store's counts, and written one behind the other into
a staged directory that appears by one rename. What is there under the same identity already is
compared, never replaced; only what is damaged goes to quarantine. Goes out: a `Sidecar`.

`Store.attach` calls `attach_values`. `tokenmill.store.sidecar_writer`, which gathers values that
are still being computed, ends in `publish_values`, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.errors import CacheError, CorruptionError, NonDeterminismError, UsageError
from tokenmill.files.sealed import Draft, SealedKind
from tokenmill.store.layout import SIDECAR_VALUES
from tokenmill.store.record import BLOCK_BYTES
from tokenmill.store.sidecars import (
    BYTES,
    KIND,
    Float32,
    Home,
    Identity,
    Per,
    Record,
    RowStarts,
    Sidecar,
    check_per,
    find,
    homes,
)
from tokenmill.store.store import Store

Values = npt.ArrayLike | Iterable[npt.ArrayLike]

BLOCK_VALUES = BLOCK_BYTES // BYTES
CHUNK_VALUES = 1 << 20  # of an array that are converted at once: 4 MiB


# Values as they are given


class Converter:
    """Brings what is given to float32 and refuses what is no number, saying where.

    Args:
        what: How a place among the values is named in a refusal.
    """

    def __init__(self, what: Callable[[int], str]) -> None:
        self._what = what
        self.taken = 0

    def __call__(self, given: npt.ArrayLike) -> Float32:
        array = _as_array(given)
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        wrong = np.isnan(values) | (np.isinf(values) & ~np.isinf(array))
        if wrong.any():
            place = int(wrong.argmax())
            raise UsageError(
                f"the value of {self._what(self.taken + place)} is {array[place]!r}: a sidecar "
                "holds numbers that float32 can hold, and no NaN; leave such rows out of the view "
                "or give them a number of your own"
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


def _pieces(values: Values, per: Per, rows: int, starts: RowStarts) -> Iterator[Float32]:
    """What `Store.attach` was given, as float32 arrays that follow one another."""
    expected = rows if per == "row" else starts.total

    def what(place: int) -> str:
        return f"row {place}" if per == "row" else f"row {starts.row_at(place)} (token {place})"

    convert = Converter(what)
    if isinstance(values, list | tuple) and per == "row" and not any(map(np.ndim, values[:1])):
        values = _as_array(values)
    if hasattr(values, "ndim") and hasattr(values, "shape"):
        whole: Any = values  # an array, a memory map or a tensor: sliced, so that it stays there
        if whole.ndim == 1 and len(whole) != expected:
            raise _wrong_count(len(whole), expected, per)
        pieces: Iterable[Any] = (
            (whole[at : at + CHUNK_VALUES] for at in range(0, len(whole), CHUNK_VALUES))
            if whole.ndim == 1
            else [whole]
        )
        yield from map(convert, pieces)
    elif isinstance(values, list | tuple) and per == "token":
        if len(values) != rows:
            raise UsageError(f"{len(values)} arrays of values for {rows} rows")
        for row, given in enumerate(values):
            piece = convert(given)
            if starts.start(row + 1) != convert.taken:
                length = starts.start(row + 1) - starts.start(row)
                raise UsageError(f"{piece.size} values for row {row}, which has {length} tokens")
            yield piece
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes | dict):
        for given in values:
            piece = convert(given)
            if convert.taken > expected:
                raise _wrong_count(convert.taken, expected, per, " or more")
            if per == "token" and convert.taken < expected:
                row = starts.row_at(convert.taken)
                if starts.start(row) != convert.taken:
                    raise UsageError(
                        f"an array of {piece.size} values ends at token {convert.taken}, within "
                        f"row {row}: give whole rows"
                    )
            yield piece
    else:
        raise UsageError(f"values are arrays or an iterable of them, not {type(values).__name__}")
    if convert.taken != expected:
        raise _wrong_count(convert.taken, expected, per)


def _wrong_count(given: int, expected: int, per: Per, more: str = "") -> UsageError:
    return UsageError(f"{given}{more} values for a store of {expected} {per}s")


# A whole sidecar


class _BlockWriter:
    """Counts values in blocks, so that what it says does not depend on how they come.

    Args:
        write: Is given the bytes of every block.
    """

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self._block = np.empty(BLOCK_VALUES, dtype="<f4")
        self._filled = 0
        self._hasher = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self._sums: list[float] = []
        self._low, self._high = math.inf, -math.inf
        self.values = self._infinite = 0

    def add(self, values: Float32) -> None:
        self.values += values.size
        while values.size:
            taken = min(values.size, BLOCK_VALUES - self._filled)
            self._block[self._filled : self._filled + taken] = values[:taken]
            self._filled += taken
            values = values[taken:]
            if self._filled == BLOCK_VALUES:
                self._end_block()

    def _end_block(self) -> None:
        block = self._block[: self._filled]
        data = block.data.cast("B")
        self._hasher.update(data)
        self._blocks.append(xxhash.xxh3_64_hexdigest(data))
        self._write(data)
        finite = block[np.isfinite(block)]
        self._infinite += block.size - finite.size
        if finite.size:
            self._low = min(self._low, float(finite.min()))
            self._high = max(self._high, float(finite.max()))
            self._sums.append(float(finite.sum(dtype=np.float64)))
        self._filled = 0

    def record(self, identity: Identity, per: Per, rows: int) -> Record:
        """What the summary says, when all values were added."""
        if self._filled:
            self._end_block()
        finite = self.values - self._infinite
        return Record(
            document=identity.document,
            per=per,
            rows=rows,
            values=self.values,
            checksum=self._hasher.hexdigest(),
            blocks=tuple(self._blocks),
            low=self._low if finite else None,
            high=self._high if finite else None,
            mean=math.fsum(self._sums) / finite if finite else None,
            infinite=self._infinite,
        )


def attach_values(store: Store, name: str, values: Values, *, made_by: str, per: str) -> Sidecar:
    """See `Store.attach`."""
    identity, kind = Identity(store.key, name, made_by), check_per(per)
    pieces = _pieces(values, kind, len(store), RowStarts(store.lengths))
    return publish_values(store, identity, kind, pieces)


def publish_values(
    store: Store, identity: Identity, per: Per, pieces: Iterable[Float32]
) -> Sidecar:
    """Write a sidecar of values that follow one another, or find the same attached already."""
    there = _whole(store, identity)
    if there is not None:
        writer = _BlockWriter(lambda data: None)
        for piece in pieces:
            writer.add(piece)
        return _require_same(there, writer.record(identity, per, len(store)))
    with contextlib.ExitStack() as stack:
        home, draft = stage_in_home(stack, store, KIND, lambda home: home.place(identity.key))
        with draft.open(SIDECAR_VALUES) as file:
            writer = _BlockWriter(file.write)
            for piece in pieces:
                writer.add(piece)
            record = writer.record(identity, per, len(store))
        draft.publish(
            home.place(identity.key), record, is_whole=lambda: _whole(store, identity) is not None
        )
    published = find(store, identity)
    if published is None:
        raise CacheError("was removed as soon as it was attached", path=home.place(identity.key))
    return _require_same(published, record)


def _whole(store: Store, identity: Identity) -> Sidecar | None:
    """The sidecar that is there, if every byte of it is what was written."""
    try:
        found = find(store, identity)
        if found is not None:
            found.check_all()
    except CorruptionError:
        return None
    return found


def _require_same(there: Sidecar, ours: Record) -> Sidecar:
    if (there.per, there.record.checksum) != (ours.per, ours.checksum):
        raise NonDeterminismError(
            f"{there.name!r} made by {there.made_by!r} is attached with other values (checksum "
            f"{there.record.checksum} per {there.per}, these have {ours.checksum} per {ours.per}); "
            "what is there stays: say in made_by what is different",
            path=there.path,
        )
    return there


def stage_in_home(
    stack: contextlib.ExitStack,
    store: Store,
    kind: SealedKind,
    target: Callable[[Home], Path],
) -> tuple[Home, Draft]:
    """A draft in the first home that can be written."""
    refusal: CacheError | None = None
    for home in homes(store):
        beside = None if home.in_cache else target(home)
        try:
            return home, stack.enter_context(kind.stage(home.root, beside=beside))
        except CacheError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal
