"""A file and its index while they are open: where rows are, and whether they still are there.

`OpenLines` is held by a reader and dropped as one when the pool closes it. It gives the bytes of
rows and watches the file's stat. Its `Hot` part is what ``rows[i]`` needs for an ordinary row and
nothing else: a map of starts, a descriptor, and until when the file is believed to be unchanged.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from time import monotonic
from typing import Any

from tokenmill.errors import SourceChanged
from tokenmill.source.block import digest_of
from tokenmill.source.bytefile import ByteFile, LocalFile, Signature
from tokenmill.source.index import Index
from tokenmill.source.limits import LARGE_ROW, RECHECK_SECONDS, STARTS_PER_PAGE
from tokenmill.source.parse import PARSING, SHALLOW, decode
from tokenmill.source.spans import element_of, end_of_line, line_of

PAGE_SHIFT = STARTS_PER_PAGE.bit_length() - 1


class Hot:
    """What a single row needs, for `value` here and for the same lines inside ``Rows``.

    Args:
        file: The open file.
        index: Its rows.
    """

    __slots__ = ("_ctime_ns", "_file", "believed_until", "checked", "fd", "starts")

    def __init__(self, file: LocalFile, index: Index) -> None:
        self.fd = file.fd
        self.starts = index.starts
        self.checked = index.checked
        self.believed_until = 0.0
        self._ctime_ns = file.signature.ctime_ns
        self._file = file  # keeps the descriptor open

    def is_unchanged(self, now: float) -> bool:
        """Look at the file's stat; every change of content, size or name changes the ctime."""
        if os.fstat(self.fd).st_ctime_ns != self._ctime_ns:
            return False
        self.believed_until = now + RECHECK_SECONDS
        return True

    def value(self, row: int) -> dict[str, Any] | None:
        """One parsed row; None when anything about it needs care."""
        now = monotonic()
        if now > self.believed_until and not self.is_unchanged(now):
            return None
        if not self.checked[row >> PAGE_SHIFT]:
            return None
        # Up to the next row: line breaks and blank lines are white space to the parser, and a
        # stretch that ends early because the file was cut is no JSON.
        start = self.starts[row]
        length = self.starts[row + 1] - start
        if length > SHALLOW:
            return None
        try:
            return decode(os.pread(self.fd, length, start))
        except PARSING:
            return None


class OpenLines:
    """An open line or array file.

    Args:
        file: Its bytes, or its copy's.
        index: Its rows.

    Attributes:
        hot: The short way to single rows; None for arrays and copies.
    """

    def __init__(self, file: ByteFile, index: Index) -> None:
        self.file = file
        self.index = index
        self.is_lines = index.document.kind == "lines"
        plain = self.is_lines and isinstance(file, LocalFile)
        self.hot = Hot(file, index) if plain and isinstance(file, LocalFile) else None
        self._believed_until = 0.0
        self._verified: set[int] = set()  # blocks found good ...
        self._verified_under: Signature | None = None  # ... while the file had this signature

    def stretch(self, row: int) -> tuple[int, int]:
        """Where a row starts, and where the next one does."""
        index = self.index
        if not index.checked[row >> PAGE_SHIFT]:
            index.check_page(row >> PAGE_SHIFT)
        return index.starts[row], index.starts[row + 1]

    def locate(self, row: int) -> tuple[int, int]:
        """Offset and length of a row."""
        start, stop = self.stretch(row)
        if stop - start > LARGE_ROW and self.is_lines:
            return start, end_of_line(self.file, start, stop) - start
        return start, len(self.trimmed(row, self.pread(start, stop)))

    def trimmed(self, row: int, stretch: bytes) -> bytes:
        """The row itself, of the bytes up to the next one."""
        if self.is_lines:
            return line_of(stretch)
        return element_of(stretch, row + 1 == self.index.document.rows)

    def pread(self, start: int, stop: int) -> bytes:
        """Bytes that must be there."""
        data = self.file.pread(stop - start, start)
        if len(data) != stop - start:
            raise SourceChanged("the file became shorter", path=self.file.path, offset=start)
        return data

    def look_again(self, row: int) -> None:
        """See whether the file is still what was indexed; the row's block decides if need be.

        Raises:
            SourceChanged: It is not.
        """
        if not isinstance(self.file, LocalFile):
            return  # a copy checks its own frames, a remote object each of its ranges
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
