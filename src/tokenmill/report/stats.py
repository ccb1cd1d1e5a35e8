"""Totals over a store: rows, tokens, trained tokens, and how they are spread.

Everything comes from the stored lengths, the table of slices and the turns; no token is read.
Percentiles are of row lengths in tokens (nearest rank, so they are lengths that occur).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tokenmill.store import Store

PERCENTILES = (1, 5, 25, 50, 75, 95, 99, 100)


def store_stats(store: Store) -> dict[str, Any]:
    """The object that ``tokenmill stats --json`` prints."""
    totals = store.manifest["totals"]
    return {
        "rows": totals["rows"],
        "tokens": totals["tokens"],
        "trained_tokens": totals["trained_tokens"],
        "rejected": totals["rejected"],
        "percentiles": percentiles(store.lengths),
        "trained_percentiles": percentiles(store.trained),
        "sources": _per_source(store),
        "roles": _per_role(store),
    }


def percentiles(values: np.ndarray[Any, Any]) -> dict[str, int]:
    """Nearest-rank percentiles."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{p}": int(value) for p, value in zip(PERCENTILES, found, strict=True)}


def _per_source(store: Store) -> list[dict[str, Any]]:
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    for entry in store.table:
        source = int(entry["source"])
        rows[source] += int(entry["rows"])
        tokens[source] += int(entry["tokens"])
        trained[source] += int(entry["trained"])
    return [
        {"path": path, "rows": rows[n], "tokens": tokens[n], "trained_tokens": trained[n]}
        for n, path in enumerate(store.sources)
    ]


def _per_role(store: Store) -> dict[str, dict[str, int]]:
    """Turns and tokens of each role."""
    counts: dict[str, dict[str, int]] = {}
    for at in range(len(store.table)):
        reader = store.slice_at(at)
        ends, bounds, roles = reader.all_turns()
        if not len(ends):
            continue
        lengths = np.diff(ends, prepend=0)
        first = bounds[:-1][np.diff(bounds) > 0]
        lengths[first] = ends[first]  # a row's first turn starts at its own zero
        for number, name in enumerate(reader.record.roles):
            mine = roles == number
            entry = counts.setdefault(name, {"turns": 0, "tokens": 0})
            entry["turns"] += int(mine.sum())
            entry["tokens"] += int(lengths[mine].sum())
    return counts
