"""Rows as a server hands them to the page: one whole, or many as a list shows them.

A *row document* holds the ids, the mask as run lengths, the turns, the origin, and a table with the
bytes of each piece that occurs, in hex. A *summary* is a line of the list: number, lengths, source
and the beginning of the first user turn as a *preview*. The page's own decoder makes the same two
of a page on disk, so that what is drawn does not know where it came from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenmill.report.page.embedded_rows import carried_text, mask_runs, origin_columns
from tokenmill.store import Row, Store
from tokenmill.tokenizer import Tokenizer

PREVIEW_TOKENS = 48
PREVIEW_CHARACTERS = 140


def row_document(store: Store, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """One row, whole."""
    row = store[number]
    ids = row.input_ids.tolist()
    used = sorted(set(ids))
    special = tokenizer.is_special(used).tolist()
    return {
        "row": number,
        "length": len(ids),
        "trained": int(row.loss_mask.sum()),
        "origin": row.origin._asdict(),
        "address": str(row.origin),
        "part": row.part,
        "turns": row.turns,
        "ids": ids,
        "runs": mask_runs(row.loss_mask).tolist(),
        "table": {
            str(number): [piece.hex(), int(control)]
            for number, piece, control in zip(used, tokenizer.pieces(used), special, strict=True)
        },
        "carried": json.loads(carried_text(row.carried) or "{}"),
    }


def summaries(store: Store, numbers: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Lines of the list."""
    rows = np.asarray(numbers, dtype=np.int64)
    columns = origin_columns(store, rows)
    return [
        {
            "row": int(number),
            "length": int(store.lengths[number]),
            "trained": int(store.trained[number]),
            "source": int(columns["source"][place]),
            "source_row": int(columns["source_row"][place]),
            "line": int(columns["line"][place]) - 1,
            "preview": preview(store[int(number)], tokenizer),
        }
        for place, number in enumerate(rows)
    ]


def preview(row: Row, tokenizer: Tokenizer) -> str:
    """The beginning of what the user said (else of the row), without control tokens."""
    turns = row.turns
    asked = [turn for turn in turns if turn[0] == "user"] or turns[:1]
    role, start, end = asked[0] if asked else ("", 0, len(row))
    ids = row.input_ids[start : min(end, start + PREVIEW_TOKENS)].tolist()
    control = tokenizer.is_special(ids).tolist()
    pieces = [p for p, c in zip(tokenizer.pieces(ids), control, strict=True) if not c]
    text = b"".join(pieces).decode("utf-8", "ignore").lstrip()
    if text.startswith(role):
        text = text[len(role) :]
    return " ".join(text.split())[:PREVIEW_CHARACTERS]
