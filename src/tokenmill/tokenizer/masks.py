"""Masks: from trained characters to trained tokens, for many rows at once.

The rule: a token is trained when any of its bytes lies in a trained span. Three steps, all on
flat arrays. `prove` shows for which rows the tokens' bytes, joined, are exactly the text's bytes:
only there is the running sum of byte lengths the table of offsets. `byte_positions` turns the
spans' characters into bytes. `trained_tokens` and `tokens_before` turn places into tokens.

::

    text    < | u | > H i   … < | a | > O k .      tokens' intervals  [0,4) [4,6) [6,10) [10,12) …
    span                              ├─────┤      overlap → mask      0     0     0      1

A token without bytes of its own (a ``▁`` that a metaspace tokenizer invented before a word)
belongs to the character that follows it, as the offsets of `tokenizers` say it too.
"""

from __future__ import annotations

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
        proven[row] = view[bounds[row] : bounds[row + 1]] == texts[row]
    return starts, proven


def byte_positions(
    texts: Sequence[bytes], chars: np.ndarray, rows: np.ndarray, ascii_rows: np.ndarray
) -> np.ndarray:
    """Byte positions (within their row) of character positions (within their row).

    Args:
        texts: UTF-8 of each row.
        chars: Character positions, 0 to the row's number of characters.
        rows: The row of each position.
        ascii_rows: Per row, whether it has as many bytes as characters.
    """
    wide: list[int] = np.flatnonzero(~ascii_rows).tolist()
    if len(wide) == 0:
        return chars
    data = np.frombuffer(b"".join([texts[row] for row in wide]), dtype=np.int8)
    # Continuation bytes are 0x80..0xBF, as signed numbers below -64: all others start a character.
    heads = np.flatnonzero(data >= -64)
    lengths = np.fromiter((len(texts[row]) for row in wide), dtype=np.int64, count=len(wide))
    byte_starts = np.concatenate(([0], np.cumsum(lengths)))
    char_starts = np.searchsorted(heads, byte_starts)
    heads = np.append(heads, len(data))
    place = np.full(len(texts), -1, dtype=np.int64)
    place[wide] = np.arange(len(wide))
    concerned = place[rows]
    inside = concerned >= 0
    positions = chars.copy()
    which = concerned[inside]
    positions[inside] = heads[char_starts[which] + chars[inside]] - byte_starts[which]
    return positions


def flatten_spans(spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends and row numbers of all spans that hold something, flat."""
    flat = [
        (row, start, end)
        for row, list_of_spans in enumerate(spans)
        if list_of_spans
        for start, end in list_of_spans
        if start != end
    ]
    if not flat:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none
    table = np.array(flat, dtype=np.int64)
    return table[:, 1], table[:, 2], table[:, 0]


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
    mask = np.zeros(len(starts), dtype=np.uint8)
    if len(span_starts) == 0 or len(starts) == 0:
        return mask
    first = np.searchsorted(ends, span_starts, side="right")
    last = np.searchsorted(starts, span_ends, side="left")
    first = np.maximum(first, row_starts[span_rows])
    last = np.minimum(last, row_starts[span_rows + 1])
    some = first < last
    steps = np.zeros(len(starts) + 1, dtype=np.int32)
    np.add.at(steps, first[some], 1)
    np.add.at(steps, last[some], -1)
    np.greater(np.cumsum(steps[:-1], out=steps[:-1]), 0, out=mask, casting="unsafe")
    return mask


def tokens_before(
    starts: np.ndarray, row_starts: np.ndarray, places: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """How many tokens of its row begin before each place: where a turn that ends there ends."""
    found = np.searchsorted(starts, places, side="left")
    found = np.clip(found, row_starts[rows], row_starts[rows + 1])
    before: np.ndarray = found - row_starts[rows]
    return before
