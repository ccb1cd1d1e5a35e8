"""The oracle: what the rows of a text file are, in the plainest Python there is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NaiveRow:
    """One row as a naive reader finds it."""

    raw: bytes
    line: int
    offset: int


def naive_rows(data: bytes) -> list[NaiveRow]:
    """Every line that holds more than spaces, tabs and carriage returns."""
    rows = []
    offset = 0
    for number, piece in enumerate(data.split(b"\n")):
        terminated = offset + len(piece) < len(data)
        text, start = piece, offset
        if number == 0 and text.startswith(b"\xef\xbb\xbf"):
            text, start = text[3:], offset + 3
        if terminated and text.endswith(b"\r"):
            text = text[:-1]
        if text.strip(b" \t\r"):
            rows.append(NaiveRow(text, number + 1, start))
        offset += len(piece) + 1
    return rows
