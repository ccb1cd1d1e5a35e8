"""The sample stream: data, order and packing, without a position of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np

from tokenmill.data.cursor import Cursor, StreamSpec
from tokenmill.data.fill import Piece
from tokenmill.data.filler import read_pieces
from tokenmill.data.index import chunks_of
from tokenmill.data.interleave import MixedOrder
from tokenmill.data.mixture import Mixture
from tokenmill.data.order import (
    LARGEST,
    GroupedOrder,
    Int64Array,
    Order,
    check_seed,
    make_order,
    unroll,
)
from tokenmill.data.order import ORDERS as BASE_ORDERS
from tokenmill.data.packs import Pack, Packs, Slots, oversize_error
from tokenmill.data.samples import PackSamples, RowSamples, Units
from tokenmill.data.view import View, as_view
from tokenmill.errors import StateError, UsageError, check_one_of
from tokenmill.store import Store

ORDERS = (*BASE_ORDERS, "length_grouped")


@dataclass(frozen=True)
class LengthGrouped:
    """Sort ``window`` positions of the order by length, then shuffle groups of ``group`` rows."""

    window: int = 8192
    group: int = 64  # best a multiple of the global batch


class Stream:
    """The samples of every epoch of some data, and the spec that identifies them in states."""

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        seed: int = 42,
        order: str | LengthGrouped = "feistel",  # one of `ORDERS`
        unit: str = "auto",  # what the order permutes
        pack: Pack | None = None,
        slots: Slots | None = None,
        ranks: int = 1,  # only packing with ``balanced`` uses them
        max_patches: int | None = None,  # of a pack's images
    ) -> None:
        self.mixture = data if isinstance(data, Mixture) else None
        self.view = data.view if isinstance(data, Mixture) else as_view(data)
        if not len(self.view):
            raise UsageError("there is nothing to serve: the data has no rows")
        self.seed = check_seed(seed)
        self.pack = pack
        self.slots = slots
        self.units = Units.of(self.view, unit, None if slots is None else slots.of)
        grouping = LengthGrouped() if order == "length_grouped" else None
        if isinstance(order, LengthGrouped):
            grouping, order = order, "length_grouped"
        check_one_of("order", order, ORDERS)
        self.order = self._make_order("feistel" if grouping else order, grouping)
        if max_patches is not None:
            self.require_at_most(self.units.patches_at, max_patches, "patches", "max_patches")
        self.samples: RowSamples | PackSamples = RowSamples(self.order, self.units)
        packing = None
        if pack is not None:
            self._check_pack(pack)
            shuffle_seed = None if order == "sequential" else self.seed
            self.samples = PackSamples(
                self.order, self.units, pack, ranks, shuffle_seed, max_patches
            )
            packing = pack.document(ranks)
            if slots is not None:
                packing["slots"] = asdict(slots)
            if max_patches is not None:
                packing["max_patches"] = max_patches
        window = "" if grouping is None else f"/{grouping.window}/{grouping.group}"
        self.spec = StreamSpec(
            dataset=data.key if isinstance(data, Mixture) else self.view.key,
            seed=self.seed,
            order=order + window + "/groups" * self.units.grouped,
            packing=packing,
        )

    def _make_order(self, name: str, grouping: LengthGrouped | None) -> Order:
        order: Order
        if self.mixture is None:
            order = make_order(name, self.units.count, self.seed)
        else:
            order = MixedOrder.of(self.mixture.schedule(self.units.grouped), name, self.seed)
        if grouping is None:
            return order
        return GroupedOrder(order, self.seed, self.units.tokens_at, grouping.window, grouping.group)

    def _check_pack(self, pack: Pack) -> None:
        if not isinstance(pack, Pack):
            raise UsageError(f"pack must be a tm.Pack, not {type(pack).__name__}")
        if self.slots is not None and pack.length % self.slots.multiple:
            raise UsageError(
                f"packs of {pack.length} tokens are no multiple of ",
                ("pad_multiple", self.slots.multiple),
            )
        if pack.oversize == "error":
            unit, length = self.longest(self.units.lengths_at)
            if length > pack.length:
                raise oversize_error(unit, length, pack, self.unit)
        if pack.oversize not in ("truncate", "split"):
            return
        if self.units.grouped:
            raise UsageError(
                "a group is not cut: ",
                ("oversize", pack.oversize),
                " has no meaning here; choose error or drop",
            )
        if self.view.has_media:
            row, length = self.longest(
                lambda rows: self.view.lengths_at(rows) * (self.view.pictures_at(rows) > 0)
            )
            if length > pack.length:
                raise UsageError(
                    f"row {row} has pictures and {length} tokens, and a pack only {pack.length}; "
                    "rows with pictures are not cut: choose Pack(oversize='drop'), a larger "
                    "length, or leave such rows out "
                    f"(data.filter('pictures == 0 or length <= {pack.length}'))"
                )

    @property
    def unit(self) -> str:
        return "group" if self.units.grouped else "row"

    def longest(self, lengths_at: Callable[[Int64Array], Int64Array]) -> tuple[int, int]:
        """The first unit with the largest length, and that length."""
        best = (0, 0)
        for numbers in chunks_of(self.units.count):
            lengths = lengths_at(numbers)
            place = int(lengths.argmax())
            if lengths[place] > best[1]:
                best = (int(numbers[place]), int(lengths[place]))
        return best

    def require_at_most(
        self, values_at: Callable[[Int64Array], Int64Array], limit: int, what: str, name: str
    ) -> None:
        """Raise `UsageError` where a unit exceeds a budget of ``what`` (a column of filters)."""
        unit, most = self.longest(values_at)
        if most > limit:
            column = "length" if what == "tokens" else what
            raise UsageError(
                f"{self.unit} {unit} takes {most} {what} and {name} is {limit}: leave it out "
                f"(data.filter('{column} <= {limit}')) or raise it"
            )

    def check(self, cursor: Cursor) -> None:
        if cursor.epoch > self.last_epoch:
            raise StateError(f"the state's epoch is {cursor.epoch}; the last is {self.last_epoch}")
        self.samples.check(cursor)

    @property
    def last_epoch(self) -> int:
        """The last epoch whose positions, counted from the first, fit into 64 bits."""
        return LARGEST // self.order.rows - 1

    def checked_epoch(self, epoch: Any) -> int:
        if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
            raise UsageError(f"epoch must be a non-negative integer, got {epoch!r}")
        if epoch > self.last_epoch:
            raise UsageError(f"epoch is {epoch}; the last is {self.last_epoch}")
        return int(epoch)

    def served(self, cursor: Cursor) -> dict[str, dict[str, int]]:
        """Rows, whole passes, tokens and trained tokens of every source before a cursor.

        Rows of completed windows are a prefix of each source's own order, known in closed form;
        those of a started window (packs, or rows grouped by length) are looked up.
        """
        started: list[Int64Array] = []  # units served from windows that are not completed
        position, order = cursor.position, self.order
        if isinstance(self.samples, PackSamples):
            position = min(cursor.window * self.samples.window, order.rows)
            inside = cursor.position - cursor.packs_before
            if inside:
                packs = self.samples.packed(cursor.epoch, cursor.window)
                stop = int(packs.bounds[inside])
                # A row that was split counts with its first piece.
                started.append(packs.rows[:stop][packs.starts[:stop] == 0])
        if isinstance(order, GroupedOrder):
            start = position // order.window * order.window
            started.append(order.indices(cursor.epoch, np.arange(start, position, dtype=np.int64)))
            position, order = start, order.base
        extra = np.concatenate([np.zeros(0, dtype=np.int64), *started])
        if self.mixture is None or not isinstance(order, MixedOrder):
            before = cursor.epoch * order.rows + position
            return {"data": _served_by(before, order, self.units, extra)}
        found = {}
        counts = order.schedule.served(cursor.epoch, position)
        begin = 0
        sources = zip(self.mixture.names, self.mixture.views, counts, order.orders, strict=True)
        for name, view, before, own_order in sources:
            units = replace(self.units, view=view)
            own = extra[(extra >= begin) & (extra < begin + units.count)] - begin
            found[name] = _served_by(before, own_order, units, own)
            begin += units.count
        return found


def _served_by(before: int, order: Order, units: Units, extra: Int64Array) -> dict[str, int]:
    """The first ``before`` positions of a source's order, and ``extra`` units."""
    passes, rest = divmod(before, order.rows)
    tokens, trained = int(units.tokens_at(extra).sum()), int(units.trained_at(extra).sum())
    if passes:
        tokens += passes * units.view.total("lengths")
        trained += passes * units.view.total("trained")
    for positions in chunks_of(rest):
        rows = order.indices(passes, positions)
        tokens += int(units.tokens_at(rows).sum())
        trained += int(units.trained_at(rows).sum())
    rows_served = before + extra.size
    return {
        "rows": rows_served,
        "passes": rows_served // order.rows,
        "tokens": tokens,
        "trained_tokens": trained,
    }


