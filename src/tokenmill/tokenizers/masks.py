"""Masks: from trained characters to trained tokens, for many rows at once.

A token is trained if any of its bytes lies in a trained span::

    text    < | u | > H i   … < | a | > O k .      tokens' intervals  [0,4) [4,6) [6,10) [10,12) …
    span                              ├─────┤      overlap → mask      0     0     0      1

White space that an added token strips is none of its bytes. A token without bytes of its own (a
``▁`` that a metaspace tokenizer adds before a word) is part of the character that follows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tokenmill.tokenizers.pieces import PieceTable

WIDE_ONE_IN = 16  # continuation bytes, from which on it is cheaper to list all characters

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
        Where each token starts in the joined pieces, and the total; and per row whether its
        pieces, joined, equal its text. Offsets of unproven rows are meaningless.
    """
    # Read as unsigned, a negative id is a large one.
    if len(ids) and int(ids.view(np.uint32).max()) >= len(table):
        # An unknown id has no bytes: its row cannot be proven.
        unknown = np.flatnonzero((ids < 0) | (ids >= len(table)))
        known = ids.copy()
        known[unknown] = 0
        starts, proven = prove(table, known, row_starts, text, byte_starts)
        proven[np.searchsorted(row_starts, unknown, side="right") - 1] = False
        return starts, proven
    starts, joined = table.joined(table.twins(ids, row_starts))
    bounds = starts[row_starts]
    proven = np.diff(bounds) == np.diff(byte_starts)
    if proven.all() and joined.equals(pa.py_buffer(text)):
        return starts, proven
    view = memoryview(joined)
    for row in np.flatnonzero(proven).tolist():
        # As bytes: memoryviews compare item by item, bytes by one memcmp.
        piece = bytes(view[bounds[row] : bounds[row + 1]])
        proven[row] = piece == text[byte_starts[row] : byte_starts[row + 1]]
    return starts, proven


def byte_places(text: bytes, chars: np.ndarray) -> np.ndarray:
    """Return byte positions of character positions of a UTF-8 text, its end included."""
    # Continuation bytes are 0x80..0xBF, as signed numbers below -64.
    inner = np.frombuffer(text, dtype=np.int8) < -64
    if WIDE_ONE_IN * np.count_nonzero(inner) > len(text):
        heads = np.flatnonzero(~inner)
        return np.where(chars == len(heads), len(text), heads.take(chars, mode="clip"))
    # Few are no start: each moves the characters after it by one.
    behind = np.flatnonzero(inner)
    behind -= np.arange(len(behind))
    return chars + np.searchsorted(behind, chars, side="right")


def flatten_spans(spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, ends and row numbers of all spans that are not empty."""
    given = [row or () for row in spans]
    counts = np.fromiter(map(len, given), np.int64, len(given))
    pairs = itertools.chain.from_iterable(given)
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
    """Return one byte per token: 1 where it overlaps a span.

    ``starts`` and ``ends`` of tokens ascend. Spans are in the same coordinates, none of them is
    empty, and have the same type: otherwise the search would copy all starts.
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
    # Runs outside and inside of spans, in turn. Spans may share a token, so a bound never goes
    # back: that gives the shared token to the first of them.
    bounds = np.empty(2 * len(first) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(starts)
    bounds[1:-1:2], bounds[2:-1:2] = first, last
    np.maximum.accumulate(bounds, out=bounds)
    inside = np.zeros(2 * len(first) + 1, dtype=np.uint8)
    inside[1::2] = 1
    return np.repeat(inside, np.diff(bounds))


def tokens_before(
    starts: np.ndarray, row_starts: np.ndarray, places: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return how many tokens of its row begin before each place."""
    found = np.searchsorted(starts, places, side="left")
    found = np.clip(found, row_starts[rows], row_starts[rows + 1])
    before: np.ndarray = found - row_starts[rows]
    return before
