"""Where a row comes from.

An *Origin* names one record of one source file so exactly that a person can open it and a program
can read it back: path, row number, physical line, byte offset and length. It travels with every
row that is served, every rejection and every error. For text formats, offset and length describe
the row's own bytes in the decompressed file: the line without its end and without a byte order
mark, or an array's element. Parquet and Arrow rows have a number but neither line nor offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenmill.errors import SourceError


class Origin(NamedTuple):
    """One record of one source file.

    Attributes:
        path: The file, as the caller named it; None when nobody knows it any more.
        row: Row number within the file, from 0.
        line: Physical line within the file, from 1; None for formats without lines.
        offset: Byte offset of the row in the decompressed file; None for formats without one.
        length: Bytes of the row.
    """

    path: str | None
    row: int
    line: int | None
    offset: int | None
    length: int

    def __str__(self) -> str:
        """``file:line`` for text formats, else ``file#row``."""
        name = self.path or "?"
        return f"{name}:{self.line}" if self.line is not None else f"{name}#{self.row}"

    @property
    def location(self) -> dict[str, Any]:
        """What an error about this row says of its place: its arguments of those names."""
        return {"path": self.path, "row": self.row, "line": self.line, "offset": self.offset}


def nothing_left(
    what: str,
    rejected: Mapping[str, int],
    rows: Iterable[tuple[Origin, str, str]],
    path: str | None,
) -> SourceError:
    """The error for a source of which every row was rejected: it stands where the first one does.

    Args:
        what: What was wanted of them, ``row`` or ``prompt``.
        rejected: How many, by reason.
        rows: Origin, reason and detail of each; only the first is looked at.
        path: The source, when nothing was rejected because there was nothing.
    """
    for origin, reason, detail in rows:
        counts = ", ".join(f"{number:,} {why}" for why, number in rejected.items() if number)
        return SourceError(
            f"no {what} left: all {sum(rejected.values()):,} were rejected ({counts}); the first, "
            f"for {reason}: {detail}",
            **origin.location,
        )
    return SourceError(f"no {what} left", path=path)
