"""``tokenmill trace``: what was recorded of rollouts, against template and tokenizer.

Reads dumps of rollouts in any of the known formats, judges every trajectory, and shows how many are
of each class and the findings: where, what should be there and what is. Exit 1 where ``--fail-on``
says so, or where no row could be judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import ENGINES, RECIPE_OPTIONS, TOKENIZER, WHERE, Given, command
from tokenmill.cli.output import Output, one_line

if TYPE_CHECKING:
    from tokenmill.report.drift import RolloutReport

RENDERED = tuple(
    RECIPE_OPTIONS[name] for name in ("chat_template", "template_kwargs", "date", "thinking_opener")
)


@command(app, *TOKENIZER, *RENDERED, *WHERE, *ENGINES)
def trace(
    output: Output,
    given: Given,
    dump: Annotated[
        list[str], typer.Argument(metavar="DUMP", help="Files of recorded rollouts, globs.")
    ],
    format: Annotated[  # noqa: A002 - a name of the contract
        Literal["auto", "openai", "rollout", "miles", "skyrl", "verl", "trl", "slime"],
        typer.Option(help="Format of the rows; auto looks at each row's columns."),
    ] = "auto",
    fail_on: Annotated[
        Literal["structure", "text", "retokenized"] | None,
        typer.Option(help="The least grave class that makes exit code 1."),
    ] = None,
    findings: Annotated[
        int, typer.Option(help="How many findings are shown; --json has all.")
    ] = 20,
) -> None:
    """Check recorded rollouts against the chat template and the tokenizer."""
    from tokenmill.api import check_rollouts

    report = check_rollouts(dump, format=format, progress=output.progress, **given)
    output.result(report.document(), lambda: show_report(output, report, findings))
    judged = report.trajectories - sum(report.rejected.values())
    if report.fails(fail_on) or (report.rejected and judged <= 0):
        raise typer.Exit(1)


def show_report(output: Output, report: RolloutReport, most: int) -> None:
    """Findings in the order of the rows, then the counts."""
    from rich.text import Text

    from tokenmill.report.terminal_text import harmless

    colours = {"structure": "bold red", "text": "yellow", "retokenized": "cyan"}
    for finding in report.findings[:most]:
        head = Text(f"{finding['class']}: ", style=colours[finding["class"]])
        head.append(finding["kind"], style="bold")
        places = [str(finding["origin"])]
        places += [
            f"{name} {finding[name]}" for name in ("turn", "token") if finding[name] is not None
        ]
        head.append(f"  {harmless(', '.join(places))}")
        output.screen.print(head)
        lines = [f"expected  {finding['expected']}", f"found     {finding['found']}"]
        lines += [finding["detail"]] if finding["detail"] else []
        for line in lines:
            output.screen.print(Text(f"    {harmless(one_line(line, 240))}"))
    more = len(report.findings) + report.findings_left_off - most
    if more > 0:
        output.say(f"and {more:,} more findings")
    for origin, reason, detail in report.rejected_rows[:most]:
        output.say(f"{origin}: rejected for {reason}: {one_line(detail, 200)}")
    for why, count in report.unchecked.items():
        output.say(f"{count:,} trajectories: {why}")
    counts = ", ".join(f"{count:,} {name}" for name, count in report.counts.items())
    rejected = sum(report.rejected.values())
    ends = f", {report.truncated:,} cut off" if report.truncated else ""
    refused = f", {rejected:,} rejected" if rejected else ""
    told = f"{report.trajectories:,} trajectories: {counts}{ends}{refused}"
    output.say(f"{told}; {report.seconds:.1f} s")
