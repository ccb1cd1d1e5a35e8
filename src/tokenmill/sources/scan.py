"""Find the rows and blocks of a line file in one pass, by content-defined chunking.

A row is a line that contains more than spaces, tabs and carriage returns. A *block* is a run of
complete lines of about 8 MiB. Once a block has `CUT_MIN` bytes, the next block starts at the first
row that *qualifies*: a 64-bit hash of the row is below the fraction ``length / CUT_MEAN`` of all
hash values. If no row qualifies, the line that would end beyond `CUT_MAX` starts the next block.
The decision depends on the row alone, so an inserted row moves only the cuts next to it.
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

SLACK = CUT_SHORT + 8  # bytes after the data that hashing may read and ignore
_PORTION = 2048  # rows hashed at once
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
)  # one odd constant per word position; arbitrary, but part of the format
_REMAINDERS = np.array([(1 << 8 * n) - 1 for n in range(8)], dtype=np.uint64)
_SHARE = np.uint64((1 << 64) // CUT_MEAN)  # of all hash values, per byte of a row


class Cutter:
    def __init__(self) -> None:
        self.block_start = 0

    def feed(
        self, starts: Integers, stops: Integers, first_qualified: Callable[[int, int], int]
    ) -> list[int]:
        """Return which of the next lines start a block.

        ``first_qualified`` returns the first of the lines ``lo:hi`` that qualifies, else -1.
        """
        cuts: list[int] = []
        count, next_line = len(starts), 0
        while next_line < count:
            eligible = int(np.searchsorted(starts, self.block_start + CUT_MIN))
            forced = int(np.searchsorted(stops, self.block_start + CUT_MAX, side="right"))
            if forced < count and starts[forced] <= self.block_start:
                forced += 1  # the first line is larger than a block and stays alone
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
    """Return the first row of ``lo:hi`` that qualifies, else -1.

    If the buffer has `SLACK` bytes after the last row, nothing is copied.
    """
    for first in range(lo, hi, _PORTION):
        last = min(first + _PORTION, hi)
        sizes = lengths[first:last]
        hashes = row_hashes(buffer, starts[first:last], sizes)
        shares = np.minimum(sizes, CUT_MEAN - 1).astype(np.uint64) * _SHARE
        qualified = np.flatnonzero(hashes < shares)
        if len(qualified):
            return first + int(qualified[0])
    return -1


def row_hashes(buffer: Buffer, starts: Integers, lengths: Integers) -> Hashes:
    """Return a 64-bit hash of each row: of its length and its first `CUT_HASHED` bytes.

    Short rows, of which there are millions, are hashed in numpy: the sum of the little-endian
    8-byte words (the last one padded with zeros), each times an odd constant for its position, and
    of the length times another constant, finalised as in splitmix64. Longer rows use xxh3.
    """
    hashes = np.empty(len(starts), dtype=np.uint64)
    short = lengths <= CUT_SHORT
    if short.all():
        return _mix_short(buffer, starts, lengths)
    rows = np.flatnonzero(short)
    hashes[rows] = _mix_short(buffer, starts[rows], lengths[rows])
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
    """Return the bytes of every row as a matrix of 8-byte words, padded with zeros."""
    width = max(8, (int(lengths.max()) + 7) // 8 * 8)
    if int(starts.max()) + width > len(buffer):
        buffer = bytes(buffer) + bytes(width)
    # With a window at every byte, indexing copies a row at once instead of word by word.
    windows: npt.NDArray[np.uint8] = np.ndarray(
        shape=(len(buffer) - width + 1, width), dtype=np.uint8, buffer=buffer, strides=(1, 1)
    )
    words = windows[starts].view("<u8")
    # Bytes after the end of a row must not count: mask its last word and clear the rest.
    full = lengths >> 3
    partial = np.flatnonzero(full < words.shape[1])
    words[partial, full[partial]] &= _REMAINDERS[lengths[partial] & 7]
    for column in range(int(full.min()) + 1, words.shape[1]):
        words[full < column, column] = 0
    return words


def _keep_freed_memory() -> None:
    """Free a large block, so that glibc raises its thresholds for mapping and trimming.

    Without this, a scan spends a third of its time on page faults for the same memory.
    """
    block = bytearray(_HEAP_BLOCK)
    del block


def _true_positions(mask: npt.NDArray[np.bool_]) -> Integers:
    """Return ``np.flatnonzero`` of a mask of 8-byte words, in half the time for longer lines."""
    words = mask.view("<u8")
    indices = np.flatnonzero(words != 0)
    nonzero = words[indices]
    if (nonzero & (nonzero - _ONE)).any():
        return np.flatnonzero(mask)  # two newlines within eight bytes
    # A word with a single 1 in byte k, times this constant, has k in its highest byte.
    positions = indices << 3
    positions += ((nonzero * _BYTE_NUMBER) >> np.uint64(56)).astype(np.int64)
    return positions


class LineScan:
    """One pass over a line file; `assembler` is complete once `starts` is exhausted.

    It reads into a buffer, because a mapped file would count as resident memory. The buffer starts
    at a line and grows for a long line up to the limit of a row; a longer line is not buffered.
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
        """Scan the file; yield the start of every row, and finally the end of the file."""
        base = incomplete = 0  # offset of the buffer in the file; bytes of an incomplete line in it
        while True:
            self._resize(incomplete)
            read = self._read(memoryview(self._buffer)[incomplete:-SLACK], base + incomplete)
            filled = incomplete + read
            data: Bytes = np.frombuffer(self._buffer, dtype=np.uint8, count=filled)
            breaks = self._line_breaks(data, incomplete)
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
                starts, done = self._skip_long_line(base, filled)
                yield starts
                base, incomplete = base + done, 0
                continue
            else:
                done = 0
            incomplete = filled - done
            memoryview(self._buffer)[:incomplete] = bytes(memoryview(self._buffer)[done:filled])
            base += done

    def _read(self, target: memoryview, offset: int) -> int:
        """Read bytes into ``target``; return their number, 0 only at the end."""
        if isinstance(self._file, LocalFile):
            return self._file.read_into(target, offset)
        data = self._file.pread(min(len(target), SCAN_BUFFER), offset)
        target[: len(data)] = data
        return len(data)

    def _line_breaks(self, data: Bytes, incomplete: int) -> Integers:
        fresh = data[incomplete:]
        if len(self._mask) < len(fresh) + 8:
            self._mask = np.empty((len(fresh) + 15) // 8 * 8, dtype=bool)
        # Reused, because new pages would cost more than the comparison.
        mask = self._mask[: (len(fresh) + 7) // 8 * 8]
        mask[len(fresh) :] = False
        np.equal(fresh, _NEWLINE, out=mask[: len(fresh)])
        breaks = _true_positions(mask)
        breaks += incomplete
        return breaks

    def _resize(self, incomplete: int) -> None:
        size = self._capacity
        while size < 2 * incomplete:
            size *= 2
        if size != len(self._buffer) - SLACK:
            # Views of the old buffer may be alive, so it is replaced instead of resized.
            self._mask = np.empty(0, dtype=bool)
            buffer = bytearray(size + SLACK)
            buffer[:incomplete] = memoryview(self._buffer)[:incomplete]
            self._buffer = buffer

    def _lines(self, data: Bytes, base: int, breaks: Integers) -> Integers:
        """Add complete lines that end at ``breaks``; return the starts of their rows."""
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
            row = first_qualified(self._buffer, row_starts, lengths, first, last)
            return int(rows[row]) if row >= 0 else -1

        lines = starts + base
        cuts = [int(lines[cut]) for cut in self._cutter.feed(lines, stops + base, qualified)]
        offsets = row_starts + base
        portion = memoryview(self._buffer)[: int(stops[-1])]
        self.assembler.feed(portion, base, offsets, lines, cuts)
        return offsets

    @staticmethod
    def _blank(data: Bytes, starts: Integers, ends: Integers) -> npt.NDArray[np.bool_] | None:
        empty = ends <= starts
        first = data[np.minimum(starts, len(data) - 1)]
        candidates = np.flatnonzero((first <= 32) & ~empty)  # a superset, checked below
        if not len(candidates) and not empty.any():
            return None
        for line in candidates.tolist():
            text = data[starts[line] : ends[line]].tobytes()
            empty[line] = not text.strip(BLANK)
        return empty

    def _skip_long_line(self, base: int, filled: int) -> tuple[Integers, int]:
        """Find the end of a line over the limit without buffering it.

        Return the start of the row, and the bytes of the line with its newline. The line is larger
        than a block, so it starts a block, and the next line starts another.
        """
        empty = np.empty(0, dtype=np.int64)
        line = np.array([base], dtype=np.int64)
        cuts = self._cutter.feed(line, line + filled, lambda lo, hi: -1)
        piece = memoryview(self._buffer)[:filled]
        start = base + (len(BOM) if base == 0 and piece[: len(BOM)] == BOM else 0)
        blank = not bytes(piece[start - base :]).strip(BLANK)
        self.assembler.feed(piece, base, empty, line, [base] * len(cuts))
        position = base + filled
        while True:
            size = self._read(memoryview(self._buffer)[: self._capacity], position)
            newline = self._buffer.find(b"\n", 0, size)
            piece = memoryview(self._buffer)[: newline + 1 if newline >= 0 else size]
            blank = blank and not bytes(piece).strip(BLANK + b"\n")
            is_end = newline >= 0 or size == 0
            row = np.array([start], dtype=np.int64) if is_end and not blank else empty
            self.assembler.feed(piece, position, row, empty, [])
            position += len(piece)
            if is_end:
                return row, position - base
