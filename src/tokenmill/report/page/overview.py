"""All that a page says beside its rows: totals, histograms, tables, rejected rows, recipe, proof.

Comes in: a store. Goes out: one JSON-able document, the *overview*, the same in a page on disk
(`make_page`) and in a served one (`serve`). It is bounded whatever the size of the store:
histograms have few bins, rejected rows and sources are listed up to a number that the document
states beside the total. Trained tokens per role need the mask of every token; beyond a stated
number of tokens they are left out (None).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tokenmill.report.packing_preview import SEED, packing_preview
from tokenmill.report.row_lookup import Rejected, rejected_rows
from tokenmill.report.source_excerpts import SourceExcerpts
from tokenmill.report.stats import length_histogram, per_role, share_histogram, store_stats
from tokenmill.store import Store

MOST_SOURCES = 5000
MOST_REJECTED = 2000
MOST_RAW_BYTES = 1 << 20
"""Bytes of raw excerpts in one page; rejected rows after that have their origin alone."""

MOST_MASK_TOKENS = 100_000_000  # about 0.3 s of reading
BINS_PER_DOUBLING = 6  # of row lengths
SHARE_BINS = 20
PACK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DRAWN_PACKS = 24
DRAWN_PIECES = 2000  # per preview: more are thinner than a pixel


def overview(store: Store, excerpts: SourceExcerpts | None) -> dict[str, Any]:
    """What a page says beside its rows.

    Args:
        store: The store.
        excerpts: Gives excerpts of rejected rows; None leaves them to be asked for one by one.
    """
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
        "packing": packing_previews(store),
        "rejected": rejected_document(store, excerpts),
        "document": store.manifest["document"],
        "tokenizer": store.manifest["tokenizer"],
        "proof": store.proof,
    }


def packing_previews(store: Store) -> dict[str, Any]:
    """What packing makes of the first window, one preview per length."""
    lengths = PACK_LENGTHS if len(store) else ()
    previews = [packing_preview(store, length, windows=1) for length in lengths]
    return {
        "rows": previews[0].rows if previews else 0,
        "of": len(store),
        "seed": SEED,
        "previews": [
            {
                **preview.document(),
                "histogram": share_histogram(
                    preview.filled, np.full(len(preview.packs), preview.length), SHARE_BINS
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
    for row in rejected_rows(store):
        if len(listed) == MOST_REJECTED:
            break
        document = rejected_row(row)
        if excerpts is not None:
            if spent < MOST_RAW_BYTES:
                document["raw"] = excerpts.excerpt(row.origin)
                spent += len(document["raw"]["text"] or "")
            else:
                note = "not in this page, which has excerpts up to a bound; --serve shows them all"
                document["raw"] = {"text": None, "bytes": 0, "cut": 0, "note": note}
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
