"""The sample stream: data, order and packing, without a position of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np

from tokenmill.data.by_source import Draws, Positions, RankPacks, check_options
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
from tokenmill.data.packs import Pack, Packs, Slots, check_pack, oversize_error
from tokenmill.data.samples import PackSamples, RowSamples, Samples
from tokenmill.data.view import View, as_view
from tokenmill.errors import StateError, UsageError, check_integer, check_one_of, check_positive
from tokenmill.store import Row, Store
from tokenmill.store.by_source import SourceRows, needs_store
from tokenmill.store.columns import row_numbers

ORDERS = (*BASE_ORDERS, "length_grouped")
# Of "length_grouped": sort this many positions by length, then shuffle groups of this many rows.
LENGTH_WINDOW = 8192
LENGTH_GROUP = 64
_GUESSED_TOKENS = 1024  # of a source row, for the size that libraries display


class Stream:
    """The samples of every epoch of some data, and the `StreamSpec` for saved states."""

    def __init__(
        self,
        data: Store | SourceRows | View | Mixture,
        *,
        seed: int = 42,
        order: str = "feistel",  # one of `ORDERS`
        unit: str = "auto",  # what the order permutes
        pack: Pack | None = None,
        slots: Slots | None = None,
        ranks: int = 1,  # used only by Pack(method="balanced")
        max_patches: int | None = None,  # per pack
        rank: int = 0,  # used only for packs of source rows
    ) -> None:
        self.mixture = data if isinstance(data, Mixture) else None
        self.view = data.view if isinstance(data, Mixture) else as_view(data)
        if not len(self.view):
            raise UsageError("the data has no rows to serve")
        self.seed = check_seed(seed)
        self.pack = pack
        self.slots = slots
        if self.view.is_by_source:
            splits = unit == "rows" and self.view.has_groups
            check_options(self.view, group_by_length=order == "length_grouped", unit=splits)
        self.units = Samples.of(self.view, unit, None if slots is None else slots.of)
        check_one_of("order", order, ORDERS)
        self.order = self._make_order(order)
        if max_patches is not None:
            self.require_at_most(self.units.patches_at, max_patches, "patches", "max_patches")
        self.samples: RowSamples | PackSamples = RowSamples(self.order, self.units)
        self.draws: Draws | None = None
        packing = None
        shuffle_seed = None if order == "sequential" else self.seed
        if self.view.is_by_source:
            sources = {"data": len(self.view)}
            if self.mixture is not None:
                sources = dict(zip(self.mixture.names, self.mixture.sizes(), strict=True))
            self.draws = draws = Draws(self.view, self.order, self.seed, sources)
            self.samples = RowSamples(Positions(self.order.rows), self.units)
            if pack is not None:
                self.samples = RankPacks(draws, pack, rank, ranks, shuffle_seed)
                packing = pack.document(1) | {"rank": rank, "world_size": ranks}
        elif pack is not None:
            self._check_pack(pack)
            self.samples = PackSamples(
                self.order, self.units, pack, ranks, shuffle_seed, max_patches
            )
            packing = pack.document(ranks)
            if slots is not None:
                packing["slots"] = asdict(slots)
            if max_patches is not None:
                packing["max_patches"] = max_patches
        if isinstance(self.order, GroupedOrder):
            order += f"/{self.order.window}/{self.order.group}"
        self.spec = StreamSpec(
            dataset=data.key if isinstance(data, Mixture) else self.view.key,
            seed=self.seed,
            order=order + "/groups" * self.units.grouped,
            packing=packing,
        )

    def _make_order(self, name: str) -> Order:
        if name == "length_grouped":
            base = self._make_order("feistel")
            return GroupedOrder(base, self.seed, self.units.tokens_at, LENGTH_WINDOW, LENGTH_GROUP)
        if self.mixture is None:
            return make_order(name, self.units.count, self.seed)
        return MixedOrder.of(self.mixture.schedule(self.units.grouped), name, self.seed)

    def _check_pack(self, pack: Pack) -> None:
        check_pack(pack)
        if self.slots is not None and pack.length % self.slots.multiple:
            raise UsageError(
                f"the pack length {pack.length} must be a multiple of ",
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
                "groups cannot be truncated or split, got ",
                ("oversize", pack.oversize),
                "; use error or drop",
            )
        if self.view.has_media:
            row, length = self.longest(
                lambda rows: self.view.lengths_at(rows) * (self.view.images_at(rows) > 0)
            )
            if length > pack.length:
                raise UsageError(
                    f"row {row} has images and {length} tokens, a pack has {pack.length}; rows "
                    "with images cannot be truncated or split: use Pack(oversize='drop'), a larger "
                    f"length, or data.filter('images == 0 or length <= {pack.length}')"
                )

    @property
    def unit(self) -> str:
        return "group" if self.units.grouped else "row"

    def longest(self, lengths_at: Callable[[Int64Array], Int64Array]) -> tuple[int, int]:
        """Return the first unit with the largest length, and that length."""
        best = (0, 0)
        for numbers in chunks_of(self.units.count):
            lengths = lengths_at(numbers)
            at = int(lengths.argmax())
            if lengths[at] > best[1]:
                best = (int(numbers[at]), int(lengths[at]))
        return best

    def require_at_most(
        self, values_at: Callable[[Int64Array], Int64Array], limit: int, what: str, name: str
    ) -> None:
        """Raise `UsageError` if a unit exceeds a budget of ``what`` (tokens or patches)."""
        unit, most = self.longest(values_at)
        if most > limit:
            column = "length" if what == "tokens" else what
            raise UsageError(
                f"{self.unit} {unit} has {most} {what}, {name} is {limit}; increase it, or use "
                f"data.filter('{column} <= {limit}')"
            )

    def check(self, cursor: Cursor) -> None:
        if cursor.epoch > self.last_epoch:
            raise StateError(
                f"epoch in the state must be at most {self.last_epoch}, got {cursor.epoch}"
            )
        self.samples.check(cursor)

    @property
    def last_epoch(self) -> int:
        """The last epoch whose positions, counted over all epochs, fit into 64 bits."""
        endless = isinstance(self.samples, RankPacks)
        return 0 if endless else LARGEST // self.order.rows - 1

    def checked_epoch(self, epoch: Any) -> int:
        return check_integer("epoch", epoch, 0, self.last_epoch)

    def served(self, cursor: Cursor) -> dict[str, dict[str, int]]:
        """Return rows, complete passes, tokens and trained tokens of every source.

        Rows of completed windows are a prefix of each source's order, so their number is enough.
        Rows of an incomplete window (packs, or rows grouped by length) are listed.
        """
        if isinstance(self.samples, RankPacks):
            return {"data": {"rows": cursor.window * self.samples.window}}  # of this rank
        started: list[Int64Array] = []  # units served from incomplete windows
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
        result = {}
        counts = order.schedule.served(cursor.epoch, position)
        begin = 0
        sources = zip(self.mixture.names, self.mixture.views, counts, order.orders, strict=True)
        for name, view, before, own_order in sources:
            units = replace(self.units, view=view)
            own = extra[(extra >= begin) & (extra < begin + units.count)] - begin
            result[name] = _served_by(before, own_order, units, own)
            begin += units.count
        return result


def _served_by(before: int, order: Order, units: Samples, extra: Int64Array) -> dict[str, int]:
    """Count the first ``before`` positions of a source's order, and ``extra`` units."""
    passes, rest = divmod(before, order.rows)
    if units.view.is_by_source:  # tokens are unknown
        return {"rows": before, "passes": passes}
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


