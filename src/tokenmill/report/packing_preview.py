"""What packing would make of a store: fill per pack, at several lengths, before anyone trains.

A *preview* packs one window of the default order (65,536 rows, seed 42, epoch 0) by ``best_fit``,
as a loader would, from stored lengths alone. It says how many packs there are, how full each is
(a histogram over packs) and which rows lie in the first few, so that a person can see them and
click. Rows longer than a pack count as cut to it here, and how many there are is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.packing import Pack, pack_window
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DRAWN_PACKS = 24
DRAWN_PIECES = 2000
"""Pieces drawn per preview: more are thinner than a pixel."""

SEED = 42
BINS = 20


def packing_previews(store: Store) -> dict[str, Any]:
    """One preview per length."""
    window = Pack(1).window
    rows = len(store)
    taken = min(rows, window)
    order = np.zeros(0, np.int64)
    if rows:
        order = FeistelOrder(rows, SEED).indices(0, np.arange(taken))
    lengths = store.lengths[order].astype(np.int64)
    return {
        "rows": taken,
        "of": rows,
        "seed": SEED,
        "previews": [_preview(order, lengths, length) for length in LENGTHS] if rows else [],
    }


def _preview(order: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, Any]:
    packs = pack_window(order, lengths, Pack(length, oversize="truncate"))
    filled = np.add.reduceat(packs.lengths, packs.bounds[:-1]) if len(packs) else np.zeros(0)
    counts, _ = np.histogram(filled / length, bins=BINS, range=(0, 1))
    drawn: list[list[list[int]]] = []
    pieces = 0
    for number in range(min(len(packs), DRAWN_PACKS)):
        first, last = int(packs.bounds[number]), int(packs.bounds[number + 1])
        pieces += last - first
        if drawn and pieces > DRAWN_PIECES:
            break
        both = zip(packs.rows[first:last], packs.lengths[first:last], strict=True)
        drawn.append([[int(row), int(tokens)] for row, tokens in both])
    return {
        "length": length,
        "packs": len(packs),
        "fill": packs.tokens / (len(packs) * length) if len(packs) else 0.0,
        "rows_per_pack": len(packs.rows) / len(packs) if len(packs) else 0.0,
        "oversize": int((lengths > length).sum()),
        "counts": counts.tolist(),
        "drawn": drawn,
    }
