"""Samples that are source rows: replace rejected rows, and fill batches of this rank's rows.

Steps contain positions, and a filler finds the row of each position. The candidate at a position is
the row of the usual order. If it is rejected, others are drawn by a key of seed, epoch, position
and number of the draw, so no rank depends on rows of other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokenmill.data.batch_media import MediaFiller
from tokenmill.data.fill import Batch
from tokenmill.data.filler import WEIGHT_SUM, WEIGHTS, Attached, Filler, LossWeights
from tokenmill.data.group_batches import group_kind
from tokenmill.data.index import Whole
from tokenmill.data.order import (
    LARGEST,
    PURPOSE_REPLACEMENT,
    Int64Array,
    Order,
    derive_key,
    unroll,
)
from tokenmill.data.packs import Pack, Packs
from tokenmill.data.samples import PackSamples, Samples, Step
from tokenmill.data.view import SumsOfRows, View
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.store import Row
from tokenmill.store.by_source import needs_store

MAX_DRAWS = 64  # replacements of a rejected row
REJECTIONS = "rejections"  # of a batch, until it is handed out
MAX_SHOWN = 5  # rejected rows per reason
_SHARE_FROM = 100  # rows read before a share of rejected rows is compared with its limit
_READ = 1024  # rows of a packing window in memory at once


@dataclass
class Rejections:
    """Counts of rejected rows, and the first ones, by source and reason."""

    read: int = 0  # rows, also accepted ones
    rows: int = 0
    by_source: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def add(self, source: str, reason: str, rows: int, messages: Iterable[str]) -> None:
        counts = self.by_source.setdefault(source, {}).setdefault(reason, {"rows": 0, "first": []})
        counts["rows"] += rows
        counts["first"] = list(dict.fromkeys([*counts["first"], *messages]))[:MAX_SHOWN]
        self.rows += rows

    def merge(self, other: Rejections) -> None:
        self.read += other.read
        for source, reasons in other.by_source.items():
            for reason, counts in reasons.items():
                self.add(source, reason, counts["rows"], counts["first"])

    def exceed(self, limit: float | int | None) -> bool:
        if isinstance(limit, float):
            limit *= max(self.read, _SHARE_FROM)
        return limit is not None and self.rows > limit

    def __str__(self) -> str:
        reasons = [pair for counts in self.by_source.values() for pair in counts.items()]
        listed = ", ".join(f"{counts['rows']:,} {reason}" for reason, counts in reasons)
        return (
            f"{self.rows:,} of {self.read:,} rows read ({self.rows / self.read:.1%}) were rejected "
            f"({listed}); the first: {reasons[0][1]['first'][0]}"
        )


class RejectionCounter(Rejections):
    """Counts the rejections of a loader, and warns once above `max_rejected` of its data."""

    def __init__(self, view: View) -> None:
        super().__init__()
        limits = [getattr(store, "max_rejected", None) for store in view.stores]
        self._limit = min((limit for limit in limits if limit is not None), default=None)

    def count(self, found: Rejections) -> None:
        self.merge(found)
        if self.exceed(self._limit):
            allowed = f"{self._limit:.0%}" if isinstance(self._limit, float) else self._limit
            message = f"{self}; more than the allowed {allowed}; they are replaced"
            self._limit = None
            warnings.warn(message, stacklevel=4)


@dataclass(frozen=True)
class Draws:
    """The accepted source row at each position of a stream, counted over all epochs."""

    view: View
    order: Order
    seed: int
    sources: dict[str, int]  # rows of each source of a mixture, in the order of the view

    def read(self, positions: Int64Array) -> tuple[Int64Array, list[list[Row]], Rejections]:
        """Return row numbers, the rows of each, and the rejected candidates."""
        numbers = unroll(self.order, positions)
        units: list[Any] = [None] * numbers.size
        found, waiting = Rejections(), list(range(numbers.size))
        ends, names = np.cumsum(list(self.sources.values())), list(self.sources)
        for draw in range(MAX_DRAWS + 1):
            for at, unit in zip(waiting, self.view.units(numbers[waiting]), strict=True):
                units[at] = unit
            found.read += len(waiting)
            waiting = [at for at in waiting if isinstance(units[at], RowError)]
            if not waiting:
                return numbers, units, found
            for at in waiting:
                source = int(np.searchsorted(ends, numbers[at], side="right"))
                found.add(names[source], units[at].reason, 1, [str(units[at])])
                epoch, position = divmod(int(positions[at]), self.order.rows)
                key = derive_key(PURPOSE_REPLACEMENT, self.seed, epoch, position, draw)
                size = self.sources[names[source]]
                numbers[at] = int(ends[source]) - size + key % size
        raise SourceError(f"{MAX_DRAWS} rows drawn for a rejected one were rejected, too; {found}")

    def plain_rows(self, positions: Int64Array) -> list[list[Row]]:
        """Return the rows of positions, for readers without loss weights."""
        units = self.read(positions)[1]
        for row in (row for unit in units for row in unit):
            if not np.array_equal(row.weights, row.loss_mask):
                raise UsageError(
                    "the row has loss weights, which only tm.Loader supports; prepare the rows "
                    "with weights of 0 and 1",
                    **row.origin.location,
                )
        return units


class Positions(Order):
    """Positions counted over all epochs, of all ranks or of one rank without end."""

    def __init__(self, rows: int, rank: int = 0, ranks: int = 1) -> None:
        self.rows = rows
        self._rank = rank
        self._ranks = ranks

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return (positions + epoch * self.rows) * self._ranks + self._rank


@dataclass(frozen=True)
class PositionSamples(Samples):
    """Positions as units; their lengths are known when they are read."""

    draws: Draws | None = None

    def as_packs(self, units: Int64Array) -> Packs:
        unknown = np.zeros_like(units)
        return Packs(units, unknown, unknown, np.arange(units.size + 1))

    def expand(self, packs: Packs) -> Packs:
        return packs

    def lengths_at(self, units: Int64Array) -> Int64Array:
        assert self.draws is not None
        lengths = [
            sum(map(len, unit))
            for first in range(0, units.size, _READ)
            for unit in self.draws.read(units[first : first + _READ])[1]
        ]
        return np.asarray(lengths, dtype=np.int64)


class RankPacks(PackSamples):
    """Packs of the positions of one rank, without end and without epochs.

    A window is read to plan its packs, and its rows are read again to fill them.
    """

    def __init__(self, draws: Draws, pack: Pack, rank: int, ranks: int, seed: int | None) -> None:
        if draws.view.has_groups:
            raise needs_store("packs of groups")
        if draws.view.has_media and pack.oversize in ("truncate", "split"):
            raise needs_store(f"packs of images with oversize={pack.oversize!r}")
        order = Positions(LARGEST // ranks, rank, ranks)
        units = PositionSamples(draws.view, draws=draws)
        super().__init__(order, units, pack, 1, seed)

    def count(self, epoch: int) -> int:
        raise needs_store("number of packs")


class BatchRows(SumsOfRows):
    """The rows of one batch in memory, with the attributes of a store that a `View` needs."""

    is_by_source = False
    sidecars = ()
    has_weights = True

    def __init__(self, units: list[list[Row]], of: View) -> None:
        self._rows = [row for unit in units for row in unit]
        sizes = [len(unit) for unit in units]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.lengths = np.fromiter(map(len, self._rows), np.int64, len(self._rows))
        self.group_size = sizes[0] if len(set(sizes)) == 1 else None if sizes else 1
        self.group_count = len(units)
        self.key, self.manifest = of.key, of.stores[0].manifest
        self.has_groups, self.has_media = of.has_groups, of.has_media

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Iterable[int]) -> list[Row]:
        return [self._rows[index] for index in indices]

    def group_starts(self, groups: Int64Array) -> Int64Array:
        return self._starts[groups]


@dataclass(frozen=True)
class SourceFiller:
    """Fills the batches of one rank; counts are those of its rows, not of the global batch."""

    draws: Draws
    filler: Any  # a `Filler`, `GroupFiller` or `MediaFiller`, for any rows
    indices: bool  # whether batches have row numbers
    packed: bool

    def fill(self, step: Step) -> Batch:
        packs = step.packs
        own = slice(int(packs.bounds[step.first]), int(packs.bounds[step.stop]))
        positions, inverse = np.unique(packs.rows[own], return_inverse=True)  # of split rows
        if not self.packed:
            positions, inverse = packs.rows[own], np.arange(own.stop - own.start)
        numbers, units, rejections = self.draws.read(positions)
        rows: Any = BatchRows(units, self.draws.view)
        view = View([rows], Whole(rows))
        held = Samples(view, view.has_groups).as_packs(inverse)
        if self.packed:
            bounds = packs.bounds[step.first : step.stop + 1] - own.start
            held = Packs(inverse, packs.starts[own], packs.lengths[own], bounds)
        batch: Batch = _with_view(self.filler, view).fill(Step(held, 0, len(held)))
        batch["local_trained_tokens"] = batch.pop("num_trained_tokens")
        batch["local_weight_sum"] = batch.pop(WEIGHT_SUM)
        if self.indices:
            sizes = [len(units[number]) for number in inverse.tolist()]
            batch["indices"] = np.repeat(numbers[inverse], sizes)
        return batch | {REJECTIONS: rejections}


def _with_view(filler: Any, view: View) -> Any:
    if isinstance(filler, Filler):
        weights = LossWeights(view, WEIGHTS, "the data", "token")
        return replace(filler, view=view, attached=Attached((weights,)))
    inner = _with_view(filler.filler, view)
    if isinstance(filler, MediaFiller):
        return replace(filler, filler=inner, view=view)
    return replace(filler, filler=inner)


def check_options(view: View, **options: Any) -> None:
    """Raise `UsageError` for options of a loader that need all rows."""
    for name, value in options.items():
        if value:
            raise needs_store(name)
    if view.has_groups and group_kind(view) == "kto":
        raise needs_store("mismatched answers of KTO rows")
