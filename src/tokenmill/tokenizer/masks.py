"""Masks: from trained characters to trained tokens, for many rows at once.

The rule: a token is trained when any of its bytes lies in a trained span. Three steps, all on
flat arrays. `prove` shows for which rows the tokens' bytes, joined, are exactly the text's bytes:
only there is the running sum of byte lengths the table of offsets. `CharMap` turns the spans'
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

from tokenmill.tokenizer.pieces import PieceTable

Spans = Sequence[Sequence[tuple[int, int]] | None]


def prove(
    table: PieceTable, ids: np.ndarray, row_starts: np.ndarray, texts: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
    """Compare the tokens' bytes with the texts' bytes.

    Args:
        table: Bytes per token id.
        ids: Token ids of all rows, flat.
        row_starts: Where each row starts in ``ids``, and the total.
        texts: UTF-8 of each row.

    Returns:
        Where each token starts, and the total, in the joined pieces; and per row whether its
        pieces, joined, equal its text. Offsets of unproven rows mean nothing.
    """
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(table)):
        # An id that the vocabulary does not know has no bytes: its row cannot be proven.
        unknown = np.flatnonzero((ids < 0) | (ids >= len(table)))
        known = ids.copy()
        known[unknown] = 0
        starts, proven = prove(table, known, row_starts, texts)
        proven[np.searchsorted(row_starts, unknown, side="right") - 1] = False
        return starts, proven
    starts, joined = table.joined(table.twins(ids, row_starts))
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    bounds = starts[row_starts].astype(np.int64)
    if np.array_equal(np.diff(bounds), lengths) and joined.equals(pa.py_buffer(b"".join(texts))):
        return starts, np.ones(len(texts), dtype=bool)
    view = memoryview(joined)
    proven = np.diff(bounds) == lengths
    for row in np.flatnonzero(proven).tolist():
        # As bytes: memoryviews compare item by item, bytes by one memcmp.
        proven[row] = bytes(view[bounds[row] : bounds[row + 1]]) == texts[row]
    return starts, proven


class CharMap:
    """Where the characters of some rows lie in their bytes.

    Args:
        texts: UTF-8 of each row.
        ascii_rows: Per row, whether it has as many bytes as characters; nothing is stored of it.
    """

    def __init__(self, texts: Sequence[bytes], ascii_rows: np.ndarray) -> None:
        wide: list[int] = np.flatnonzero(~ascii_rows).tolist()
        self._place = np.full(len(texts), -1, dtype=np.int64)
        self._place[wide] = np.arange(len(wide))
        some = [texts[row] for row in wide]
        data = np.frombuffer(b"".join(some), dtype=np.int8)
        # Continuation bytes are 0x80..0xBF, as signed numbers below -64: all others start a
        # character.
        self._heads = np.flatnonzero(data >= -64)
        self._byte_starts = np.cumsum([0, *map(len, some)])
        self._char_starts = np.searchsorted(self._heads, self._byte_starts)

    def positions(self, chars: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Byte positions of character positions, both counted within their row.

        Args:
            chars: Character positions, 0 to the row's number of characters.
            rows: The row of each.
        """
        place = self._place[rows]
        wide = place >= 0
        if not wide.any():
            return chars
        positions = chars.copy()
        which = place[wide]
        index = self._char_starts[which] + chars[wide]
        at_end = index == self._char_starts[which + 1]
        index[at_end] = 0
        found = self._heads[index] - self._byte_starts[which]
        ends = self._byte_starts[which + 1] - self._byte_starts[which]
        positions[wide] = np.where(at_end, ends, found)
        return positions


def flatten_spans(spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends and row numbers of all spans that hold something, flat."""
    counts = np.fromiter((len(row) if row else 0 for row in spans), np.int64, len(spans))
    total = int(counts.sum())
    pairs = itertools.chain.from_iterable(row for row in spans if row)
    numbers = np.fromiter(itertools.chain.from_iterable(pairs), np.int64, 2 * total)
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
        span_starts: Spans in the same coordinates as ``starts``, none of them empty.
        span_ends: See ``span_starts``.
        span_rows: The row of each span.
    """
    if len(span_starts) == 0 or len(starts) == 0:
        return np.zeros(len(starts), dtype=np.uint8)
    # In the haystack's own type: else the search would copy all of it into the needles'.
    first = np.searchsorted(ends, span_starts.astype(ends.dtype), side="right")
    last = np.searchsorted(starts, span_ends.astype(starts.dtype), side="left")
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
    found = np.searchsorted(starts, places.astype(starts.dtype), side="left")
    found = np.clip(found, row_starts[rows], row_starts[rows + 1])
    before: np.ndarray = found - row_starts[rows]
    return before
