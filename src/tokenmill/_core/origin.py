"""Where a row comes from.

An `Origin` accompanies every served row, rejection and error. For text formats, offset and length
describe the row's own bytes in the decompressed file: the line without its end and without a byte
order mark, or an array's element. Parquet and Arrow rows have neither line nor offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenmill.errors import SourceError


class Origin(NamedTuple):
    """One record of one source file.

    Attributes:
        path: The file, as the caller named it; None when it is not known.
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
        """Arguments of an error about this row."""
        return {"path": self.path, "row": self.row, "line": self.line, "offset": self.offset}


def nothing_left(
    what: str,
    rejected: Mapping[str, int],
    rows: Iterable[tuple[Origin, str, str]],
    path: str | None,
) -> SourceError:
    """Return the error for a source of which every row was rejected.

    Args:
        what: ``row`` or ``prompt``.
        rejected: How many, by reason.
        rows: Origin, reason and detail of each; only the first is used.
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
