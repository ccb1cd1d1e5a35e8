"""The table of slices: ``slices.bin``.

A store is an ordered list of slices. The table gives each a row of fixed width, so that a million
of them are mapped and searched, never parsed: which slice (its key), which commit record exactly
(its digest), which rows it serves (the number of the first), and where its bytes stand in which
source. Sixty-four bytes of header say what the file is; everything is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import CorruptionError
from tokenmill.store.access import ByteFile, reading_errors

MAGIC = b"TOKMILL\0"
VERSION = 1
HEADER_BYTES = 64  # keeps the rows aligned for any member, with room for what a later version adds

SLICE_ROW = np.dtype(
    [
        ("key", "u1", 20),  # slice key
        ("record", "u1", 16),  # xxh3-128 of the commit record's bytes
        ("source", "<u4"),  # index into the manifest's sources
        ("rows", "<u4"),  # rows served
        ("rejected", "<u4"),  # rows rejected, so that a search for them skips most slices
        ("first_row", "<i8"),  # number of its first row in the store
        ("source_row", "<i8"),  # number, within the source, of its first source row
        ("line", "<i8"),  # physical line of its first byte, from 1; 0 when the format has none
        ("offset", "<i8"),  # byte offset in the decompressed source; -1 when it has none
        ("tokens", "<i8"),
        ("trained", "<i8"),
    ]
)
"""One slice of a store: 96 bytes."""

STRETCH = 8192  # rows read at once by whoever passes over the whole table

_HEADER = struct.Struct("<8sIIQ")
_ROW = struct.Struct("<20s16s3I6q")  # `SLICE_ROW`, for writing one


def header(count: int) -> bytes:
    """The first bytes of a table of ``count`` slices."""
    packed = _HEADER.pack(MAGIC, VERSION, SLICE_ROW.itemsize, count)
    return packed.ljust(HEADER_BYTES, b"\0")


def count_rows(size: int) -> int:
    """Slices in a table of this many bytes."""
    return (size - HEADER_BYTES) // SLICE_ROW.itemsize


def pack_row(
    key: str,
    record: str,
    *,
    source: int,
    rows: int,
    rejected: int,
    first_row: int,
    source_row: int,
    line: int | None,
    offset: int | None,
    tokens: int,
    trained: int,
) -> bytes:
    """One row of the table; the names are those of `SLICE_ROW`, key and record as hex digits."""
    return _ROW.pack(
        bytes.fromhex(key),
        bytes.fromhex(record),
        source,
        rows,
        rejected,
        first_row,
        source_row,
        line or 0,
        -1 if offset is None else offset,
        tokens,
        trained,
    )


def read_stretches(path: Path) -> Iterator[bytes]:
    """A table's header, then its rows, some thousands at a time: for one pass without mapping.

    Touching a mapped table from end to end would make all of it resident.
    """
    with reading_errors(path), open(path, "rb") as file:
        yield file.read(HEADER_BYTES)
        while piece := file.read(STRETCH * SLICE_ROW.itemsize):
            if len(piece) % SLICE_ROW.itemsize:
                raise CorruptionError("ends within a row", path=path)
            yield piece


def load_table(file: ByteFile) -> NDArray[np.void]:
    """View a table in place, checking header and size."""
    if file.size < HEADER_BYTES:
        raise CorruptionError(
            f"{file.size} bytes, shorter than its header", path=file.path, offset=file.size
        )
    magic, version, width, count = _HEADER.unpack_from(file.view(0, HEADER_BYTES))
    if magic != MAGIC or version != VERSION or width != SLICE_ROW.itemsize:
        raise CorruptionError(
            f"not a slice table of version {VERSION} (magic {magic!r}, version {version}, "
            f"width {width})",
            path=file.path,
            offset=0,
        )
    expected = HEADER_BYTES + count * width
    if file.size != expected:
        raise CorruptionError(
            f"{file.size} bytes, expected {expected} for {count} slices",
            path=file.path,
            offset=min(file.size, expected),
        )
    return np.frombuffer(file.view(HEADER_BYTES, count * width), SLICE_ROW)
