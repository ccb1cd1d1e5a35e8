"""Fill batches: from the integers of a step to arrays.

Of the other ranks' rows only stored columns are read, for ``num_trained_tokens`` and ``weight_sum``
of the whole global batch. Fillers hold no position and pickle small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.data.fill import Batch, Piece, fill_packs, fill_rows, fill_slabs, shard
from tokenmill.data.micro import MicroBatches
from tokenmill.data.order import Int64Array
from tokenmill.data.packs import Packs
from tokenmill.data.samples import Step
from tokenmill.data.view import Float32Array, View, ViewSidecar
from tokenmill.errors import UsageError
from tokenmill.store import Row

if TYPE_CHECKING:
    from tokenmill.data.group_batches import GroupFiller

SidecarNames = Iterable[str] | Mapping[str, str] | None
"""Names of sidecars, or names with what made each; None: all that are attached to the data."""

WEIGHTS, WEIGHT_SUM = "loss_weights", "weight_sum"  # the sum is over the global batch


class LossWeights(ViewSidecar):
    """The weight of each token in the loss: values like those of a sidecar."""

    def of_tokens(self, indices: Int64Array) -> list[Float32Array]:
        return [row.weights for row in self.view.rows(indices)]


class _Pieces(NamedTuple):
    rows: Int64Array
    starts: Int64Array  # first token within the row
    lengths: Int64Array
    places: Int64Array  # start in the flattened batch
    segments: Int64Array  # row or segment of the batch


@dataclass(frozen=True)
class Attached:
    """The sidecars that a loader serves, laid out like the tokens of their rows.

    A value per token is at its token's position. Per row there is one value for every row of the
    padded batch; packed, one for every segment of ``cu_seqlens``. Padding is 0.0. The weights of
    the data itself are laid out the same way: 0 wherever the label is -100.
    """

    sidecars: tuple[ViewSidecar, ...] = ()

    @classmethod
    def of(cls, view: View, names: SidecarNames) -> Attached:
        if isinstance(names, str):
            raise UsageError(f"sidecars are names, such as [{names!r}], not one text")
        if names is None:
            found = view.sidecars
        else:
            makers = names if isinstance(names, Mapping) else dict.fromkeys(names)
            found = [view.sidecar(name, maker) for name, maker in makers.items()]
        if view.has_weights:
            for name in {WEIGHTS, WEIGHT_SUM} & {sidecar.name for sidecar in found}:
                raise UsageError(
                    f"the data has weights of its own and a sidecar {name!r}: say which others to "
                    "hand out (sidecars=[…]), or attach it under another name"
                )
            found = [*found, LossWeights(view, WEIGHTS, "the data", "token")]
        return cls(tuple(found))

    @property
    def has_weights(self) -> bool:
        return any(isinstance(sidecar, LossWeights) for sidecar in self.sidecars)

    def padded(
        self, rows: Int64Array, starts: Int64Array, lengths: Int64Array, width: int, side: str
    ) -> Batch:
        """Lay out pieces like `fill_rows`."""
        height = max(rows.size, 1)
        places = np.arange(rows.size, dtype=np.int64) * width
        if side == "left":
            places += width - lengths
        pieces = _Pieces(rows, starts, lengths, places, np.arange(rows.size))
        return self._laid_out(pieces, height, (height, width))

    def packed(
        self,
        rows: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        bounds: Int64Array,
        length: int,
    ) -> Batch:
        """Lay out pieces like `fill_packs`."""
        packs = bounds.size - 1
        number = np.repeat(np.arange(packs), np.diff(bounds))  # of each piece's pack
        before = np.concatenate(([0], np.cumsum(lengths)))  # tokens of all packs, without tails
        places = number * length + before[:-1] - before[bounds[number]]
        filled = np.diff(before[bounds]) if packs else np.zeros(1, dtype=np.int64)
        tails = np.cumsum(filled < length)  # segments of padding up to each pack's end
        segments = np.arange(rows.size) + np.concatenate(([0], tails))[number]
        pieces = _Pieces(rows, starts, lengths, places, segments)
        return self._laid_out(pieces, rows.size + int(tails[-1]), (max(packs, 1), length))

    def in_slabs(
        self, rows: Int64Array, starts: Int64Array, batch: Batch, real: Int64Array
    ) -> Batch:
        """Lay out pieces like `fill_slabs`; ``real`` are the sequences that hold pieces."""
        places = batch["cu_seqlens_padded"][real].astype(np.int64)
        lengths = np.diff(batch["cu_seqlens"])[real].astype(np.int64)
        pieces = _Pieces(rows, starts, lengths, places, real)
        return self._laid_out(pieces, batch["cu_seqlens"].size - 1, batch["input_ids"].shape)

    def _laid_out(self, pieces: _Pieces, segments: int, shape: tuple[int, ...]) -> Batch:
        batch: Batch = {}
        for sidecar in self.sidecars:
            if sidecar.per == "row":
                values = np.zeros(segments, dtype=np.float32)
                values[pieces.segments] = sidecar.of_rows(pieces.rows)
                batch[sidecar.name] = values
            else:
                batch[sidecar.name] = _of_tokens(sidecar, pieces, prod(shape)).reshape(shape)
        return batch


def _of_tokens(sidecar: ViewSidecar, pieces: _Pieces, size: int) -> Float32Array:
    found = np.zeros(size, dtype=np.float32)
    rows, starts, lengths, places, _ = pieces
    for values, start, length, place in zip(
        sidecar.of_tokens(rows), starts.tolist(), lengths.tolist(), places.tolist(), strict=True
    ):
        found[place : place + length] = values[start : start + length]
    if isinstance(sidecar, LossWeights):
        found[places[lengths > 0]] = 0  # the first label of every piece is -100
    return found


def read_pieces(rows: list[Row], starts: Int64Array, lengths: Int64Array) -> list[Piece]:
    pieces = []
    for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
        ids, mask = row.input_ids, row.loss_mask
        if length != ids.size:
            ids, mask = ids[start : start + length], mask[start : start + length]
        pieces.append((ids, mask))
    return pieces


@dataclass(frozen=True)
class Filler:
    view: View
    pad_id: int
    pad_side: str = "right"
    multiple: int | None = None  # widths are rounded up to a multiple of this
    pack_length: int | None = None  # tokens per pack; None pads rows instead
    indices: bool = False  # also hand out row numbers
    attached: Attached = field(default_factory=Attached)

    def fill(self, step: Step, rows: list[Row] | None = None) -> Batch:
        """The batch of this rank; ``rows`` are those of its pieces, if they were already read."""
        packs = step.packs
        begin, end = int(packs.bounds[step.first]), int(packs.bounds[step.stop])
        own = packs.rows[begin:end], packs.starts[begin:end], packs.lengths[begin:end]
        pieces = read_pieces(self.view.rows(own[0]) if rows is None else rows, *own[1:])
        if self.pack_length is None:
            batch = fill_rows(pieces, self.pad_id, side=self.pad_side, multiple=self.multiple)
            width = batch["input_ids"].shape[1]
            batch |= self.attached.padded(*own, width, self.pad_side)
        else:
            bounds = packs.bounds[step.first : step.stop + 1] - begin
            grouped = [pieces[a:b] for a, b in pairwise(bounds.tolist())]
            batch = fill_packs(grouped, self.pack_length, self.pad_id)
            batch |= self.attached.packed(*own, bounds, self.pack_length)
        trained = int(batch["loss_mask"].sum(dtype=np.int64))
        for first, stop in ((0, begin), (end, packs.rows.size)):
            trained += int(self.trained(packs, first, stop).sum())
        batch["num_trained_tokens"] = trained
        batch |= self.weight_sum(packs)
        if self.indices:
            batch["indices"] = own[0].copy()
        return batch

    def trained(self, packs: Packs, first: int, stop: int) -> Int64Array:
        """Labels ≠ -100 of some pieces, from stored columns; the first token of a piece is none."""
        if first == stop:
            return np.zeros(0, dtype=np.int64)
        return self.view.trained_within(*self._label_bounds(packs, first, stop))

    def weight_sum(self, packs: Packs) -> Batch:
        """The sum of all pieces' weights, where the data has some, the same bits on every rank."""
        if not self.attached.has_weights:
            return {}
        sums = self.view.weighed_within(*self._label_bounds(packs, 0, packs.rows.size))
        return {WEIGHT_SUM: fsum(sums)}

    def _label_bounds(
        self, packs: Packs, first: int, stop: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        rows, starts = packs.rows[first:stop], packs.starts[first:stop]
        # A piece that is padded to a multiple takes more than its row has.
        stops = np.minimum(starts + packs.lengths[first:stop], self.view.lengths_at(rows))
        return rows, starts + 1, stops


@dataclass(frozen=True)
class MicroFiller:
    """Fills the micro-batches of a step.

    The plan is a function of the step's lengths, the same on every rank, so nothing is exchanged
    and nothing is saved.
    """

    filler: Filler
    micro: MicroBatches
    rank: int  # among all ranks, those that share a slab included
    world_size: int
    groups: GroupFiller | None = None  # adds the columns of groups, where samples are groups

    def fill(self, step: Step) -> list[Batch]:
        shared = self.micro.context_parallel
        packs, owner = step.packs, self.rank // shared
        trained = self.filler.trained(packs, 0, packs.rows.size)
        totals = {"num_trained_tokens": int(trained.sum()), **self.filler.weight_sum(packs)}
        patches = None
        if self.micro.max_patches is not None:
            patches = self.filler.view.patches_at(packs.rows)
        ranks = self.world_size // shared
        numbers, each = self.micro.plan(packs, trained, ranks, self.filler.pack_length, patches)
        own = np.flatnonzero(numbers // each == owner)
        own = own[np.argsort(numbers[own], kind="stable")]
        mine = packs.take(own)
        bounds = np.searchsorted(numbers[own], owner * each + np.arange(each + 1)).tolist()
        rows = self.filler.view.rows(mine.rows)
        pieces = read_pieces(rows, mine.starts, mine.lengths)
        batches = []
        for first, stop in pairwise(bounds):
            filled = batch = self._batch(mine, pieces, first, stop)
            own_rows = slice(int(mine.bounds[first]), int(mine.bounds[stop]))
            numbers = mine.rows[own_rows]
            if self.groups is not None:
                batch = self.groups.arrange(filled, numbers, rows[own_rows], self.micro.sequence)
            if shared > 1:
                batch = batch | shard(filled, self.rank % shared, shared, self.micro.shards)
            batch |= totals
            if self.filler.indices:
                batch["indices"] = numbers.copy()
            batches.append(batch)
        return batches

    def _batch(self, packs: Packs, pieces: list[Piece], first: int, stop: int) -> Batch:
        micro, filler = self.micro, self.filler
        bounds = packs.bounds[first : stop + 1]
        own = slice(int(bounds[0]), int(bounds[-1]))
        within, rows, starts = pieces[own], packs.rows[own], packs.starts[own]
        if filler.pack_length is None and micro.layout == "padded":
            side = filler.pad_side
            batch = fill_rows(within, filler.pad_id, side=side, multiple=micro.sequence)
            width = batch["input_ids"].shape[1]
            return batch | filler.attached.padded(rows, starts, packs.lengths[own], width, side)
        if filler.pack_length is None:
            bounds = bounds[[0, -1]]
        slabs = [pieces[a:b] for a, b in pairwise(bounds.tolist())]
        batch = fill_slabs(
            slabs,
            filler.pad_id,
            sequence=micro.sequence,
            slab=micro.slab,
            length=filler.pack_length,
        )
        # A slab without pieces is one sequence all the same.
        counts = np.diff(bounds)
        real = np.flatnonzero(np.repeat(counts > 0, np.maximum(counts, 1)))
        return batch | filler.attached.in_slabs(rows, starts, batch, real)
