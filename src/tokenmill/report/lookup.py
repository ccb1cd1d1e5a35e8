"""Find rows by rule or by origin, rejected rows, and the source text behind a row.

A *rule* is ``longest``, ``shortest`` (in tokens), ``least-trained`` (smallest trained share),
``rejected`` or ``random``, which draws with a seed from the permutation that training uses. An
*address* is what an `Origin` prints: ``file:line``, or ``file#row`` for formats without lines; the
file may be named by the end of its path.

A store may come from anybody and names its sources, so `SourceExcerpts` opens local files only
(unless the caller allows more), and shows nothing but bytes that a slice of the store was made of:
the slice's key holds their digest.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.build.plan import SliceKeys
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.origin import Origin
from tokenmill.sampling import FeistelOrder
from tokenmill.source import Rows, open_rows
from tokenmill.store import Store

RULES = ("longest", "shortest", "least-trained", "rejected", "random")
EXCERPT_BYTES = 2048


class Rejected(NamedTuple):
    """One rejected row."""

    number: int  # among the rejected
    origin: Origin
    reason: str
    detail: str


class Addressed(NamedTuple):
    """The rows at an address."""

    rows: list[int]  # several with ``expand``
    rejected: list[Rejected]


def rows_by_rule(store: Store, rule: str, count: int, seed: int = 0) -> list[int]:
    """Return row numbers by a rule, except ``rejected``."""
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
    """Return the sort key of every row, ascending."""
    shares = order in ("least-trained", "most-trained")
    weights = trained_shares(store) if shares else store.lengths.astype(np.float64)
    return -weights if order in ("longest", "most-trained") else weights


def trained_shares(store: Store) -> NDArray[np.float64]:
    """Return trained tokens of every row over all its tokens."""
    shares: NDArray[np.float64] = store.trained / np.maximum(store.lengths, 1)
    return shares


def rejected_rows(store: Store, first: int = 0) -> Iterator[Rejected]:
    """Yield rejected rows in the order of the sources."""
    for number, (origin, reason, detail) in enumerate(store.rejected_rows()):
        if number >= first:
            yield Rejected(number, origin, reason, detail)


def row_at_address(store: Store, address: str) -> Addressed:
    """Return the rows made of the source row at ``file:line`` or ``file#row``.

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
    """Return numbers of the source whose path is, or ends with, a name."""
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
    """Return the rows made of one row (from 0) or line (from 1) of a source."""
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


class SourceExcerpts:
    """Reads excerpts of a store's source rows; ``fetch`` allows remote sources."""

    def __init__(self, store: Store, cache_dir: str | None = None, *, fetch: bool = False) -> None:
        self._store = store
        self._cache_dir = cache_dir
        self._fetch = fetch
        self._opened: dict[str, tuple[Rows, _PreparedRows] | str] = {}

    def excerpt(self, origin: Origin, max_bytes: int = EXCERPT_BYTES) -> dict[str, Any]:
        """Return ``{text, bytes, cut, note}``; where text is None the note says why."""
        if origin.path is None:
            return no_excerpt("the paths of this store's source files are unknown")
        # What is no local file may be a URL or the name of a hub dataset.
        if not self._fetch and not os.path.lexists(origin.path):
            return no_excerpt(
                "the source cannot be read here; if it is elsewhere, --fetch-sources asks for it "
                "there"
            )
        opened = self._open(origin.path)
        if isinstance(opened, str):
            return no_excerpt(opened)
        rows, prepared = opened
        try:
            there = rows.origin(origin.row)
            raw = rows.raw(origin.row)
        except (TokenmillError, IndexError) as error:
            return no_excerpt(f"the source has no such row any more: {error}")
        same = len(raw) == origin.length and there.offset == origin.offset
        if not same or not prepared.has(origin.row):
            return no_excerpt(
                "the source changed since, or only a part of it was prepared: what stands here now "
                "is not shown"
            )
        text = raw[:max_bytes].decode("utf-8", "backslashreplace")
        return {"text": text, "bytes": len(raw), "cut": max(0, len(raw) - max_bytes), "note": ""}

    def _open(self, path: str) -> tuple[Rows, _PreparedRows] | str:
        if path not in self._opened:
            try:
                rows = open_rows(path, cache_dir=self._cache_dir)
                self._opened[path] = rows, _PreparedRows(rows, self._made_of, self._keys)
            except (TokenmillError, OSError) as error:
                self._opened[path] = f"the source cannot be read here: {error}"
        return self._opened[path]

    @cached_property
    def _made_of(self) -> SliceKeys:
        manifest = self._store.manifest
        return SliceKeys(manifest["document"].get("recipe", {}), manifest["tokenizer"]["identity"])

    @cached_property
    def _keys(self) -> set[str]:
        return set(self._store.slice_keys())


class _PreparedRows:
    """The rows of a file, as it is now, in blocks that slices were made of."""

    def __init__(self, rows: Rows, made_of: SliceKeys, keys: set[str]) -> None:
        self._firsts: list[int] = []
        self._known: list[bool] = []
        for block in rows.blocks():
            self._firsts.append(block.first_row)
            self._known.append(not keys.isdisjoint(made_of.in_store(block)))

    def has(self, row: int) -> bool:
        return self._known[bisect_right(self._firsts, row) - 1]


def no_excerpt(note: str) -> dict[str, Any]:
    """Return an excerpt that is only a note."""
    return {"text": None, "bytes": 0, "cut": 0, "note": note}
