"""Fill batches: from the integers of a step to arrays.

``num_trained_tokens`` and ``weight_sum`` of the global batch come from stored columns, so rows of
other ranks are not read. Fillers have no position and small pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.data.fill import Batch, Piece, fill_packs, fill_padded_packs, fill_rows, shard
from tokenmill.data.micro import MicroBatches
from tokenmill.data.order import Int64Array
from tokenmill.data.packs import Packs
from tokenmill.data.samples import Step
from tokenmill.data.view import Float32Array, View, ViewSidecar
from tokenmill.errors import UsageError, check_strings
from tokenmill.store import Row

if TYPE_CHECKING:
    from tokenmill.data.group_batches import GroupFiller

SidecarNames = Iterable[str] | Mapping[str, str] | None
"""Names of sidecars, or a mapping from names to producers; None: all attached sidecars."""

WEIGHTS, WEIGHT_SUM = "loss_weights", "weight_sum"  # the sum is over the global batch


class LossWeights(ViewSidecar):
    """Loss weights of tokens, with the interface of a sidecar."""

    def of_tokens(self, indices: Int64Array) -> list[Float32Array]:
        return [row.weights for row in self.view.rows(indices)]


class _Pieces(NamedTuple):
    rows: Int64Array
    starts: Int64Array  # first token within the row
    lengths: Int64Array
    positions: Int64Array  # start in the flattened batch
    segments: Int64Array  # row or segment of the batch


@dataclass(frozen=True)
class Attached:
    """The sidecars that a loader adds to batches.

    A value per token is at its token's position. A value per row is in an array over the rows of a
    padded batch, or over the segments of ``cu_seqlens``. Padding is 0.0. Loss weights are added
    the same way, and are 0 where the label is -100.
    """

    sidecars: tuple[ViewSidecar, ...] = ()

    @classmethod
    def of(cls, view: View, names: SidecarNames) -> Attached:
        if names is None:
            sidecars = view.sidecars
        else:
            listed = dict.fromkeys(check_strings("sidecars", names))
            producers = names if isinstance(names, Mapping) else listed
            sidecars = [view.sidecar(name, producer) for name, producer in producers.items()]
        if view.has_weights:
            if WEIGHTS in (sidecar.name for sidecar in sidecars):
                raise UsageError(
                    f"the data has loss weights and a sidecar {WEIGHTS!r}; leave it out with "
                    "sidecars=[…], or attach it under another name"
                )
            sidecars = [*sidecars, LossWeights(view, WEIGHTS, "the data", "token")]
        return cls(tuple(sidecars))

    @property
    def has_weights(self) -> bool:
        return any(isinstance(sidecar, LossWeights) for sidecar in self.sidecars)

    def padded(
        self, rows: Int64Array, starts: Int64Array, lengths: Int64Array, width: int, side: str
    ) -> Batch:
        """Return arrays in the layout of `fill_rows`."""
        height = max(rows.size, 1)
        positions = np.arange(rows.size, dtype=np.int64) * width
        if side == "left":
            positions += width - lengths
        pieces = _Pieces(rows, starts, lengths, positions, np.arange(rows.size))
        return self._arrays(pieces, height, (height, width))

    def packed(self, rows: Int64Array, starts: Int64Array, batch: Batch) -> Batch:
        """Return arrays in the layout of `fill_packs`."""
        segments = batch["seq_idx"].reshape(-1)[batch["cu_seqlens"][:-1]]
        return self.segmented(rows, starts, batch, "cu_seqlens", np.flatnonzero(segments >= 0))

    def segmented(
        self, rows: Int64Array, starts: Int64Array, batch: Batch, bounds: str, real: Int64Array
    ) -> Batch:
        """Return arrays in the layout of ``batch``, of which the sequences ``real`` have pieces."""
        positions = batch[bounds][real].astype(np.int64)
        lengths = np.diff(batch["cu_seqlens"])[real].astype(np.int64)
        pieces = _Pieces(rows, starts, lengths, positions, real)
        return self._arrays(pieces, batch["cu_seqlens"].size - 1, batch["input_ids"].shape)

    def _arrays(self, pieces: _Pieces, segments: int, shape: tuple[int, ...]) -> Batch:
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
    flat = np.zeros(size, dtype=np.float32)
    rows, starts, lengths, positions, _ = pieces
    for values, start, length, position in zip(
        sidecar.of_tokens(rows), starts.tolist(), lengths.tolist(), positions.tolist(), strict=True
    ):
        flat[position : position + length] = values[start : start + length]
    if isinstance(sidecar, LossWeights):
        flat[positions[lengths > 0]] = 0  # the first label of every piece is -100
    return flat


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
    pad_token_id: int
    padding_side: str = "right"
    multiple: int | None = None  # widths are padded to a multiple of this
    pack_length: int | None = None  # tokens per pack; None pads rows instead
    indices: bool = False  # whether batches have row numbers
    attached: Attached = field(default_factory=Attached)

    def fill(self, step: Step, rows: list[Row] | None = None) -> Batch:
        """Return the batch of this rank; ``rows`` are the rows of its pieces, if already read."""
        packs = step.packs
        begin, end = int(packs.bounds[step.first]), int(packs.bounds[step.stop])
        own = packs.rows[begin:end], packs.starts[begin:end], packs.lengths[begin:end]
        pieces = read_pieces(self.view.rows(own[0]) if rows is None else rows, *own[1:])
        if self.pack_length is None:
            batch = fill_rows(
                pieces, self.pad_token_id, side=self.padding_side, multiple=self.multiple
            )
            width = batch["input_ids"].shape[1]
            batch |= self.attached.padded(*own, width, self.padding_side)
        else:
            bounds = packs.bounds[step.first : step.stop + 1] - begin
            grouped = [pieces[a:b] for a, b in pairwise(bounds.tolist())]
            batch = fill_packs(grouped, self.pack_length, self.pad_token_id)
            batch |= self.attached.packed(own[0], own[1], batch)
        trained = int(batch["loss_mask"].sum(dtype=np.int64))
        for first, stop in ((0, begin), (end, packs.rows.size)):
            trained += int(self.trained(packs, first, stop).sum())
        batch["num_trained_tokens"] = trained
        batch |= self.weight_sum(packs)
        if self.indices:
            batch["indices"] = own[0].copy()
        return batch

    def trained(self, packs: Packs, first: int, stop: int) -> Int64Array:
        """Count labels other than -100 of some pieces, from stored columns."""
        if first == stop:
            return np.zeros(0, dtype=np.int64)
        return self.view.trained_within(*self._label_bounds(packs, first, stop))

    def weight_sum(self, packs: Packs) -> Batch:
        """Return the sum of all weights, bitwise equal on every rank, if the data has weights."""
        if not self.attached.has_weights:
            return {}
        sums = self.view.weighed_within(*self._label_bounds(packs, 0, packs.rows.size))
        return {WEIGHT_SUM: fsum(sums)}

    def _label_bounds(
        self, packs: Packs, first: int, stop: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        rows, starts = packs.rows[first:stop], packs.starts[first:stop]
        # A piece that is padded to a multiple is longer than its row.
        stops = np.minimum(starts + packs.lengths[first:stop], self.view.lengths_at(rows))
        return rows, starts + 1, stops


@dataclass(frozen=True)
class MicroFiller:
    """Fills the micro-batches of a step.

    Every rank computes the same plan from the lengths, without communication or saved state.
    """

    filler: Filler
    micro: MicroBatches
    rank: int  # among all ranks, including those that share a micro-batch
    world_size: int
    groups: GroupFiller | None = None  # adds columns if samples are groups

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
        own_packs = packs.take(own)
        bounds = np.searchsorted(numbers[own], owner * each + np.arange(each + 1)).tolist()
        rows = self.filler.view.rows(own_packs.rows)
        pieces = read_pieces(rows, own_packs.starts, own_packs.lengths)
        batches = []
        for first, stop in pairwise(bounds):
            filled = batch = self._batch(own_packs, pieces, first, stop)
            own_rows = slice(int(own_packs.bounds[first]), int(own_packs.bounds[stop]))
            numbers = own_packs.rows[own_rows]
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
            side = filler.padding_side
            batch = fill_rows(within, filler.pad_token_id, side=side, multiple=micro.sequence)
            width = batch["input_ids"].shape[1]
            return batch | filler.attached.padded(rows, starts, packs.lengths[own], width, side)
        if filler.pack_length is None:
            bounds = bounds[[0, -1]]
        grouped = [pieces[a:b] for a, b in pairwise(bounds.tolist())]
        batch = fill_padded_packs(
            grouped,
            filler.pad_token_id,
            sequence=micro.sequence,
            multiple=micro.multiple,
            length=filler.pack_length,
        )
        # A pack without pieces has one sequence, of padding.
        counts = np.diff(bounds)
        real = np.flatnonzero(np.repeat(counts > 0, np.maximum(counts, 1)))
        return batch | filler.attached.segmented(rows, starts, batch, "cu_seqlens_padded", real)
