"""From rows and cuts to what an index stores.

An *entry* is one unsigned 32-bit integer per row: the row's start within its block (24 bits) and
the *gap* behind it (8 bits): the bytes from the row's end to the next row's start, or to the end
of the block. A newline is a gap of 1, CRLF of 2, a blank line adds its bytes; gaps too large for
8 bits are `LONG_GAP`, and the reader then finds the row's end in the bytes themselves. So an index
costs four bytes per row, whatever the file looks like.

A `BlockEntry` is one line of the table of blocks: byte span, rows, lines and the xxh3-128 of the
span. The `Assembler` is fed portions of a scan in order and knows nothing of how rows were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.source.cut import Integers

Entries = npt.NDArray[np.uint32]

LONG_GAP = 255
START_SHIFT = 8

BLOCK_TABLE = np.dtype(
    [
        ("offset", "<i8"),
        ("length", "<i8"),
        ("first_row", "<i8"),
        ("rows", "<i8"),
        ("first_line", "<i8"),
        ("lines", "<i8"),
        ("digest", "u1", (16,)),
    ]
)


class BlockEntry(NamedTuple):
    """One block of a file: where it is, what it counts, what it contains."""

    offset: int
    length: int
    first_row: int
    rows: int
    first_line: int  # 1 + line breaks before the block
    lines: int  # line formats: lines that start in it; arrays: line breaks in it
    digest: str


class Assembler:
    """Turns scanned rows into entries and blocks.

    Attributes:
        blocks: The finished blocks, in order; complete after `finish`.
        rows: Rows seen.
    """

    def __init__(self) -> None:
        self.blocks: list[BlockEntry] = []
        self.rows = 0
        self._offset = 0  # of the open block
        self._first_row = 0
        self._first_line = 1
        self._lines = 0
        self._hash = xxhash.xxh3_128()
        self._held: tuple[int, int] | None = None  # a row whose gap is not known yet

    def feed(
        self,
        data: memoryview,
        base: int,
        starts: Integers,
        ends: Integers,
        marks: Integers,
        cuts: Sequence[int],
    ) -> Entries:
        """Take the next portion of the file.

        Args:
            data: The portion's bytes; every byte of the file is fed once.
            base: Offset of the portion.
            starts: Offset of each row that starts here, ascending.
            ends: Offset behind each of them.
            marks: Offsets that count as lines: line starts, or line breaks for arrays.
            cuts: Offsets at which a block opens.

        Returns:
            The entries that are now known; a row's comes with its successor.
        """
        entries = self._entries(starts, ends, cuts)
        self.rows += len(starts)
        before = self.rows - len(starts)
        position, mark = base, 0
        for cut in cuts:
            self._hash.update(data[position - base : cut - base])
            marks_before = int(np.searchsorted(marks, cut))
            self._lines += marks_before - mark
            self._close(cut, before + int(np.searchsorted(starts, cut)))
            position, mark = cut, marks_before
        self._hash.update(data[position - base :])
        self._lines += len(marks) - mark
        return entries

    def finish(self, end: int) -> Entries:
        """The file ends here: close the last block, give the last entry."""
        entries = np.empty(0, dtype=np.uint32)
        if self._held is not None:
            start, stop = self._held
            gap = min(end - stop, LONG_GAP)
            entries = np.array([(start - self._offset) << START_SHIFT | gap], dtype=np.uint32)
            self._held = None
        self._close(end, self.rows)
        return entries

    def _entries(self, starts: Integers, ends: Integers, cuts: Sequence[int]) -> Entries:
        if self._held is not None:
            starts = np.concatenate([np.array([self._held[0]], dtype=np.int64), starts])
            ends = np.concatenate([np.array([self._held[1]], dtype=np.int64), ends])
        if not len(starts):
            return np.empty(0, dtype=np.uint32)
        opens = np.array([self._offset, *cuts], dtype=np.int64)
        block = np.searchsorted(opens, starts, side="right") - 1
        # The last row's gap ends at a row or cut that is still to come, unless it is cut here.
        complete = len(starts) if block[-1] < len(cuts) else len(starts) - 1
        self._held = None if complete == len(starts) else (int(starts[-1]), int(ends[-1]))
        closes = np.append(opens[1:], np.iinfo(np.int64).max)[block]
        following = np.append(starts[1:], np.iinfo(np.int64).max)
        gaps = np.minimum(np.minimum(following, closes) - ends, LONG_GAP)[:complete]
        within = (starts - opens[block])[:complete]
        words: Entries = (within << START_SHIFT | gaps).astype(np.uint32)
        return words

    def _close(self, end: int, rows: int) -> None:
        self.blocks.append(
            BlockEntry(
                offset=self._offset,
                length=end - self._offset,
                first_row=self._first_row,
                rows=rows - self._first_row,
                first_line=self._first_line,
                lines=self._lines,
                digest=self._hash.hexdigest(),
            )
        )
        self._offset, self._first_row = end, rows
        self._first_line += self._lines
        self._lines = 0
        self._hash = xxhash.xxh3_128()


def table_of(blocks: Sequence[BlockEntry]) -> bytes:
    """The blocks as the bytes of blocks.bin."""
    table = np.zeros(len(blocks), dtype=BLOCK_TABLE)
    for name in ("offset", "length", "first_row", "rows", "first_line", "lines"):
        table[name] = [getattr(block, name) for block in blocks]
    if blocks:
        digests = b"".join(bytes.fromhex(block.digest) for block in blocks)
        table["digest"] = np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16)
    return table.tobytes()
