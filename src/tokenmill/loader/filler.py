"""From a step's integers to a batch of arrays.

A `Filler` reads this rank's rows from the view and fills the arrays; of the other ranks' rows it
counts the trained tokens by the stores' columns, so that every rank can say `num_trained_tokens` of
the whole global batch without asking the others and without opening a row of theirs. It holds no
position and pickles small: a worker process needs a filler and steps, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum

import numpy as np

from tokenmill.dataset import View
from tokenmill.loader.attached import WEIGHT_SUM, Attached
from tokenmill.loader.steps import Step
from tokenmill.packing import Batch, Packs, Piece, fill_packs, fill_rows
from tokenmill.sampling import Int64Array
from tokenmill.store import Row


@dataclass(frozen=True)
class Filler:
    """Fills batches.

    Args:
        view: The rows.
        pad_id: Token of the padding.
        pad_side: right or left.
        multiple: Widths are rounded up to a multiple of this.
        pack_length: Tokens per pack; None pads rows instead.
        indices: Also hand out row numbers.
        attached: The sidecars that are handed out beside the tokens.
    """

    view: View
    pad_id: int
    pad_side: str = "right"
    multiple: int | None = None
    pack_length: int | None = None
    indices: bool = False
    attached: Attached = field(default_factory=Attached)

    def fill(self, step: Step, rows: list[Row] | None = None) -> Batch:
        """The batch of this rank.

        Args:
            step: The global batch.
            rows: Those of this rank's pieces, where they are at hand.
        """
        packs = step.packs
        begin, end = int(packs.bounds[step.first]), int(packs.bounds[step.stop])
        pieces = self.read(packs, begin, end, rows)
        served = packs.rows[begin:end], packs.starts[begin:end], packs.lengths[begin:end]
        if self.pack_length is None:
            batch = fill_rows(pieces, self.pad_id, side=self.pad_side, multiple=self.multiple)
            width = batch["input_ids"].shape[1]
            batch |= self.attached.padded(*served, width, self.pad_side)
        else:
            bounds = packs.bounds[step.first : step.stop + 1] - begin
            grouped = [pieces[a:b] for a, b in pairwise(bounds.tolist())]
            batch = fill_packs(grouped, self.pack_length, self.pad_id)
            batch |= self.attached.packed(*served, bounds, self.pack_length)
        trained = int(batch["loss_mask"].sum(dtype=np.int64))
        for first, stop in ((0, begin), (end, packs.rows.size)):
            trained += int(self.trained(packs, first, stop).sum())
        batch["num_trained_tokens"] = trained
        batch |= self.weighed(packs)
        if self.indices:
            batch["indices"] = packs.rows[begin:end].copy()
        return batch

    def read(
        self, packs: Packs, begin: int, end: int, rows: list[Row] | None = None
    ) -> list[Piece]:
        """Ids and mask of some pieces, as views onto the stored tokens; rows as for `fill`."""
        if rows is None:
            rows = self.view.rows(packs.rows[begin:end])
        pieces = []
        for row, start, length in zip(
            rows, packs.starts[begin:end].tolist(), packs.lengths[begin:end].tolist(), strict=True
        ):
            ids, mask = row.input_ids, row.loss_mask
            if length != ids.size:
                ids, mask = ids[start : start + length], mask[start : start + length]
            pieces.append((ids, mask))
        return pieces

    def trained(self, packs: Packs, first: int, stop: int) -> Int64Array:
        """Labels ≠ -100 of some pieces, by the stores' columns: the first token of none is one."""
        if first == stop:
            return np.zeros(0, dtype=np.int64)
        return self.view.trained_within(*self._predicted(packs, first, stop))

    def weighed(self, packs: Packs) -> Batch:
        """The sum of all pieces' weights, where the data has some, the same bits on every rank."""
        if not self.attached.weighs:
            return {}
        sums = self.view.weighed_within(*self._predicted(packs, 0, packs.rows.size))
        return {WEIGHT_SUM: fsum(sums)}

    def _predicted(
        self, packs: Packs, first: int, stop: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Rows of some pieces, and the tokens of them that may be labels."""
        rows, starts = packs.rows[first:stop], packs.starts[first:stop]
        # A piece that is padded to a multiple takes more than its row has.
        stops = np.minimum(starts + packs.lengths[first:stop], self.view.lengths_at(rows))
        return rows, starts + 1, stops