class RunIndex:
    """The samples of several epochs by number: rows, groups or packs.

    Sample i is a function of (seed, i), so a trainer that skips the first n samples resumes
    exactly, in any process and with any number of workers. Memory does not grow with the rows.
    With packing, the number of packs of every window and epoch is computed once (8 bytes per 65,536
    rows and epoch) and pickled for workers.
    """

    def __init__(
        self,
        data: Store | SourceRows | View | Mixture,
        *,
        epochs: int = 1,
        seed: int = 42,
        order: str = "feistel",
        pack: Pack | None = None,
        slots: Slots | None = None,  # the reader of a pack then pads its rows
        world_size: int = 1,
        unit: str = "rows",  # rows of groups require order="sequential"
        ends: Int64Array | None = None,  # number of packs up to each window's end, if known
    ) -> None:
        self.epochs = check_positive("epochs", epochs)
        self.unit = unit
        self._data = data if isinstance(data, Mixture) else as_view(data)
        view = self._data.view if isinstance(self._data, Mixture) else self._data
        if view.is_mapped:
            raise UsageError(
                "exports and datasets of other libraries do not support map(); use a tm.Loader, or "
                "prepare the changed rows"
            )
        if view.has_groups and unit == "rows" and (order != "sequential" or pack is not None):
            raise UsageError(
                "this data has groups, which a shuffle or packing of rows would split; use "
                "order='sequential' without pack, or a tm.Loader"
            )
        self._options: dict[str, Any] = {
            "seed": seed, "order": order, "pack": pack, "slots": slots, "unit": unit,
        }  # fmt: skip
        self._ranks = world_size
        if view.is_by_source and pack is not None:
            raise needs_store("packs of a dataset with a length")
        self._stream = Stream(self._data, ranks=world_size, **self._options)
        self._stream.checked_epoch(self.epochs - 1)
        self.view = self._stream.view
        self.pad_token_id = self.view.pad_token_id
        self.slots = slots
        self.spec = self._stream.spec
        self._ends = ends
        if ends is None and isinstance(self._stream.samples, PackSamples):
            counts = map(self._stream.samples.window_counts, range(self.epochs))
            self._ends = np.cumsum([count for epoch in counts for count in epoch], dtype=np.int64)
        if not len(self):
            raise UsageError("the data has no samples to serve")

    def __reduce__(self) -> Any:
        rebuild = partial(RunIndex, epochs=self.epochs, world_size=self._ranks, ends=self._ends)
        return partial(rebuild, **self._options), (self._data,)

    def __len__(self) -> int:
        if self._ends is None:
            return self._stream.order.rows * self.epochs
        return int(self._ends[-1])

    @property
    def tokens(self) -> int:
        """Estimated number of tokens of all samples."""
        if self._stream.draws is not None:
            return _GUESSED_TOKENS * len(self)
        total = self.view.total("lengths")
        return round(total / len(self.view) * self._stream.order.rows * self.epochs)

    def packs(self, indices: Iterable[SupportsIndex]) -> Packs:
        """Return samples by number: a row is a pack of one piece, a group one of several."""
        numbers = row_numbers(indices, len(self), "sample")
        if self._stream.draws is not None:
            raise needs_store("lengths of samples")
        if self._ends is None:
            return self._stream.units.as_packs(unroll(self._stream.order, numbers))
        return self._stream.units.expand(self._packs(numbers, self._ends))

    def groups(self, indices: Iterable[SupportsIndex]) -> list[list[Row]]:
        """Return the rows of every sample, without packing."""
        if self._stream.draws is not None:
            return self._stream.draws.plain_rows(row_numbers(indices, len(self), "sample"))
        packs = self.packs(indices)
        rows = self.view.rows(packs.rows)
        return [rows[first:stop] for first, stop in pairwise(packs.bounds.tolist())]

    def _packs(self, numbers: Int64Array, ends: Int64Array) -> Packs:
        samples = self._stream.samples
        assert isinstance(samples, PackSamples)
        windows = np.searchsorted(ends, numbers, side="right")
        parts: list[Packs] = []
        positions: list[Int64Array] = []
        for window in np.unique(windows).tolist():
            here = np.flatnonzero(windows == window)
            begin = int(ends[window - 1]) if window else 0
            packed = samples.packed(*divmod(window, samples.windows))
            parts.append(packed.take(numbers[here] - begin))
            positions.append(here)
        if len(parts) <= 1:
            return Packs.join(parts)
        back = np.argsort(np.concatenate(positions), kind="stable")
        return Packs.join(parts).take(back)

    def pieces(self, indices: Iterable[SupportsIndex]) -> list[list[Piece]]:
        if self._ends is None:
            return [[(row.input_ids, row.loss_mask) for row in own] for own in self.groups(indices)]
        packs = self.packs(indices)
        pieces = self.read(packs)
        return [pieces[first:stop] for first, stop in pairwise(packs.bounds.tolist())]

    def read(self, packs: Packs) -> list[Piece]:
        if self.slots is not None:  # include the tokens without a slot
            packs = replace(packs, lengths=packs.lengths + self.slots.label_shift)
        return read_pieces(self.view.rows(packs.rows), packs.starts, packs.lengths)
