"""What packing would make of a store, before anyone trains.

Comes in: an open store and a pack length. Goes out: a `PackingPreview`, for ``tokenmill stats``
(how full packs would be) and for the page (the same with a histogram, and the first packs to look
at). Packs are those of the loader, in its default order (seed 42, epoch 0) and by its default
method, from stored lengths alone. A window of the order is packed at a time, and of very large
stores the first `MOST_WINDOWS`: the preview says of how many rows it speaks. Rows longer than a
pack are left out and counted. ``tokenmill pack`` counts a whole epoch of any order and method.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset import as_view
from tokenmill.loader import PackSamples, Units
from tokenmill.packing import Pack, Packs
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store

SEED = 42  # of the order that is packed: the loader's default
MOST_WINDOWS = 16  # of 65,536 rows: a million rows say what a hundred million would


@dataclass(frozen=True)
class PackingPreview:
    """Packs of one length.

    Attributes:
        length: Tokens of a pack.
        rows: How many rows were looked at.
        rows_longer: How many of them are longer than a pack.
        packs: The packs.
    """

    length: int
    rows: int
    rows_longer: int
    packs: Packs

    @property
    def filled(self) -> npt.NDArray[np.int64]:
        """Tokens in each pack."""
        return self.packs.per_pack(self.packs.lengths)

    def document(self) -> dict[str, Any]:
        """As ``tokenmill stats --json`` prints it."""
        room = len(self.packs) * self.length
        return {
            "length": self.length,
            "packs": len(self.packs),
            "fill": round(self.packs.tokens / room, 6) if room else 0.0,
            "rows": self.rows,
            "rows_longer": self.rows_longer,
        }

    def first_packs(self, most_packs: int, most_pieces: int) -> list[list[list[int]]]:
        """Row and tokens of every piece of the first packs; at least one pack."""
        shown: list[list[list[int]]] = []
        for first, last in pairwise(self.packs.bounds[: most_packs + 1].tolist()):
            if shown and last > most_pieces:
                break
            pieces = zip(self.packs.rows[first:last], self.packs.lengths[first:last], strict=True)
            shown.append([[int(row), int(tokens)] for row, tokens in pieces])
        return shown


def packing_preview(store: Store, length: int, windows: int = MOST_WINDOWS) -> PackingPreview:
    """Pack the first windows of a store's default order."""
    pack = Pack(length, oversize="drop")
    units = Units.of(as_view(store), "auto")
    rows = min(units.count, windows * pack.window)
    if not rows:
        nothing = np.zeros(0, np.int64)
        return PackingPreview(length, 0, 0, Packs(nothing, nothing, nothing, np.zeros(1, np.int64)))
    order = FeistelOrder(units.count, SEED)
    samples = PackSamples(order, units, pack, 1, None)
    packs = Packs.join([samples.packed(0, n) for n in range(min(samples.windows, windows))])
    longer = units.lengths_at(order.indices(0, np.arange(rows))) > length
    return PackingPreview(length, rows, int(longer.sum()), units.expand(packs))
