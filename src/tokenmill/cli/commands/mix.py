"""``tokenmill mix``: the shares that a mixture will serve, before anything runs.

Reads the recipe of a mixture (``sources``, ``weights`` and the other arguments of `tokenmill.mix`),
counts what each source would give to the steps, and draws how the shares change. The counts are
those of the loader; nothing is read but the stores' totals.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import command
from tokenmill.cli.output import Output
from tokenmill.report.terminal_text import harmless

WIDTH = 60  # columns of a line of the drawing
FILLS = "█▓▒░▚▞▤▥"  # of the sources, in turn


@command(app)
def mix(
    output: Output,
    recipe: Annotated[str, typer.Argument(help="YAML with sources (stores by name) and weights.")],
    steps: Annotated[int, typer.Option(min=1, help="How many steps are planned.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step, over all ranks.")] = 1,
) -> None:
    """Plan what a mixture will serve: the share of every source, step by step."""
    from tokenmill.report.mixture_plan import mixture_plan, open_mixture

    document = mixture_plan(open_mixture(recipe), steps, batch_size)
    output.result(document, lambda: _show(output, document))


def _show(output: Output, document: dict[str, Any]) -> None:
    fills = {name: FILLS[at % len(FILLS)] for at, name in enumerate(document["shares"])}
    for stretch in document["stretches"]:
        output.say(f"{stretch['first_step']:>12,}  {_bar(stretch['shares'], fills)}")
    for name, fill in fills.items():
        output.say(
            f"{fill} {harmless(name)}: {document['shares'][name]:.2%}, "
            f"{document['rows'][name]:,} of {document['samples']:,} samples, "
            f"{document['passes'][name]:,.3g} passes"
        )


def _bar(shares: dict[str, float], fills: dict[str, str]) -> str:
    """All sources side by side in one line."""
    line, reached = "", 0.0
    for name, share in shares.items():
        reached += share
        line += fills[name] * (round(reached * WIDTH) - len(line))
    return line
