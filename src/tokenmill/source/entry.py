"""What is known about one opened file: enough for any process to read it.

A `FileEntry` is plain JSON-able data: where the file is, which state of it was seen, which index
(and seekable copy) on the shelf belongs to that content. It is what notes store, pickles carry and
readers start from, so that a worker neither scans nor globs again.

A `SourceFile` is the part of it that callers see: kind, size, rows and a digest of the content
(decompressed) that no path, time or compression changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tokenmill.files import is_remote
from tokenmill.source.bytefile import ByteFile, LocalFile, Signature, open_remote


class Span(NamedTuple):
    """A record batch of a remote Arrow file; the schema stands first, as one without rows."""

    rows: int
    bytes: int  # decoded
    start: int
    stop: int


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
        version: What told this state of a remote object from another; its size is the
            signature's, the rest of which is zero.
        spans: Of a remote Arrow file: its schema's bytes, then each record batch's.
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
    version: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def expected(self) -> Signature:
        """The signature that the file must still have."""
        return Signature(*self.signature)

    @property
    def is_remote(self) -> bool:
        """Whether the file lives elsewhere."""
        return is_remote(self.location)

    def open(self) -> ByteFile:
        """The file's own bytes, in the state that was seen."""
        if self.is_remote:
            return open_remote(self.location, self.path, self.expected, self.version, self.settled)
        return LocalFile(self.location, self.expected)


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
