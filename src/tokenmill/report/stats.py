"""What is in a store, counted: totals, distributions, and what a limit or a pack length would do.

Comes in: an open store. Goes out: plain values for ``tokenmill stats`` (`store_stats` and
`store_distributions`, which its JSON joins) and for the page's overview. Everything comes from the
stored lengths, the table of slices and the turns; no token is read, so any number can be tried.

*Percentiles* are nearest rank, so they are lengths that occur. A *histogram* is a list of bins with
``from``, ``to`` and ``rows``: lengths in equal steps of their logarithm, shares in equal steps from
0 to 1. An *effect* says what ``max_length`` would drop, or cut off with ``overlong="truncate"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.report.packing_preview import packing_preview
from tokenmill.store import Store
from tokenmill.store.sidecar_writer import unfinished

PERCENTILES = (1, 5, 25, 50, 75, 95, 99, 100)
MAX_LENGTHS = tuple(1 << power for power in range(9, 21))  # 512 to 1M: what models are trained at
PACK_LENGTHS = (4096, 8192, 16384, 32768)

Lengths = npt.NDArray[np.int32]


def store_stats(store: Store) -> dict[str, Any]:
    """Totals, percentiles, and a table per source and role."""
    totals = store.manifest["totals"]
    return {
        "rows": totals["rows"],
        "tokens": totals["tokens"],
        "trained_tokens": totals["trained_tokens"],
        "rejected": totals["rejected"],
        "groups": totals.get("groups", {}),
        "percentiles": percentiles(store.lengths),
        "trained_percentiles": percentiles(store.trained),
        "sources": _per_source(store),
        "roles": per_role(store),
        "sidecars": sidecar_stats(store),
        **picture_stats(store),
    }


def picture_stats(store: Store) -> dict[str, int]:
    """Rows with pictures, pictures and patches, counted with their repetitions."""
    pictures = store.pictures
    return {
        "rows_with_pictures": int(np.count_nonzero(pictures)),
        "pictures": int(pictures.sum(dtype=np.int64)),
        "patches": int(store.patches.sum(dtype=np.int64)),
    }


def sidecar_stats(store: Store) -> list[dict[str, Any]]:
    """What is attached: range and mean as the summaries say, and rows that are still missing."""
    complete = [
        {
            "name": sidecar.name,
            "made_by": sidecar.made_by,
            "per": sidecar.per,
            "bytes": sidecar.bytes,
            "low": sidecar.record.low,
            "high": sidecar.record.high,
            "mean": sidecar.record.mean,
            "infinite": sidecar.record.infinite,
            "missing": 0,
        }
        for sidecar in store.sidecars
    ]
    unknown = dict.fromkeys(("low", "high", "mean", "infinite"))
    return complete + [
        {
            "name": writer.identity.name,
            "made_by": writer.identity.made_by,
            "per": writer.per,
            "bytes": 0,
            **unknown,
            "missing": int(writer.missing.size),
        }
        for writer in unfinished(store)
    ]


def store_distributions(store: Store, *, max_lengths: Sequence[int] = ()) -> dict[str, Any]:
    """Histograms, what a ``max_length`` would drop, how full packs would be."""
    lengths, trained = np.asarray(store.lengths), np.asarray(store.trained)
    limits = limits_to_try(lengths, max_lengths)
    return {
        "histogram": length_histogram(lengths),
        "trained_share_histogram": share_histogram(trained, lengths),
        "max_length": [limit_effect(lengths, trained, limit) for limit in limits],
        "packing": [packing_preview(store, length).document() for length in PACK_LENGTHS],
        "source_percentiles": _percentiles_per_source(store, lengths),
    }


def percentiles(values: np.ndarray[Any, Any]) -> dict[str, int]:
    """Nearest-rank percentiles."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{p}": int(value) for p, value in zip(PERCENTILES, found, strict=True)}


def length_histogram(lengths: Lengths, per_doubling: int = 2) -> list[dict[str, int]]:
    """Rows and tokens by row length, some bins for each power of two, empty ends left out."""
    if not len(lengths):
        return []
    top = int(lengths.max())
    steps = per_doubling * (top.bit_length() + 1)
    edges = [0, *sorted({round(2 ** (step / per_doubling)) for step in range(steps)})]
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


def share_histogram(
    parts: npt.NDArray[Any], wholes: npt.NDArray[Any], bins: int = 10
) -> list[dict[str, Any]]:
    """Rows by the share that a part makes of its whole; the last bin holds 1."""
    places = parts.astype(np.int64) * bins // np.maximum(wholes, 1)
    rows = np.bincount(np.minimum(places, bins - 1), minlength=bins)
    return [{"from": n / bins, "to": (n + 1) / bins, "rows": int(rows[n])} for n in range(bins)]


def limits_to_try(lengths: Lengths, asked: Sequence[int] = ()) -> list[int]:
    """Limits worth showing: the usual ones up to the first that drops nothing, and those asked."""
    for limit in asked:
        if isinstance(limit, bool) or limit < 1:
            raise UsageError(f"max_length is {limit!r}; it is a positive integer")
    longest = int(lengths.max()) if len(lengths) else 0
    usual = [limit for limit in MAX_LENGTHS if limit < longest]
    usual += [limit for limit in MAX_LENGTHS if limit >= longest][:1]
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


def _percentiles_per_source(store: Store, lengths: Lengths) -> list[dict[str, int]]:
    """Percentiles of row lengths of each source, in the order of ``store.sources``."""
    owners = np.repeat(store.table["source"], store.table["rows"])
    return [percentiles(lengths[owners == number]) for number in range(len(store.sources))]


def _per_source(store: Store) -> list[dict[str, Any]]:
    columns = {"rows": "rows", "tokens": "tokens", "trained_tokens": "trained",
               "rejected": "rejected"}  # fmt: skip
    sums = {
        name: np.bincount(store.table["source"], store.table[column], len(store.sources))
        for name, column in columns.items()
    }
    return [
        {"path": path, **{name: int(values[number]) for name, values in sums.items()}}
        for number, path in enumerate(store.sources)
    ]


def per_role(store: Store, *, with_trained: bool = False) -> dict[str, dict[str, int]]:
    """Turns and tokens of each role; trained tokens where asked, which reads every mask."""
    counts: dict[str, dict[str, int]] = {}
    for at in range(len(store.table)):
        reader = store.slice_at(at)
        ends, bounds, roles = reader.all_turns()
        if not len(ends):
            continue
        starts = np.concatenate(([0], ends[:-1]))
        starts[bounds[:-1][np.diff(bounds) > 0]] = 0  # a row's first turn starts at its own zero
        of_turns = {"turns": np.ones_like(ends), "tokens": ends - starts}
        if with_trained:
            _, mask = reader.all_tokens()
            before = np.repeat(np.frombuffer(reader.starts, np.int32)[:-1], np.diff(bounds))
            running = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
            of_turns["trained_tokens"] = running[before + ends] - running[before + starts]
        for number, name in enumerate(reader.record.roles):
            entry = counts.setdefault(name, dict.fromkeys(of_turns, 0))
            for what, values in of_turns.items():
                entry[what] += int(values[roles == number].sum())
    return counts
