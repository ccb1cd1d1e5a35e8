"""From rows and cuts to what an index stores of them.

Of a row only its *start* is stored, eight bytes; one more holds the end of the file. A row's bytes
are what stands between its start and the next one's, without the line break and blank lines (or
comma and white space) behind it: the bytes themselves say where it ends. So two numbers of the
index find a row, without a search, and a parser may be given the whole stretch.

A `BlockEntry` is one line of the table of blocks: byte span, rows, lines and the xxh3-128 of the
span. `Blocks` is that table as it grows, 64 bytes a line: a file may have a million of them, so
they are packed, not objects. The `Assembler` is fed portions of a scan in order and knows nothing
of how rows were found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from tokenmill.source.cut import Integers

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


_LINE = struct.Struct("<6q16s")  # one line of `BLOCK_TABLE`
_DIGESTS = 4096  # digests written out at once


class Blocks(Sequence[BlockEntry]):
    """The table of blocks, packed; an entry is made when it is asked for."""

    def __init__(self) -> None:
        self.packed = bytearray()

    def append(self, entry: BlockEntry) -> None:
        """Add the next block."""
        self.packed += _LINE.pack(*entry[:6], bytes.fromhex(entry.digest))

    def __len__(self) -> int:
        return len(self.packed) // _LINE.size

    def __getitem__(self, number: int) -> BlockEntry:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        *numbers, digest = _LINE.unpack_from(self.packed, number * _LINE.size)
        return BlockEntry._make((*numbers, digest.hex()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self.packed == other.packed

    __hash__ = None  # type: ignore[assignment]

    def digests(self) -> Iterator[list[str]]:
        """The blocks' digests in order, some thousands at a time."""
        table = np.frombuffer(bytes(self.packed), dtype=BLOCK_TABLE)["digest"]
        for first in range(0, len(table), _DIGESTS):
            digits = table[first : first + _DIGESTS].tobytes().hex()
            yield [digits[at : at + 32] for at in range(0, len(digits), 32)]


class Assembler:
    """Counts, hashes and cuts what a scan finds.

    Attributes:
        blocks: The finished blocks, in order; complete after `finish`.
        rows: Rows seen.
    """

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.rows = 0
        self._offset = 0  # of the open block
        self._first_row = 0
        self._first_line = 1
        self._lines = 0
        self._hash = xxhash.xxh3_128()

    def feed(
        self,
        data: memoryview,
        base: int,
        starts: Integers,
        marks: Integers,
        cuts: Sequence[int],
    ) -> None:
        """Take the next portion of the file.

        Args:
            data: The portion's bytes; every byte of the file is fed once.
            base: Offset of the portion.
            starts: Offset of each row that starts here, ascending.
            marks: Offsets that count as lines: line starts, or line breaks for arrays.
            cuts: Offsets at which a block opens.
        """
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

    def finish(self, end: int) -> None:
        """The file ends here: close the last block."""
        self._close(end, self.rows)

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
