"""What is known about one opened file: enough for any process to read it.

A `FileEntry` is plain JSON-able data: where the file is, which state of it was seen, which index
(and seekable copy) on the shelf belongs to that content. It is what notes store, pickles carry and
readers start from, so that a worker neither scans nor globs again.

A `SourceFile` is the part of it that callers see: kind, size, rows and a digest of the content
(decompressed) that no path, time or compression changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tokenmill.source.bytefile import Signature


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file, as seen by the process that opened the source.

    Attributes:
        path: The file as the caller's source names it.
        location: The same as an absolute path.
        kind: "lines", "array", "parquet" or "arrow".
        signature: Its stat when it was read.
        settled: Whether an equal signature proves equal bytes.
        rows: Rows in it.
        bytes: Size of its content, decompressed.
        digest: Of its content; empty for columnar files until somebody asks.
        index: Key of the row index; empty for columnar files.
        copy: Key of the seekable copy of a compressed file; empty for others.
    """

    path: str
    location: str
    kind: str
    signature: tuple[int, int, int, int]
    settled: bool
    rows: int
    bytes: int
    digest: str = ""
    index: str = ""
    copy: str = ""

    @property
    def expected(self) -> Signature:
        """The signature that the file must still have."""
        return Signature(*self.signature)


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
