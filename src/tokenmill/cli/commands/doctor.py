"""``tokenmill doctor``: is everything there that a preparation needs, and what to do if not.

One line per check: status, what was seen, and what to do about it. With ``--tokenizer`` the engines
are compared on it; with sources, free space is compared with what their store needs. Exit 1 where a
check fails; notes and warnings do not change the exit code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import CACHE, TOKENIZER, Given, command
from tokenmill.cli.output import Output, one_line

if TYPE_CHECKING:
    from tokenmill.report.doctor import Check

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "bold red"}


TRIED = TOKENIZER[0]._replace(help="Directory, tokenizer.json or hub id to try engines with.")


@command(app, TRIED, *TOKENIZER[1:], *CACHE)
def doctor(
    output: Output,
    given: Given,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SRC", help="Sources that are to be prepared.")
    ] = None,
) -> None:
    """Check engines, cache, disk, settings and Ray, and say what to do."""
    from tokenmill.report.doctor import examine

    given["describe_ray"] = _describe_ray
    checks = examine(sources or (), given.pop("tokenizer", None), **given)
    failed = [check for check in checks if check.status == "fail"]
    document = {"ok": not failed, "checks": [check.document() for check in checks]}
    output.result(document, lambda: show(output, checks))
    if failed:
        raise typer.Exit(1)


def _describe_ray() -> dict[str, Any]:
    """Ask Ray, which is loaded only for this."""
    from tokenmill.integrations.ray import describe

    return describe()


def show(output: Output, checks: list[Check]) -> None:
    """One line per check, and one for what to do."""
    from rich.text import Text

    from tokenmill.report.terminal_text import harmless

    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.status:<7}", style=COLOURS[check.status])
        line.append(f" {check.name:<{width}}  ", style="bold")
        line.append(harmless(one_line(check.detail, 300)))
        output.screen.print(line)
        output.screen.print(Text(f"{'':<{width + 10}}→ {harmless(check.remedy)}", style="dim"))
    failed = sum(check.status == "fail" for check in checks)
    output.say(f"{failed} of {len(checks)} checks failed" if failed else "ready")
