"""The source row behind a row: an excerpt of its own bytes, where the source is still readable.

In go a store and an origin; out comes text for ``tokenmill inspect`` and for the page's rejected
rows. A `SourceExcerpts` opens the sources of a store, each once and only when asked, and answers
with an *excerpt*: a document with the first bytes of the row as text, how many more there are, and
a note. A source that is gone or changed gives a note and no text: what is shown is never another
row's.

The paths are what the store's proof says, and a store may come from anybody: only what stands on
this machine's file systems is opened, nothing is fetched unless the caller allows it, and nothing
is shown but out of the very bytes that a slice of the store was made of. Its key holds their
digest, so a store that names a file of this machine as its source gets nothing out of it that it
did not know before; pages with excerpts are handed on.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from functools import cached_property
from typing import Any

from tokenmill.build.plan import SliceKeys
from tokenmill.errors import TokenmillError
from tokenmill.origin import Origin
from tokenmill.source import Rows, open_rows
from tokenmill.store import Store

MOST_BYTES = 2048
"""Bytes of an excerpt; a person sees what is wrong in the first lines."""


class SourceExcerpts:
    """Excerpts of a store's source rows.

    Args:
        store: Whose sources are asked.
        cache_dir: Where row indexes are kept; None: the user's own.
        fetch: Whether sources that are elsewhere are asked for over the network.
    """

    def __init__(self, store: Store, cache_dir: str | None = None, *, fetch: bool = False) -> None:
        self._store = store
        self._cache_dir = cache_dir
        self._fetch = fetch
        self._opened: dict[str, tuple[Rows, _PreparedRows] | str] = {}

    def excerpt(self, origin: Origin, most: int = MOST_BYTES) -> dict[str, Any]:
        """``{text, bytes, cut, note}``; text is None where the note says why."""
        if origin.path is None:
            return no_excerpt("the paths of this store's source files are unknown")
        # What stands here is opened as that; any other words may name a URL or a hub's dataset.
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
        text = raw[:most].decode("utf-8", "backslashreplace")
        return {"text": text, "bytes": len(raw), "cut": max(0, len(raw) - most), "note": ""}

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
    """Which rows of a file, as it is now, stand in blocks that slices were made of."""

    def __init__(self, rows: Rows, made_of: SliceKeys, keys: set[str]) -> None:
        self._firsts: list[int] = []
        self._known: list[bool] = []
        for block in rows.blocks():
            self._firsts.append(block.first_row)
            self._known.append(not keys.isdisjoint(made_of.in_store(block)))

    def has(self, row: int) -> bool:
        return self._known[bisect_right(self._firsts, row) - 1]


def no_excerpt(note: str) -> dict[str, Any]:
    """An excerpt that is only a note."""
    return {"text": None, "bytes": 0, "cut": 0, "note": note}
