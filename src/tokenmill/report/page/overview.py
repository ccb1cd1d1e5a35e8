"""Everything on the page except rows, as one JSON document of bounded size."""

from __future__ import annotations

import json
import os
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.packing import Pack
from tokenmill.report.lookup import Rejected, SourceExcerpts, no_excerpt, rejected_rows
from tokenmill.report.row import UNJUDGED, RowFacts, labelled
from tokenmill.report.stats import (
    PACK_SEED,
    length_histogram,
    packing_preview,
    per_role,
    share_histogram,
    store_stats,
)
from tokenmill.rollouts.verdict import CLASSES
from tokenmill.store import Store
from tokenmill.store.sidecars import column_of

MAX_SOURCES = 5000
MAX_REJECTED = 2000
MAX_RAW_BYTES = 1 << 20  # of the texts of rejected rows in one page
MAX_MASK_TOKENS = 100_000_000  # about 0.3 s of reading
BINS_PER_DOUBLING = 6  # of row lengths
SHARE_BINS = 20
MAX_STEPS = 48
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SCALE_ROWS = 64  # rows that the ends of a colour scale are taken from
SCALE_SHARE = 0.02  # of their values lie beyond each end
PACK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DRAWN_PACKS = 24
DRAWN_ROWS = 2000  # per preview: more are thinner than a pixel


def overview(
    facts: RowFacts, excerpts: SourceExcerpts | None, *, max_steps: int = MAX_STEPS
) -> dict[str, Any]:
    """Return the overview; without ``excerpts``, rejected rows have no text."""
    store = facts.store
    stats = store_stats(store)
    known = store.manifest["totals"]["tokens"] <= MAX_MASK_TOKENS
    roles = per_role(store, with_trained=True) if known else stats["roles"]
    return {
        "name": os.path.basename(os.path.abspath(store.path))[:16],
        "path": str(store.path),
        "key": store.key,
        "totals": store.manifest["totals"],
        "percentiles": stats["percentiles"],
        "trained_percentiles": stats["trained_percentiles"],
        "sources": stats["sources"][:MAX_SOURCES],
        "sources_total": len(stats["sources"]),
        "roles": [
            {"role": role, "trained_tokens": None, **counts} for role, counts in roles.items()
        ],
        "lengths": length_histogram(np.asarray(store.lengths), BINS_PER_DOUBLING),
        "shares": share_histogram(store.trained, store.lengths, SHARE_BINS),
        "drift": drift_counts(facts, slice(None)),
        "numbers": number_ranges(facts),
        "scales": colour_scales(store),
        "steps": over_steps(facts, max_steps),
        "packing": packing_previews(store),
        "rejected": rejected_document(store, excerpts),
        "document": store.manifest["document"],
        "tokenizer": store.manifest["tokenizer"],
        "proof": store.proof,
    }


def drift_counts(facts: RowFacts, rows: Any) -> dict[str, int] | None:
    """Return the rows of each drift class; None in a store without rollouts."""
    if facts.drift is None:
        return None
    counts = np.bincount(facts.drift[rows] + 1, minlength=len(CLASSES) + 1).tolist()
    return dict(zip((UNJUDGED, *CLASSES), counts, strict=True))


def filter_names(store: Store) -> dict[str, str]:
    """Return the sidecars per row that a filter can name, with the column of each."""
    return {
        label: column_of(sidecar.name, sidecar.made_by)
        for label, sidecar in labelled(store.sidecars)
        if sidecar.per == "row" and label.isidentifier()
    }


def number_ranges(facts: RowFacts) -> list[dict[str, Any]]:
    """Return the range of every number per row, and what a filter calls it."""
    attached = filter_names(facts.store)
    found = []
    for name, column in facts.numbers.items():
        finite = column[np.isfinite(column)]
        low, high = (
            (float(f"{end:.6g}") for end in (finite.min(), finite.max()))
            if len(finite)
            else (None, None)
        )
        carried = f"carried[{json.dumps(name)}]" if name in facts.carried else None
        filtered = carried or (name if name in attached else None)
        found.append({"name": name, "low": low, "high": high, "filter": filtered})
    return found


