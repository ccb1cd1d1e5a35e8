"""Sidecars in batches: what is attached to rows, laid out as the rows are.

Comes in: row numbers of a batch with the pieces of them that are served, and how they are arranged,
as the filler has them. Goes out: one float32 array per sidecar, under its name.

    rows  a b c  and  d e,  one value per token, one per row (x, y)
        padded   a b c    x        packed   a b c d e . . .    x y 0
                 d e .    y                 cu_seqlens 0 3 5 8

Per token a value stands where its token stands, and padding is 0.0. Per row there is one value for
every row of the padded batch; packed, one for every segment that ``cu_seqlens`` names, the padding
tails with 0.0. Which sidecars are served is settled when a loader is made: what is attached later
changes no batch of it.

The weights of the data itself (`LossWeights`) are laid out the same way, as ``loss_weights``, where
a trained token counts other than 1: 0 wherever the label is -100.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from tokenmill.dataset import View, ViewSidecar
from tokenmill.dataset.sidecars import Float32Array
from tokenmill.errors import UsageError
from tokenmill.packing import Batch
from tokenmill.sampling import Int64Array

Wanted = Iterable[str] | Mapping[str, str] | None
"""Names of sidecars, or names with what made each; None: all that is attached to the data."""


WEIGHTS, WEIGHT_SUM = "loss_weights", "weight_sum"
"""What batches call the weights of the data, and their sum over the whole global batch."""


class LossWeights(ViewSidecar):
    """What each token of the rows counts in the loss: values like a sidecar's, of the data."""

    def of_tokens(self, indices: Int64Array) -> list[Float32Array]:
        """The weights of each row, as it is served."""
        return [row.weights for row in self.view.rows(indices)]


@dataclass(frozen=True)
class Attached:
    """The sidecars that a loader serves."""

    sidecars: tuple[ViewSidecar, ...] = ()

    @classmethod
    def of(cls, view: View, wanted: Wanted) -> Attached:
        """Those of a view that are wanted.

        Raises:
            UsageError: One of them is not attached, or was made by several and none was named.
        """
        if isinstance(wanted, str):
            raise UsageError(f"sidecars are names, such as [{wanted!r}], not one text")
        if wanted is None:
            found = view.sidecars
        else:
            makers = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
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
    def weighs(self) -> bool:
        """Whether the data has weights of its own."""
        return any(isinstance(sidecar, LossWeights) for sidecar in self.sidecars)

    def padded(
        self, rows: Int64Array, starts: Int64Array, lengths: Int64Array, width: int, side: str
    ) -> Batch:
        """As `fill_rows` lays out pieces: token ``start`` to ``start + length`` of each row."""
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
        """As `fill_packs` lays them out; pack n holds pieces ``bounds[n]`` to ``bounds[n + 1]``."""
        packs = bounds.size - 1
        height = max(packs, 1)
        number = np.repeat(np.arange(packs), np.diff(bounds))  # of each piece's pack
        before = np.concatenate(([0], np.cumsum(lengths)))  # tokens of all packs, without tails
        places = number * length + before[:-1] - before[bounds[number]]
        filled = np.diff(before[bounds]) if packs else np.zeros(1, dtype=np.int64)
        tails = np.cumsum(filled < length)  # segments of padding up to each pack's end
        segments = np.arange(rows.size) + np.concatenate(([0], tails))[number]
        pieces = _Pieces(rows, starts, lengths, places, segments)
        return self._laid_out(pieces, rows.size + int(tails[-1]), (height, length))

    def in_slabs(
        self, rows: Int64Array, starts: Int64Array, batch: Batch, real: Int64Array
    ) -> Batch:
        """As `fill_slabs` lays them out; per row there is one value for every sequence.

        Args:
            rows: Of the pieces.
            starts: First token of each within its row.
            batch: As `fill_slabs` made it.
            real: Which of its sequences the pieces are: slabs of padding alone have one, too.
        """
        places = batch["cu_seqlens_padded"][real].astype(np.int64)
        lengths = np.diff(batch["cu_seqlens"])[real].astype(np.int64)
        pieces = _Pieces(rows, starts, lengths, places, real)
        return self._laid_out(pieces, batch["cu_seqlens"].size - 1, batch["input_ids"].shape)

    def _laid_out(self, pieces: _Pieces, segments: int, shape: tuple[int, ...]) -> Batch:
        """Of every sidecar one value per segment, or one per token in the batch's shape."""
        batch: Batch = {}
        for sidecar in self.sidecars:
            if sidecar.per == "row":
                values = np.zeros(segments, dtype=np.float32)
                values[pieces.segments] = sidecar.of_rows(pieces.rows)
                batch[sidecar.name] = values
            else:
                batch[sidecar.name] = _of_tokens(sidecar, pieces, prod(shape)).reshape(shape)
        return batch


class _Pieces(NamedTuple):
    """Which stretches of rows a batch holds, and where.

    Attributes:
        rows: Row of each piece.
        starts: Its first token within the row.
        lengths: Its tokens.
        places: Where it begins in the flattened batch.
        segments: Which of the batch's rows, or segments, it is.
    """

    rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    places: Int64Array
    segments: Int64Array


def _of_tokens(sidecar: ViewSidecar, pieces: _Pieces, size: int) -> Float32Array:
    """The values of pieces' tokens, each piece at its place in a flat array of zeros."""
    found = np.zeros(size, dtype=np.float32)
    rows, starts, lengths, places, _ = pieces
    for values, start, length, place in zip(
        sidecar.of_tokens(rows), starts.tolist(), lengths.tolist(), places.tolist(), strict=True
    ):
        found[place : place + length] = values[start : start + length]
    if isinstance(sidecar, LossWeights):
        found[places[lengths > 0]] = 0  # the first label of every piece is -100
    return found
