"""All that a page says beside its rows: totals, histograms, tables, rejected rows, recipe, proof.

Comes in: a store. Goes out: one JSON-able document, the *overview*, the same in a page on disk
(`make_page`) and in a served one (`serve`). It is bounded whatever the size of the store:
histograms have few bins, rejected rows and sources are listed up to a number that the document
states beside the total; steps of training beyond a number are drawn together. Trained tokens per
role need the mask of every token; beyond a stated number of tokens they are left out (None).
"""

from __future__ import annotations

import os
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.packing import Pack
from tokenmill.report.row import labelled
from tokenmill.report.row_facts import UNJUDGED, RowFacts
from tokenmill.report.row_lookup import Rejected, rejected_rows
from tokenmill.report.source_excerpts import SourceExcerpts, no_excerpt
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

MOST_SOURCES = 5000
MOST_REJECTED = 2000
MOST_RAW_BYTES = 1 << 20
"""Bytes of raw excerpts in one page; rejected rows after that have their origin alone."""

MOST_MASK_TOKENS = 100_000_000  # about 0.3 s of reading
BINS_PER_DOUBLING = 6  # of row lengths
SHARE_BINS = 20
MOST_STEPS = 48
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SCALE_ROWS = 64  # rows that the ends of a colour scale are taken from
SCALE_SHARE = 0.02  # of their values lie beyond each end
PACK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DRAWN_PACKS = 24
DRAWN_PIECES = 2000  # per preview: more are thinner than a pixel


def overview(facts: RowFacts, excerpts: SourceExcerpts | None) -> dict[str, Any]:
    """What a page says beside its rows.

    Args:
        facts: Of the store.
        excerpts: Gives excerpts of rejected rows; None leaves them to be asked for one by one.
    """
    store = facts.store
    stats = store_stats(store)
    known = store.manifest["totals"]["tokens"] <= MOST_MASK_TOKENS
    roles = per_role(store, with_trained=True) if known else stats["roles"]
    return {
        "name": os.path.basename(os.path.abspath(store.path))[:16],
        "path": str(store.path),
        "key": store.key,
        "totals": store.manifest["totals"],
        "percentiles": stats["percentiles"],
        "trained_percentiles": stats["trained_percentiles"],
        "sources": stats["sources"][:MOST_SOURCES],
        "sources_total": len(stats["sources"]),
        "roles": [
            {"role": role, "trained_tokens": None, **counts} for role, counts in roles.items()
        ],
        "lengths": length_histogram(np.asarray(store.lengths), BINS_PER_DOUBLING),
        "shares": share_histogram(store.trained, store.lengths, SHARE_BINS),
        "drift": drift_counts(facts, slice(None)),
        "numbers": [number_range(name, column) for name, column in facts.numbers.items()],
        "scales": colour_scales(store),
        "steps": over_steps(facts),
        "packing": packing_previews(store),
        "rejected": rejected_document(store, excerpts),
        "document": store.manifest["document"],
        "tokenizer": store.manifest["tokenizer"],
        "proof": store.proof,
    }


def drift_counts(facts: RowFacts, rows: Any) -> dict[str, int] | None:
    """Rows of each drift class, and how many have none; None in a store without rollouts."""
    if facts.drift is None:
        return None
    counts = np.bincount(facts.drift[rows] + 1, minlength=len(CLASSES) + 1).tolist()
    return dict(zip((UNJUDGED, *CLASSES), counts, strict=True))


def number_range(name: str, column: NDArray[np.float64]) -> dict[str, Any]:
    """Least and greatest of what is a number in every row."""
    finite = column[np.isfinite(column)]
    ends = [float(f"{value:.6g}") for value in (finite.min(), finite.max())] if len(finite) else []
    low, high = ends or (None, None)
    return {"name": name, "low": low, "high": high}


def colour_scales(store: Store) -> list[dict[str, Any]]:
    """The ends of the scale of everything attached per token; log-probabilities first.

    They are those of trained tokens, of rows spread over the store; the few values beyond them
    would make all others pale.
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
        # Colour says how far from 0, so that 0 is an end of the scale unless it lies within.
        low, high = min(low, 0), max(high, 0)
        found.append({"name": name, "low": float(f"{low:.3g}"), "high": float(f"{high:.3g}")})
    return sorted(found, key=lambda one: "logp" not in one["name"].lower())


def over_steps(facts: RowFacts) -> dict[str, Any] | None:
    """Rewards, lengths and drift classes step by step; None where rows have no step.

    More than `MOST_STEPS` steps are drawn together, neighbours with neighbours.
    """
    steps = facts.numbers.get("step")
    if steps is None:
        return None
    rows = np.flatnonzero(np.isfinite(steps))
    distinct, place = np.unique(steps[rows], return_inverse=True)
    bins = min(MOST_STEPS, len(distinct))
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
    """What packing makes of the first window, one preview per length."""
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
                "drawn": preview.first_packs(DRAWN_PACKS, DRAWN_PIECES),
            }
            for preview in previews
        ],
    }


def rejected_document(store: Store, excerpts: SourceExcerpts | None) -> dict[str, Any]:
    """Rejected rows, up to a number, with excerpts up to a size."""
    listed: list[dict[str, Any]] = []
    spent = 0
    for row in islice(rejected_rows(store), MOST_REJECTED):
        document = rejected_row(row)
        if excerpts is not None:
            if spent < MOST_RAW_BYTES:
                document["raw"] = excerpts.excerpt(row.origin)
                spent += len(document["raw"]["text"] or "")
            else:
                note = "not in this page, which has excerpts up to a bound; --serve shows them all"
                document["raw"] = no_excerpt(note)
        listed.append(document)
    return {"total": sum(store.rejected.values()), "reasons": store.rejected, "rows": listed}


def rejected_row(row: Rejected) -> dict[str, Any]:
    """One rejected row as a page lists it."""
    return {
        "number": row.number,
        "origin": row.origin._asdict(),
        "address": str(row.origin),
        "reason": row.reason,
        "detail": row.detail,
    }
