"""What is known about one opened file: enough for any process to read it.

A `FileEntry` is plain JSON-able data: where the file is, which state of it was seen, which index
(and seekable copy) on the shelf belongs to that content. It is what notes store, pickles carry and
readers start from, so that a worker neither scans nor globs again.
"""

from __future__ import annotations

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
