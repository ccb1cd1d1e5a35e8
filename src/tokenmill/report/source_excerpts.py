"""The source row behind a row: an excerpt of its own bytes, where the source is still readable.

In go a store and an origin; out comes text for ``tokenmill inspect`` and for the page's rejected
rows. A `SourceExcerpts` opens the sources of a store, each once and only when asked, and answers
with an *excerpt*: a document with the first bytes of the row as text, how many more there are, and
a note. A source that is gone, or whose row is no longer what it was, gives a note and no text: what
is shown is never another row's. Whether the file as a whole is the one that was prepared is said
too, because of a rejected row only place and length are known.

The paths are what the store's proof says, and a store may come from anybody: only what stands on
this machine's file systems is opened, and nothing is fetched unless the caller allows it.
"""

from __future__ import annotations

import os
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.origin import Origin
from tokenmill.source import Rows, open_rows
from tokenmill.store import Store
from tokenmill.work.inputs import source_documents

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
        self._opened: dict[str, tuple[Rows | None, str]] = {}

    def excerpt(self, origin: Origin, most: int = MOST_BYTES) -> dict[str, Any]:
        """``{text, bytes, note}``; text is None where the note says why."""
        if origin.path is None:
            return _without("the paths of this store's source files are unknown")
        # What stands here is opened as that; any other words may name a URL or a hub's dataset.
        if not self._fetch and not os.path.lexists(origin.path):
            return _without(
                "the source cannot be read here; if it is elsewhere, --fetch-sources asks for it "
                "there"
            )
        rows, note = self._open(origin.path)
        if rows is None:
            return _without(note)
        try:
            there = rows.origin(origin.row)
            raw = rows.raw(origin.row)
        except (TokenmillError, IndexError) as error:
            return _without(f"the source has no such row any more: {error}")
        if len(raw) != origin.length or there.offset != origin.offset:
            return _without("the source changed since: this row is not what it was")
        text = raw[:most].decode("utf-8", "backslashreplace")
        return {"text": text, "bytes": len(raw), "cut": max(0, len(raw) - most), "note": note}

    def _open(self, path: str) -> tuple[Rows | None, str]:
        if path not in self._opened:
            try:
                rows = open_rows(path, cache_dir=self._cache_dir)
                self._opened[path] = (rows, self._doubt(rows))
            except (TokenmillError, OSError) as error:
                self._opened[path] = (None, f"the source cannot be read here: {error}")
        return self._opened[path]

    def _doubt(self, rows: Rows) -> str:
        known = {source["digest"] for source in self._store.manifest["document"]["sources"]}
        now = {source["digest"] for source in source_documents(rows.blocks())}
        if now <= known:
            return ""
        return "this file as a whole is not what was prepared: a part of it was, or it changed"


def _without(note: str) -> dict[str, Any]:
    return {"text": None, "bytes": 0, "cut": 0, "note": note}
