"""Rows as JSON for the page: summaries for its list, whole rows, and thumbnails of images."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tokenmill.errors import SourceChanged, TokenmillError
from tokenmill.media import Limits, Pictures
from tokenmill.report.row import (
    RowFacts,
    answer_name,
    attached_to,
    findings_of,
    group_name,
    media_document,
)
from tokenmill.store import Media, Row, Store
from tokenmill.tokenizer import Tokenizer

PREVIEW_TOKENS = 32
PREVIEW_CHARACTERS = 80  # the list shows about half of them
MAX_CARRIED = 2000  # characters of a row's carried columns
THUMBNAIL_EDGE = 256  # pixels of the longer side
MAX_THUMBNAIL_BYTES = 24 << 10
JPEG_QUALITIES = (80, 55, 30)  # until the thumbnail fits
MAX_PIXELS = 50_000_000  # of an image that is opened: 150 MB for a moment
MAX_THUMBNAILS = 800  # in one page; each costs milliseconds of decoding
THUMBNAIL_OVERHEAD = 120  # bytes of an entry beside the image


def row_summary(facts: RowFacts, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a row as the list shows it."""
    row = facts.store[number]
    return {
        "row": number,
        "length": len(row),
        "trained": int(row.loss_mask.sum()),
        "address": str(row.origin),
        "preview": preview(row, tokenizer),
        "group": group_document(facts, number),
        "drift": facts.drift_of(number),
        "numbers": facts.numbers_of(number),
    }


def row_document(facts: RowFacts, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a whole row; the bytes of its tokens are in a `piece_table`."""
    row = facts.store[number]
    is_rollout = facts.drift is not None
    return {
        **row_summary(facts, number, tokenizer),
        "origin": row.origin._asdict(),
        "part": row.part,
        "turns": row.turns,
        "ids": row.input_ids.tolist(),
        "mask": row.loss_mask.tolist(),
        "carried": short_carried(row.carried, is_rollout=is_rollout),
        "media": [media_document(media) for media in row.media],
        "findings": findings_of(row.carried) if is_rollout else [],
        "attached": shown_values(attached_to(facts.store.sidecars, number)),
    }


def piece_table(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[str, tuple[str, int]]:
    """Return by token id its bytes in hex, and whether it is a control token."""
    used = sorted(set(ids))
    special = tokenizer.is_special(used).tolist()
    return {
        str(token): (piece.hex(), int(control))
        for token, piece, control in zip(used, tokenizer.pieces(used), special, strict=True)
    }


def row_with_pieces(facts: RowFacts, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a whole row with its own piece table."""
    row = row_document(facts, number, tokenizer)
    return {**row, "table": piece_table(tokenizer, row["ids"])}


def group_document(facts: RowFacts, number: int) -> dict[str, Any] | None:
    """Return the group of a row, and which answer of it the row is."""
    if facts.groups is None:
        return None
    row, group = facts.store[number], int(facts.groups.of(np.asarray([number]))[0])
    rows = facts.groups.members(group).tolist()
    found = {"number": group, "rows": rows}
    if facts.store.has_groups:
        return found | {
            "name": None,
            "answer": answer_name(row.label, number - rows[0], len(rows)),
            "score": None if row.score is None else f"{row.score:g}",
            "margin": None if row.margin is None else f"{row.margin:g}",
            "prompt_tokens": row.prompt_tokens,
        }
    if len(rows) < 2:
        return None
    carried = row.carried
    step = "" if carried["step"] is None else f" at step {carried['step']}"
    return found | {
        "name": group_name(carried["group"]) + step,
        "answer": f"answer {rows.index(number) + 1}",
        **dict.fromkeys(("score", "margin", "prompt_tokens")),
    }


def shown_values(
    attached: dict[str, float | list[float]],
) -> dict[str, float | str | list[float | str]]:
    """Return sidecar values in four digits; infinite ones as text, for JSON has none."""

    def shown(value: float) -> float | str:
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)

    return {
        name: [shown(value) for value in values] if isinstance(values, list) else shown(values)
        for name, values in attached.items()
    }


def preview(row: Row, tokenizer: Tokenizer) -> str:
    """Return the beginning of the first user turn, without control tokens and images."""
    turns = row.turns
    asked = [turn for turn in turns if turn[0] == "user"] or turns[:1]
    role, start, end = asked[0] if asked else ("", 0, len(row))
    places = np.arange(start, end)
    for media in row.media:
        places = places[(places < media.start) | (places >= media.start + media.count)]
    ids = row.input_ids[places[:PREVIEW_TOKENS]].tolist()
    control = tokenizer.is_special(ids).tolist()
    pieces = [p for p, c in zip(tokenizer.pieces(ids), control, strict=True) if not c]
    text = b"".join(pieces).decode("utf-8", "ignore").lstrip().removeprefix(role)
    return " ".join(text.split())[:PREVIEW_CHARACTERS]


def short_carried(carried: dict[str, Any], *, is_rollout: bool = False) -> dict[str, Any]:
    """Return carried columns, or a note for each where they are too long.

    Of a rollout, null columns are left out, and drift and findings are shown elsewhere.
    """
    if is_rollout:
        hidden = ("drift", "findings")
        carried = {k: v for k, v in carried.items() if v is not None and k not in hidden}
    if not carried or len(json.dumps(carried, ensure_ascii=False)) <= MAX_CARRIED:
        return carried
    return {
        name: f"({len(json.dumps(value)):,} characters; tokenmill inspect --row)"
        for name, value in carried.items()
    }


# Images. Notes are the same whatever a file holds: a store may come from anybody and name any file
# of this machine, and pages are handed on.


def thumbnail(store: Store, media: Media) -> dict[str, str]:
    """Return ``src``, a data URI, or a ``note`` that says why there is none."""
    try:
        data = store.picture(media)
        image = Pictures(limits=Limits(pixels=MAX_PIXELS)).open(data, media.reference)
    except SourceChanged:
        return {"note": "changed since: what is there now is not what the row was prepared from"}
    except (TokenmillError, OSError):
        return {"note": "gone, or it cannot be read here; open_store(media_root=) says where it is"}
    image.thumbnail((THUMBNAIL_EDGE, THUMBNAIL_EDGE))
    for quality in JPEG_QUALITIES:
        written = io.BytesIO()
        image.save(written, "JPEG", quality=quality)
        if written.tell() <= MAX_THUMBNAIL_BYTES:
            coded = base64.b64encode(written.getvalue()).decode("ascii")
            return {"src": f"data:image/jpeg;base64,{coded}"}
    return {"note": "even a small picture of it is too large for a page"}


def thumbnails(store: Store, rows: Sequence[int], max_bytes: int) -> dict[str, dict[str, str]]:
    """Return thumbnails by digest, as many as fit into a page."""
    found: dict[str, dict[str, str]] = {}
    left = float(max_bytes)
    for number in rows if store.has_media else ():
        for media in store[number].media:
            if media.digest in found:
                continue
            made = thumbnail(store, media)
            # Base64 in compressed JSON in base64: a little more than the first base64 alone.
            left -= 1.05 * sum(map(len, made.values())) + THUMBNAIL_OVERHEAD
            if left < 0 or len(found) == MAX_THUMBNAILS:
                return found
            found[media.digest] = made
    return found
