"""Checks of a store's own files: recount, compare, and say both numbers.

The manifest states a size and a checksum for every file beside it and the totals over all slices.
These functions compare what is there with what is stated and raise a `CorruptionError` that names
file, expected and actual; none of them repairs anything. A damaged proof is only a warning: it is
advisory, part of no digest.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import CorruptionError
from tokenmill.files.sealed import require_file
from tokenmill.store.access import REMEDY
from tokenmill.store.layout import TABLE
from tokenmill.store.manifest import Document
from tokenmill.store.record import UNREADABLE
from tokenmill.store.table import SLICE_ROW, read_stretches


def check_file(path: Path, stated: Document, *, content: bool) -> None:
    """Compare a file's size, and its checksum if ``content``, with what the manifest states."""
    require_file(path, stated["size"], stated["checksum"] if content else None, REMEDY)


@dataclass
class _Recount:
    """The totals of a table, counted a stretch at a time."""

    slices: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    rejected: int = 0
    last_source: int = -1

    def add(self, stretch: np.ndarray[Any, Any], path: Path) -> None:
        ends = self.rows + np.cumsum(stretch["rows"], dtype=np.int64)
        if not np.array_equal(stretch["first_row"], ends - stretch["rows"]):
            raise CorruptionError("rows of the slices do not follow one another", path=path)
        self.slices += len(stretch)
        self.rows = int(ends[-1])
        self.tokens += int(stretch["tokens"].sum())
        self.trained_tokens += int(stretch["trained"].sum())
        self.rejected += int(stretch["rejected"].sum(dtype=np.int64))
        self.last_source = max(self.last_source, int(stretch["source"].max()))


def check_table(manifest: Document, path: Path, *, content: bool) -> None:
    """Recount the table's totals, and hash it if ``content``; compare both with the manifest."""
    recount, hasher = _Recount(), xxhash.xxh3_128()
    pieces = read_stretches(path)
    hasher.update(next(pieces))
    for piece in pieces:
        if content:
            hasher.update(piece)
        recount.add(np.frombuffer(piece, SLICE_ROW), path)
    if content:
        found, stated = hasher.hexdigest(), manifest["files"][TABLE]["checksum"]
        if found != stated:
            raise CorruptionError(f"checksum is {found}, expected {stated}; {REMEDY}", path=path)
    totals = manifest["totals"]
    for name in ("slices", "rows", "tokens", "trained_tokens"):
        number = getattr(recount, name)
        if totals[name] != number:
            raise CorruptionError(
                f"{number} {name} in the table, expected {totals[name]}", path=path
            )
    if totals["rows_in"] != totals["rows"] + recount.rejected:
        raise CorruptionError(
            f"{totals['rows_in']} rows in, but {totals['rows']} kept and {recount.rejected} "
            "rejected",
            path=path,
        )
    sources = manifest["document"].get("sources", [])
    if recount.last_source >= len(sources):
        raise CorruptionError(
            f"a slice of source {recount.last_source} of {len(sources)}", path=path
        )


class _Proof(msgspec.Struct):
    """What others rely on in a proof; it may say anything else."""

    paths: list[str | None] = []
    notes: dict[str, dict[str, int]] = {}


def read_proof(path: Path) -> Document:
    """The advisory proof; one that cannot be read is a warning and empty: no row needs it."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        msgspec.convert(document, _Proof)
    except (OSError, *UNREADABLE) as error:
        warnings.warn(
            f"{path}: proof cannot be read ({error}); rows are not affected", stacklevel=4
        )
        return {}
    return document
