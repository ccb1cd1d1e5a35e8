"""Rows as the page takes them: one whole, or many as a list shows them.

A *row document* holds the ids, the mask as run lengths, the turns, the origin, what is attached,
and a table with the bytes of each piece that occurs, in hex. A *summary* is a line of the list:
number, lengths, source and the beginning of the first user turn as a *preview*. Both say which
answer of which group the row is, where the store has groups, and what is known of it (`RowFacts`):
its numbers and, of a recorded rollout, its drift class. `serve` and `compare` hand out these
two; the page's own decoder makes the same of the rows that a page on disk carries, so that what is
drawn does not know where it came from. `embedded_rows` uses the columns, the run lengths, the
groups and what is attached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.report.row import answer_name, attached_to, media_document
from tokenmill.report.row_facts import RowFacts, StoredGroups, findings_of, group_name
from tokenmill.store import Row, Store
from tokenmill.tokenizer import Tokenizer

PREVIEW_TOKENS = 48
PREVIEW_CHARACTERS = 140
MOST_CARRIED = 2000  # characters of a row's carried columns

Int64 = NDArray[np.int64]


def row_document(facts: RowFacts, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """One row, whole."""
    store = facts.store
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
        "carried": short_carried(row.carried, judged=facts.drift is not None),
        "media": [media_document(one) for one in row.media],
        "findings": findings_of(row.carried) if facts.drift is not None else [],
        "drift": facts.drift_of(number),
        "numbers": facts.numbers_of(number),
        "attached": shown_values(attached_to(store.sidecars, number)),
        "group": group_documents(facts, [number])[0],
    }


def group_documents(facts: RowFacts, numbers: Sequence[int]) -> list[dict[str, Any] | None]:
    """Of each row its group, and which answer it is there; None for a row without one.

    ``rows`` are the group's; score and margin are as the terminal prints them. A recorded group has
    a ``name``, and its answers part where their tokens do.
    """
    groups = facts.groups
    if groups is None:
        return [None] * len(numbers)
    documents: list[dict[str, Any] | None] = []
    found = groups.of(np.asarray(numbers, dtype=np.int64)).tolist()
    for number, group in zip(numbers, found, strict=True):
        row, rows = facts.store[number], groups.members(group).tolist()
        common = {"number": group, "rows": rows}
        if isinstance(groups, StoredGroups):
            documents.append(
                {
                    **common,
                    "name": None,
                    "answer": answer_name(row.label, number - rows[0], len(rows)),
                    "score": None if row.score is None else f"{row.score:g}",
                    "margin": None if row.margin is None else f"{row.margin:g}",
                    "prompt_tokens": row.prompt_tokens,
                }
            )
        elif len(rows) > 1:
            carried = row.carried
            step = "" if carried["step"] is None else f" at step {carried['step']}"
            documents.append(
                {
                    **common,
                    "name": group_name(carried["group"]) + step,
                    "answer": f"answer {rows.index(number) + 1}",
                    "score": None,
                    "margin": None,
                    "prompt_tokens": None,
                }
            )
        else:
            documents.append(None)
    return documents


def shown_values(
    attached: dict[str, float | list[float]],
) -> dict[str, float | str | list[float | str]]:
    """What is attached to a row, in four digits; JSON knows no infinite numbers."""

    def shown(value: float) -> float | str:
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)

    return {
        name: [shown(value) for value in values] if isinstance(values, list) else shown(values)
        for name, values in attached.items()
    }


def summaries(
    facts: RowFacts, numbers: Sequence[int], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Lines of the list."""
    store = facts.store
    rows = np.asarray(numbers, dtype=np.int64)
    columns, groups = origin_columns(store, rows), group_documents(facts, numbers)
    return [
        {
            "row": int(number),
            "length": int(store.lengths[number]),
            "trained": int(store.trained[number]),
            "source": int(columns["source"][place]),
            "source_row": int(columns["source_row"][place]),
            "line": int(columns["line"][place]),
            "preview": preview(store[int(number)], tokenizer),
            "group": groups[place],
            "drift": facts.drift_of(int(number)),
            "numbers": facts.numbers_of(int(number)),
        }
        for place, number in enumerate(rows)
    ]


def preview(row: Row, tokenizer: Tokenizer) -> str:
    """The beginning of what the user said (else of the row): no control tokens, no pictures."""
    turns = row.turns
    asked = [turn for turn in turns if turn[0] == "user"] or turns[:1]
    role, start, end = asked[0] if asked else ("", 0, len(row))
    places = np.arange(start, end)
    for one in row.media:
        places = places[(places < one.start) | (places >= one.start + one.count)]
    ids = row.input_ids[places[:PREVIEW_TOKENS]].tolist()
    control = tokenizer.is_special(ids).tolist()
    pieces = [p for p, c in zip(tokenizer.pieces(ids), control, strict=True) if not c]
    text = b"".join(pieces).decode("utf-8", "ignore").lstrip()
    if text.startswith(role):
        text = text[len(role) :]
    return " ".join(text.split())[:PREVIEW_CHARACTERS]


def short_carried(carried: dict[str, Any], *, judged: bool = False) -> dict[str, Any]:
    """Carried columns; where they are too long, a note instead of each, never a part of one.

    Args:
        carried: What a row carries.
        judged: It is a rollout: its class and findings are told apart from the rest, and what was
            not recorded is not told at all.
    """
    if judged:
        told = ("drift", "findings")
        carried = {k: v for k, v in carried.items() if v is not None and k not in told}
    if not carried or len(json.dumps(carried, ensure_ascii=False)) <= MOST_CARRIED:
        return carried
    return {
        name: f"({len(json.dumps(value)):,} characters; tokenmill inspect --row)"
        for name, value in carried.items()
    }


def mask_runs(mask: NDArray[np.uint8]) -> Int64:
    """Lengths of runs, the first of untrained tokens (and 0 where a trained one comes first)."""
    changes = np.flatnonzero(np.diff(mask, prepend=np.uint8(0)))
    runs: Int64 = np.diff(changes, prepend=0, append=len(mask))
    return runs


def origin_columns(store: Store, rows: Int64) -> dict[str, Int64]:
    """Origins of many rows as columns; ``line`` and ``offset`` are -1 where there is none."""
    names = ("source", "source_row", "line", "offset", "raw_length", "part")
    columns = {name: np.zeros(len(rows), np.int64) for name in names}
    slices = np.searchsorted(store.table["first_row"], rows, side="right") - 1
    for at in np.unique(slices):
        entry, reader = store.table[at], store.slice_at(int(at))
        here = np.flatnonzero(slices == at)
        numbers = rows[here] - int(entry["first_row"])
        row, line, offset = (
            reader.column(f"{name}_in_slice")[numbers].astype(np.int64)
            for name in ("row", "line", "offset")
        )
        first_line, first_offset = int(entry["line"]), int(entry["offset"])
        columns["source"][here] = int(entry["source"])
        columns["source_row"][here] = int(entry["source_row"]) + row
        has_line = (line >= 0) & (first_line > 0)
        columns["line"][here] = np.where(has_line, first_line + line, -1)
        has_offset = (offset >= 0) & (first_offset >= 0)
        columns["offset"][here] = np.where(has_offset, first_offset + offset, -1)
        columns["raw_length"][here] = reader.column("raw_length")[numbers]
        columns["part"][here] = reader.column("part")[numbers]
    return columns
