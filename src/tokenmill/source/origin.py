"""Where a row comes from, and what a source file is: the room's two small public values.

An `Origin` names the bytes of one row: the file, the row's number in it, its physical line (text
formats), the byte offset and length of exactly what ``raw(i)`` returns, in the decompressed file.
Parquet and Arrow rows have no line and no offset; their length is that of their canonical JSON.

A `SourceFile` is one file of an opened source with what is known about it: its kind, size, rows
and a digest of its (decompressed) content that no path, time or compression changes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of one row.

    Attributes:
        path: The file, as the caller's source led to it.
        row: Number of the row within the file, from 0.
        line: Physical line, from 1; None where the format has no lines.
        offset: Byte offset in the decompressed file; None for Parquet and Arrow.
        length: Bytes of the row's raw form.
    """

    path: str
    row: int
    line: int | None
    offset: int | None
    length: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of an opened source.

    Attributes:
        path: The file.
        kind: "lines", "array", "parquet" or "arrow".
        bytes: Size of the content; decompressed for .gz and .zst.
        rows: Rows in the file.
        digest: 40 hex digits that name the content.
    """

    path: str
    kind: str
    bytes: int
    rows: int
    digest: str
