"""Samples that are source rows: replace rejected rows, and fill batches of this rank's rows.

Steps contain positions, and a filler finds the row of each position. The candidate at a position is
the row of the usual order. If it is rejected, others are drawn by a key of seed, epoch, position
and number of the draw, so no rank depends on rows of other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenmill.data.batch_media import MediaFiller
from tokenmill.data.fill import Batch
from tokenmill.data.filler import WEIGHT_SUM, Attached, Filler
from tokenmill.data.group_batches import group_kind
from tokenmill.data.index import Whole
from tokenmill.data.order import LARGEST, PURPOSE_REPLACEMENT, Int64Array, Order, derive_key, unroll
from tokenmill.data.packs import Pack, Packs, oversize_error
from tokenmill.data.samples import PackSamples, Samples, Step
from tokenmill.data.view import SumsOfRows, View
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.store import Row
from tokenmill.store.by_source import needs_store

MAX_DRAWS = 64  # replacements of a rejected row; also windows without a pack
REJECTED = "rejected"  # what a batch replaced, until it is handed out
MAX_SHOWN = 5  # rejected rows per reason
_SHARE_FROM = 100  # rows read before a share of rejected rows is compared with its limit
_READ = 1024  # rows of a packing window in memory at once

Rejected = list[tuple[str, str, str]]
"""Source, reason and message of rejected rows."""


class Rejections:
    """Counts the rejected rows of a loader, and warns once if they exceed a limit."""

    def __init__(self, limit: float | int | None = None) -> None:
        self.by_source: dict[str, dict[str, dict[str, Any]]] = {}  # by source and reason
        self._limit = limit
        self._read = self._rows = 0

    def count(self, accepted: int, rejected: Rejected) -> None:
        self._read += accepted + len(rejected)
        self._rows += len(rejected)
        for source, reason, message in rejected:
            reasons = self.by_source.setdefault(source, {})
            counts = reasons.setdefault(reason, {"rows": 0, "first": []})
            counts["rows"] += 1
            if len(counts["first"]) < MAX_SHOWN and message not in counts["first"]:
                counts["first"].append(message)
        limit, is_share = self._limit, isinstance(self._limit, float)
        read = max(self._read, _SHARE_FROM) if is_share else 1
        if limit is not None and self._rows > limit * read:
            self._limit = None
            allowed = f"{limit:.0%}" if is_share else limit
            message = f"{self}; more than the allowed {allowed}; they are replaced"
            warnings.warn(message, stacklevel=4)

    def __str__(self) -> str:
        reasons = [pair for counts in self.by_source.values() for pair in counts.items()]
        listed = ", ".join(f"{counts['rows']:,} {reason}" for reason, counts in reasons)
        return (
            f"{self._rows:,} of {self._read:,} rows read ({self._rows / self._read:.1%}) were "
            f"rejected ({listed}); the first: {reasons[0][1]['first'][0]}"
        )


@dataclass(frozen=True)
class Draws:
    """The accepted source row at each position of a stream, counted over all epochs."""

    view: View
    order: Order
    seed: int
    sources: dict[str, int]  # rows of each source of a mixture, in the order of the view

    def read(self, positions: Int64Array) -> tuple[Int64Array, list[list[Row]], Rejected]:
        """Return row numbers, the rows of each, and the rejected candidates."""
        numbers = unroll(self.order, positions)
        units: list[Any] = [None] * numbers.size
        rejected: Rejected = []
        waiting = list(range(numbers.size))
        ends, names = np.cumsum(list(self.sources.values())), list(self.sources)
        for draw in range(MAX_DRAWS + 1):
            for at, unit in zip(waiting, self.view.units(numbers[waiting]), strict=True):
                units[at] = unit
            waiting = [at for at in waiting if isinstance(units[at], RowError)]
            if not waiting:
                return numbers, units, rejected
            for at in waiting:
                source = int(np.searchsorted(ends, numbers[at], side="right"))
                rejected.append((names[source], units[at].reason, str(units[at])))
                epoch, position = divmod(int(positions[at]), self.order.rows)
                key = derive_key(PURPOSE_REPLACEMENT, self.seed, epoch, position, draw)
                size = self.sources[names[source]]
                numbers[at] = int(ends[source]) - size + key % size
        found = Rejections()
        found.count(numbers.size - len(waiting), rejected)
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
        super().__init__(order, Samples(draws.view), pack, 1, seed)
        self._draws = draws
        self._without_packs = 0  # windows, one after the other

    def lengths_at(self, units: Int64Array) -> Int64Array:
        lengths: list[int] = []
        for first in range(0, units.size, _READ):
            numbers, rows, _ = self._draws.read(units[first : first + _READ])
            found = [len(row) for [row] in rows]
            longest = int(np.argmax(found))
            if self._pack.oversize == "error" and found[longest] > self._pack.length:
                raise oversize_error(int(numbers[longest]), found[longest], self._pack)
            lengths += found
        return np.asarray(lengths, dtype=np.int64)

    def _pack_window(self, epoch: int, window: int) -> Packs:
        packs = super()._pack_window(epoch, window)
        self._without_packs = 0 if len(packs) else self._without_packs + 1
        if self._without_packs == MAX_DRAWS:
            raise UsageError(
                f"all rows of {MAX_DRAWS} windows have more than {self._pack.length} tokens, the "
                "length of a pack; set a larger length"
            )
        return packs

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

    def fill(self, step: Step) -> Batch:
        packs = step.packs
        own = slice(int(packs.bounds[step.first]), int(packs.bounds[step.stop]))
        positions, inverse = np.unique(packs.rows[own], return_inverse=True)  # of split rows
        numbers, units, rejected = self.draws.read(positions)
        rows: Any = BatchRows(units, self.draws.view)
        view = View([rows], Whole(rows))
        held = Samples(view, view.has_groups).as_packs(inverse)
        if packs.lengths.any():  # of packs; those of rows are known only now
            bounds = packs.bounds[step.first : step.stop + 1] - own.start
            held = Packs(inverse, packs.starts[own], packs.lengths[own], bounds)
        batch: Batch = _with_view(self.filler, view).fill(Step(held, 0, len(held)))
        batch["local_trained_tokens"] = batch.pop("num_trained_tokens")
        batch["local_weight_sum"] = batch.pop(WEIGHT_SUM)
        if self.indices:
            sizes = [len(units[number]) for number in inverse.tolist()]
            batch["indices"] = np.repeat(numbers[inverse], sizes)
        return batch | {REJECTED: (len(units), rejected)}


def _with_view(filler: Any, view: View) -> Any:
    if isinstance(filler, Filler):
        return replace(filler, view=view, attached=Attached.of(view, ()))
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
