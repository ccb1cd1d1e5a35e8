"""How a store's rows are spread, and what a limit or a pack length would make of them.

Everything is computed from the stored lengths, so nothing is read again and any number can be
tried. A *histogram* is a list of bins (from, to, rows, tokens): lengths in half powers of two,
trained shares in tenths. A *limit* says what ``max_length`` would drop, or lose at the end of rows
with ``overlong="truncate"``. A *fill* says how full packs of a length would be, by the loader's own
packing in its own order; of very large stores the first `MOST_WINDOWS` windows are packed, and the
answer says of how many rows it speaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.packing import Pack, pack_window
from tokenmill.report.stats import percentiles
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store

LIMITS = tuple(1 << power for power in range(9, 21))  # 512 to 1M tokens: what models are trained at
PACK_LENGTHS = (4096, 8192, 16384, 32768)
SEED = 42  # of the order that is packed: the loader's default
MOST_WINDOWS = 16  # of 65,536 rows: a million rows say what a hundred million would
TENTHS = 10

Lengths = npt.NDArray[np.int32]


def store_spread(
    store: Store,
    *,
    limits: Sequence[int] = (),
    pack_lengths: Sequence[int] = PACK_LENGTHS,
) -> dict[str, Any]:
    """Histograms, what limits would drop, what packs would hold.

    Args:
        store: An open store.
        limits: Limits to try beside the usual ladder.
        pack_lengths: Lengths of packs to try.
    """
    lengths, trained = np.asarray(store.lengths), np.asarray(store.trained)
    return {
        "histogram": length_histogram(lengths),
        "trained_share_histogram": share_histogram(lengths, trained),
        "max_length": [limit_effect(lengths, trained, limit) for limit in ladder(lengths, limits)],
        "packing": [packing_fill(store, length) for length in pack_lengths],
        "source_percentiles": _percentiles_per_source(store, lengths),
    }


def length_histogram(lengths: Lengths) -> list[dict[str, int]]:
    """Rows and tokens by row length, in bins of half a power of two, empty ends left out."""
    if not len(lengths):
        return []
    top = int(lengths.max())
    edges = [0, *sorted({round(2 ** (half / 2)) for half in range(2 * top.bit_length() + 2)})]
    first = int(np.searchsorted(edges, lengths.min(), side="right")) - 1
    last = int(np.searchsorted(edges, top, side="right"))
    edges = edges[first : last + 1]
    places = np.searchsorted(edges, lengths, side="right") - 1
    rows = np.bincount(places, minlength=len(edges) - 1)
    tokens = np.bincount(places, weights=lengths.astype(np.float64), minlength=len(edges) - 1)
    return [
        {"from": edges[n], "to": edges[n + 1] - 1, "rows": int(rows[n]), "tokens": int(tokens[n])}
        for n in range(len(edges) - 1)
    ]


def share_histogram(lengths: Lengths, trained: Lengths) -> list[dict[str, Any]]:
    """Rows by the share of their tokens that is trained, in tenths; the last bin holds 1."""
    filled = lengths > 0
    tenths = trained[filled].astype(np.int64) * TENTHS // lengths[filled]
    rows = np.bincount(np.minimum(tenths, TENTHS - 1), minlength=TENTHS)
    return [
        {"from": n / TENTHS, "to": (n + 1) / TENTHS, "rows": int(rows[n])} for n in range(TENTHS)
    ]


def ladder(lengths: Lengths, asked: Sequence[int] = ()) -> list[int]:
    """Limits worth showing: the usual ones up to the first that drops nothing, and those asked."""
    for limit in asked:
        if isinstance(limit, bool) or limit < 1:
            raise UsageError(f"max_length is {limit!r}; it is a positive integer")
    longest = int(lengths.max()) if len(lengths) else 0
    usual = [limit for limit in LIMITS if limit < longest]
    usual += [limit for limit in LIMITS if limit >= longest][:1]
    return sorted({*usual, *asked})


def limit_effect(lengths: Lengths, trained: Lengths, limit: int) -> dict[str, Any]:
    """What ``max_length=limit`` would drop, or cut off."""
    over = lengths > limit
    wide = lengths[over].astype(np.int64)
    return {
        "max_length": limit,
        "rows_dropped": int(over.sum()),
        "tokens_dropped": int(wide.sum()),
        "trained_tokens_dropped": int(trained[over].astype(np.int64).sum()),
        "tokens_truncated": int((wide - limit).sum()),
    }


def packing_fill(store: Store, length: int) -> dict[str, Any]:
    """How full packs of one length would be; rows longer than a pack are left out and counted."""
    wish = Pack(length, oversize="drop")
    lengths = np.asarray(store.lengths)
    order = FeistelOrder(len(store), SEED) if len(store) else None
    windows = -(-len(store) // wish.window)
    packs = tokens = rows = longer = 0
    for window in range(min(windows, MOST_WINDOWS)):
        assert order is not None
        places = np.arange(window * wish.window, min((window + 1) * wish.window, len(store)))
        chosen = order.indices(0, places)
        sizes = lengths[chosen]
        packed = pack_window(chosen, sizes.astype(np.int64), wish)
        packs, tokens = packs + len(packed), tokens + packed.tokens
        rows, longer = rows + len(chosen), longer + int((sizes > length).sum())
    return {
        "length": length,
        "packs": packs,
        "fill": round(tokens / (packs * length), 6) if packs else 0.0,
        "rows": rows,
        "rows_longer": longer,
    }


def _percentiles_per_source(store: Store, lengths: Lengths) -> list[dict[str, int]]:
    """Percentiles of row lengths of each source, in the order of ``store.sources``."""
    owners = np.repeat(store.table["source"], store.table["rows"])
    return [percentiles(lengths[owners == number]) for number in range(len(store.sources))]
