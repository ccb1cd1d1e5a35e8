"""Packing, on integers: lengths → packs; packs and rows → filled arrays.

`Pack` says how, `pack_window` gives the `Packs` of one window of an order, `fill_packs`
and `fill_rows` make the arrays. `MicroBatches` says how a step is cut into several batches, which
`fill_slabs` fills and `shard` divides among ranks. No file is touched and no token copied before a
batch is filled.
"""

from __future__ import annotations

from tokenmill.packing.fill import (
    IGNORE,
    Batch,
    Piece,
    fill_packs,
    fill_rows,
    fill_slabs,
    labels_of,
    padded_width,
    shard,
)
from tokenmill.packing.micro import Align, MicroBatches
from tokenmill.packing.packs import (
    METHODS,
    OVERSIZE,
    PACKING_VERSION,
    Pack,
    Packs,
    Slots,
    oversize_error,
    pack_window,
    share_of,
)

__all__ = [
    "IGNORE",
    "METHODS",
    "OVERSIZE",
    "PACKING_VERSION",
    "Align",
    "Batch",
    "MicroBatches",
    "Pack",
    "Packs",
    "Piece",
    "Slots",
    "fill_packs",
    "fill_rows",
    "fill_slabs",
    "labels_of",
    "oversize_error",
    "pack_window",
    "padded_width",
    "shard",
    "share_of",
]
