"""Finding the rows of a line file at memory speed.

One pass with one reused buffer (a mapped scan would count as resident memory): newlines are found
by numpy, blank lines are told apart, the `Cutter` says where blocks open, the `Assembler` hashes
and makes entries. The buffer always begins at a line's first byte; it grows for a long line up to
the limit of a row, and a line beyond that is only walked over, never held.

A row is a line that holds more than spaces, tabs and carriage returns; its bytes exclude the
newline, one carriage return before it, and a byte order mark at the very start of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokenmill.source.bytefile import SourceBytes
from tokenmill.source.cut import SLACK, Cutter, Integers, first_qualified
from tokenmill.source.index import Assembler
from tokenmill.source.limits import MAX_ROW, SCAN_BUFFER

BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r"
WHITE_SPACE = b" \t\r\n"  # JSON's
_NEWLINE = 10
_ONE = np.uint64(1)
_BYTE_NUMBER = np.uint64(0x0001020304050607)
_HEAP_BLOCK = 4 << 20  # bytes: larger than any array of a scan

Bytes = npt.NDArray[np.uint8]


def settle_heap() -> None:
    """Have the allocator keep what numpy frees, instead of returning it a hundred times a second.

    glibc raises its thresholds for mapping and trimming when a large block is freed; without this
    a third of a scan's time would go into faulting the same pages in again. The block itself is
    never touched. Other allocators do not care.
    """
    block = bytearray(_HEAP_BLOCK)
    del block


def _true_positions(mask: npt.NDArray[np.bool_]) -> Integers:
    """``np.flatnonzero`` of a mask of whole words, at half its price where lines are longer."""
    words = mask.view("<u8")
    marked = np.flatnonzero(words != 0)
    found = words[marked]
    if (found & (found - _ONE)).any():
        return np.flatnonzero(mask)  # two newlines within eight bytes
    # A word with a single 1 in byte k, times this constant, has k in its highest byte.
    places = marked << 3
    places += ((found * _BYTE_NUMBER) >> np.uint64(56)).astype(np.int64)
    return places


class LineScan:
    """One pass over a line file; no result depends on the size of its buffer.

    Attributes:
        assembler: Holds the blocks and counts once `starts` is exhausted.
    """

    def __init__(self, file: SourceBytes, buffer_bytes: int = SCAN_BUFFER) -> None:
        self.assembler = Assembler()
        self.bytes = 0
        self._file = file
        self._capacity = buffer_bytes
        self._cutter = Cutter()
        self._buffer = bytearray(buffer_bytes + SLACK)
        self._mask = np.empty(0, dtype=bool)
        settle_heap()

    def starts(self) -> Iterator[Integers]:
        """Scan, giving the start of every row, and at last the end of the file."""
        base = held = 0  # offset of the buffer's first byte, bytes kept from the last round
        while True:
            self._make_room(held)
            read = self._file.read_into(memoryview(self._buffer)[held:-SLACK], base + held)
            filled = held + read
            data: Bytes = np.frombuffer(self._buffer, dtype=np.uint8, count=filled)
            breaks = self._line_breaks(data, held)
            if read == 0:
                if filled:
                    yield self._lines(data, base, np.append(breaks, filled))
                self.bytes = base + filled
                self.assembler.finish(self.bytes)
                yield np.array([self.bytes], dtype=np.int64)
                return
            if len(breaks):
                yield self._lines(data, base, breaks)
                done = int(breaks[-1]) + 1
            elif filled > MAX_ROW:
                starts, done = self._walk_over(base, filled)
                yield starts
                base, held = base + done, 0
                continue
            else:
                done = 0
            held = filled - done
            memoryview(self._buffer)[:held] = bytes(memoryview(self._buffer)[done:filled])
            base += done

    def _line_breaks(self, data: Bytes, held: int) -> Integers:
        """Where the newlines among the new bytes are."""
        fresh = data[held:]
        if len(self._mask) < len(fresh) + 8:
            self._mask = np.empty((len(fresh) + 15) // 8 * 8, dtype=bool)
        # Reused: fresh pages would cost more than the comparison.
        mask = self._mask[: (len(fresh) + 7) // 8 * 8]
        mask[len(fresh) :] = False
        np.equal(fresh, _NEWLINE, out=mask[: len(fresh)])
        breaks = _true_positions(mask)
        breaks += held
        return breaks

    def _make_room(self, held: int) -> None:
        """Grow for a line that fills the buffer, shrink after it."""
        size = len(self._buffer) - SLACK
        wanted = self._capacity
        while wanted < 2 * held:
            wanted *= 2
        if wanted != size:
            # Views of the old buffer may be alive, so it is replaced and not resized.
            self._mask = np.empty(0, dtype=bool)
            fresh = bytearray(wanted + SLACK)
            fresh[:held] = memoryview(self._buffer)[:held]
            self._buffer = fresh

    def _lines(self, data: Bytes, base: int, breaks: Integers) -> Integers:
        """Account for whole lines; ``breaks`` are their ends, the last may be the file's."""
        starts = np.empty(len(breaks), dtype=np.int64)
        starts[0] = 0
        starts[1:] = breaks[:-1] + 1
        stops = np.minimum(breaks + 1, len(data))
        row_starts = starts
        if base == 0 and self._buffer[: len(BOM)] == BOM:
            row_starts = starts.copy()
            row_starts[0] = len(BOM)
        blank = self._blank(data, row_starts, breaks)
        if blank is not None:
            rows = np.flatnonzero(~blank)
            row_starts, breaks = row_starts[rows], breaks[rows]
        else:
            rows = None
        lengths = breaks - row_starts

        def qualified(lo: int, hi: int) -> int:
            if rows is None:
                return first_qualified(self._buffer, row_starts, lengths, lo, hi)
            first, last = np.searchsorted(rows, (lo, hi)).tolist()
            found = first_qualified(self._buffer, row_starts, lengths, first, last)
            return int(rows[found]) if found >= 0 else -1

        lines = starts + base
        cuts = [int(lines[cut]) for cut in self._cutter.feed(lines, stops + base, qualified)]
        found = row_starts + base
        portion = memoryview(self._buffer)[: int(stops[-1])]
        self.assembler.feed(portion, base, found, lines, cuts)
        return found

    @staticmethod
    def _blank(data: Bytes, starts: Integers, ends: Integers) -> npt.NDArray[np.bool_] | None:
        """Which lines are blank; None when none is."""
        empty = ends <= starts
        first = data[np.minimum(starts, len(data) - 1)]
        suspects = np.flatnonzero((first <= 32) & ~empty)  # a superset, settled below
        if not len(suspects) and not empty.any():
            return None
        for line in suspects.tolist():
            text = data[starts[line] : ends[line]].tobytes()
            empty[line] = not text.strip(BLANK)
        return empty

    def _walk_over(self, base: int, filled: int) -> tuple[Integers, int]:
        """A line beyond the limit: find its end without holding it.

        It is larger than a block, so it opens one whatever its hash says, and the next line opens
        the next.

        Returns:
            The row's start, and how many bytes the line has with its newline.
        """
        nothing = np.empty(0, dtype=np.int64)
        line = np.array([base], dtype=np.int64)
        cuts = self._cutter.feed(line, line + filled, lambda lo, hi: -1)
        piece = memoryview(self._buffer)[:filled]
        start = base + (len(BOM) if base == 0 and piece[: len(BOM)] == BOM else 0)
        blank = not bytes(piece[start - base :]).strip(BLANK)
        self.assembler.feed(piece, base, nothing, line, [base] * len(cuts))
        position = base + filled
        while True:
            size = self._file.read_into(memoryview(self._buffer)[: self._capacity], position)
            found = self._buffer.find(b"\n", 0, size)
            piece = memoryview(self._buffer)[: found + 1 if found >= 0 else size]
            blank = blank and not bytes(piece).strip(BLANK + b"\n")
            ended = found >= 0 or size == 0
            row = np.array([start], dtype=np.int64) if ended and not blank else nothing
            self.assembler.feed(piece, position, row, nothing, [])
            position += len(piece)
            if ended:
                return row, position - base
