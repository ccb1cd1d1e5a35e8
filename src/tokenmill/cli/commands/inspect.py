"""``tokenmill inspect``: one row's tokens and mask, to look at.

Colours: green is trained text, plain is not trained; control tokens are cyan, the trained one that
closes a turn is green on reverse. Spaces show as ``·``, line ends as ``⏎``, tabs as ``⇥``. Without
colour (a pipe, ``NO_COLOR``) trained stretches stand in ``⟦ ⟧``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import AsJson, StorePath
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError
from tokenmill.report.characters import harmless, visible

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.report.row import RowView

STYLES = {
    "untrained": "",
    "trained": "green",
    "special": "cyan",
    "closer": "bold green reverse",
    "control": "bold cyan underline",
}

LEGEND = "green: trained · cyan: control token · reversed: trained and closes a turn"
LEGEND_PLAIN = "⟦ ⟧: trained"


@app.command()
def inspect(
    store: StorePath,
    row: Annotated[int, typer.Option(help="Number of the row; negative counts from the end.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show one row's tokens and mask."""
    from tokenmill.report.row import store_tokenizer, view_row
    from tokenmill.store import open_store

    opened = open_store(store)
    if not -len(opened) <= row < len(opened):
        raise UsageError(f"--row {row}: the store has {len(opened):,} rows")
    view = view_row(opened, row, store_tokenizer(opened))
    output = Output.current()
    output.result(view.document(), lambda: show_row(output.screen, view))


def show_row(console: Console, view: RowView) -> None:
    """Print a row, turn by turn."""
    from rich.text import Text

    plain = not console.is_terminal or console.no_color
    trained = sum(view.mask)
    head = f"row {view.number}  {view.origin}  {len(view.ids)} tokens, {trained} trained"
    console.print(Text(harmless(head), style="bold"))
    for name, value in view.carried.items():
        console.print(Text(f"{name}: {value!r}", style="dim"))
    for role, start, end in view.turns:
        share = sum(view.mask[start:end])
        title = f"── {harmless(role)} [{start}:{end}] {share} trained "
        console.print(Text(title, style="dim"))
        text = Text()
        for at in range(start, end):
            if plain and view.mask[at] and (at == start or not view.mask[at - 1]):
                text.append("⟦")
            text.append(visible(view.pieces[at]), style=STYLES[view.kinds[at]])
            if plain and view.mask[at] and (at + 1 == end or not view.mask[at + 1]):
                text.append("⟧")
        if text.plain.endswith("\n"):
            text.right_crop()  # the line end is shown; the screen has one of its own
        console.print(text)
    console.print(Text(LEGEND_PLAIN if plain else LEGEND, style="dim"))
