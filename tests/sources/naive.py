"""The oracle: what the rows of a text file are, in the plainest Python there is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NaiveRow:
    """One row as a naive reader finds it."""

    raw: bytes
    line: int
    offset: int


def naive_rows(data: bytes, *, at_start: bool = True) -> list[NaiveRow]:
    """Every line of a file, or of a part of it, with more than spaces, tabs and returns."""
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
