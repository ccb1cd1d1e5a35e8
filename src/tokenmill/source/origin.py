"""What a source file is; where a row comes from is `tokenmill.origin.Origin`.

Offset and length of an origin describe exactly what ``raw(i)`` returns, in the decompressed file.
Parquet and Arrow rows have no line and no offset; their length is that of their canonical JSON.

A `SourceFile` is one file of an opened source with what is known about it: its kind, size, rows
and a digest of its (decompressed) content that no path, time or compression changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.origin import Origin

__all__ = ["Origin", "SourceFile"]


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
