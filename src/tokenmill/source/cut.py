"""Where blocks begin: a pure function of the bytes.

A *block* is a run of whole lines (or array elements) of about 8 MiB and the unit in which content
is hashed, built and reused. A block opens at the first row that *qualifies* once its predecessor
holds `CUT_MIN` bytes. A row qualifies when a 64-bit hash of its own bytes falls below its share
``length / CUT_MEAN`` of all hashes, so that block sizes do not depend on row sizes. Where no row
qualifies in time, the line that would end beyond `CUT_MAX` opens a block; a line larger than that
is a block of its own.

Since the row alone decides, an insertion moves only the cuts beside it: the next qualifying row
is the same as before. Nothing here knows of files or buffers: a `Cutter` is fed lines in portions
of any size and gives the same cuts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.source.limits import CUT_HASHED, CUT_MAX, CUT_MEAN, CUT_MIN, CUT_SHORT

Integers = npt.NDArray[np.int64]
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
    """Finds the lines that open a block."""

    def __init__(self) -> None:
        self.block_start = 0

    def feed(
        self, starts: Integers, stops: Integers, first_qualified: Callable[[int, int], int]
    ) -> list[int]:
        """Take the next lines.

        Args:
            starts: Offset of each line, ascending.
            stops: Offset behind each line's terminator.
            first_qualified: Given ``lo, hi``, the first of these lines that is a row and
                qualifies, else -1. Only asked for lines beyond the minimum.

        Returns:
            Positions, within the fed lines, of those that open a block.
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
