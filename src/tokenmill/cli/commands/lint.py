"""``tokenmill lint``: what is wrong with this data, with file and line.

Takes the flags of ``prepare`` that shape rows, renders and encodes a sample of the rows (``--all``:
every one) as a build would, and reports per rule how many rows it concerns, where they stand and
one example, with a hint. Exit 1 where an error was found (or what ``--fail-on`` says).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import ENGINES, MEDIA, RECIPE, WHERE, Given, command, recipe_arguments
from tokenmill.cli.output import Output, one_line
from tokenmill.report.lint.rules import RULES, SAMPLE_ROWS

if TYPE_CHECKING:
    from tokenmill.report.lint.rules import LintReport

PLACES_SHOWN = 5  # of a finding's places; --json has more


@command(app, *RECIPE, *WHERE, *MEDIA, *ENGINES)
def lint(
    output: Output,
    given: Given,
    sample: Annotated[
        int, typer.Option(help="How many rows are checked; always the same.")
    ] = SAMPLE_ROWS,
    check_all: Annotated[bool, typer.Option("--all", help="Check every row.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Run this rule alone. Repeatable, or with commas."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Leave out this rule. Repeatable, or with commas."),
    ] = None,
    fail_on: Annotated[
        Literal["error", "warning", "info", "never"],
        typer.Option(help="The least severe finding that makes exit code 1."),
    ] = "error",
    list_rules: Annotated[bool, typer.Option(help="List the rules.")] = False,
) -> None:
    """Find what is wrong with rows before they are prepared."""
    from tokenmill.api import lint as look

    if list_rules:
        show_rules(output)
        return
    report = look(
        **recipe_arguments(given),
        sample=None if check_all else sample,
        only=_names(only),
        ignore=_names(ignore),
        progress=output.progress,
    )
    output.result(report.document(), lambda: show_report(output, report))
    if report.fails(fail_on):
        raise typer.Exit(1)


def _names(given: list[str] | None) -> list[str]:
    return [name.strip() for item in given or () for name in item.split(",") if name.strip()]


def show_rules(output: Output) -> None:
    """Every rule with its severity."""
    document = {
        "rules": [
            {"rule": r.name, "severity": r.severity, "about": r.about, "hint": r.hint}
            for r in RULES.values()
        ]
    }
    width = max(map(len, RULES))

    def show() -> None:
        for rule in RULES.values():
            typer.echo(f"{rule.severity:<8} {rule.name:<{width}}  {rule.about}")

    output.result(document, show)


def show_report(output: Output, report: LintReport) -> None:
    """Findings, worst first, then what was looked at."""
    from rich.text import Text

    from tokenmill.report.terminal_text import harmless

    colours = {"error": "bold red", "warning": "yellow", "info": "cyan"}
    for finding in report.findings:
        head = Text(f"{finding.severity}: ", style=colours[finding.severity])
        rows = "the tokenizer" if not finding.places else f"{finding.count:,} rows"
        head.append(f"{finding.rule}", style="bold")
        head.append(f"  {rows if finding.count != 1 else rows.replace('1 rows', '1 row')}")
        output.screen.print(head)
        lines = [finding.detail if not finding.places else f"{finding.places[0]}: {finding.detail}"]
        if finding.excerpt:
            lines.append(f"| {finding.excerpt}")
        if len(finding.places) > 1:
            shown = ", ".join(map(str, finding.places[1:PLACES_SHOWN]))
            more = finding.count - min(len(finding.places), PLACES_SHOWN)
            lines.append(f"also {shown}{f' and {more:,} more' if more > 0 else ''}")
        lines.append(f"→ {finding.hint}")
        for line in lines:
            output.screen.print(Text(f"    {harmless(one_line(line, 240))}"))
    counts = {severity: len(report.of(severity)) for severity in ("error", "warning", "info")}
    found = ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in counts.items() if n)
    looked = f"{report.rows_checked:,} of {report.rows:,} rows"
    output.say(f"{found or 'nothing found'} in {looked}; {report.seconds:.1f} s")
    if report.sample is not None:
        output.say(f"this was a sample of {report.sample['rows']:,} rows; --all checks every row")
