"""Masks: from trained characters to trained tokens, for many rows at once.

The rule: a token is trained when any of its bytes lies in a trained span. White space that an
added token swallows around itself is none of its bytes. Three steps, all on
flat arrays. `prove` shows for which rows the tokens' bytes, joined, are exactly the text's bytes:
only there is the running sum of byte lengths the table of offsets. `byte_places` turns the spans'
characters into bytes. `trained_tokens` and `tokens_before` turn places into tokens.

::

    text    < | u | > H i   … < | a | > O k .      tokens' intervals  [0,4) [4,6) [6,10) [10,12) …
    span                              ├─────┤      overlap → mask      0     0     0      1

A token without bytes of its own (a ``▁`` that a metaspace tokenizer invented before a word)
belongs to the character that follows it, as the offsets of `tokenizers` say it too.
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
    """Compare the tokens' bytes with the texts' bytes.

    Args:
        table: Bytes per token id.
        ids: Token ids of all rows, flat.
        row_starts: Where each row starts in ``ids``, and the total.
        text: UTF-8 of all rows, joined.
        byte_starts: Where each row starts in ``text``, and the total.

    Returns:
        Where each token starts, and the total, in the joined pieces; and per row whether its
        pieces, joined, equal its text. Offsets of unproven rows mean nothing.
    """
    # Read as unsigned, a negative id is a large one.
    if len(ids) and int(ids.view(np.uint32).max()) >= len(table):
        # An id that the vocabulary does not know has no bytes: its row cannot be proven.
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
    """Byte positions of character positions, 0 to the number of characters of a UTF-8 text."""
    # Continuation bytes are 0x80..0xBF, as signed numbers below -64: all others start a
    # character.
    inner = np.frombuffer(text, dtype=np.int8) < -64
    if WIDE_ONE_IN * np.count_nonzero(inner) > len(text):
        heads = np.flatnonzero(~inner)
        return np.where(chars == len(heads), len(text), heads.take(chars, mode="clip"))
    # Few are no start: each moves by one the characters that begin behind it.
    behind = np.flatnonzero(inner)
    behind -= np.arange(len(behind))
    return chars + np.searchsorted(behind, chars, side="right")


def flatten_spans(spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends and row numbers of all spans that hold something, flat."""
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
    """One byte per token: 1 where it overlaps a span.

    Args:
        starts: Where each token starts; rows follow one another, so never falling.
        ends: Where each token ends; likewise.
        row_starts: First token of each row, and the total.
        span_starts: Spans in the same coordinates as ``starts``, none of them empty, and of the
            same type, else the search would copy all starts into theirs.
        span_ends: See ``span_starts``.
        span_rows: The row of each span.
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
    # Stretches outside and inside of spans, in turn. Spans may share a token, so a bound never
    # goes back: that gives the shared token to the first of them.
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
    """How many tokens of its row begin before each place: where a turn that ends there ends."""
    found = np.searchsorted(starts, places, side="left")
    found = np.clip(found, row_starts[rows], row_starts[rows + 1])
    before: np.ndarray = found - row_starts[rows]
    return before
