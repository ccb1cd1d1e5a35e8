"""A file and its index while they are open: where rows are, and whether they still are there.

`OpenLines` is held by a reader and dropped as one when the pool closes it. It locates rows,
watches the file's stat, and makes the *hot path* of ``rows[i]``: one closure over everything a row
needs (a pread, a parse, and as little as possible around them), which answers None whenever
anything is out of the ordinary, so that the reader goes the careful way.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

from tokenmill.errors import SourceChanged
from tokenmill.source.assemble import LONG_GAP, START_SHIFT
from tokenmill.source.block import digest_of
from tokenmill.source.bytefile import ByteFile, LocalFile, Signature
from tokenmill.source.index import Index
from tokenmill.source.limits import ENTRIES_PER_PAGE, RECHECK_SECONDS
from tokenmill.source.parse import SHALLOW, decode
from tokenmill.source.spans import end_of_element, end_of_line

_PAGE_SHIFT = ENTRIES_PER_PAGE.bit_length() - 1


class OpenLines:
    """An open line or array file.

    Args:
        file: Its bytes, or its copy's.
        index: Its rows.

    Attributes:
        value: Parses one row, or None when that needs care.
    """

    def __init__(self, file: ByteFile, index: Index) -> None:
        self.file = file
        self.index = index
        self.value = _hot_path(file, index) if isinstance(file, LocalFile) else _never
        self._kind = index.document.kind
        self._believed_until = 0.0
        self._verified: set[int] = set()  # blocks found good ...
        self._verified_under: Signature | None = None  # ... while the file had this signature

    def locate(self, row: int) -> tuple[int, int]:
        """Offset and length of one row."""
        index = self.index
        if not index.checked[row >> _PAGE_SHIFT]:
            index.check_page(row >> _PAGE_SHIFT)
        block = bisect_right(index.first_rows, row) - 1
        word, offset = index.entries[row], index.offsets[block]
        start, gap = word >> START_SHIFT, word & LONG_GAP
        if row + 1 < index.first_rows[block + 1]:
            stop = index.entries[row + 1] >> START_SHIFT
        else:
            stop = index.offsets[block + 1] - offset
        if gap < LONG_GAP:
            return offset + start, stop - start - gap
        return offset + start, self._end(row, offset + start, offset + stop) - offset - start

    def _end(self, row: int, offset: int, limit: int) -> int:
        if self._kind == "lines":
            return end_of_line(self.file, offset, limit)
        return end_of_element(self.file, offset, limit, row + 1 == self.index.document.rows)

    def look_again(self, row: int) -> None:
        """See whether the file is still what was indexed; the row's block decides if need be.

        Raises:
            SourceChanged: It is not.
        """
        if not isinstance(self.file, LocalFile):
            return  # a copy on the shelf checks its own frames
        now = monotonic()
        if now < self._believed_until:
            return
        seen = self.file.now()
        if seen == self.file.signature:
            self._believed_until = now + RECHECK_SECONDS
            return
        if seen.size != self.file.signature.size:
            self.file.check()
        # The times changed, not the size: from now on every block is looked at before it is read.
        if seen != self._verified_under:
            self._verified, self._verified_under = set(), seen
        number = bisect_right(self.index.first_rows, row) - 1
        if number not in self._verified:
            self._verify(number)
            self._verified.add(number)

    def _verify(self, number: int) -> None:
        block = self.index.block(number)
        if digest_of(self.file, block.offset, block.length) != block.digest:
            raise SourceChanged(
                f"bytes {block.offset} to {block.offset + block.length} are not what was indexed; "
                "open the file again",
                path=self.file.path,
                offset=block.offset,
            )


def _never(row: int) -> None:
    """No hot path: the bytes do not come from a descriptor."""


def _hot_path(file: LocalFile, index: Index) -> Callable[[int], dict[str, Any] | None]:
    # Closed over instead of looked up: attribute access would cost a fifth of the row.
    entries, checked, first_rows, offsets = (
        index.entries,
        index.checked,
        index.first_rows,
        index.offsets,
    )
    fd, ctime_ns = file.fd, file.signature.ctime_ns
    pread, fstat, clock = os.pread, os.fstat, monotonic
    believed_until = 0.0

    def value(row: int, keep_open: LocalFile = file) -> dict[str, Any] | None:
        nonlocal believed_until
        now = clock()
        if now > believed_until:
            # Every change of content, size or name changes the ctime, which nobody can set.
            if fstat(fd).st_ctime_ns != ctime_ns:
                return None
            believed_until = now + RECHECK_SECONDS
        if not checked[row >> _PAGE_SHIFT]:
            return None
        block = bisect_right(first_rows, row) - 1
        word = entries[row]
        start = word >> START_SHIFT
        gap = word & LONG_GAP
        offset = offsets[block]
        if row + 1 < first_rows[block + 1]:
            length = (entries[row + 1] >> START_SHIFT) - start - gap
        else:
            length = offsets[block + 1] - offset - start - gap
        if gap == LONG_GAP or length > SHALLOW:
            return None
        data = pread(fd, length, offset + start)
        if len(data) != length:
            return None
        try:
            return decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    return value
