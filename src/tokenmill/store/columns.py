"""The rows of a slice in memory (`SliceColumns`), and masks and weights as runs.

A mask changes at few positions of a row: into a trained run, out of it, and so on. Stores contain
these positions, so a rank counts the trained tokens of a global batch without opening rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill._core.fingerprint import canonical
from tokenmill.store import layout as names
from tokenmill.store.record import GROUP_COLUMNS, MEDIA_COLUMNS, RejectedRow

if TYPE_CHECKING:
    from tokenmill.store.store import Store

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


T = TypeVar("T")


def row_numbers(indices: Iterable[SupportsIndex], size: int, noun: str = "row") -> Int64:
    """Return indices as non-negative numbers; raise IndexError if one is out of range."""
    if isinstance(indices, np.ndarray) and indices.ndim == 1 and indices.dtype.kind in "iu":
        given = indices
    else:
        # As objects, because an integer may exceed 64 bits.
        listed = require_iterable(indices, noun)
        given = np.asarray([row_number(index, noun) for index in listed], dtype=object)
    wrong = np.asarray((given < -size) | (given >= size), dtype=np.bool_)
    if wrong.any():
        raise IndexError(f"{noun} {int(given[wrong][0])} is out of range: there are {size}")
    numbers = given.astype(np.int64)
    return np.where(numbers < 0, numbers + size, numbers)


def require_iterable(indices: Iterable[T], noun: str = "row") -> Iterable[T]:
    if not isinstance(indices, Iterable):
        raise TypeError(f"numbers of {noun}s must be a list of integers, got {indices!r:.200}")
    return indices


def row_number(index: SupportsIndex, noun: str = "row") -> int:
    try:
        return operator.index(index)
    except TypeError as error:
        raise TypeError(f"the number of a {noun} must be an integer, got {index!r}") from error


def runs_of(mask: NDArray[Any], starts: NDArray[Any]) -> tuple[Int32, Int64]:
    """Return the positions in each row where its mask changes, and each row's first index."""
    starts = np.asarray(starts, np.int64)
    return _within(_changes(mask, starts), starts)


