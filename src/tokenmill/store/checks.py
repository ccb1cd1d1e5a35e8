"""Checks of a store's own files: recount, compare, and say both numbers.

The manifest states a size and a checksum for every file beside it and the totals over all slices.
These functions compare what is there with what is stated and raise a `CorruptionError` that names
file, expected and actual; none of them repairs anything. A damaged proof is only a warning: it is
advisory, part of no digest.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.errors import CorruptionError
from tokenmill.store.access import REMEDY, reading_errors
from tokenmill.store.layout import TABLE, StoreLayout
from tokenmill.store.manifest import Document

_READ_BYTES = 1 << 20


def check_file(path: Path, stated: Document, *, content: bool) -> None:
    """Compare a file's size, and its checksum if ``content``, with what the manifest states."""
    hasher = xxhash.xxh3_128()
    with reading_errors(path):
        size = path.stat().st_size
        if size != stated["size"]:
            raise CorruptionError(
                f"{size} bytes, expected {stated['size']}; {REMEDY}",
                path=path,
                offset=min(size, stated["size"]),
            )
        if not content:
            return
        with open(path, "rb") as file:
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    if hasher.hexdigest() != stated.get("checksum"):
        raise CorruptionError(
            f"checksum is {hasher.hexdigest()}, expected {stated.get('checksum')}; {REMEDY}",
            path=path,
        )


def check_totals(manifest: Document, table: np.ndarray[Any, Any], layout: StoreLayout) -> None:
    """Recount the totals over the table and compare them with the manifest's."""
    totals, path = manifest["totals"], layout.file(TABLE)
    counted = {
        "slices": len(table),
        "rows": int(table["rows"].sum(dtype=np.int64)),
        "tokens": int(table["tokens"].sum()),
        "trained_tokens": int(table["trained"].sum()),
    }
    for name, number in counted.items():
        if totals[name] != number:
            raise CorruptionError(
                f"{number} {name} in the table, expected {totals[name]}", path=path
            )
    rejected = int(table["rejected"].sum(dtype=np.int64))
    if totals["rows_in"] != totals["rows"] + rejected:
        raise CorruptionError(
            f"{totals['rows_in']} rows in, but {totals['rows']} kept and {rejected} rejected",
            path=path,
        )
    firsts = np.concatenate([[0], np.cumsum(table["rows"], dtype=np.int64)])[:-1]
    if not np.array_equal(firsts, table["first_row"]):
        raise CorruptionError("rows of the slices do not follow one another", path=path)
    sources = manifest["document"].get("sources", [])
    if len(table) and int(table["source"].max()) >= len(sources):
        raise CorruptionError(
            f"a slice of source {int(table['source'].max())} of {len(sources)}", path=path
        )


def warn_about_proof(path: Path, error: Exception) -> None:
    """Tell that the advisory proof cannot be read; the rows are not affected."""
    warnings.warn(f"{path}: proof cannot be read ({error}); rows are not affected", stacklevel=3)
