"""The inspector page: a store to look at in a browser, from one file or from a server.

`make_page` gives the file: everything in one document, rows as far as they fit, and a sentence that
says which. `serve` (in its own module, the only one that knows starlette) gives the same page over
the whole store. Both show one `overview`; rows come to the browser either encoded by `compact` or
one by one from `rows_document`. `Comparison` sets the rows of two stores side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.report.page.document import page, write_page
from tokenmill.report.page.overview import overview
from tokenmill.report.page.selection import select
from tokenmill.report.row import store_tokenizer
from tokenmill.report.source_excerpts import RawRows
from tokenmill.store import Store

PAGE_BYTES = 14_500_000
"""A page on disk stays below this: it has to travel by mail and open at once."""


def make_page(
    store: Store,
    target: Path,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
    count: int | None = None,
    seed: int = 0,
    cache_dir: str | None = None,
    fetch: bool = False,
    most_bytes: int = PAGE_BYTES,
) -> dict[str, Any]:
    """Write the page of a store.

    Args:
        store: What to show.
        target: The file.
        rule: Rows of a rule only.
        rows: Rows of these numbers only.
        count: At most so many rows.
        seed: Of a random choice.
        cache_dir: Where row indexes of the sources are kept, for excerpts of rejected rows.
        fetch: Whether sources that are elsewhere are asked for those excerpts.
        most_bytes: Bound of the file.

    Returns:
        ``html``, ``bytes``, ``rows_in_page``, ``rows`` and ``selection``, the sentence.
    """
    raws = RawRows(store, cache_dir, fetch=fetch)
    data: dict[str, Any] = {"mode": "file", "overview": overview(store, raws)}
    bare = page(data, served=False)
    chosen = select(
        store,
        store_tokenizer(store),
        most_bytes - len(bare),
        rule=rule,
        rows=rows,
        count=count,
        seed=seed,
    )
    data["rows"] = chosen.rows.document()
    data["selection"] = chosen.sentence
    content = page(data, served=False)
    write_page(target, content)
    return {
        "html": str(target),
        "bytes": len(content),
        "rows_in_page": len(chosen.rows.rows),
        "rows": len(store),
        "selection": chosen.sentence,
    }
