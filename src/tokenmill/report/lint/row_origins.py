"""From a position among all rows to a file and a line.

Comes in: opened rows. Goes out: a `RowOrigins` that tells `run_lint` how many rows each block has
and, for the few rows that a finding names, their origin and how they begin. Blocks are walked once;
what is kept of each is four integers. A position counts from 0 over all files. Text formats have an
index that tells the line of a row; columnar files have none, and asking for a single row would make
a copy of the whole file, so their origins are made from the block, and a row is shown by decoding
the one group that holds it.
"""

from __future__ import annotations

import json

import numpy as np

from tokenmill.origin import Origin
from tokenmill.report.lint.findings import excerpt
from tokenmill.source import Rows

COLUMNAR = ("parquet", "arrow")
SHOWN_CHARS = 400  # of a row's JSON before it is cut to an excerpt


class RowOrigins:
    """Where opened rows come from.

    Args:
        rows: The rows.

    Attributes:
        counts: Rows of every block.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._columnar: dict[int, str] = {}  # file → its path
        self.counts: list[int] = []
        files, first_rows = [], []
        for block in rows.blocks():
            self.counts.append(block.rows)
            files.append(block.file)
            first_rows.append(block.first_row)
            if block.kind in COLUMNAR:
                self._columnar[block.file] = block.path
        self._files = np.array(files, np.int32)
        self._first_rows = np.array(first_rows, np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))

    def start(self, block: int) -> int:
        """Position of a block's first row."""
        return int(self._starts[block])

    def origin(self, position: int) -> Origin:
        """File and line of a row, or file and row of one in a columnar file."""
        block = int(np.searchsorted(self._starts, position, side="right")) - 1
        path = self._columnar.get(int(self._files[block]))
        if path is None:
            return self._rows.origin(position)
        row = int(self._first_rows[block]) + position - self.start(block)
        return Origin(path, row, None, None, 0)

    def shown(self, position: int) -> str:
        value = self._rows.batch([position])[0]
        return excerpt(json.dumps(value, ensure_ascii=False)[:SHOWN_CHARS])
