"""Checking candidates for near-duplicates: open the rows again and compare their shingles exactly.

The parent (`run_lint`) knows candidates by their positions among the opened rows and nothing of
their text, so checking is work for the executor again, which imports `open_comparer` by name. In
come some rows with the earlier rows each may repeat; out go, per row, the first of them whose
Jaccard index reaches the threshold, and the index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tokenmill.report.lint import minhash
from tokenmill.report.lint.groups import side_of, sides_of
from tokenmill.report.lint.linter import Linter, body
from tokenmill.source import open_rows

ENTRY = "tokenmill.report.lint.pairs:open_comparer"
ROWS_PER_TASK = 256  # rows, each with up to `minhash.ANCHORS` others


def open_comparer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load what comparing needs and return the function that compares some rows."""
    linter = Linter.of(options)
    rows = open_rows(list(options["sources"]), cache_dir=options["cache"])

    def compare(payload: dict[str, Any]) -> dict[str, Any]:
        pairs: list[tuple[int, list[int]]] = payload["pairs"]
        wanted = sorted({number for row, others in pairs for number in (row, *others)})
        sets = shingle_sets(linter, rows.batch(wanted))
        known = dict(zip(wanted, sets, strict=True))
        return {"near": [list(found) for found in near_duplicates(pairs, known)]}

    return compare


def near_duplicates(
    pairs: Sequence[tuple[int, list[int]]], known: dict[int, minhash.Hashes]
) -> Iterator[tuple[int, int, float]]:
    """Row, the candidate it nearly repeats, and their index."""
    for row, others in pairs:
        for other in others:
            index = minhash.jaccard(known[row], known[other])
            if index >= minhash.THRESHOLD:
                yield row, other, round(index, 4)
                break


def shingle_sets(linter: Linter, values: Sequence[dict[str, Any]]) -> list[minhash.Hashes]:
    """Each row's shingles, each once; rows that are not accepted have none."""
    rendering = linter.renderer.render(values)
    parsed_rows = [
        side_of(sides_of(linter.renderer.read(values[place])), part)
        for place, part in zip(rendering.source, rendering.part, strict=True)
    ]
    encoded = linter.encode(rendering, parsed_rows)
    sets = [np.zeros(0, np.uint64)] * len(values)
    for place in encoded.kept.tolist():  # of a row's parts the last counts, as before
        sets[rendering.source[place]] = np.unique(minhash.shingles(body(encoded, place)))
    return sets


def absolute(source: str) -> str:
    """A source as any process of this machine finds it; addresses of elsewhere stay."""
    return source if "://" in source else os.path.abspath(source)