def colour_scales(store: Store) -> list[dict[str, Any]]:
    """Return the colour scale of every sidecar per token, log-probabilities first.

    The ends are quantiles of trained tokens of some rows: outliers would make the rest pale.
    """
    rows = np.unique(np.linspace(0, len(store) - 1, SCALE_ROWS).astype(np.int64)).tolist()
    found = []
    for name, sidecar in labelled(store.sidecars):
        if sidecar.per != "token" or not len(store):
            continue
        values = np.concatenate([sidecar[row][store[row].loss_mask == 1] for row in rows])
        values = values[np.isfinite(values)]
        low, high = (
            np.quantile(values, [SCALE_SHARE, 1 - SCALE_SHARE]).tolist() if len(values) else (0, 0)
        )
        # Colour is the distance from 0, so 0 is on every scale.
        low, high = min(low, 0), max(high, 0)
        found.append({"name": name, "low": float(f"{low:.3g}"), "high": float(f"{high:.3g}")})
    return sorted(found, key=lambda one: "logp" not in one["name"].lower())


def over_steps(facts: RowFacts, max_steps: int) -> dict[str, Any] | None:
    """Return rewards, lengths and drift classes by step, neighbouring steps joined if too many."""
    steps = facts.numbers.get("step")
    if steps is None:
        return None
    rows = np.flatnonzero(np.isfinite(steps))
    distinct, place = np.unique(steps[rows], return_inverse=True)
    bins = min(max_steps, len(distinct))
    place = place * bins // max(1, len(distinct))
    order = np.argsort(place, kind="stable")
    rows, place = rows[order], place[order]
    bounds = np.searchsorted(place, np.arange(bins + 1))
    columns = {"length": facts.store.lengths.astype(np.float64)}
    if "reward" in facts.numbers:
        columns = {"reward": facts.numbers["reward"], **columns}
    found = []
    for start, stop in pairwise(bounds.tolist()):
        here = rows[start:stop]
        found.append(
            {
                "from": float(steps[here].min()),
                "to": float(steps[here].max()),
                "rows": len(here),
                "drift": drift_counts(facts, here),
                **{name: _quantiles(column[here]) for name, column in columns.items()},
            }
        )
    return {"steps": len(distinct), "numbers": list(columns), "bins": found}


def _quantiles(values: NDArray[np.float64]) -> list[float] | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return [float(f"{value:.6g}") for value in np.quantile(finite, QUANTILES)]


def packing_previews(store: Store) -> dict[str, Any]:
    """Return a preview of the first window for every pack length."""
    lengths = PACK_LENGTHS if len(store) else ()
    previews = [
        packing_preview(store, Pack(length, oversize="drop"), windows=1) for length in lengths
    ]
    return {
        "rows": previews[0].rows if previews else 0,
        "of": len(store),
        "seed": PACK_SEED,
        "previews": [
            {
                **preview.document(),
                "histogram": share_histogram(
                    preview.filled, np.full(len(preview.packs), preview.pack.length), SHARE_BINS
                ),
                "drawn": preview.first_packs(DRAWN_PACKS, DRAWN_ROWS),
            }
            for preview in previews
        ],
    }


def rejected_document(store: Store, excerpts: SourceExcerpts | None) -> dict[str, Any]:
    """Return rejected rows up to a number, with texts up to a size."""
    listed: list[dict[str, Any]] = []
    spent = 0
    for row in islice(rejected_rows(store), MAX_REJECTED):
        document = rejected_row(row)
        if excerpts is not None:
            if spent < MAX_RAW_BYTES:
                document["raw"] = excerpts.excerpt(row.origin)
                spent += len(document["raw"]["text"] or "")
            else:
                note = "not in this page, which has excerpts up to a bound; --serve shows them all"
                document["raw"] = no_excerpt(note)
        listed.append(document)
    return {"total": sum(store.rejected.values()), "reasons": store.rejected, "rows": listed}


def rejected_row(row: Rejected) -> dict[str, Any]:
    """Return one rejected row as the page lists it."""
    return {
        "number": row.number,
        "origin": row.origin._asdict(),
        "address": str(row.origin),
        "reason": row.reason,
        "detail": row.detail,
    }
