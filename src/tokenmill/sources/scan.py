"""Find the rows of a line file, and where its blocks begin, in one pass at memory speed.

A row is a line that contains more than spaces, tabs and carriage returns. A *block* is a run of
whole lines of about 8 MiB. It begins at the first row that *qualifies* once its predecessor has
`CUT_MIN` bytes: a 64-bit hash of its bytes is below its share ``length / CUT_MEAN`` of all hashes.
Where no row qualifies in time, the line that would end beyond `CUT_MAX` begins a block. The row
alone decides, so an insertion moves only the cuts beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.sources.bytefile import LocalFile, SourceBytes
from tokenmill.sources.index import Assembler, Integers
from tokenmill.sources.limits import (
    CUT_HASHED,
    CUT_MAX,
    CUT_MEAN,
    CUT_MIN,
    CUT_SHORT,
    MAX_ROW,
    SCAN_BUFFER,
)

Bytes = npt.NDArray[np.uint8]
BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r"
WHITE_SPACE = b" \t\r\n"  # JSON's
_NEWLINE = 10
_ONE = np.uint64(1)
_BYTE_NUMBER = np.uint64(0x0001020304050607)
_HEAP_BLOCK = 4 << 20  # bytes: larger than any array of a scan

Hashes = npt.NDArray[np.uint64]
Buffer = bytes | bytearray | memoryview

SLACK = CUT_SHORT + 8  # bytes behind the data that hashing may touch without counting them
_PORTION = 2048  # rows hashed before looking whether one qualified
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: spreads every input bit
_FINAL_1 = np.uint64(0xBF58476D1CE4E5B9)  # the two multipliers of the splitmix64 finaliser
_FINAL_2 = np.uint64(0x94D049BB133111EB)
_WEIGHTS = np.array(
    [
        int.from_bytes(hashlib.blake2b(b"tokenmill cut %d" % n, digest_size=8).digest(), "little")
        | 1
        for n in range(CUT_SHORT // 8)
    ],
    dtype=np.uint64,
)  # one odd constant per position of a word, arbitrary but for ever the same
_REMAINDERS = np.array([(1 << 8 * n) - 1 for n in range(8)], dtype=np.uint64)
_SHARE = np.uint64((1 << 64) // CUT_MEAN)  # of all hashes, per byte of a row


class Cutter:
    def __init__(self) -> None:
        self.block_start = 0

    def feed(
        self, starts: Integers, stops: Integers, first_qualified: Callable[[int, int], int]
    ) -> list[int]:
        """Return the positions, within the next lines, of those that open a block.

        Args:
            starts: Offset of each line, ascending.
            stops: Offset behind each line's terminator.
            first_qualified: Of the lines ``lo:hi``, the first that is a row and qualifies, else -1.
        """
        cuts: list[int] = []
        count, next_line = len(starts), 0
        while next_line < count:
            eligible = int(np.searchsorted(starts, self.block_start + CUT_MIN))
            forced = int(np.searchsorted(stops, self.block_start + CUT_MAX, side="right"))
            if forced < count and starts[forced] <= self.block_start:
                forced += 1  # the block's first line is larger than a block: it stays alone
            lo, hi = max(next_line, eligible), min(forced, count)
            cut = first_qualified(lo, hi) if lo < hi else -1
            if cut < 0:
                if forced >= count:
                    break
                cut = forced
            cuts.append(cut)
            self.block_start = int(starts[cut])
            next_line = cut + 1
        return cuts


def first_qualified(buffer: Buffer, starts: Integers, lengths: Integers, lo: int, hi: int) -> int:
    """The first row of ``lo:hi`` that qualifies, else -1.

    With `SLACK` more bytes in the buffer behind the last row nothing is copied.
    """
    for first in range(lo, hi, _PORTION):
        last = min(first + _PORTION, hi)
        sizes = lengths[first:last]
        hashes = row_hashes(buffer, starts[first:last], sizes)
        shares = np.minimum(sizes, CUT_MEAN - 1).astype(np.uint64) * _SHARE
        found = np.flatnonzero(hashes < shares)
        if len(found):
            return first + int(found[0])
    return -1


def row_hashes(buffer: Buffer, starts: Integers, lengths: Integers) -> Hashes:
    """A 64-bit hash of each row (of its first `CUT_HASHED` bytes and its length).

    Short rows, of which there are millions, go through numpy: the sum of their little-endian
    8-byte words (the last one padded with zeros), each times an odd constant of its position, and
    of their length times another, finished as in splitmix64. Longer rows go to xxh3.
    """
    hashes = np.empty(len(starts), dtype=np.uint64)
    short = lengths <= CUT_SHORT
    if short.all():
        return _mix_short(buffer, starts, lengths)
    chosen = np.flatnonzero(short)
    hashes[chosen] = _mix_short(buffer, starts[chosen], lengths[chosen])
    view = memoryview(buffer)
    for row in np.flatnonzero(~short).tolist():
        start, length = int(starts[row]), int(lengths[row])
        part = view[start : start + min(length, CUT_HASHED)]
        hashes[row] = xxhash.xxh3_64_intdigest(part, seed=length)
    return hashes


def _mix_short(buffer: Buffer, starts: Integers, lengths: Integers) -> Hashes:
    if not len(starts):
        return np.empty(0, dtype=np.uint64)
    words = _words(buffer, starts, lengths)
    mixed: Hashes = words @ _WEIGHTS[: words.shape[1]]
    mixed += lengths.astype(np.uint64) * _MULTIPLY
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FINAL_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _FINAL_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _words(buffer: Buffer, starts: Integers, lengths: Integers) -> Hashes:
    """The bytes of every row as a matrix of 8-byte words, zeros behind its end."""
    width = max(8, (int(lengths.max()) + 7) // 8 * 8)
    if int(starts.max()) + width > len(buffer):
        buffer = bytes(buffer) + bytes(width)
    # A window begins at every byte: picking windows copies a row at once, not word by word.
    windows: npt.NDArray[np.uint8] = np.ndarray(
        shape=(len(buffer) - width + 1, width), dtype=np.uint8, buffer=buffer, strides=(1, 1)
    )
    words = windows[starts].view("<u8")
    # What stands behind a row's end must not count: mask its last word, clear those behind.
    whole = lengths >> 3
    broken = np.flatnonzero(whole < words.shape[1])
    words[broken, whole[broken]] &= _REMAINDERS[lengths[broken] & 7]
    for column in range(int(whole.min()) + 1, words.shape[1]):
        words[whole < column, column] = 0
    return words


def _keep_freed_memory() -> None:
    """Free a large block, so that glibc raises its thresholds for mapping and trimming.

    Without this, a third of a scan's time goes into faulting the same pages in again.
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
    """One pass over a line file; `assembler` is complete once `starts` is exhausted.

    The buffer is reused, because a mapped scan would count as resident memory. It begins at the
    first byte of a line and grows for a long line up to the limit of a row; a longer line is not
    held.
    """

    def __init__(self, file: SourceBytes, buffer_bytes: int = SCAN_BUFFER) -> None:
        self.assembler = Assembler()
        self.bytes = 0
        self._file = file
        self._capacity = buffer_bytes
        self._cutter = Cutter()
        self._buffer = bytearray(buffer_bytes + SLACK)
        self._mask = np.empty(0, dtype=bool)
        _keep_freed_memory()

    def starts(self) -> Iterator[Integers]:
        """Scan, giving the start of every row, and at last the end of the file."""
        base = held = 0  # offset of the buffer's first byte, bytes kept from the last round
        while True:
            self._make_room(held)
            read = self._read(memoryview(self._buffer)[held:-SLACK], base + held)
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

    def _read(self, target: memoryview, offset: int) -> int:
        """Read some bytes; 0 only at the end."""
        if isinstance(self._file, LocalFile):
            return self._file.read_into(target, offset)
        data = self._file.pread(min(len(target), SCAN_BUFFER), offset)
        target[: len(data)] = data
        return len(data)

    def _line_breaks(self, data: Bytes, held: int) -> Integers:
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
        """Find the end of a line beyond the limit without holding it.

        Return the row's start, and the bytes of the line with its newline. Such a line is larger
        than a block, so it begins one, and the next line begins the next.
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
            size = self._read(memoryview(self._buffer)[: self._capacity], position)
            found = self._buffer.find(b"\n", 0, size)
            piece = memoryview(self._buffer)[: found + 1 if found >= 0 else size]
            blank = blank and not bytes(piece).strip(BLANK + b"\n")
            ended = found >= 0 or size == 0
            row = np.array([start], dtype=np.int64) if ended and not blank else nothing
            self.assembler.feed(piece, position, row, nothing, [])
            position += len(piece)
            if ended:
                return row, position - base
