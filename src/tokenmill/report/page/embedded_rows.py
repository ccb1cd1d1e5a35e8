"""Rows in few bytes, for a page that carries them along.

A `Compact` is what a page on disk holds of its rows: one table of the *pieces* that occur (most
frequent first, so that common tokens have small numbers), *blocks* of 256 rows (ids as numbers into
that table, mask as run lengths, turns, carried columns), and one *index* with a few numbers per
row. All numbers are varints (seven bits a byte, the high bit says more follows), each part is
deflated on its own so that a browser opens only what it shows, and base64 makes text of it.

Blocks are added until a stated number of bytes is used up; what did not fit is counted and said.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.store import Store
from tokenmill.tokenizer import Tokenizer

BLOCK_ROWS = 256
LEVEL = 6  # of deflate: 9 gains one percent for three times the time
MOST_CARRIED = 2000  # characters of a row's carried columns
LAST_ROLE_BIT = 50  # a browser's numbers are exact to 53 bits; later roles share the last one

Int64 = NDArray[np.int64]


@dataclass
class Compact:
    """Rows of a page.

    Attributes:
        rows: Their numbers in the store, in the order of the blocks.
        roles: Names of the roles met.
        pieces: The table of pieces.
        index: The columns named `INDEX`, one after another.
        blocks: The rows, ``block_rows`` each.
        block_rows: `BLOCK_ROWS`, or fewer where rows are so long that no block would fit.
    """

    rows: Int64
    roles: list[str]
    pieces: str
    index: str
    blocks: list[str] = field(default_factory=list)
    block_rows: int = BLOCK_ROWS

    def document(self) -> dict[str, Any]:
        """What stands in the page."""
        return {
            "count": len(self.rows),
            "block_rows": self.block_rows,
            "columns": list(INDEX),
            "roles": self.roles,
            "pieces": self.pieces,
            "index": self.index,
            "blocks": self.blocks,
        }

    @property
    def size(self) -> int:
        """Characters in the page, names and brackets aside."""
        return len(self.pieces) + len(self.index) + sum(map(len, self.blocks))


INDEX = ("row", "length", "trained", "source", "source_row", "line", "offset", "raw_length", "part",
         "roles")  # fmt: skip
"""Columns of the index. ``line`` and ``offset`` are one more than they are, 0 for none; ``roles``
is a set of bits."""


def varints(values: NDArray[Any]) -> bytes:
    """Whole numbers from 0 as little-endian base-128 varints."""
    numbers = np.asarray(values, dtype=np.int64)
    sizes = np.ones(len(numbers), np.int64)
    for bits in range(7, 63, 7):
        more = numbers >> bits > 0
        if not more.any():
            break
        sizes += more
    ends = np.cumsum(sizes)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - sizes
    for place in range(int(sizes.max()) if len(sizes) else 0):
        here = sizes > place
        part = (numbers[here] >> (7 * place)) & 127
        out[starts[here] + place] = part | ((sizes[here] > place + 1) << 7)
    return out.tobytes()


def packed(data: bytes) -> str:
    """Deflated, as text that may stand in a page."""
    return base64.b64encode(zlib.compress(data, LEVEL)).decode("ascii")


def compact(store: Store, tokenizer: Tokenizer, rows: Sequence[int], most_bytes: int) -> Compact:
    """Encode rows, in order, as far as they fit into ``most_bytes`` characters of a page."""
    wanted = np.asarray(rows, dtype=np.int64)
    counts = np.zeros(len(tokenizer.table), np.int64)
    for first in range(0, len(wanted), BLOCK_ROWS):
        ids = np.concatenate([store[int(n)].input_ids for n in wanted[first : first + BLOCK_ROWS]])
        found = np.bincount(ids, minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    used = np.flatnonzero(counts)
    used = used[np.argsort(-counts[used], kind="stable")]
    rank = np.zeros(len(counts), np.int64)
    rank[used] = np.arange(len(used))
    pieces = _pieces(tokenizer, used)
    for block_rows in (BLOCK_ROWS, max(1, BLOCK_ROWS // 16), 1):
        result = Compact(wanted[:0], [], pieces, "", block_rows=block_rows)
        _add_blocks(result, store, rank, wanted, most_bytes - len(pieces))
        if result.blocks:
            break
    return result


def _add_blocks(result: Compact, store: Store, rank: Int64, wanted: Int64, left: int) -> None:
    """Add blocks while they fit into ``left`` characters, together with the index."""
    sets: list[int] = []
    of_a_block = 0
    for first in range(0, len(wanted), result.block_rows):
        block = wanted[first : first + result.block_rows]
        text = packed(_block(store, rank, block, result.roles, sets))
        # The index grows with the rows; its first block tells how much a row of it takes.
        of_a_block = of_a_block or len(_index(store, block, sets))
        left -= len(text) + of_a_block
        if left < 0:
            break
        result.blocks.append(text)
    result.rows = wanted[: len(result.blocks) * result.block_rows]
    result.index = _index(store, result.rows, sets[: len(result.rows)])


def _pieces(tokenizer: Tokenizer, used: Int64) -> str:
    """Ids, whether special, and bytes of the pieces that occur."""
    pieces = tokenizer.pieces(used)
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    special = tokenizer.is_special(used.tolist()).astype(np.int64)
    head = varints(np.concatenate(([len(used)], used, special, lengths)))
    return packed(head + b"".join(pieces))


def _block(store: Store, rank: Int64, rows: Int64, roles: list[str], sets: list[int]) -> bytes:
    """Ids, mask, turns and carried columns of some rows; adds each row's set of roles."""
    ids, masks, turns, carried = [], [], [], []
    for number in rows:
        row = store[int(number)]
        ids.append(row.input_ids)
        masks.append(row.loss_mask)
        bits, flat = 0, []
        for role, start, end in row.turns:
            if role not in roles:
                roles.append(role)
            bits |= 1 << min(roles.index(role), LAST_ROLE_BIT)
            flat += [roles.index(role), end - start]
        sets.append(bits)
        turns += [len(flat) // 2, *flat]
        carried.append(carried_text(row.carried))
    texts = [text.encode("utf-8", "surrogatepass") for text in carried]
    flat_ids = rank[np.concatenate(ids)]
    runs = mask_runs(np.concatenate(masks))
    sizes = np.array([len(text) for text in texts])
    head = (flat_ids, [len(runs)], runs, turns, sizes)
    return b"".join(varints(np.asarray(part)) for part in head) + b"".join(texts)


def carried_text(carried: dict[str, Any]) -> str:
    """Carried columns as JSON text; too long a text is replaced by a note, never cut inside."""
    if not carried:
        return ""
    text = json.dumps(carried, ensure_ascii=False)
    if len(text) <= MOST_CARRIED:
        return text
    return json.dumps({name: f"({len(json.dumps(value)):,} characters; tokenmill inspect --row)"
                       for name, value in carried.items()}, ensure_ascii=False)  # fmt: skip


def mask_runs(mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Lengths of runs, the first of untrained tokens (and 0 where a trained one comes first)."""
    changes = np.flatnonzero(np.diff(mask, prepend=np.uint8(0)))
    runs: NDArray[np.int64] = np.diff(changes, prepend=0, append=len(mask))
    return runs


def _index(store: Store, rows: Int64, sets: Sequence[int]) -> str:
    """The index columns of some rows."""
    columns = origin_columns(store, rows)
    columns["row"] = rows
    columns["length"] = store.lengths[rows].astype(np.int64)
    columns["trained"] = store.trained[rows].astype(np.int64)
    columns["roles"] = np.asarray(sets, dtype=np.int64)
    return packed(b"".join(varints(columns[name]) for name in INDEX))


def origin_columns(store: Store, rows: Int64) -> dict[str, Int64]:
    """Origins of many rows as columns; ``line`` and ``offset`` one more, 0 for none."""
    names = ("source", "source_row", "line", "offset", "raw_length", "part")
    columns = {name: np.zeros(len(rows), np.int64) for name in names}
    slices = np.searchsorted(store.table["first_row"], rows, side="right") - 1
    for at in np.unique(slices):
        entry, reader = store.table[at], store.slice_at(int(at))
        here = np.flatnonzero(slices == at)
        numbers = rows[here] - int(entry["first_row"])
        line = reader.column("line_in_slice")[numbers].astype(np.int64)
        offset = reader.column("offset_in_slice")[numbers].astype(np.int64)
        first_line, first_offset = int(entry["line"]), int(entry["offset"])
        columns["source"][here] = int(entry["source"])
        columns["source_row"][here] = int(entry["source_row"]) + reader.column("row_in_slice")[
            numbers
        ].astype(np.int64)
        has_line = (line >= 0) & (first_line > 0)
        columns["line"][here] = np.where(has_line, first_line + line + 1, 0)
        has_offset = (offset >= 0) & (first_offset >= 0)
        columns["offset"][here] = np.where(has_offset, first_offset + offset + 1, 0)
        columns["raw_length"][here] = reader.column("raw_length")[numbers]
        columns["part"][here] = reader.column("part")[numbers]
    return columns