class WholeRun:
    """The samples of several epochs by number: rows, groups or packs, each epoch in our order.

    Sample i is a function of (seed, i), so a trainer that skips the first n samples resumes
    exactly, in any process and with any number of workers. Nothing is kept per row. With packing
    the number of packs in every window of every epoch is kept (8 bytes per 65,536 rows and epoch),
    since the length of the list must be known; it is pickled along, so workers do not count again.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        epochs: int = 1,
        seed: int = 42,
        order: str | LengthGrouped = "feistel",
        pack: Pack | None = None,
        slots: Slots | None = None,  # the reader of a pack then pads its rows
        world_size: int = 1,
        unit: str = "rows",  # rows of groups are only served in their stored order
        ends: Int64Array | None = None,  # where each window's packs end, when already counted
    ) -> None:
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 1:
            raise UsageError(f"epochs must be a positive integer, got {epochs!r}")
        self.epochs = int(epochs)
        self.unit = unit
        self._data = data if isinstance(data, Mixture) else as_view(data)
        view = self._data.view if isinstance(self._data, Mixture) else self._data
        if view.is_mapped:
            raise UsageError(
                "exports and other libraries' datasets are named by their content, and the "
                "function of a map is part of no name: serve mapped rows with a Loader, or prepare "
                "them as they shall be"
            )
        if view.has_groups and unit == "rows" and (order != "sequential" or pack is not None):
            raise UsageError(
                "the rows of this data belong to groups, which would be parted: take them in the "
                "order sequential and without packs, or serve groups with a Loader"
            )
        self._options: dict[str, Any] = {
            "seed": seed, "order": order, "pack": pack, "slots": slots, "unit": unit,
        }  # fmt: skip
        self._ranks = world_size
        self._stream = Stream(self._data, ranks=world_size, **self._options)
        self._stream.checked_epoch(self.epochs - 1)
        self.view = self._stream.view
        self.pad_id = self.view.pad_id
        self.slots = slots
        self.spec = self._stream.spec
        self._ends = ends
        if ends is None and isinstance(self._stream.samples, PackSamples):
            counts = map(self._stream.samples.window_counts, range(self.epochs))
            self._ends = np.cumsum([count for epoch in counts for count in epoch], dtype=np.int64)
        if not len(self):
            raise UsageError("there is nothing to serve: an epoch has no samples")

    def __reduce__(self) -> Any:
        made = partial(WholeRun, epochs=self.epochs, world_size=self._ranks, ends=self._ends)
        return partial(made, **self._options), (self._data,)

    def __len__(self) -> int:
        if self._ends is None:
            return self._stream.order.rows * self.epochs
        return int(self._ends[-1])

    @property
    def tokens(self) -> int:
        """About how many tokens all samples have together."""
        total = self.view.total("lengths")
        return round(total / len(self.view) * self._stream.order.rows * self.epochs)

    def packs(self, indices: Iterable[SupportsIndex]) -> Packs:
        """Samples by number: a row is a pack of one piece, a group one of several."""
        numbers = np.asarray([int(index) for index in indices], dtype=np.int64)
        wrong = (numbers < 0) | (numbers >= len(self))
        if wrong.any():
            raise IndexError(f"sample {int(numbers[wrong][0])} of {len(self)}")
        if self._ends is None:
            return self._stream.units.as_packs(unroll(self._stream.order, numbers))
        return self._stream.units.expand(self._packs(numbers, self._ends))

    def _packs(self, numbers: Int64Array, ends: Int64Array) -> Packs:
        samples = self._stream.samples
        assert isinstance(samples, PackSamples)
        windows = np.searchsorted(ends, numbers, side="right")
        found: list[Packs] = []
        places: list[Int64Array] = []
        for window in np.unique(windows).tolist():
            here = np.flatnonzero(windows == window)
            begin = int(ends[window - 1]) if window else 0
            packed = samples.packed(*divmod(window, samples.windows))
            found.append(packed.take(numbers[here] - begin))
            places.append(here)
        if len(found) <= 1:
            return Packs.join(found)
        back = np.argsort(np.concatenate(places), kind="stable")
        return Packs.join(found).take(back)

    def pieces(self, indices: Iterable[SupportsIndex]) -> list[list[Piece]]:
        packs = self.packs(indices)
        pieces = self.read(packs)
        return [pieces[first:stop] for first, stop in pairwise(packs.bounds.tolist())]

    def read(self, packs: Packs) -> list[Piece]:
        if self.slots is not None:  # also the tokens of a row that take no place in its slot
            packs = replace(packs, lengths=packs.lengths + self.slots.unpredicted)
        return read_pieces(self.view.rows(packs.rows), packs.starts, packs.lengths)
