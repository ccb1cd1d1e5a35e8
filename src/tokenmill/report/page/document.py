"""The page as one HTML file, and its rows.

The client (`client/page.html`, `page.css`, `*.js`) is put together when a page is written or
served. A content security policy allows exactly this style and program, by their hashes, so text of
a row can never run as code. The data is JSON, compressed with gzip, as base64 in a script element
that no browser runs.

A page on disk carries its rows in blocks. Where not all rows of a store fit, it holds the longest,
the shortest and the least trained ones and a random sample, and says so. A group that the store
keeps is in the page whole or not at all.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.dataset import as_view
from tokenmill.errors import UsageError
from tokenmill.files import Staging, replace_file, writing_errors
from tokenmill.report.lookup import SourceExcerpts, rows_by_rule
from tokenmill.report.page.overview import overview
from tokenmill.report.page.rows import piece_table, row_document, thumbnails
from tokenmill.report.row import Int64, RowFacts, store_tokenizer
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store
from tokenmill.tokenizer import Tokenizer

SCRIPTS = ("text.js", "data.js", "pictures.js", "rows.js", "list.js", "charts.js", "rollouts.js",
           "panels.js", "compare.js", "groups.js", "main.js")  # fmt: skip
GENERATOR = b'<meta name="generator" content="tokenmill inspect">'
HEAD_BYTES = 2048  # of an existing file, to recognize one of our pages
GZIP_LEVEL = 6  # 9 gains one percent for three times the time

PAGE_BYTES = 14_500_000  # of a page on disk: small enough for mail
MEDIA_SHARE = 0.4  # of the bytes for rows, where rows have images
SENTENCE_BYTES = 1000  # of the sentence about the selection, and of brackets around the rows
BLOCK_GROUPS = 256  # groups (or rows) that are compressed together
MAX_TOKENS = 12_000_000  # a browser has to hold them
EXTREMES = 20  # rows of each extreme in a sample


@cache
def client() -> tuple[str, str, str]:
    """Return frame, style and program of the page."""
    folder = resources.files("tokenmill.report.page") / "client"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    program = "\n".join(read(name) for name in SCRIPTS)
    return read("page.html"), read("page.css"), f'"use strict";\n(() => {{\n{program}\n}})();'


def security_policy(*, served: bool) -> str:
    """Allow the page's own style and program, and requests to its own server."""
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
    """Return the page.

    Args:
        about: ``overview``, ``selection`` (a sentence) and ``compare`` for two stores.
        rows: Compressed ``blocks`` and ``pictures``; None where a server has the rows.
    """
    frame, style, program = client()
    parts = {
        "TITLE": html.escape(f"{about['overview']['name']} · tokenmill inspect"),
        "POLICY": html.escape(security_policy(served=rows is None)),
        "STYLE": style,
        "DATA": json.dumps({"about": compressed(about), "rows": rows}, separators=(",", ":")),
        "PROGRAM": program,
    }
    # Odd pieces are placeholders. Replacing one after the other could replace in data.
    pieces = [parts[p] if n % 2 else p for n, p in enumerate(frame.split("%%"))]
    return "".join(pieces).encode("utf-8", "replace")


def compressed(value: Any) -> str:
    """Return a value as JSON, compressed with gzip, in base64."""
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates in somebody's data
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(data, GZIP_LEVEL, mtime=0)).decode("ascii")


