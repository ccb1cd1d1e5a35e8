"""The inspector page: a store to look at in a browser, from one file or from a server.

`make_page` gives the file: everything in one document, rows as far as they fit, and a sentence that
says which. `serve` (in its own module, the only one that knows starlette) gives the same page over
the whole store. Both show one `overview`; rows come to the browser either along with the page
(`embedded_rows`) or one by one (`rows`). `StoreComparison` sets the rows of two stores side by
side. ``tokenmill inspect`` calls all of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.report.page.document import compressed, page, write_page
from tokenmill.report.page.embedded_rows import select_rows
from tokenmill.report.page.overview import overview
from tokenmill.report.page.thumbnails import embedded_thumbnails
from tokenmill.report.row import store_tokenizer
from tokenmill.report.row_facts import RowFacts
from tokenmill.report.source_excerpts import SourceExcerpts
from tokenmill.store import Store

PAGE_BYTES = 14_500_000
"""A page on disk stays below this: it has to travel by mail and open at once."""

PICTURES_SHARE = 0.4  # of what is left of a page, where rows have pictures
SENTENCE_BYTES = 1000  # of the sentence about the selection, and of brackets around the rows


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
        count: Rows at most.
        seed: Of a random choice.
        cache_dir: Where row indexes of the sources are kept, for excerpts of rejected rows.
        fetch: Whether sources that are elsewhere are asked for those excerpts.
        most_bytes: Bound of the file.

    Returns:
        ``html``, ``bytes``, ``rows_in_page``, ``rows`` and ``selection``, the sentence.
    """
    excerpts = SourceExcerpts(store, cache_dir, fetch=fetch)
    facts = RowFacts(store)
    about: dict[str, Any] = {"overview": overview(facts, excerpts)}
    left = most_bytes - len(page(about, rows={})) - SENTENCE_BYTES
    taken, about["selection"] = select_rows(
        facts,
        store_tokenizer(store),
        left - int(PICTURES_SHARE * left) if store.has_media else left,
        rule=rule,
        rows=rows,
        count=count,
        seed=seed,
    )
    rows_document = taken.document()
    left = most_bytes - len(page(about, rows=rows_document)) - SENTENCE_BYTES
    thumbnails = embedded_thumbnails(store, taken.rows.tolist(), left)
    content = page(about, rows={**rows_document, "pictures": compressed(thumbnails)})
    write_page(target, content)
    return {
        "html": str(target),
        "bytes": len(content),
        "rows_in_page": len(taken.rows),
        "rows": len(store),
        "selection": about["selection"],
    }
