"""From a step's integers to this rank's micro-batches.

A `MicroFiller` plans a step (which sample goes into which micro-batch of which rank), reads the
rows of this rank and fills its batches; with context parallelism it hands out this rank's shard of
each. The plan is a function of the step's lengths, the same on every rank, so nothing is exchanged
and nothing is saved: a state stands between two steps, as ever. Like a `Filler` it holds no
position and pickles small.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokenmill.loader.filler import Filler
from tokenmill.loader.group_batches import GroupFiller
from tokenmill.loader.steps import Step
from tokenmill.packing import Batch, MicroBatches, Packs, Piece, fill_rows, fill_slabs, shard


@dataclass(frozen=True)
class MicroFiller:
    """Fills the micro-batches of a step.

    Args:
        filler: Reads rows and counts trained tokens.
        micro: Budget, balance, alignment and layout.
        rank: This rank among all.
        world_size: All ranks, those that share a slab included.
        groups: Adds what belongs to groups, where samples are groups.
        max_patches: Of the pictures of a micro-batch, at most; None sets no bound.
    """

    filler: Filler
    micro: MicroBatches
    rank: int
    world_size: int
    groups: GroupFiller | None = None
    max_patches: int | None = None

    def fill(self, step: Step) -> list[Batch]:
        """The micro-batches of this rank: as many as every rank has."""
        shared = self.micro.context_parallel
        packs, owner = step.packs, self.rank // shared
        trained = self.filler.trained(packs, 0, packs.rows.size)
        weighed = self.filler.weighed(packs)
        length = self.filler.pack_length
        patches = None
        if self.max_patches is not None:
            patches = self.filler.view.patches_at(packs.rows), self.max_patches
        numbers, each = self.micro.plan(packs, trained, self.world_size // shared, length, patches)
        own = np.flatnonzero(numbers // each == owner)
        own = own[np.argsort(numbers[own], kind="stable")]
        mine = packs.take(own)
        bounds = np.searchsorted(numbers[own], owner * each + np.arange(each + 1)).tolist()
        rows = self.filler.view.rows(mine.rows)
        pieces = self.filler.read(mine, 0, mine.rows.size, rows)
        batches = []
        for first, stop in pairwise(bounds):
            filled = batch = self._batch(mine, pieces, first, stop)
            own_rows = slice(int(mine.bounds[first]), int(mine.bounds[stop]))
            numbers = mine.rows[own_rows]
            if self.groups is not None:
                batch = self.groups.arrange(filled, numbers, rows[own_rows], self.micro.sequence)
            if shared > 1:
                batch = batch | shard(filled, self.rank % shared, shared, self.micro.shards)
            batch |= {"num_trained_tokens": int(trained.sum()), **weighed}
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
