"""Write the page as one HTML file.

A content security policy allows only the page's own style and script, by their hashes, so the text
of a row can never run as code. The data is JSON, compressed with gzip, as base64 in a script
element that browsers do not run. Stored groups are never split.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core.publish import Staging, writing_errors
from tokenmill.data.packs import Pack
from tokenmill.data.view import as_view
from tokenmill.errors import SourceChanged, TokenmillError, UsageError
from tokenmill.inspect.lint.rules import RULES
from tokenmill.inspect.rejected import rejected_by_file
from tokenmill.inspect.row import (
    UNCHECKED,
    Int64,
    Rejected,
    RowFacts,
    SourceExcerpts,
    answer_name,
    attached_to,
    findings_of,
    labelled,
    media_document,
    no_excerpt,
    rows_by_rule,
)
from tokenmill.inspect.stats import (
    PACK_SEED,
    length_histogram,
    packing_preview,
    per_role,
    share_histogram,
    store_stats,
)
from tokenmill.media import Images, Limits
from tokenmill.rl.verdict import CLASSES
from tokenmill.store import Media, Row, Store
from tokenmill.store.sidecars import column_of
from tokenmill.tokenizers.tokenizer import Tokenizer

SCRIPTS = ("text.js", "data.js", "images.js", "rows.js", "list.js", "charts.js", "rollouts.js",
           "panels.js", "compare.js", "groups.js", "main.js")  # fmt: skip
GENERATOR = b'<meta name="generator" content="tokenmill inspect">'
HEAD_BYTES = 2048  # of an existing file, to recognize a page of tokenmill
GZIP_LEVEL = 6  # 9 gains one percent for three times the time

PAGE_BYTES = 14_500_000  # of a page on disk: small enough for mail
MEDIA_SHARE = 0.4  # of the bytes, for images
SENTENCE_BYTES = 1000  # reserved for the sentence about the selection and for brackets
BLOCK_GROUPS = 256  # groups (or rows) that are compressed together
MAX_TOKENS = 12_000_000  # in the memory of a browser
EXTREMES = 20  # rows of each extreme in a sample


@cache
def client() -> tuple[str, str, str]:
    folder = resources.files("tokenmill.inspect.page") / "client"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    program = "\n".join(read(name) for name in SCRIPTS)
    return read("page.html"), read("page.css"), f'"use strict";\n(() => {{\n{program}\n}})();'


def security_policy(*, served: bool) -> str:
    _, style, program = client()
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src '{_hash(program)}'; style-src '{_hash(style)}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"sha256-{digest}"


def page(about: dict[str, Any], *, rows: dict[str, Any] | None = None) -> bytes:
    """Return the HTML of the page; ``rows`` has compressed blocks, or is None for a server."""
    frame, style, program = client()
    parts = {
        "TITLE": html.escape(f"{about['overview']['name']} · tokenmill inspect"),
        "POLICY": html.escape(security_policy(served=rows is None)),
        "STYLE": style,
        "DATA": json.dumps({"about": compressed(about), "rows": rows}, separators=(",", ":")),
        "PROGRAM": program,
    }
    # Odd pieces are placeholders. Replacing them one after the other could replace inside data.
    pieces = [parts[p] if n % 2 else p for n, p in enumerate(frame.split("%%"))]
    return "".join(pieces).encode("utf-8", "replace")


def compressed(value: Any) -> str:
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates in the data
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(data, GZIP_LEVEL, mtime=0)).decode("ascii")


def make_page(
    store: Store,
    target: Path,
    *,
    cache_dir: str | None = None,
    fetch: bool = False,  # read remote sources for the text of rejected rows
    max_bytes: int = PAGE_BYTES,
    **selection: Any,  # arguments of `select_rows`
) -> dict[str, Any]:
    """Write the page of a store, or of some of its rows; return what ``inspect --json`` prints."""
    facts = RowFacts(store)
    excerpts = SourceExcerpts(store, cache_dir, fetch=fetch)
    about: dict[str, Any] = {"overview": overview(facts, excerpts)}
    left = max_bytes - len(page(about, rows={})) - SENTENCE_BYTES
    selected, how = select_rows(facts, **selection)
    for_rows = left - int(MEDIA_SHARE * left) if store.has_media else left
    embedded, blocks = embed(facts, selected, for_rows)
    about["selection"] = _sentence(facts, len(embedded), how)
    left = max_bytes - len(page(about, rows={"blocks": blocks})) - SENTENCE_BYTES
    images = compressed(thumbnails(store, embedded, left))
    content = page(about, rows={"blocks": blocks, "images": images})
    write_page(target, content)
    return {
        "html": str(target),
        "bytes": len(content),
        "rows_in_page": len(embedded),
        "rows": len(store),
        "selection": about["selection"],
    }


def select_rows(
    facts: RowFacts,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> tuple[Int64, str]:
    """Return the rows of a page, the most important first, and a description of the choice."""
    store = facts.store
    if rows is not None:
        chosen, how = list(rows), "the requested rows"
    elif rule is not None:
        if rule == "rejected":
            message = " selects no rows; the page always lists the rejected ones"
            raise UsageError(("rule", rule), message)
        chosen = rows_by_rule(store, rule, len(store) if count is None else count, seed)
        how = f"by rule {rule}{f' with seed {seed}' if rule == 'random' else ''}"
    else:
        chosen = sampled_rows(store, seed)
        how = (
            f"the {EXTREMES} longest, the {EXTREMES} shortest, the {EXTREMES} with the smallest "
            f"trained share, and random rows (seed {seed})"
        )
    selected = np.asarray(chosen, dtype=np.int64)
    if facts.groups is not None:
        selected = facts.groups.with_groups(selected)
    if not len(selected):
        return selected, how
    ends = _group_ends(store, selected)
    tokens = np.cumsum(store.lengths[selected], dtype=np.int64)[ends - 1]
    fitting = (tokens <= MAX_TOKENS) & (ends <= (len(selected) if count is None else count))
    return selected[: ends[max(0, int(fitting.sum()) - 1)]], how


def sampled_rows(store: Store, seed: int) -> list[int]:
    """Return extremes first, then random rows, with twice as many tokens as fit into a page."""
    chosen: dict[int, None] = {}
    for rule in ("longest", "shortest", "least-trained"):
        chosen |= dict.fromkeys(rows_by_rule(store, rule, EXTREMES))
    if len(store):
        mean = max(1.0, store.manifest["totals"]["tokens"] / len(store))
        drawn = min(len(store), int(2 * MAX_TOKENS / mean) + EXTREMES)
        chosen |= dict.fromkeys(rows_by_rule(store, "random", drawn, seed))
    return list(chosen)


def _group_ends(store: Store, rows: Int64) -> Int64:
    """Return the end position of every stored group; every row is a group if there are none."""
    groups = as_view(store).groups_of(rows)
    ends: Int64 = np.flatnonzero(np.diff(groups, append=-1)) + 1
    return ends


def embed(facts: RowFacts, selected: Int64, max_bytes: int) -> tuple[list[int], list[str]]:
    """Compress as many complete groups as fit into blocks of rows, each with its new pieces."""
    groups = np.split(selected, _group_ends(facts.store, selected)[:-1]) if len(selected) else []
    embedded: list[int] = []
    blocks: list[str] = []
    known: set[int] = set()
    at, size = 0, BLOCK_GROUPS
    while at < len(groups):
        numbers = np.concatenate(groups[at : at + size]).tolist()
        rows = [row_document(facts, number) for number in numbers]
        new = set().union(*(row["ids"] for row in rows)) - known
        block = compressed({"rows": rows, "table": piece_table(facts.store, new)})
        if len(block) + 3 <= max_bytes:  # quotes and a comma
            max_bytes -= len(block) + 3
            blocks.append(block)
            embedded += numbers
            known |= new
            at += size
        elif size > 1:
            size //= 4
        else:
            break
    return embedded, blocks


def _sentence(facts: RowFacts, embedded: int, how: str) -> str:
    total = len(facts.store)
    if embedded == total:
        return f"This page contains all {total:,} rows of the store."
    if facts.store.has_groups:
        how += ", each with its whole group"
    elif facts.groups is not None:
        how += ", each with the rest of its group as far as it fits"
    return (
        f"This page contains {embedded:,} of {total:,} rows: {how}. "
        "To see every row: tokenmill inspect STORE --serve"
    )


def write_page(target: Path, content: bytes) -> None:
    """Publish a page; replace only an existing page of tokenmill."""
    if target.is_dir():
        raise UsageError(("html",), " must be a file, this is a directory", path=target)
    with writing_errors(target):
        if target.exists():
            with open(target, "rb") as file:
                ours = GENERATOR in file.read(HEAD_BYTES)
            if not ours:
                message = " would overwrite a file that is not a tokenmill page; choose another"
                raise UsageError(("html",), message, path=target)
        with Staging(target.parent, beside=target) as staging:
            staging.replace(staging.write(target.name, content), target)


# The overview: everything on the page except rows. Its size is bounded.

MAX_SOURCES = 5000
MAX_REJECTED = 2000
MAX_REJECTED_FILES = 20  # per reason
MAX_RAW_BYTES = 1 << 20  # of the texts of rejected rows in one page
MAX_MASK_TOKENS = 100_000_000  # about 0.3 s of reading
BINS_PER_DOUBLING = 6  # of row lengths
SHARE_BINS = 20
MAX_STEPS = 48
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SCALE_ROWS = 64  # rows that determine the ends of a colour scale
SCALE_SHARE = 0.02  # of their values are beyond each end
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
    if facts.drift is None:
        return None
    counts = np.bincount(facts.drift[rows] + 1, minlength=len(CLASSES) + 1).tolist()
    return dict(zip((UNCHECKED, *CLASSES), counts, strict=True))


def filter_names(store: Store) -> dict[str, str]:
    return {
        label: column_of(sidecar.name, sidecar.producer)
        for label, sidecar in labelled(store.sidecars)
        if sidecar.per == "row" and label.isidentifier()
    }


def number_ranges(facts: RowFacts) -> list[dict[str, Any]]:
    attached = filter_names(facts.store)
    found = []
    for name, column in facts.numbers.items():
        finite = column[np.isfinite(column)]
        ends = (finite.min(), finite.max()) if len(finite) else ()
        low, high = [float(f"{end:.6g}") for end in ends] or (None, None)
        filtered = name if name in attached else None
        if name in facts.extra:
            filtered = f"extra[{json.dumps(name)}]"
        found.append({"name": name, "low": low, "high": high, "filter": filtered})
    return found


def colour_scales(store: Store) -> list[dict[str, Any]]:
    """Return the colour scale of every sidecar per token, log-probabilities first."""
    rows = np.unique(np.linspace(0, len(store) - 1, SCALE_ROWS).astype(np.int64)).tolist()
    found = []
    for name, sidecar in labelled(store.sidecars):
        if sidecar.per != "token" or not len(store):
            continue
        values = np.concatenate([sidecar[row][store[row].loss_mask == 1] for row in rows])
        values = values[np.isfinite(values)]
        # Without outliers, which would make the rest pale. Colour is the distance from 0, so every
        # scale includes 0.
        ends = [SCALE_SHARE, 1 - SCALE_SHARE]
        low, high = np.quantile(values, ends).tolist() if len(values) else (0, 0)
        low, high = min(low, 0), max(high, 0)
        found.append({"name": name, "low": float(f"{low:.3g}"), "high": float(f"{high:.3g}")})
    return sorted(found, key=lambda one: "logp" not in one["name"].lower())


def over_steps(facts: RowFacts, max_steps: int) -> dict[str, Any] | None:
    """Return rewards, lengths and drift classes by step; join adjacent steps if there are many."""
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
                    preview.packs.per_pack(preview.packs.lengths),
                    np.full(len(preview.packs), preview.pack.length),
                    SHARE_BINS,
                ),
                "drawn": preview.first_packs(DRAWN_PACKS, DRAWN_ROWS),
            }
            for preview in previews
        ],
    }


def rejected_document(store: Store, excerpts: SourceExcerpts | None) -> dict[str, Any]:
    listed: list[dict[str, Any]] = []
    spent = 0
    for number, row in enumerate(islice(store.rejected_rows(), MAX_REJECTED)):
        document = rejected_row(number, row)
        if excerpts is not None:
            if spent < MAX_RAW_BYTES:
                document["raw"] = excerpts.excerpt(row[0])
                spent += len(document["raw"]["text"] or "")
            else:
                document["raw"] = no_excerpt("left out to limit the size of the page; use --serve")
        listed.append(document)
    by_file = [
        {
            "reason": reason,
            "count": store.rejected[reason],
            "hint": RULES[reason].hint,
            "files": [
                {"path": file.path, "count": file.count, "rows": file.source_rows}
                for file in files[:MAX_REJECTED_FILES]
            ],
            "more": max(0, len(files) - MAX_REJECTED_FILES),
        }
        for reason, files in rejected_by_file(store).items()
    ]
    total = sum(store.rejected.values())
    return {"total": total, "reasons": store.rejected, "by_file": by_file, "rows": listed}


def rejected_row(number: int, row: Rejected) -> dict[str, Any]:
    origin, reason, detail = row
    return {
        "number": number,
        "origin": origin._asdict(),
        "address": str(origin),
        "reason": reason,
        "detail": detail,
    }


# Rows: summaries for the list, and whole rows

MAX_GROUP_NAME = 80  # characters
PREVIEW_TOKENS = 32
PREVIEW_CHARACTERS = 80  # the list shows about half of them
MAX_EXTRA = 2000  # characters of a row's extra columns
THUMBNAIL_EDGE = 256  # pixels of the longer side
MAX_THUMBNAIL_BYTES = 24 << 10
JPEG_QUALITIES = (80, 55, 30)  # until the thumbnail fits
MAX_PIXELS = 50_000_000  # of an image that is opened: 150 MB for a moment
MAX_THUMBNAILS = 800  # in one page; each costs milliseconds of decoding
THUMBNAIL_OVERHEAD = 120  # bytes of an entry beside the image


def row_summary(facts: RowFacts, number: int) -> dict[str, Any]:
    row = facts.store[number]
    return {
        "row": number,
        "length": len(row),
        "trained": int(row.loss_mask.sum()),
        "address": str(row.origin),
        "preview": preview(row, facts.store.tokenizer),
        "group": group_document(facts, number),
        "drift": facts.drift_of(number),
        "numbers": facts.numbers_of(number),
    }


def row_document(facts: RowFacts, number: int) -> dict[str, Any]:
    """Return a whole row; the bytes of its tokens are in a `piece_table`."""
    row = facts.store[number]
    is_rollout = facts.drift is not None
    return {
        **row_summary(facts, number),
        "origin": row.origin._asdict(),
        "part": row.part,
        "turns": row.turns,
        "ids": row.input_ids.tolist(),
        "mask": row.loss_mask.tolist(),
        "extra": short_extra(row.extra, is_rollout=is_rollout),
        "media": [media_document(media) for media in row.media],
        "findings": findings_of(row.extra) if is_rollout else [],
        "attached": shown_values(attached_to(facts.store.sidecars, number)),
    }


def piece_table(store: Store, ids: Iterable[int]) -> dict[str, tuple[str, int]]:
    used, tokenizer = sorted(set(ids)), store.tokenizer
    special = tokenizer.is_special(used).tolist()
    return {
        str(token): (piece.hex(), int(control))
        for token, piece, control in zip(used, tokenizer.pieces(used), special, strict=True)
    }


def row_with_pieces(facts: RowFacts, number: int) -> dict[str, Any]:
    row = row_document(facts, number)
    return {**row, "table": piece_table(facts.store, row["ids"])}


def group_document(facts: RowFacts, number: int) -> dict[str, Any] | None:
    if facts.groups is None:
        return None
    row, group = facts.store[number], int(facts.groups.group_of[number])
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
    extra, name = row.extra, row.extra["group"]
    name = name if isinstance(name, str) else json.dumps(name)
    step = "" if extra["step"] is None else f" at step {extra['step']}"
    return found | {
        "name": name[:MAX_GROUP_NAME] + step,
        "answer": f"answer {rows.index(number) + 1}",
        **dict.fromkeys(("score", "margin", "prompt_tokens")),
    }


def shown_values(
    attached: dict[str, float | list[float]],
) -> dict[str, float | str | list[float | str]]:
    """Return sidecar values with four digits; infinite ones as text, because JSON has none."""

    def shown(value: float) -> float | str:
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)

    return {
        name: [shown(value) for value in values] if isinstance(values, list) else shown(values)
        for name, values in attached.items()
    }


def preview(row: Row, tokenizer: Tokenizer) -> str:
    turns = row.turns
    user_turns = [turn for turn in turns if turn[0] == "user"] or turns[:1]
    role, start, end = user_turns[0] if user_turns else ("", 0, len(row))
    places = np.arange(start, end)
    for media in row.media:
        places = places[(places < media.start) | (places >= media.start + media.count)]
    ids = row.input_ids[places[:PREVIEW_TOKENS]].tolist()
    control = tokenizer.is_special(ids).tolist()
    pieces = [p for p, c in zip(tokenizer.pieces(ids), control, strict=True) if not c]
    text = b"".join(pieces).decode("utf-8", "ignore").lstrip().removeprefix(role)
    return " ".join(text.split())[:PREVIEW_CHARACTERS]


def short_extra(extra: dict[str, Any], *, is_rollout: bool = False) -> dict[str, Any]:
    if is_rollout:
        hidden = ("drift", "findings")  # shown separately
        extra = {k: v for k, v in extra.items() if v is not None and k not in hidden}
    if not extra or len(json.dumps(extra, ensure_ascii=False)) <= MAX_EXTRA:
        return extra
    return {
        name: f"({len(json.dumps(value)):,} characters; use tokenmill inspect --row)"
        for name, value in extra.items()
    }


# Images. A store may come from anybody and refer to any file of this machine, and pages are shared.
# So a note must not depend on the contents of a file.


def thumbnail(store: Store, media: Media) -> dict[str, str]:
    """Return ``src``, a data URI, or a ``note`` with the reason why there is none."""
    try:
        data = store.image(media)
        image = Images(limits=Limits(pixels=MAX_PIXELS)).open(data, media.reference)
    except SourceChanged:
        return {"note": "not shown: the image changed after the build"}
    except (TokenmillError, OSError):
        return {"note": "the image is missing or unreadable"}
    image.thumbnail((THUMBNAIL_EDGE, THUMBNAIL_EDGE))
    for quality in JPEG_QUALITIES:
        written = io.BytesIO()
        image.save(written, "JPEG", quality=quality)
        if written.tell() <= MAX_THUMBNAIL_BYTES:
            coded = base64.b64encode(written.getvalue()).decode("ascii")
            return {"src": f"data:image/jpeg;base64,{coded}"}
    return {"note": "too large for a page"}


def thumbnails(store: Store, rows: Sequence[int], max_bytes: int) -> dict[str, dict[str, str]]:
    images: dict[str, dict[str, str]] = {}
    left = float(max_bytes)
    for number in rows if store.has_media else ():
        for media in store[number].media:
            if media.digest in images:
                continue
            image = thumbnail(store, media)
            # Base64 in compressed JSON in base64 is a little longer than the first base64 alone.
            left -= 1.05 * sum(map(len, image.values())) + THUMBNAIL_OVERHEAD
            if left < 0 or len(images) == MAX_THUMBNAILS:
                return images
            images[media.digest] = image
    return images