def make_page(
    store: Store,
    target: Path,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
    count: int | None = None,
    seed: int = 0,
    cache_dir: str | None = None,
    fetch: bool = False,
    max_bytes: int = PAGE_BYTES,
) -> dict[str, Any]:
    """Write the page of a store.

    Args:
        store: The store.
        target: The file; an older page is replaced, anything else refused.
        rule: Only rows of a rule.
        rows: Only rows of these numbers.
        count: Maximum number of rows.
        seed: Of a random choice.
        cache_dir: Cache for row indexes of the sources, for the text of rejected rows.
        fetch: Whether remote sources are read for that text.
        max_bytes: Maximum size of the file.

    Returns:
        ``html``, ``bytes``, ``rows_in_page``, ``rows`` and ``selection``, the sentence.
    """
    facts = RowFacts(store)
    about: dict[str, Any] = {
        "overview": overview(facts, SourceExcerpts(store, cache_dir, fetch=fetch))
    }
    left = max_bytes - len(page(about, rows={})) - SENTENCE_BYTES
    wanted, how = select_rows(facts, rule=rule, rows=rows, count=count, seed=seed)
    for_rows = left - int(MEDIA_SHARE * left) if store.has_media else left
    taken, blocks = embed(facts, store_tokenizer(store), wanted, for_rows)
    about["selection"] = _sentence(facts, len(taken), how)
    left = max_bytes - len(page(about, rows={"blocks": blocks})) - SENTENCE_BYTES
    pictures = compressed(thumbnails(store, taken, left))
    content = page(about, rows={"blocks": blocks, "pictures": pictures})
    write_page(target, content)
    return {
        "html": str(target),
        "bytes": len(content),
        "rows_in_page": len(taken),
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
    """Return the rows of a page, the most important first, and how they were chosen."""
    store = facts.store
    if rows is not None:
        chosen, how = list(rows), "the rows asked for"
    elif rule is not None:
        if rule == "rejected":
            raise UsageError("--rule rejected names no rows; every page lists the rejected ones")
        chosen = rows_by_rule(store, rule, len(store) if count is None else count, seed)
        how = f"by rule {rule}{f' with seed {seed}' if rule == 'random' else ''}"
    else:
        chosen = sampled_rows(store, seed)
        how = (
            f"the {EXTREMES} longest, the {EXTREMES} shortest and the {EXTREMES} with the smallest "
            f"trained share first, then rows drawn at random with seed {seed}"
        )
    wanted = np.asarray(chosen, dtype=np.int64)
    if facts.groups is not None:
        wanted = facts.groups.whole(wanted)
    if not len(wanted):
        return wanted, how
    ends = _group_ends(store, wanted)
    tokens = np.cumsum(store.lengths[wanted], dtype=np.int64)[ends - 1]
    fitting = (tokens <= MAX_TOKENS) & (ends <= (len(wanted) if count is None else count))
    return wanted[: ends[max(0, int(fitting.sum()) - 1)]], how


def sampled_rows(store: Store, seed: int) -> list[int]:
    """Return extremes first, then rows in random order, twice as many tokens as a page holds."""
    chosen: dict[int, None] = {}
    for rule in ("longest", "shortest", "least-trained"):
        chosen |= dict.fromkeys(rows_by_rule(store, rule, EXTREMES))
    if len(store):
        mean = max(1.0, store.manifest["totals"]["tokens"] / len(store))
        drawn = min(len(store), int(2 * MAX_TOKENS / mean) + EXTREMES)
        chosen |= dict.fromkeys(
            FeistelOrder(len(store), seed).indices(0, np.arange(drawn)).tolist()
        )
    return list(chosen)


def _group_ends(store: Store, rows: Int64) -> Int64:
    """Return the positions behind every stored group of rows; behind every row without groups."""
    groups = as_view(store).groups_of(rows)
    ends: Int64 = np.flatnonzero(np.diff(groups, append=-1)) + 1
    return ends


def embed(
    facts: RowFacts, tokenizer: Tokenizer, wanted: Int64, max_bytes: int
) -> tuple[list[int], list[str]]:
    """Compress rows block by block, as many whole groups as fit.

    A block holds ``rows`` and the ``table`` of pieces that no earlier block has.
    """
    groups = np.split(wanted, _group_ends(facts.store, wanted)[:-1]) if len(wanted) else []
    taken: list[int] = []
    blocks: list[str] = []
    known: set[int] = set()
    at, size = 0, BLOCK_GROUPS
    while at < len(groups):
        numbers = np.concatenate(groups[at : at + size]).tolist()
        rows = [row_document(facts, number, tokenizer) for number in numbers]
        new = set().union(*(row["ids"] for row in rows)) - known
        block = compressed({"rows": rows, "table": piece_table(tokenizer, new)})
        if len(block) + 3 <= max_bytes:  # quotes and a comma
            max_bytes -= len(block) + 3
            blocks.append(block)
            taken += numbers
            known |= new
            at += size
        elif size > 1:
            size //= 4
        else:
            break
    return taken, blocks


def _sentence(facts: RowFacts, taken: int, how: str) -> str:
    total = len(facts.store)
    if taken == total:
        return f"All {total:,} rows of the store are in this page."
    if facts.store.has_groups:
        how += ", each with its whole group"
    elif facts.groups is not None:
        how += ", each with the others of its group as far as they fit"
    return (
        f"{taken:,} of {total:,} rows are in this page: {how}. {total - taken:,} rows are "
        "not; tokenmill inspect STORE --serve shows every row."
    )


def write_page(target: Path, content: bytes) -> None:
    """Publish a page; it replaces a page of ours and nothing else."""
    if target.is_dir():
        raise UsageError("--html names a file, this is a directory", path=target)
    with writing_errors(target):
        if target.exists():
            with open(target, "rb") as file:
                ours = GENERATOR in file.read(HEAD_BYTES)
            if not ours:
                raise UsageError(
                    "this file is not a page of ours and is left alone; name another", path=target
                )
        with Staging(target.parent, beside=target) as staging:
            replace_file(staging.write(target.name, content), target)