def _changes(values: NDArray[Any], starts: Int64) -> NDArray[np.bool_]:
    """Return whether each value differs from the previous one of its row (0 before the first)."""
    changes = np.empty(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    firsts = starts[:-1][starts[:-1] < len(values)]
    changes[firsts] = values[firsts] != 0
    return changes


def _within(changes: NDArray[np.bool_], starts: Int64) -> tuple[Int32, Int64]:
    positions = np.flatnonzero(changes)
    bounds = np.searchsorted(positions, starts)
    within = positions - np.repeat(starts[:-1], np.diff(bounds))
    return within.astype(np.int32), bounds.astype(np.int64)


def firsts_of(runs: Int32, bounds: Int64) -> NDArray[np.uint8]:
    firsts = np.zeros(len(bounds) - 1, np.uint8)
    some = np.flatnonzero(bounds[:-1] < bounds[1:])
    firsts[some] = runs[bounds[some]] == 0
    return firsts


def count_within(runs: Int32, first: Int64, last: Int64, starts: Int64, stops: Int64) -> Int64:
    """Count trained tokens in ``start:stop`` of some rows.

    ``first`` and ``last`` delimit each row's positions in ``runs``.
    """
    sizes = last - first
    ends = np.cumsum(sizes)
    number = np.arange(int(ends[-1]) if ends.size else 0, dtype=np.int64)
    number -= np.repeat(ends - sizes, sizes)  # of a change among those of its row
    change = runs[np.repeat(first, sizes) + number].astype(np.int64)
    # Add all tokens after a change into a run, and subtract those after the change out of it.
    covered = np.maximum(np.repeat(stops, sizes) - change, 0)
    covered -= np.maximum(np.repeat(starts, sizes) - change, 0)
    covered[number % 2 == 1] *= -1
    total = np.concatenate(([0], np.cumsum(covered)))
    return np.asarray(total[ends] - total[ends - sizes], np.int64)


class WeightRuns(NamedTuple):
    """Loss weights of rows as runs; a row without weights other than 0 and 1 has none."""

    positions: Int32  # where each row's weight changes, all rows concatenated
    weights: NDArray[np.float32]  # from each position on; 0 before the first
    bounds: Int64  # index of each row's first position, and one more


def weight_runs_of(weights: NDArray[np.float32], starts: NDArray[Any]) -> WeightRuns:
    starts = np.asarray(starts, np.int64)
    weighted = np.concatenate(([0], np.cumsum((weights != 0) & (weights != 1))))
    changes = _changes(weights, starts)
    changes &= np.repeat(weighted[starts[1:]] > weighted[starts[:-1]], np.diff(starts))
    within, bounds = _within(changes, starts)
    return WeightRuns(within, weights[changes], bounds)


def weights_along(
    positions: Int32, weights: NDArray[np.float32], mask: NDArray[np.uint8]
) -> NDArray[np.float32]:
    """Return the weight of every token of one row.

    Tokens that `map` made trained have weight 1.
    """
    if not len(positions):
        return mask.astype(np.float32)
    stored = np.repeat(
        np.concatenate((np.zeros(1, np.float32), weights)),
        np.diff(np.concatenate(([0], positions, [len(mask)]))),
    )
    return np.where(mask > 0, np.where(stored > 0, stored, np.float32(1)), np.float32(0))


def trained_within(store: Store, rows: Int64, starts: Int64, stops: Int64) -> Int64:
    """Count trained tokens in ``start:stop`` of each row, without opening rows."""
    lengths = store.lengths[rows].astype(np.int64)
    counts = store.trained[rows].astype(np.int64)
    partly = (counts > 0) & (counts < lengths)
    counts = np.where(partly, 0, np.where(counts > 0, np.maximum(stops - starts, 0), 0))
    if not partly.any():
        return counts
    tail = partly & (starts == 1) & (stops == lengths)
    counts[tail] = store.trained[rows[tail]] - store.own_array(names.FIRST_TRAINED)[rows[tail]]
    cut = np.flatnonzero(partly & ~tail)
    if cut.size:
        ends = store.own_array(names.MASK_RUN_ENDS)
        before = np.where(rows[cut] > 0, ends[np.maximum(rows[cut] - 1, 0)], 0)
        runs = store.own_array(names.MASK_RUNS)
        counts[cut] = count_within(runs, before, ends[rows[cut]], starts[cut], stops[cut])
    return counts


def weighed_within(store: Store, rows: Int64, starts: Int64, stops: Int64) -> NDArray[np.float64]:
    """Sum the loss weights in ``start:stop`` of each row, without opening rows."""
    sums = trained_within(store, rows, starts, stops).astype(np.float64)
    if not store.has_weights:
        return sums
    ends = store.own_array(names.WEIGHT_RUN_ENDS)
    positions, weights = store.own_array(names.WEIGHT_RUNS), store.own_array(names.RUN_WEIGHTS)
    first = np.where(rows > 0, ends[np.maximum(rows - 1, 0)], 0)
    last = ends[rows]
    for number in np.flatnonzero(first < last).tolist():
        own = slice(int(first[number]), int(last[number]))
        bounds = np.append(positions[own], store.lengths[rows[number]]).astype(np.int64)
        inside = np.diff(np.clip(bounds, starts[number], max(starts[number], stops[number])))
        sums[number] = float(inside @ weights[own].astype(np.float64))
    return sums


@dataclass(frozen=True)
class GroupColumns:
    """Additional columns of a slice with groups; the rows of a group are adjacent."""

    label: NDArray[np.int8]  # 1 preferred, 0 not preferred, -1 not known
    score: NDArray[np.float64]  # of the answer, or NaN
    margin: NDArray[np.float64]  # of the group, the same on all its rows, or NaN
    prompt_tokens: Int32  # that all rows of the group begin with; -1 where their prompts differ

    def take(self, rows: NDArray[Any]) -> GroupColumns:
        return GroupColumns(**{name: getattr(self, name)[rows] for name in GROUP_COLUMNS})

    def counts(self, part: Int32) -> dict[str, int]:
        """Return the `GROUP_COUNTS`; each group begins with part 0."""
        first = part == 0
        alone = np.ones(len(part), bool)  # groups of one row: the next row starts a group
        alone[:-1] = first[1:]
        alone = alone[first]
        labelled = (self.label >= 0)[first]
        return {
            "preference": int((labelled & ~alone).sum()),
            "kto": int((labelled & alone).sum()),
            "ranked": int((~labelled & ~alone).sum()),
            "single": int((~labelled & alone).sum()),
            "scores": int((~np.isnan(self.score))[first].sum()),
            "margins": int((~np.isnan(self.margin))[first].sum()),
        }


@dataclass(frozen=True)
class MediaColumns:
    detail: Sequence[str]  # JSON text of each row's images; see `tokenmill.store.record.Media`
    images: Int32
    patches: Int32

    def take(self, rows: NDArray[np.bool_]) -> MediaColumns | None:
        """Return the columns of some rows; None if none of them has an image."""
        if not self.images[rows].any():
            return None
        detail = [text for text, keep in zip(self.detail, rows.tolist(), strict=True) if keep]
        return MediaColumns(detail, self.images[rows], self.patches[rows])


def weights_or_none(
    weights: NDArray[np.float32], mask: NDArray[np.uint8]
) -> NDArray[np.float32] | None:
    """Return the weights, or None if they equal the mask."""
    return None if np.array_equal(weights, mask) else weights


@dataclass(frozen=True)
class SliceColumns:
    """All rows of one slice."""

    ids: Int32  # of all rows, one after another
    mask: NDArray[np.uint8]  # 1 where a token is trained
    starts: Int64  # where each row starts in ``ids``, and one more
    row: Int32  # number of each served row within the slice's source rows
    part: Int32  # number of its (first) turn under ``expand``, number within its group, else 0
    line: Int64  # within the slice, from 0; -1 when the format has none
    offset: Int64  # in bytes within the slice; -1 when the format has none
    raw_length: Int64  # bytes of the source row
    digest: NDArray[np.uint64]  # xxh3-64 of the source row's bytes
    turn_ends: Int32  # token at which each turn ends, within its row
    turn_roles: NDArray[np.signedinteger[Any]]  # indexes into ``roles``, of the type `role_type`
    turn_starts: Int64  # where each row's turns start, and one more
    roles: tuple[str, ...]
    source_rows: int
    rows_in: int  # rows after expansion, or groups: served plus rejected
    rejected: Sequence[RejectedRow] = ()
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)  # JSON text of each row
    groups: GroupColumns | None = None
    weights: NDArray[np.float32] | None = None  # of each token, 0 untrained; None: as the mask
    media: MediaColumns | None = None

    def __post_init__(self) -> None:
        rows = len(self.row)
        if len(self.starts) != rows + 1 or len(self.turn_starts) != rows + 1:
            raise AssertionError("one start per row and one at the end")
        units = rows if self.groups is None else int((self.part == 0).sum())
        if self.rows_in != units + len(self.rejected):
            raise AssertionError(f"{self.rows_in} rows in, {units} + {len(self.rejected)} out")
        if self.weights is not None and not np.array_equal(self.weights > 0, self.mask > 0):
            raise AssertionError("exactly the trained tokens must have weights above 0")

    @cached_property
    def lengths(self) -> Int32:
        return np.diff(self.starts).astype(np.int32)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    @cached_property
    def trained(self) -> Int32:
        counts = np.zeros(len(self.row), np.int32)
        some = self.starts[:-1] < self.starts[1:]  # `reduceat` cannot add up empty rows
        if some.any():
            counts[some] = np.add.reduceat(self.mask, self.starts[:-1][some], dtype=np.int32)
        return counts

    @cached_property
    def mask_runs(self) -> tuple[Int32, Int64]:
        return runs_of(self.mask, self.starts)

    @cached_property
    def weight_runs(self) -> WeightRuns | None:
        return None if self.weights is None else weight_runs_of(self.weights, self.starts)

    def content(self) -> str:
        """Return a digest of the values, independent of the Arrow version that writes them.

        Derived values (lengths, trained counts, runs of the mask) are not part of it.
        """
        hasher = xxhash.xxh3_128()
        arrays: list[NDArray[Any]] = [
            self.ids, self.mask, self.starts, self.row, self.part, self.line, self.offset,
            self.raw_length, self.digest, self.turn_ends, self.turn_roles, self.turn_starts,
        ]  # fmt: skip
        if self.groups is not None:
            arrays += [getattr(self.groups, name) for name in GROUP_COLUMNS]
        if self.weights is not None:
            arrays.append(self.weights)
        if self.media is not None:
            arrays += [getattr(self.media, name) for name in MEDIA_COLUMNS]
        for array in arrays:
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            hasher.update(f"{array.dtype.str[1:]}:{len(array)};".encode())
            hasher.update(little.data)
        rest: dict[str, Any] = {
            "roles": self.roles,
            "source_rows": self.source_rows,
            "rows_in": self.rows_in,
            "extra": {name: list(texts) for name, texts in self.extra.items()},
            "rejected": list(self.rejected),
            **({} if self.media is None else {"media": list(self.media.detail)}),
        }
        hasher.update(canonical(rest))
        return hasher.hexdigest()
