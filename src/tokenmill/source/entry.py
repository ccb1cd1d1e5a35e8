"""What is known about one opened file: enough for any process to read it.

A `SeenFile` says where a file is and which state of it was seen. A `FileEntry` adds which index
(and seekable copy) on the shelf belongs to that content. It is plain JSON-able data: what notes
store, pickles carry and readers start from, so that a worker neither scans nor globs again. A
`Block` (`tokenmill.source.block`) is a run of rows of a seen file.

A `SourceFile` is the part of it that callers see: kind, size, rows and a digest of the content
(decompressed) that no path, time or compression changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tokenmill.files.ranged import RemoteFile
from tokenmill.files.remote import Version, is_remote
from tokenmill.source.bytefile import LocalFile, Signature


class Span(NamedTuple):
    """A record batch of a remote Arrow file; the schema stands first, as one without rows."""

    rows: int
    bytes: int  # decoded
    start: int
    stop: int


class SeenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the state that was seen.

    Attributes:
        path: The file as the caller's source names it.
        location: The same as an absolute path.
        kind: "lines", "array", "parquet" or "arrow".
        signature: Its stat when it was read.
        settled: Whether an equal signature proves equal bytes.
        version: What told this state of a remote object from another; its size is the
            signature's, the rest of which is zero.
        spans: Of a remote Arrow file: its schema's bytes, then those of the batches concerned.
    """

    path: str
    location: str
    kind: str
    signature: tuple[int, int, int, int]
    settled: bool
    version: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def is_remote(self) -> bool:
        return is_remote(self.location)

    def open(self) -> LocalFile | RemoteFile:
        """The file's own bytes; another state is `SourceChanged`."""
        if self.is_remote:
            return self.open_remote()
        return LocalFile(self.location, Signature(*self.signature))

    def open_remote(self) -> RemoteFile:
        """The same where it lives elsewhere: every range is compared with the state."""
        size = self.signature[0]
        file = RemoteFile(self.location, Version(size, self.version, self.settled))
        file.path = self.path
        return file


class FileEntry(SeenFile, frozen=True, kw_only=True, omit_defaults=True):
    """One file, as seen by the process that opened the source.

    Attributes:
        rows: Rows in it.
        bytes: Size of its content, decompressed.
        digest: Of its content; empty for columnar files until somebody asks.
        index: Key of the row index; empty for columnar files.
        copy: Key of the seekable copy of a compressed file; empty for others.
    """

    rows: int
    bytes: int
    digest: str = ""
    index: str = ""
    copy: str = ""


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
