"""``tokenmill stats``: what is in a store.

Rows, tokens and trained tokens, percentiles of row lengths, and a table per source and role. All
numbers come from the stored lengths; no token is read, so it is quick on any size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenmill.cli.app import app
from tokenmill.cli.options import AsJson, StorePath
from tokenmill.cli.output import Output
from tokenmill.report.characters import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 10_000  # columns


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
    """Print the totals and three tables."""
    tokens, trained = document["tokens"], document["trained_tokens"]
    rejected = sum(document["rejected"].values())
    console.print(
        f"{document['rows']:,} rows, {tokens:,} tokens, {trained:,} trained "
        f"({_share(trained, tokens)}), {rejected:,} rejected"
    )
    lengths = _table("per row", *document["percentiles"])
    _add(lengths, "tokens", document["percentiles"].values())
    _add(lengths, "trained", document["trained_percentiles"].values())
    roles = _table("role", "turns", "tokens", "share")
    for role, counts in document["roles"].items():
        _add(roles, role, (counts["turns"], counts["tokens"]), _share(counts["tokens"], tokens))
    sources = _table("source", "rows", "tokens", "trained", "share")
    for source in document["sources"]:
        numbers = (source["rows"], source["tokens"], source["trained_tokens"])
        _add(sources, source["path"] or "?", numbers, _share(numbers[2], numbers[1]))
    # Wider than any screen: a long path runs over the edge instead of being cut or folded.
    width, console.width = console.width, WIDEST
    for table in (lengths, roles, sources):
        if table.row_count and len(table.columns) > 1:
            console.print()
            console.print(table)
    console.width = width


def _table(first: str, *numbers: str) -> Table:
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, name: str, numbers: Iterable[int], *rest: str) -> None:
    from rich.text import Text

    # A Text is taken as it stands; a path such as [a].jsonl is no markup.
    table.add_row(Text(harmless(name), no_wrap=True), *(f"{number:,}" for number in numbers), *rest)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
