"""Which rows are kept: a compare of stored lengths, and the k-th row that passes it.

A `Kept` answers "how many rows pass" and "which source row is the k-th of them" for one limit,
straight from the mapped lengths. It keeps one running count per page of `PAGE` rows and nothing
per row; finding rows compares a page again, which takes microseconds. So another ``max_length`` is
one vectorised pass over four bytes per row, and nothing is written for it.

The rule is that of the eager datasets: a prompt is kept when its tokens, counted without added
special tokens, are at most ``max_length``. Messages that no template renders have no length;
where the first prompt is such a list, nothing is filtered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.prompts.lengths import NO_LENGTH, REJECTED, Int32Array

PAGE = 4096  # rows per running count: a page is 16 KiB, compared in two microseconds

Int64Array = npt.NDArray[np.int64]


class Kept:
    """The rows that a limit keeps.

    Args:
        lengths: One per source row, mapped.
        max_length: Most tokens of a prompt; None keeps every prompt.

    Attributes:
        overlong: Prompts that the limit leaves out.
    """

    def __init__(self, lengths: Int32Array, max_length: int | None) -> None:
        self._lengths = lengths
        self._limit = max_length
        prompts = 0
        counts = np.zeros(-(-len(lengths) // PAGE) + 1, dtype=np.int64)
        if max_length is not None and self._first() == NO_LENGTH:
            self._limit = None
        for number in range(len(counts) - 1):
            page = lengths[number * PAGE : (number + 1) * PAGE]
            prompts += int(np.count_nonzero(page != REJECTED))
            counts[number + 1] = np.count_nonzero(self._passes(page))
        self._before = np.cumsum(counts)
        self.overlong = prompts - len(self)

    def _first(self) -> int:
        """The length of the first prompt."""
        for start in range(0, len(self._lengths), PAGE):
            page = self._lengths[start : start + PAGE]
            prompts = page[page != REJECTED]
            if prompts.size:
                return int(prompts[0])
        return REJECTED

    def _passes(self, lengths: Int32Array) -> npt.NDArray[np.bool_]:
        passes: npt.NDArray[np.bool_] = lengths != REJECTED
        if self._limit is not None:
            passes &= lengths <= self._limit
        return passes

    def __len__(self) -> int:
        return int(self._before[-1])

    def rows(self, numbers: Int64Array) -> Int64Array:
        """The source rows of kept ones, by their numbers among the kept."""
        pages = np.searchsorted(self._before, numbers, side="right") - 1
        found = np.empty(numbers.shape, dtype=np.int64)
        for page in np.unique(pages).tolist():
            here = pages == page
            start = page * PAGE
            passing = np.flatnonzero(self._passes(self._lengths[start : start + PAGE]))
            found[here] = start + passing[numbers[here] - self._before[page]]
        return found

    def row(self, number: int) -> int:
        """The source row of one: the scalar twin."""
        page = int(np.searchsorted(self._before, number, side="right")) - 1
        start = page * PAGE
        passing = np.flatnonzero(self._passes(self._lengths[start : start + PAGE]))
        return start + int(passing[number - int(self._before[page])])

    def overlong_rows(self) -> Int64Array:
        """The source rows that the limit leaves out, in order."""
        if self._limit is None:
            return np.zeros(0, dtype=np.int64)
        out = (self._lengths != REJECTED) & (self._lengths > self._limit)
        return np.flatnonzero(out)
