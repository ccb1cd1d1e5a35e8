"""Which rows a page on disk carries, and the sentence that says so.

A page has a bound in bytes. Where the whole store fits, all rows are in it, in order. Where it does
not, the *selection* is the rows a person would look for first (the longest, the shortest, those
with the smallest trained share) and then rows drawn at random with a seed, as many as fit: a fair
sample, not the beginning of a file. Rows chosen by rule stay what was asked for. In every case the
page says which rows it holds, how many it does not, and how to see those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.report.page.embedded_rows import BLOCK_ROWS, Compact, compact
from tokenmill.report.row_lookup import rows_by_rule
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store
from tokenmill.tokenizer import Tokenizer

MOST_TOKENS = 24_000_000
"""Tokens that a page may carry whatever their size: a browser has to hold them."""

EXTREMES = 20  # rows of each extreme in a sample
ESTIMATED_BLOCKS = 4


class Selection(NamedTuple):
    """The rows of a page and the sentence about them."""

    rows: Compact
    sentence: str


def select(
    store: Store,
    tokenizer: Tokenizer,
    most_bytes: int,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> Selection:
    """Choose and encode the rows of a page."""
    if rows is not None:
        taken = compact(store, tokenizer, list(rows)[:count], most_bytes)
        return Selection(taken, _sentence(taken, len(store), "the rows asked for"))
    if rule is not None:
        if rule == "rejected":
            raise UsageError("--rule rejected names no rows; every page lists the rejected ones")
        chosen = rows_by_rule(store, rule, len(store) if count is None else count, seed)
        chosen = chosen[: _fitting(store, chosen)]
        taken = compact(store, tokenizer, chosen, most_bytes)
        drawn = f" with seed {seed}" if rule == "random" else ""
        return Selection(taken, _sentence(taken, len(store), f"by rule {rule}{drawn}"))
    if count is None and _everything_fits(store, tokenizer, most_bytes):
        taken = compact(store, tokenizer, range(len(store)), most_bytes)
        if len(taken.rows) == len(store):
            return Selection(taken, f"All {len(store):,} rows of the store are in this page.")
    sample = sampled_rows(store, seed)
    taken = compact(store, tokenizer, sample[:count], most_bytes)
    how = (
        f"the {EXTREMES} longest, the {EXTREMES} shortest and the {EXTREMES} with the smallest "
        f"trained share first, then rows drawn at random with seed {seed}"
    )
    return Selection(taken, _sentence(taken, len(store), how))


def sampled_rows(store: Store, seed: int) -> list[int]:
    """Extremes first, then the rest in a random order, up to the tokens a page may carry."""
    chosen: dict[int, None] = {}
    for rule in ("longest", "shortest", "least-trained"):
        chosen |= dict.fromkeys(rows_by_rule(store, rule, EXTREMES))
    if len(store):
        mean = max(1.0, store.manifest["totals"]["tokens"] / len(store))
        wanted = min(len(store), int(2 * MOST_TOKENS / mean) + EXTREMES)
        drawn = FeistelOrder(len(store), seed).indices(0, np.arange(wanted))
        chosen |= dict.fromkeys(drawn.tolist())
    rows = list(chosen)
    return rows[: _fitting(store, rows)]


def _fitting(store: Store, rows: Sequence[int]) -> int:
    """How many of the rows stay within the tokens a page may carry; at least one."""
    running = np.cumsum(store.lengths[np.asarray(rows, dtype=np.int64)], dtype=np.int64)
    return max(1, int(np.searchsorted(running, MOST_TOKENS, side="right")))


def _everything_fits(store: Store, tokenizer: Tokenizer, most_bytes: int) -> bool:
    """An estimate from a few blocks spread over the store."""
    tokens: int = store.manifest["totals"]["tokens"]
    if tokens > MOST_TOKENS:
        return False
    if len(store) <= ESTIMATED_BLOCKS * BLOCK_ROWS:
        return True
    step = (len(store) - BLOCK_ROWS) // (ESTIMATED_BLOCKS - 1)
    some = [n + i for n in range(0, ESTIMATED_BLOCKS * step, step) for i in range(BLOCK_ROWS)]
    some = [n for n in some if n < len(store)]
    tried = compact(store, tokenizer, some, 1 << 40)
    share = max(1, int(store.lengths[tried.rows].sum())) / max(1, tokens)
    # The table of pieces grows slower than the rows, so it counts twice, not in proportion.
    estimate = (tried.size - len(tried.pieces)) / share + 2 * len(tried.pieces)
    return estimate <= most_bytes


def _sentence(taken: Compact, total: int, how: str) -> str:
    missing = total - len(taken.rows)
    if not missing:
        return f"All {total:,} rows of the store are in this page, {how}."
    return (
        f"{len(taken.rows):,} of {total:,} rows are in this page: {how}. {missing:,} rows are "
        "not; tokenmill inspect STORE --serve shows every row."
    )
