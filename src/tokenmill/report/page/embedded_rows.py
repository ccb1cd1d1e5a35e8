"""The rows that a page on disk carries: which ones, in few bytes, and the sentence that says so.

Comes in: a store, its tokenizer, a bound in bytes and, where somebody asked for some, a rule or row
numbers. Goes out: `EmbeddedRows`, whose `document` the page holds and ``client/data.js`` reads, and
a sentence about them. Only `make_page` calls it; a served page asks for its rows one by one.

Where the whole store fits, all rows are in the page, in order. Where it does not, the *selection*
is the rows a person would look for first (the longest, the shortest, those with the smallest
trained share) and then rows drawn at random with a seed, as many as fit: a fair sample, not the
beginning of a file. Rows chosen by rule stay what was asked for. A row of a group brings the whole
group along; where not all fit, no group that the store keeps is in the page in part, and of
recorded ones as much as fits. In every case the page says which rows it holds, how many it does
not, and how to see those.

Everything is compressed JSON (`compressed`), in parts, so that a browser opens only what it shows:
one table of the *pieces* that occur, most frequent first; one *index* with the columns that filters
ask for, most of them as differences to the row before; and *blocks* of 256 rows. A block has the
*rows* (turns, mask as run lengths, carried columns, findings, pictures, what is attached, groups)
and the *ids*: numbers into the table of pieces, each as a varint (seven bits a byte, the high bit
says more follows). As JSON they would take a fifth more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.dataset import as_view
from tokenmill.errors import UsageError
from tokenmill.report.page.document import compressed
from tokenmill.report.page.rows import (
    group_documents,
    mask_runs,
    origin_columns,
    short_carried,
    shown_values,
)
from tokenmill.report.row import attached_to, media_document
from tokenmill.report.row_facts import RowFacts, findings_of
from tokenmill.report.row_lookup import rows_by_rule
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Row, Store
from tokenmill.tokenizer import Tokenizer

BLOCK_ROWS = 256
MOST_TOKENS = 24_000_000
"""Tokens that a page may carry whatever their size: a browser has to hold them."""

EXTREMES = 20  # rows of each extreme in a sample
ESTIMATED_BLOCKS = 4

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class EmbeddedRows:
    """Rows of a page.

    Attributes:
        rows: Their numbers in the store, in the order of the blocks.
        pieces: The table of pieces, compressed.
        index: The index, compressed.
        blocks: ``rows`` and ``ids`` of ``block_rows`` rows each, compressed.
        block_rows: `BLOCK_ROWS`, or fewer where rows are so long that no block would fit.
    """

    rows: Int64
    pieces: str
    index: str
    blocks: list[dict[str, str]]
    block_rows: int

    def document(self) -> dict[str, Any]:
        """What stands in the page."""
        return {
            "block_rows": self.block_rows,
            "pieces": self.pieces,
            "index": self.index,
            "blocks": self.blocks,
        }


def select_rows(
    facts: RowFacts,
    tokenizer: Tokenizer,
    most_bytes: int,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> tuple[EmbeddedRows, str]:
    """The rows of a page, and the sentence about them."""
    store = facts.store
    if rows is not None:
        chosen = _first_groups(store, whole_groups(facts, rows), count)
        taken = embed(facts, tokenizer, chosen, most_bytes)
        return taken, _sentence(taken, facts, "the rows asked for")
    if rule is not None:
        if rule == "rejected":
            raise UsageError("--rule rejected names no rows; every page lists the rejected ones")
        found = rows_by_rule(store, rule, len(store) if count is None else count, seed)
        chosen = _first_groups(store, whole_groups(facts, found), count)
        chosen = _first_groups(store, chosen, _fitting(store, chosen))
        taken = embed(facts, tokenizer, chosen, most_bytes)
        drawn = f" with seed {seed}" if rule == "random" else ""
        return taken, _sentence(taken, facts, f"by rule {rule}{drawn}")
    if count is None and _everything_fits(facts, tokenizer, most_bytes):
        taken = embed(facts, tokenizer, range(len(store)), most_bytes)
        if len(taken.rows) == len(store):
            return taken, f"All {len(store):,} rows of the store are in this page."
    sample = _first_groups(store, sampled_rows(facts, seed), count)
    taken = embed(facts, tokenizer, sample, most_bytes)
    how = (
        f"the {EXTREMES} longest, the {EXTREMES} shortest and the {EXTREMES} with the smallest "
        f"trained share first, then rows drawn at random with seed {seed}"
    )
    return taken, _sentence(taken, facts, how)


def whole_groups(facts: RowFacts, rows: Sequence[int]) -> Int64:
    """Rows with all others of their groups; as they are where there are none."""
    numbers = np.asarray(rows, dtype=np.int64)
    return numbers if facts.groups is None else facts.groups.whole(numbers)


def sampled_rows(facts: RowFacts, seed: int) -> Int64:
    """Extremes first, then the rest in a random order, up to the tokens a page may carry."""
    store = facts.store
    chosen: dict[int, None] = {}
    for rule in ("longest", "shortest", "least-trained"):
        chosen |= dict.fromkeys(rows_by_rule(store, rule, EXTREMES))
    if len(store):
        mean = max(1.0, store.manifest["totals"]["tokens"] / len(store))
        wanted = min(len(store), int(2 * MOST_TOKENS / mean) + EXTREMES)
        drawn = FeistelOrder(len(store), seed).indices(0, np.arange(wanted))
        chosen |= dict.fromkeys(drawn.tolist())
    rows = whole_groups(facts, list(chosen))
    return _first_groups(store, rows, _fitting(store, rows))


def _group_ends(store: Store, rows: Int64) -> Int64:
    """The places in ``rows`` at which a group has ended; every place where there are none."""
    ends = np.arange(1, len(rows) + 1, dtype=np.int64)
    return ends[np.diff(as_view(store).groups_of(rows), append=-1) != 0] if len(rows) else ends


def _first_groups(store: Store, rows: Int64, most: int | None) -> Int64:
    """The first groups whose rows together are within a bound; at least one."""
    if most is None or len(rows) <= most:
        return rows
    ends = _group_ends(store, rows)
    return rows[: ends[max(0, int(np.searchsorted(ends, most, side="right")) - 1)]]


def _fitting(store: Store, rows: Int64) -> int:
    """How many of the rows stay within the tokens a page may carry; at least one."""
    running = np.cumsum(store.lengths[rows], dtype=np.int64)
    return max(1, int(np.searchsorted(running, MOST_TOKENS, side="right")))


def _everything_fits(facts: RowFacts, tokenizer: Tokenizer, most_bytes: int) -> bool:
    """An estimate from a few blocks spread over the store."""
    store = facts.store
    tokens: int = store.manifest["totals"]["tokens"]
    if tokens > MOST_TOKENS:
        return False
    if len(store) <= ESTIMATED_BLOCKS * BLOCK_ROWS:
        return True
    step = (len(store) - BLOCK_ROWS) // (ESTIMATED_BLOCKS - 1)
    some = [n + i for n in range(0, ESTIMATED_BLOCKS * step, step) for i in range(BLOCK_ROWS)]
    some = [n for n in some if n < len(store)]
    tried = embed(facts, tokenizer, some, 1 << 40)
    share = max(1, int(store.lengths[tried.rows].sum())) / max(1, tokens)
    # The table of pieces grows slower than the rows, so it counts twice, not in proportion.
    in_proportion = len(tried.index) + sum(map(_size, tried.blocks))
    return in_proportion / share + 2 * len(tried.pieces) <= most_bytes


def _sentence(taken: EmbeddedRows, facts: RowFacts, how: str) -> str:
    total = len(facts.store)
    missing = total - len(taken.rows)
    if facts.store.has_groups:
        how += ", each with its whole group"
    elif facts.groups is not None:
        how += ", each with the others of its group as far as they fit"
    if not missing:
        return f"All {total:,} rows of the store are in this page, {how}."
    return (
        f"{len(taken.rows):,} of {total:,} rows are in this page: {how}. {missing:,} rows are "
        "not; tokenmill inspect STORE --serve shows every row."
    )


def embed(
    facts: RowFacts, tokenizer: Tokenizer, rows: Sequence[int] | Int64, most_bytes: int
) -> EmbeddedRows:
    """Encode rows, in order, as far as they fit into ``most_bytes`` of a page.

    A group that the store keeps, and of which the last row does not fit, is left out whole.
    """
    store = facts.store
    wanted = np.asarray(rows, dtype=np.int64)
    counts = np.zeros(len(tokenizer.table), np.int64)
    for first in range(0, len(wanted), BLOCK_ROWS):
        ids = np.concatenate([store[int(n)].input_ids for n in wanted[first : first + BLOCK_ROWS]])
        found = np.bincount(ids, minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    used = np.flatnonzero(counts)
    used = used[np.argsort(-counts[used], kind="stable")]
    number_of = np.zeros(len(counts), np.int32)  # a token's number in the table of pieces
    number_of[used] = np.arange(len(used))
    pieces = compressed(_table(tokenizer, used))
    sidecars = store.sidecars
    blocks: list[dict[str, str]] = []
    roles: list[list[str]] = []

    def block_of(numbers: Int64) -> tuple[dict[str, str], list[list[str]]]:
        rows_here = [store[int(number)] for number in numbers]
        attached = [shown_values(attached_to(sidecars, int(number))) for number in numbers]
        groups = group_documents(facts, numbers.tolist())
        block = _block(rows_here, number_of, attached, groups, judged=facts.drift is not None)
        return block, [sorted({role for role, _, _ in row.turns}) for row in rows_here]

    for block_rows in (BLOCK_ROWS, max(1, BLOCK_ROWS // 16), 1):
        left = most_bytes - len(pieces)
        for first in range(0, len(wanted), block_rows):
            numbers = wanted[first : first + block_rows]
            block, roles_here = block_of(numbers)
            # The index of all blocks together takes a little less than those of each.
            left -= _size(block) + len(compressed(_index(facts, numbers, roles_here)))
            if left < 0:
                break
            blocks.append(block)
            roles += roles_here
        if blocks:
            break
    ends = _group_ends(store, wanted)
    whole = int(ends[ends <= len(roles)].max(initial=0))
    if whole < len(roles):
        del blocks[whole // block_rows :], roles[whole:]
        if whole % block_rows:
            blocks.append(block_of(wanted[whole - whole % block_rows : whole])[0])
    taken = wanted[:whole]
    index = compressed(_index(facts, taken, roles))
    return EmbeddedRows(taken, pieces, index, blocks, block_rows)


def _size(block: dict[str, str]) -> int:
    return len(json.dumps(block)) + 1  # and a comma


def _table(tokenizer: Tokenizer, used: Int64) -> dict[str, Any]:
    """Id and bytes of each piece that occurs, and which of them are special."""
    return {
        "ids": used.tolist(),
        "special": used[tokenizer.is_special(used.tolist())].tolist(),
        "pieces": [_text_or_bytes(piece) for piece in tokenizer.pieces(used)],
    }


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:  # a part of a character
        return list(piece)


def _block(
    rows: Sequence[Row],
    number_of: NDArray[np.int32],
    attached: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any] | None],
    *,
    judged: bool,
) -> dict[str, str]:
    parts = {
        "turns": [[[role, end - start] for role, start, end in row.turns] for row in rows],
        "runs": [mask_runs(row.loss_mask).tolist() for row in rows],
        "carried": [short_carried(row.carried, judged=judged) for row in rows],
        "media": [[media_document(one) for one in row.media] for row in rows],
        "findings": [findings_of(row.carried) if judged else [] for row in rows],
        "attached": attached,
        "groups": groups,
    }
    ids = number_of[np.concatenate([row.input_ids for row in rows])]
    return {"rows": compressed(parts), "ids": compressed(varints(ids))}


def _index(facts: RowFacts, numbers: Int64, roles: Sequence[Sequence[str]]) -> dict[str, Any]:
    store = facts.store
    columns = {
        "row": numbers,
        "length": store.lengths[numbers].astype(np.int64),
        "trained": store.trained[numbers].astype(np.int64),
        **origin_columns(store, numbers),
    }
    steps = {name: np.diff(column, prepend=0).tolist() for name, column in columns.items()}
    return {
        **steps,
        "roles": roles,
        "drift": None if facts.drift is None else facts.drift[numbers].tolist(),
        "numbers": {
            name: [value if math.isfinite(value) else None for value in column[numbers].tolist()]
            for name, column in facts.numbers.items()
        },
    }


def varints(numbers: NDArray[np.int32]) -> bytes:
    """Numbers from 0 to 2²⁸ - 1 as base-128 varints, the lowest seven bits first."""
    parts = np.zeros((len(numbers), 4), np.uint8)
    written = np.ones(parts.shape, bool)
    for column in range(4):
        rest = numbers >> (7 * column)
        parts[:, column] = (rest & 127) | (rest > 127).astype(np.uint8) << 7
        written[:, column] = rest > 0
    written[:, 0] = True
    encoded: bytes = parts[written].tobytes()
    return encoded
