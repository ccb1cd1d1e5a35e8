"""The origin of a row: its file and position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenmill.errors import IN_MEMORY, SourceError, public_path


class Origin(NamedTuple):
    """Where a row comes from.

    Attributes:
        path: The file, as the caller named it; None if unknown.
        row: Row number within the file, from 0.
        line: Physical line within the file, from 1; None for formats without lines.
        offset: Byte offset of the row in the decompressed file; None for Parquet and Arrow.
        length: Bytes of the row, without the end of its line.
    """

    path: str | None
    row: int
    line: int | None
    offset: int | None
    length: int

    def __str__(self) -> str:
        """``file:line`` for text formats, ``file#row`` for others and in-memory data."""
        name = public_path(self.path or "?")
        if self.line is not None and name != IN_MEMORY:
            return f"{name}:{self.line}"
        return f"{name}#{self.row}"

    @property
    def location(self) -> dict[str, Any]:
        return {"path": self.path, "row": self.row, "line": self.line, "offset": self.offset}


def nothing_left(
    what: str,
    rejected: Mapping[str, int],
    rows: Iterable[tuple[Origin, str, str]],
    path: str | None,
) -> SourceError:
    """Return the error for a source without accepted rows; it names the first rejected row.

    ``what`` is ``row`` or ``prompt``; ``path`` is the source, used if no row was rejected.
    """
    for origin, reason, detail in rows:
        counts = ", ".join(f"{number:,} {why}" for why, number in rejected.items() if number)
        return SourceError(
            f"no {what} left: all {sum(rejected.values()):,} were rejected ({counts}); the first, "
            f"for {reason}: {detail}",
            **origin.location,
        )
    return SourceError(f"no {what} left", path=path)
