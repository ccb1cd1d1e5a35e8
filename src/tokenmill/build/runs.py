"""Runs of one token in expansions: encoded as one token, and repeated afterwards.

An expansion is mostly one token, thousands of times over, and encoding it would cost more than all
else of its row. Where that token is split off before a tokenizer looks at the rest of a text
(`Processor.repeatable`), the text around it is encoded alike however often it stands there. So
`Folding` leaves one token of each run in the text, and `unfolded` repeats its id. A run that is not
that very token in the encoded text is reported, not repeated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tokenmill.tokenizer import Encoded

_MOST_KEPT = 128  # expansions; one of a large picture has 200 kB


class FoldedRun(NamedTuple):
    """A run in a folded text.

    Attributes:
        at: The character where its one token begins.
        token: Its id.
        length: How many tokens it has.
    """

    at: int
    token: int
    length: int


class Folding:
    """Folds expansions.

    Args:
        tokens: Text and id of those that may be folded.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._pattern = re.compile(rf"({'|'.join(map(re.escape, tokens))})\1+")
        self._known = functools.lru_cache(_MOST_KEPT)(self._fold)

    def fold(self, text: str) -> tuple[str, list[FoldedRun]]:
        """A text with one token of each run, and the runs."""
        return self._known(text) if self._tokens else (text, [])

    def _fold(self, text: str) -> tuple[str, list[FoldedRun]]:
        folded, runs, last = "", [], 0
        for found in self._pattern.finditer(text):
            token = found[1]
            folded += text[last : found.start()]
            runs.append(FoldedRun(len(folded), self._tokens[token], len(found[0]) // len(token)))
            folded += token
            last = found.end()
        return folded + text[last:], runs


def unfolded(encoded: Encoded, folded: Iterable[tuple[int, int, FoldedRun]]) -> Encoded | None:
    """The batch with its runs at their full length; None where one is not what it should be.

    Args:
        encoded: What the folded texts gave.
        folded: Per run its row, the number of the row's turn end that is where it begins, and it.
    """
    found = list(folded)
    if not found:
        return encoded
    rows, marks, runs = zip(*found, strict=True)
    _, tokens, lengths = zip(*runs, strict=True)
    numbers = np.asarray(rows)
    ends = encoded.turn_ends[encoded.turn_starts[numbers] + np.asarray(marks)]
    places = encoded.row_starts[numbers] + ends
    if (places >= encoded.row_starts[numbers + 1]).any():
        return None
    if not np.array_equal(encoded.ids[places], tokens):
        return None
    repeats = np.ones(len(encoded.ids), np.int64)
    repeats[places] = lengths
    return encoded.repeated(repeats)
