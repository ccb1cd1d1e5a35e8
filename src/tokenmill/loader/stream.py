"""The stream: everything that turns a cursor into a batch and the next cursor.

A `Stream` is composed once from data, order, packing and geometry, and never moves. Its parts: an
*order* (position → row), *samples* over it (rows or packs), a *stepper* (global batches), a
*filler* (arrays), and a *spec* that tells its states from those of other streams.
`LengthGrouped` names an order with numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tokenmill.dataset import Mixture, View, as_view
from tokenmill.errors import StateError, UsageError, check_one_of, check_positive
from tokenmill.loader.account import Account, served
from tokenmill.loader.attached import Attached, Wanted
from tokenmill.loader.cursor import Cursor, StreamSpec
from tokenmill.loader.filler import Filler
from tokenmill.loader.group_batches import GroupFiller, group_kind
from tokenmill.loader.media import WAYS, MediaFiller, Pixels
from tokenmill.loader.micro import MicroFiller
from tokenmill.loader.samples import PackSamples, RowSamples, Samples
from tokenmill.loader.steps import BatchStepper, BudgetStepper, Geometry, Step, Stepper
from tokenmill.loader.units import Units
from tokenmill.packing import MicroBatches, Pack, Slots, oversize_error, padded_widths
from tokenmill.sampling import (
    LARGEST,
    GroupedOrder,
    Int64Array,
    MixedOrder,
    Order,
    check_seed,
    make_order,
)
from tokenmill.store import Store

BatchFiller = Filler | GroupFiller | MicroFiller | MediaFiller
"""What turns a step into a batch, or a list of them."""

ORDERS = ("feistel", "miles", "sequential", "length_grouped")
_CHUNK = 1 << 18  # rows looked at a time where all lengths must be seen


@dataclass(frozen=True)
class LengthGrouped:
    """The order ``length_grouped`` with numbers of its own.

    Args:
        window: Positions that are sorted by length together.
        group: Rows that stay together; best a multiple of the global batch.
    """

    window: int = 8192
    group: int = 64


class Stream:
    """Cursor → batch and next cursor; the arguments are those of `Loader`.

    Only who fills packs by itself gives ``slots``: the filler here knows nothing of them. Sidecars
    are served as far as they are named.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        batch_size: int = 8,
        seed: int = 42,
        shuffle: bool = True,
        order: str | LengthGrouped = "feistel",
        rank: int = 0,
        world_size: int = 1,
        last: str = "wrap",
        pad_id: int | None = None,
        pad_side: str = "right",
        pad_to_multiple_of: int | None = None,
        max_tokens: int | None = None,
        pack: Pack | None = None,
        slots: Slots | None = None,
        indices: bool = False,
        micro_batches: MicroBatches | None = None,
        sidecars: Wanted = (),
        unit: str = "auto",
        layout: str = "sides",
        media: str | None = None,
        max_patches: int | None = None,
        processor: Any = None,
    ) -> None:
        self.mixture = data if isinstance(data, Mixture) else None
        self.view = data.view if isinstance(data, Mixture) else as_view(data)
        self.seed = check_seed(seed)
        self.geometry = Geometry(batch_size, rank, world_size, last)
        self.micro_batches = micro_batches
        self.pack = pack
        if micro_batches is not None:
            others = {"max_tokens": max_tokens, "pad_to_multiple_of": pad_to_multiple_of}
            self._check_micro_batches(micro_batches, world_size, others)
            shared = micro_batches.context_parallel
            self.geometry = Geometry(batch_size, rank // shared, world_size // shared, last)
            if pack is not None and micro_batches.sequence > 1:
                slots = Slots(micro_batches.sequence)
        self.slots = slots
        self.max_tokens, self.max_patches = max_tokens, max_patches
        if not len(self.view):
            raise UsageError("there is nothing to serve: the data has no rows")
        self._check_shape(pad_side, pad_to_multiple_of)
        self.units = Units.of(self.view, unit, None if slots is None else slots.of)
        if self.units.grouped and pack is not None and pack.oversize in ("truncate", "split"):
            raise UsageError(
                f"a group is not cut: Pack(oversize={pack.oversize!r}) has no meaning here; choose "
                "error or drop"
            )
        self._check_media(media, processor)
        name, grouping = _order_name(order, shuffle)
        self.order = self._make_order(name, grouping)
        self.samples = self._make_samples(shuffled=name != "sequential")
        self.stepper = self._make_stepper(pad_to_multiple_of)
        self.reader = Filler(
            self.view,
            self._pad_id(pad_id),
            pad_side=pad_side,
            multiple=pad_to_multiple_of,
            pack_length=None if pack is None else pack.length,
            indices=indices or self._illustrates(media),
            attached=Attached.of(self.view, sidecars),
        )
        self.filler: BatchFiller = self.reader
        groups = self._group_filler(layout) if self.units.grouped else None
        if micro_batches is not None:
            self.filler = MicroFiller(
                self.reader, micro_batches, rank, world_size, groups, max_patches
            )
        elif groups is not None:
            self.filler = groups
        if self._illustrates(media):
            pixels = Pixels(self.view, processor) if media == "pixels" else None
            self.filler = MediaFiller(self.filler, self.view, indices, pixels)
        numbers = "" if grouping is None else f"/{grouping.window}/{grouping.group}"
        numbers += "/groups" * self.units.grouped
        self.spec = StreamSpec(
            dataset=data.key if isinstance(data, Mixture) else self.view.key,
            seed=self.seed,
            order=name + numbers,
            packing=None if pack is None else self._packing(pack),
        )

    # Composition

    def _group_filler(self, layout: str) -> GroupFiller:
        """Fills groups; by their sides only where every row has a line of its own, whole."""
        groups, micro = GroupFiller.of(self.reader, layout, self.seed), self.micro_batches
        if micro is None:
            return groups
        if groups.kind == "kto" and micro.context_parallel > 1:
            raise UsageError(
                "the mismatched answers of KTO rows are not shared among ranks: "
                "context_parallel must be 1"
            )
        whole = micro.layout == "padded" and micro.context_parallel == 1
        return replace(groups, sides=groups.sides and whole)

    def _packing(self, pack: Pack) -> dict[str, Any]:
        slots = {} if self.slots is None else {"slots": asdict(self.slots)}
        patches = {} if self.max_patches is None else {"max_patches": self.max_patches}
        return pack.document(self.geometry.world_size) | slots | patches

    def _illustrates(self, media: str | None) -> bool:
        """Whether batches are to say which pictures they have."""
        return media is not None and self.view.has_media

    def _check_media(self, media: str | None, processor: Any) -> None:
        if media is not None:
            check_one_of("media", media, WAYS)
        if processor is not None and media != "pixels":
            raise UsageError("processor= makes pixels: say media='pixels'")
        if self.max_patches is not None and (self.max_tokens, self.pack, self.micro_batches) == (
            None, None, None,
        ):  # fmt: skip
            raise UsageError(
                "max_patches is a second budget: it goes with max_tokens, pack or micro_batches"
            )
        if not self.view.has_media:
            return
        if self.micro_batches is not None and self.micro_batches.context_parallel > 1:
            raise UsageError(
                "rows of this data have pictures, which shards would cut through: leave "
                "context_parallel=1, set Align(sequence=…), and let the model shard its embeddings"
            )
        if self.pack is not None and self.pack.oversize in ("truncate", "split"):
            unit, length = self._longest(self._illustrated_lengths)
            if length > self.pack.length:
                raise UsageError(
                    f"row {unit} has pictures and {length} tokens, and a pack only "
                    f"{self.pack.length}; rows with pictures are not cut: choose "
                    "Pack(oversize='drop'), a larger length, or leave such rows out "
                    f"(data.filter('pictures == 0 or length <= {self.pack.length}'))"
                )
        if media == "pixels" and self.units.grouped and group_kind(self.view) == "kto":
            raise UsageError(
                "the mismatched answers of KTO rows come without pixels: media='references' serves "
                "them"
            )

    def _illustrated_lengths(self, units: Int64Array) -> Int64Array:
        """Tokens of the rows that have pictures, 0 of others."""
        return self.units.lengths_at(units) * (self.view.pictures_at(units) > 0)

    def _check_shape(self, pad_side: str, multiple: int | None) -> None:
        if pad_side not in ("right", "left"):
            raise UsageError(f"pad_side must be right or left, not {pad_side!r}")
        for name, value in (
            ("pad_to_multiple_of", multiple),
            ("max_tokens", self.max_tokens),
            ("max_patches", self.max_patches),
        ):
            if value is not None:
                check_positive(name, value)
        pack, micro = self.pack, self.micro_batches
        if micro is not None and micro.layout == "slab" and pad_side == "left":
            raise UsageError("slabs have no padding at the left: pad_side='left' has no meaning")
        if pack is None:
            return
        if not isinstance(pack, Pack):
            raise UsageError(f"pack must be a tm.Pack, not {type(pack).__name__}")
        if self.slots is not None and pack.length % self.slots.multiple:
            raise UsageError(
                f"packs of {pack.length} tokens are no multiple of pad_multiple="
                f"{self.slots.multiple}"
            )
        if self.max_tokens is not None:
            raise UsageError("pack and max_tokens exclude each other: a pack is a token budget")
        if pad_side == "left":
            raise UsageError("packs have their padding at the tail: pad_side='left' has no meaning")
        if multiple is not None and pack.length % multiple:
            raise UsageError(
                f"packs of {pack.length} tokens are no multiple of pad_to_multiple_of={multiple}"
            )

    def _check_micro_batches(
        self, micro: MicroBatches, world_size: int, others: dict[str, Any]
    ) -> None:
        if not isinstance(micro, MicroBatches):
            raise UsageError(f"micro_batches must be a tm.MicroBatches, not {micro!r}")
        for name, value in others.items():
            if value is not None:
                raise UsageError(
                    f"micro_batches and {name} exclude each other: MicroBatches has max_tokens and "
                    "align of its own"
                )
        if world_size % micro.context_parallel:
            raise UsageError(
                f"world_size={world_size} is no multiple of context_parallel="
                f"{micro.context_parallel}: ranks that share a slab follow each other"
            )
        if self.pack is None:
            return
        if micro.layout != "slab":
            raise UsageError("pack and MicroBatches(layout='padded') exclude each other")
        length = self.pack.length
        if length % micro.slab or length > micro.budget:
            raise UsageError(
                f"packs of {length} tokens: they must be a multiple of {micro.slab} (align and "
                f"context_parallel) and at most {micro.budget} (max_tokens × context_parallel)"
            )

    def _pad_id(self, pad_id: int | None) -> int:
        found = self.view.pad_id if pad_id is None else pad_id
        if found is None:
            raise UsageError(
                "the tokenizer names neither a pad nor an eos token (or the stores disagree): "
                "say pad_id"
            )
        return int(found)

    def _make_order(self, name: str, grouping: LengthGrouped | None) -> Order:
        base = name if grouping is None else "feistel"
        order: Order
        if self.mixture is None:
            order = make_order(base, self.units.count, self.seed)
        else:
            order = MixedOrder.of(self.mixture.schedule(self.units.grouped), base, self.seed)
        if grouping is not None:
            order = GroupedOrder(
                order, self.seed, self.units.tokens_at, grouping.window, grouping.group
            )
        return order

    def _make_samples(self, *, shuffled: bool) -> Samples:
        if self.max_patches is not None:
            self._refuse_more_patches(self.max_patches)
        if self.pack is None:
            return RowSamples(self.order, self.units)
        if self.pack.oversize == "error":
            unit, length = self._longest(self.units.lengths_at)
            if length > self.pack.length:
                raise oversize_error(unit, length, self.pack, self._unit)
        return PackSamples(
            self.order,
            self.units,
            self.pack,
            self.geometry.world_size,
            self.seed if shuffled else None,
            self.max_patches,
        )

    def _make_stepper(self, multiple: int | None) -> Stepper:
        if self.micro_batches is not None and self.pack is None:
            self._refuse_longer(self.micro_batches)
        if self.max_tokens is None:
            return BatchStepper(self.samples, self.geometry)

        def padded(units: Int64Array) -> Int64Array:
            rows, longest = self.units.shapes_at(units)
            return rows * padded_widths(longest, multiple)

        unit, width = self._longest(padded)
        if width > self.max_tokens:
            raise UsageError(
                f"{self._unit} {unit} takes {width} tokens and max_tokens is {self.max_tokens}: "
                f"leave it out (data.filter('length <= {self.max_tokens}')) or raise it"
            )
        return BudgetStepper(
            self.order, self.units, self.geometry, self.max_tokens, multiple, self.max_patches
        )

    def _refuse_more_patches(self, max_patches: int) -> None:
        unit, patches = self._longest(self.units.patches_at)
        if patches > max_patches:
            raise UsageError(
                f"{self._unit} {unit} has {patches} patches and max_patches is {max_patches}: "
                f"leave it out (data.filter('patches <= {max_patches}')) or raise it"
            )

    def _refuse_longer(self, micro: MicroBatches) -> None:
        """A row, or a group, that takes more than a whole micro-batch."""

        def taken(units: Int64Array) -> Int64Array:
            if micro.layout == "padded":
                rows, longest = self.units.shapes_at(units)
                return rows * micro.places(longest)
            packs = self.units.as_packs(units)
            return packs.per_pack(micro.places(packs.lengths))

        unit, most = self._longest(taken)
        if most > micro.budget:
            raise UsageError(
                f"{self._unit} {unit} takes {most} tokens and a micro-batch has at most "
                f"{micro.budget}: leave it out (data.filter('length <= {micro.budget}')) or raise "
                "max_tokens"
            )

    @property
    def _unit(self) -> str:
        """What a unit is called."""
        return "group" if self.units.grouped else "row"

    def _longest(self, lengths_at: Callable[[Int64Array], Int64Array]) -> tuple[int, int]:
        """The first longest unit and its length."""
        best = (0, 0)
        for first in range(0, self.units.count, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, self.units.count), dtype=np.int64)
            lengths = lengths_at(numbers)
            place = int(lengths.argmax())
            if lengths[place] > best[1]:
                best = (first + place, int(lengths[place]))
        return best

    # Service

    def check(self, cursor: Cursor) -> None:
        """Refuse a cursor that lies outside of its epoch, or in one that nobody reaches."""
        if cursor.epoch > self.last_epoch:
            raise StateError(
                f"the state stands in epoch {cursor.epoch}; the last is {self.last_epoch}"
            )
        self.samples.check(cursor)

    @property
    def last_epoch(self) -> int:
        """The last epoch whose positions, counted from the first, keep within 64 bits."""
        return LARGEST // self.order.rows - 1

    def checked_epoch(self, epoch: Any) -> int:
        """An epoch as somebody names it.

        Raises:
            UsageError: It is no whole number from 0, or too large.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
            raise UsageError(f"epoch must be a whole number from 0, not {epoch!r}")
        if epoch > self.last_epoch:
            raise UsageError(f"epoch is {epoch}; the last is {self.last_epoch}")
        return int(epoch)

    def steps(self, cursor: Cursor, end: int | None) -> Iterator[tuple[Step, Cursor]]:
        """Steps from a cursor on, each with the cursor behind it."""
        while True:
            found = self.stepper.step(cursor, end)
            if found is None:
                return
            yield found
            cursor = found[1]

    def batches(self, cursor: Cursor, end: int | None) -> Iterator[tuple[Any, Cursor]]:
        """Batches (or lists of them) from a cursor on, each with the cursor behind it."""
        for step, behind in self.steps(cursor, end):
            yield self.filler.fill(step), behind

    def served(self, cursor: Cursor) -> Account:
        """What each source gave before a cursor."""
        return served(cursor, self.order, self.samples, self.units, self.mixture)


def packing_plan(
    data: Store | View | Mixture,
    pack: Pack,
    *,
    order: str = "feistel",
    seed: int = 42,
    epoch: int = 0,
    world_size: int = 1,
) -> tuple[int, int]:
    """Packs of one epoch as a loader would make them, and the tokens in them."""
    # The plan asks for no token, so any padding will do.
    stream = Stream(data, seed=seed, order=order, world_size=world_size, pack=pack, pad_id=0)
    assert isinstance(stream.samples, PackSamples)
    return stream.samples.fill(epoch)


def _order_name(order: str | LengthGrouped, shuffle: bool) -> tuple[str, LengthGrouped | None]:
    grouping = LengthGrouped() if order == "length_grouped" else None
    if isinstance(order, LengthGrouped):
        grouping, order = order, "length_grouped"
    check_one_of("order", order, ORDERS)
    if shuffle:
        return order, grouping
    if order not in ("feistel", "sequential"):
        raise UsageError(f"shuffle=False serves rows as they stand: it excludes order={order!r}")
    return "sequential", None
