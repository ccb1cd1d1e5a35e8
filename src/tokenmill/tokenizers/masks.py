"""Map trained characters to trained tokens, for many rows at once.

A token is trained if any of its bytes is in a trained span::

    text    < | u | > H i   … < | a | > O k .      tokens' intervals  [0,4) [4,6) [6,10) [10,12) …
    span                              ├─────┤      overlap → mask      0     0     0      1

White space that an added token strips is not part of the token. A token without bytes (a ``▁``
that a metaspace tokenizer adds before a word) counts as part of the next character.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tokenmill.tokenizers.pieces import PieceTable

WIDE_TEXT_RATIO = 16  # with more than 1/16 continuation bytes, listing all characters is faster

Spans = Sequence[Sequence[tuple[int, int]] | None]


def prove(
    table: PieceTable,
    ids: np.ndarray,
    row_starts: np.ndarray,
    text: bytes,
    byte_starts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Compare the bytes of the tokens with the bytes of the texts.

    Returns:
        The start of each token in the joined pieces, followed by the total; and per row whether
        its joined pieces equal its text. Offsets of unproven rows are meaningless.
    """
    # Viewed as unsigned, a negative id is a large number.
    if len(ids) and int(ids.view(np.uint32).max()) >= len(table):
        # An unknown id has no bytes, so its row cannot be proven.
        unknown = np.flatnonzero((ids < 0) | (ids >= len(table)))
        known = ids.copy()
        known[unknown] = 0
        starts, proven = prove(table, known, row_starts, text, byte_starts)
        proven[np.searchsorted(row_starts, unknown, side="right") - 1] = False
        return starts, proven
    starts, joined = table.joined(table.prefixless_ids(ids, row_starts))
    bounds = starts[row_starts]
    proven = np.diff(bounds) == np.diff(byte_starts)
    if proven.all() and joined.equals(pa.py_buffer(text)):
        return starts, proven
    view = memoryview(joined)
    for row in np.flatnonzero(proven).tolist():
        # Compare bytes, which is one memcmp; memoryviews compare item by item.
        piece = bytes(view[bounds[row] : bounds[row + 1]])
        proven[row] = piece == text[byte_starts[row] : byte_starts[row + 1]]
    return starts, proven


def byte_positions(text: bytes, chars: np.ndarray) -> np.ndarray:
    """Return the byte positions of character positions (including the end) in a UTF-8 text."""
    # Continuation bytes are 0x80..0xBF: below -64 as signed numbers.
    inner = np.frombuffer(text, dtype=np.int8) < -64
    if WIDE_TEXT_RATIO * np.count_nonzero(inner) > len(text):
        heads = np.flatnonzero(~inner)
        return np.where(chars == len(heads), len(text), heads.take(chars, mode="clip"))
    # Each of the few continuation bytes moves the characters after it by one.
    shifts = np.flatnonzero(inner)
    shifts -= np.arange(len(shifts))
    return chars + np.searchsorted(shifts, chars, side="right")


def flatten_spans(spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    per_row = [row or () for row in spans]
    counts = np.fromiter(map(len, per_row), np.int64, len(per_row))
    pairs = itertools.chain.from_iterable(per_row)
    numbers = np.fromiter(itertools.chain.from_iterable(pairs), np.int64, 2 * int(counts.sum()))
    starts, ends = numbers[::2], numbers[1::2]
    rows = np.repeat(np.arange(len(spans)), counts)
    some = starts != ends
    return (starts, ends, rows) if some.all() else (starts[some], ends[some], rows[some])


def trained_tokens(
    starts: np.ndarray,
    ends: np.ndarray,
    row_starts: np.ndarray,
    span_starts: np.ndarray,
    span_ends: np.ndarray,
    span_rows: np.ndarray,
) -> np.ndarray:
    """Return one byte per token: 1 if it overlaps a span.

    ``starts`` and ``ends`` of tokens ascend. Spans use the same coordinates and are not empty.
    Their dtype must equal that of ``starts``; otherwise the search would copy all starts.
    """
    if len(span_starts) == 0 or len(starts) == 0:
        return np.zeros(len(starts), dtype=np.uint8)
    first = np.searchsorted(ends, span_starts, side="right")
    last = np.searchsorted(starts, span_ends, side="left")
    first = np.maximum(first, row_starts[span_rows])
    last = np.minimum(last, row_starts[span_rows + 1])
    if bool((first[1:] < first[:-1]).any()):
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
    # Bounds of alternating runs outside and inside of spans. Spans may share a token. Bounds never
    # decrease, so a shared token counts for the first span.
    bounds = np.empty(2 * len(first) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(starts)
    bounds[1:-1:2], bounds[2:-1:2] = first, last
    np.maximum.accumulate(bounds, out=bounds)
    inside = np.zeros(2 * len(first) + 1, dtype=np.uint8)
    inside[1::2] = 1
    return np.repeat(inside, np.diff(bounds))


def tokens_before(
    starts: np.ndarray, row_starts: np.ndarray, positions: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return for each position the number of tokens of its row that start before it."""
    tokens = np.searchsorted(starts, positions, side="left")
    tokens = np.clip(tokens, row_starts[rows], row_starts[rows + 1])
    before: np.ndarray = tokens - row_starts[rows]
    return before
