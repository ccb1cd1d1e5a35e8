"""The command `stats`: statistics of a store, its packs, or a mixture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import PackMethod, PackOversize, PackWindow, command
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError
from tokenmill.inspect.terminal_text import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_WIDTH = 10_000  # columns
MAX_BAR = 40  # columns of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


@command(app)
def stats(
    output: Output,
    store: Annotated[
        str | None, typer.Argument(metavar="STORE", help="Path, name or key of a store, or @last.")
    ] = None,
    *,
    max_length: list[int] | None = None,
    pack: list[int] | None = None,
    method: PackMethod = "best_fit",
    window: PackWindow = 65536,
    oversize: PackOversize = "drop",
    mix: str | None = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of --mix.")] = 1000,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples per step of --mix, over all ranks.")
    ] = 1,
) -> None:
    """Count rows and tokens; try limits, packs and mixtures.

    Args:
        max_length: Also show what this limit drops. Repeatable.
        pack: Pack an epoch to this length instead of the usual ones. Repeatable.
        mix: YAML file with the stores of a mixture (paths or names) and their weights.
    """
    from tokenmill.data.packs import Pack
    from tokenmill.inspect.stats import (
        mixture_stats,
        open_mixture,
        store_distributions,
        store_stats,
    )
    from tokenmill.store import open_store

    if (store is None) == (mix is None):
        raise UsageError("Give either a STORE or --mix RECIPE")
    if mix is not None:
        document = mixture_stats(open_mixture(mix), steps, batch_size)
        output.result(document, lambda: _show_mixture(output.stdout, document))
        return
    assert store is not None
    packs = [Pack(length, method, window, oversize) for length in pack or ()]
    opened = open_store(store)
    document = {
        **store_stats(opened),
        **store_distributions(opened, max_lengths=max_length or (), packs=packs),
    }

    def show() -> None:
        show_stats(output.stdout, document)
        _show_distributions(output.stdout, document)

    output.result(document, show)


def _show_mixture(console: Console, document: dict[str, Any]) -> None:
    table = new_table("source", "share", "samples", "passes")
    for name, rows in document["rows"].items():
        share, passes = document["shares"][name], document["passes"][name]
        _add(table, name, (), f"{share:.2%}", f"{rows:,}", f"{passes:,.3g}")
    console.print(table)


def _show_distributions(console: Console, document: dict[str, Any]) -> None:
    lengths, shares = document["histogram"], document["trained_share_histogram"]
    _show_bars(console, "tokens", [(f"{b['from']:,}–{b['to']:,}", b["rows"]) for b in lengths])
    bins = [(f"{b['from']:.0%}–{b['to']:.0%}", b["rows"]) for b in shares]
    _show_bars(console, "trained share", bins)
    rows, tokens = document["rows"], document["tokens"]
    limits = new_table("max_length", "rows dropped", "share", "tokens dropped", "or cut off")
    for limit in document["max_length"]:
        dropped, dropped_tokens = limit["rows_dropped"], limit["tokens_dropped"]
        shown = (
            f"{dropped:,}",
            _share(dropped, rows),
            f"{dropped_tokens:,} ({_share(dropped_tokens, tokens)})",
        )
        limits.add_row(f"{limit['max_length']:,}", *shown, f"{limit['tokens_truncated']:,}")
    packs = new_table("packs of", "packs", "fill", "rows too long")
    for fill in document["packing"]:
        shares = (f"{fill['packs']:,}", f"{fill['fill']:.2%}", f"{fill['rows_longer']:,}")
        packs.add_row(f"{fill['length']:,}", *shares)
    for table in (limits, packs):
        console.print()
        console.print(table)
    packed = document["packing"][0]["rows"] if document["packing"] else rows
    if packed < rows:
        console.print(f"(packs of the first {packed:,} rows only)")


def _show_bars(console: Console, title: str, bins: list[tuple[str, int]]) -> None:
    from rich.text import Text

    largest = max((rows for _, rows in bins), default=0)
    if not largest:
        return
    label_width = max(len(title), *(len(label) for label, _ in bins))
    count_width = max(4, len(f"{largest:,}"))
    console.print()
    console.print(Text(f"{title:<{label_width}}  {'rows':>{count_width}}", style="bold"))
    for label, rows in bins:
        line = Text(f"{label:>{label_width}}  {rows:>{count_width},}  ")
        console.print(line.append(_bar(rows / largest), style="cyan"))


def _bar(share: float) -> str:
    """Return a bar drawn in eighths of a column; any share above 0 is visible."""
    eighths = max(int(share * MAX_BAR * 8), 1 if share else 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[rest] if rest else "")


def show_stats(console: Console, document: dict[str, Any]) -> None:
    tokens, trained = document["tokens"], document["trained_tokens"]
    rejected = sum(document["rejected"].values())
    console.print(
        f"{document['rows']:,} rows, {tokens:,} tokens, {trained:,} trained "
        f"({_share(trained, tokens)}), {rejected:,} rejected"
    )
    groups = {name: count for name, count in document.get("groups", {}).items() if count}
    if groups:
        console.print("groups: " + ", ".join(f"{count:,} {name}" for name, count in groups.items()))
    if document["images"]:
        console.print(
            f"{document['images']:,} images of {document['patches']:,} patches in "
            f"{document['rows_with_images']:,} rows"
        )
    lengths = new_table("per row", *document["percentiles"])
    _add(lengths, "tokens", document["percentiles"].values())
    _add(lengths, "trained", document["trained_percentiles"].values())
    roles = new_table("role", "turns", "tokens", "share")
    for role, counts in document["roles"].items():
        _add(roles, role, (counts["turns"], counts["tokens"]), _share(counts["tokens"], tokens))
    sources = new_table("source", "rows", "tokens", "trained", "rejected", "share")
    for source in document["sources"]:
        names = ("rows", "tokens", "trained_tokens", "rejected")
        numbers = tuple(source[name] for name in names)
        _add(sources, source["path"] or "?", numbers, _share(numbers[2], numbers[1]))
    tables = (lengths, roles, sources, _sidecars(document))
    shown = [table for table in tables if table.row_count and len(table.columns) > 1]
    console.print()
    show_tables(console, *shown)


def _sidecars(document: dict[str, Any]) -> Table:
    from rich.text import Text

    table = new_table("attached", "per", "low", "mean", "high", "rows missing", "producer")
    for it in document["sidecars"]:
        numbers = ("–" if it[k] is None else f"{it[k]:.4g}" for k in ("low", "mean", "high"))
        producer = Text(harmless(it["producer"]), no_wrap=True)
        table.add_row(it["name"], it["per"], *numbers, f"{it['missing']:,}", producer)
    return table


def new_table(first: str, *numbers: str, texts: Iterable[str] = ()) -> Table:
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in texts:
        table.add_column(name, no_wrap=True)
    return table


def show_tables(console: Console, *tables: Table) -> None:
    # A long path runs over the edge of the screen instead of being cut or folded.
    width, console.width = console.width, MAX_WIDTH
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)
    console.width = width


def _add(table: Table, name: str, numbers: Iterable[int], *rest: str) -> None:
    from rich.text import Text

    # A string would be read as markup, for example in the path [a].jsonl.
    table.add_row(Text(harmless(name), no_wrap=True), *(f"{number:,}" for number in numbers), *rest)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
