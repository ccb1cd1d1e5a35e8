"""``tokenmill stats``: what is in a store.

Rows, tokens and trained tokens, percentiles of row lengths, and a table per source and role. All
numbers come from the stored lengths; no token is read, so it is quick on any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.cli.app import app
from tokenmill.cli.options import AsJson, StorePath
from tokenmill.cli.output import Output

if TYPE_CHECKING:
    from rich.console import Console


@app.command()
def stats(
    store: StorePath,
    as_json: AsJson = False,
) -> None:
    """Count rows, tokens and trained tokens."""
    from tokenmill.report.stats import store_stats
    from tokenmill.store import open_store

    output = Output.current()
    document = store_stats(open_store(store))
    output.result(document, lambda: show_stats(output.screen, document))


def show_stats(console: Console, document: dict[str, Any]) -> None:
    """Print the totals and two tables."""
    from rich.table import Table

    tokens, trained = document["tokens"], document["trained_tokens"]
    share = trained / tokens if tokens else 0
    console.print(
        f"{document['rows']:,} rows, {tokens:,} tokens, {trained:,} trained ({share:.1%}), "
        f"{sum(document['rejected'].values()):,} rejected"
    )
    lengths = Table("", *document["percentiles"], title=None, box=None, pad_edge=False)
    lengths.add_row("length", *(f"{value:,}" for value in document["percentiles"].values()))
    lengths.add_row("trained", *(f"{v:,}" for v in document["trained_percentiles"].values()))
    console.print(lengths)
    sources = Table("source", "rows", "tokens", "trained", box=None, pad_edge=False)
    for source in document["sources"]:
        numbers = (source["rows"], source["tokens"], source["trained_tokens"])
        sources.add_row(source["path"] or "?", *(f"{number:,}" for number in numbers))
    console.print(sources)
    roles = Table("role", "turns", "tokens", box=None, pad_edge=False)
    for role, counts in document["roles"].items():
        roles.add_row(role, f"{counts['turns']:,}", f"{counts['tokens']:,}")
    console.print(roles)
