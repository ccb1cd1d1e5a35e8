"""Which rows to look at: by number, by origin, by rule.

In go a store and a rule or an address; out come row numbers, or rejected rows. ``tokenmill
inspect`` and the page call it. A *rule* names rows by what makes them worth a look: ``longest``,
``shortest`` (in tokens), ``least-trained`` (smallest trained share), ``rejected`` and ``random``,
drawn with a seed from the same permutation that training uses, so a seed names the same rows
everywhere. An *address* is what an `Origin` prints: ``file:line``, or ``file#row`` for formats
without lines; the file may be named by the end of its path. Only stored lengths and origins are
read, no token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import UsageError
from tokenmill.origin import Origin
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store

RULES = ("longest", "shortest", "least-trained", "rejected", "random")


class Rejected(NamedTuple):
    """One rejected row, with its number among the rejected."""

    number: int
    origin: Origin
    reason: str
    detail: str


class Addressed(NamedTuple):
    """What stands at an address: rows of the store (several under ``expand``), rejected rows."""

    rows: list[int]
    rejected: list[Rejected]


def rows_by_rule(store: Store, rule: str, count: int, seed: int = 0) -> list[int]:
    """Numbers of rows by a rule, the most telling first (``rejected`` has no rows)."""
    if rule not in RULES or rule == "rejected":
        raise UsageError(f"--rule {rule!r}: choose one of {', '.join(RULES)}")
    rows = len(store)
    count = min(count, rows)
    if rule == "random":
        if not rows:
            return []
        return [int(n) for n in FeistelOrder(rows, seed).indices(0, np.arange(count))]
    return [int(n) for n in np.argsort(row_weights(store, rule), kind="stable")[:count]]


def row_weights(store: Store, order: str) -> NDArray[np.float64]:
    """By what rows are sorted, by length or trained share; the smaller, the earlier."""
    shares = order in ("least-trained", "most-trained")
    weights = trained_shares(store) if shares else store.lengths.astype(np.float64)
    return -weights if order in ("longest", "most-trained") else weights


def trained_shares(store: Store) -> NDArray[np.float64]:
    """Trained tokens of every row over all its tokens."""
    shares: NDArray[np.float64] = store.trained / np.maximum(store.lengths, 1)
    return shares


def rejected_rows(store: Store, first: int = 0) -> Iterator[Rejected]:
    """Rejected rows in the order of the sources."""
    for number, (origin, reason, detail) in enumerate(store.rejected_rows()):
        if number >= first:
            yield Rejected(number, origin, reason, detail)


def row_at_address(store: Store, address: str) -> Addressed:
    """The rows that were made of the source row at ``file:line`` or ``file#row``.

    Raises:
        UsageError: The address is malformed, its file is not of this store, or nothing is there.
    """
    found = re.fullmatch(r"(.+?)([:#])(\d+)", address, re.DOTALL)
    if found is None:
        raise UsageError(f"--origin {address!r}: write file:line, or file#row (rows count from 0)")
    sources = sources_named(store, found[1])
    wanted, by_line = int(found[3]), found[2] == ":"
    rows = [
        row
        for source in sources
        for row in rows_of_source_row(store, source, wanted, by_line=by_line)
    ]
    path = store.sources[sources[0]]
    rejected = [
        row
        for row in rejected_rows(store)
        if row.origin.path == path and (row.origin.line if by_line else row.origin.row) == wanted
    ]
    if not rows and not rejected:
        what = "line" if by_line else "row"
        raise UsageError(f"--origin {address!r}: nothing in this store comes from that {what}")
    return Addressed(rows, rejected)


def sources_named(store: Store, name: str) -> list[int]:
    """Numbers of the source whose path is, or ends with, a name; several where it is listed so."""
    paths = [path or "" for path in store.sources]
    exact = [number for number, path in enumerate(paths) if path == name]
    ending = [number for number, path in enumerate(paths) if path.endswith(f"/{name}")]
    for numbers in (exact, ending):
        distinct = sorted({paths[number] for number in numbers})
        if len(distinct) == 1:
            return numbers
        if distinct:
            raise UsageError(f"{name!r} is the end of several sources: {', '.join(distinct[:5])}")
    known = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    raise UsageError(f"no source {name!r} in this store; there are {known}")


def rows_of_source_row(store: Store, source: int, wanted: int, *, by_line: bool) -> list[int]:
    """Rows of the store made of one row (from 0) or line (from 1) of a source."""
    first, column = ("line", "line_in_slice") if by_line else ("source_row", "row_in_slice")
    mine = np.flatnonzero(store.table["source"] == source)
    starts = store.table[first][mine]
    rows: list[int] = []
    # A source may be listed twice, so its slices need not be sorted.
    for at in mine[(starts <= wanted) & (starts > 0 if by_line else True)]:
        entry = store.table[at]
        here = store.slice_at(int(at)).column(column) == wanted - int(entry[first])
        rows += (int(entry["first_row"]) + np.flatnonzero(here)).tolist()
    return rows
