"""A reference reader: the rows of a text file in simple Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NaiveRow:
    raw: bytes
    line: int
    offset: int


def naive_rows(data: bytes, *, at_start: bool = True) -> list[NaiveRow]:
    """Return every line of a file, or of a part of it, that is not blank."""
    rows = []
    offset = 0
    for number, piece in enumerate(data.split(b"\n")):
        terminated = offset + len(piece) < len(data)
        text, start = piece, offset
        if at_start and number == 0 and text.startswith(b"\xef\xbb\xbf"):
            text, start = text[3:], offset + 3
        if terminated and text.endswith(b"\r"):
            text = text[:-1]
        if text.strip(b" \t\r"):
            rows.append(NaiveRow(text, number + 1, start))
        offset += len(piece) + 1
    return rows
