"""What every kind of file offers to `Rows`.

A `Reader` answers for one file by row number; a `Part` is a run of rows of one file. Line and
array files are read through their index (`lines`), Parquet and Arrow through pyarrow (`columnar`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tokenmill.errors import RowError
from tokenmill.origin import Origin
from tokenmill.source.block import Block
from tokenmill.source.entry import FileEntry, SourceFile
from tokenmill.source.opened import Hot

Value = dict[str, Any] | RowError


class Part(NamedTuple):
    """The rows ``first:last`` of a file."""

    file: int
    first: int
    last: int


class Reader(Protocol):
    """Access to the rows of one file; safe in threads and after a fork."""

    entry: FileEntry

    def value(self, row: int) -> dict[str, Any]:
        """One parsed row, or RowError."""
        ...

    def hot(self) -> Hot | None:
        """The short way to ordinary rows, where there is one."""
        ...

    def raw(self, row: int) -> bytes:
        """The bytes of one row."""
        ...

    def origin(self, row: int) -> Origin:
        """Where one row is."""
        ...

    def values(self, rows: Sequence[int]) -> list[Value]:
        """Many rows in the given order."""
        ...

    def stream(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        """Rows in order, in portions that begin at the given row."""
        ...

    def blocks(self, part: Part) -> Iterator[Block]:
        """The blocks of a run of rows."""
        ...

    def source_file(self) -> SourceFile:
        """What is known about the file, its digest included."""
        ...
