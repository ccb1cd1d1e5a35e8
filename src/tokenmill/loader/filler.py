"""From a step's integers to a batch of arrays.

A `Filler` reads this rank's rows from the view and fills the arrays; for the other ranks' rows it
only counts the trained tokens, so that every rank can say `num_trained_tokens` of the whole global
batch without talking to the others. It holds no position and pickles small: a worker process needs
a filler and steps, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokenmill.dataset import View
from tokenmill.loader.steps import Step
from tokenmill.packing import Batch, Packs, Piece, fill_packs, fill_rows
from tokenmill.sampling import Int64Array


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
    """

    view: View
    pad_id: int
    pad_side: str = "right"
    multiple: int | None = None
    pack_length: int | None = None
    indices: bool = False

    def fill(self, step: Step) -> Batch:
        """The batch of this rank."""
        packs = step.packs
        begin, end = int(packs.bounds[step.first]), int(packs.bounds[step.stop])
        pieces = self.read(packs, begin, end)
        if self.pack_length is None:
            batch = fill_rows(pieces, self.pad_id, side=self.pad_side, multiple=self.multiple)
        else:
            bounds = (packs.bounds[step.first : step.stop + 1] - begin).tolist()
            grouped = [pieces[a:b] for a, b in pairwise(bounds)]
            batch = fill_packs(grouped, self.pack_length, self.pad_id)
        trained = int(batch["loss_mask"].sum(dtype=np.int64))
        for first, stop in ((0, begin), (end, packs.rows.size)):
            trained += self._trained(packs, first, stop)
        batch["num_trained_tokens"] = trained
        if self.indices:
            batch["indices"] = packs.rows[begin:end].copy()
        return batch

    def read(self, packs: Packs, begin: int, end: int) -> list[Piece]:
        """Ids and mask of some pieces, as views onto the stored tokens."""
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

    def _trained(self, packs: Packs, first: int, stop: int) -> int:
        """Labels ≠ -100 among pieces that other ranks fill."""
        if first == stop:
            return 0
        rows, lengths = packs.rows[first:stop], packs.lengths[first:stop]
        trained = self.view.trained_at(rows)
        whole = lengths == self.view.lengths_at(rows)
        # The first token of a piece is never a label: it must be looked at, unless the counts say
        # that all tokens are trained, or none.
        total = int(trained[whole].sum()) - int(np.count_nonzero(whole & (trained == lengths)))
        look = np.flatnonzero(~whole | ((trained > 0) & (trained < lengths)))
        return total + self._corrections(packs, first + look, whole[look])

    def _corrections(self, packs: Packs, places: Int64Array, whole: Int64Array) -> int:
        total = 0
        for row, start, length, is_whole in zip(
            self.view.rows(packs.rows[places]),
            packs.starts[places].tolist(),
            packs.lengths[places].tolist(),
            whole.tolist(),
            strict=True,
        ):
            mask = row.loss_mask
            if is_whole:
                total -= int(mask[0])
            else:
                total += int(mask[start + 1 : start + length].sum(dtype=np.int64))
        return total
