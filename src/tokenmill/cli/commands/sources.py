"""Commands that look at data before a build: `rows`, `lint`, `trace` and `doctor`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import (
    CACHE,
    ENGINES,
    MEDIA,
    RECIPE,
    RECIPE_OPTIONS,
    RUN_OPTIONS,
    TOKENIZER,
    WHERE,
    Given,
    Sources,
    command,
    recipe_arguments,
)
from tokenmill.cli.output import Output, one_line
from tokenmill.errors import RowError, UsageError
from tokenmill.inspect.lint.rules import RULES, SAMPLE_ROWS
from tokenmill.inspect.terminal_text import harmless

if TYPE_CHECKING:
    from tokenmill.inspect.doctor import Check
    from tokenmill.inspect.drift import RolloutReport
    from tokenmill.inspect.lint.rules import LintReport
    from tokenmill.sources.rows import Rows


@command(app, *CACHE, RUN_OPTIONS["rehash"])
def rows(
    output: Output,
    given: Given,
    sources: Sources,
    *,
    row: int | None = None,
    scan: bool = False,
) -> None:
    """Index rows, count them, show one.

    Args:
        row: Show this row; negative counts from the end.
        scan: Parse every row and count the bad ones.
    """
    from tokenmill.sources.rows import open_rows

    start = time.perf_counter()
    opened = open_rows(sources, **given)
    document: dict[str, Any] = {
        "rows": len(opened),
        "bytes": sum(file.bytes for file in opened.files),
        "files": len(opened.files),
    }
    if scan:
        parsed = (value for _, value in opened.scan())
        document["bad"] = Counter(bad.reason for bad in parsed if isinstance(bad, RowError))
    document["seconds"] = round(time.perf_counter() - start, 3)
    output.known.update(document)
    if row is None:
        output.result(document, lambda: _show_totals(output, document))
    else:
        _show_source_row(output, opened, row)


def _show_totals(output: Output, document: dict[str, Any]) -> None:
    output.say(
        f"{document['rows']:,} rows in {document['files']:,} files, "
        f"{document['bytes']:,} bytes, {document['seconds']} s"
    )
    for reason, count in document.get("bad", {}).items():
        output.say(f"  {count:,} {reason}")


def _show_source_row(output: Output, opened: Rows, row: int) -> None:
    """Print the row's own bytes on stdout, its origin on stderr."""
    if not -len(opened) <= row < len(opened):
        raise UsageError(f"--row {row}: there are {len(opened):,} rows")
    origin = opened.origin(row)
    if not output.as_json:
        byte = "" if origin.offset is None else f"byte {origin.offset:,}, "
        output.say(f"{origin} (row {origin.row:,}, {byte}{origin.length:,} bytes)")
        raw = opened.raw(row)
        if sys.stdout.isatty():  # a program gets the bytes, a terminal what cannot steer it
            typer.echo(harmless(raw.decode("utf-8", "backslashreplace")))
        else:
            typer.echo(raw)
    output.known["origin"] = origin._asdict()
    value = opened[row]  # a bad row is refused here
    output.result({**output.known, "row": value}, lambda: None)


PLACES_SHOWN = 5  # of a finding's places; --json has more


@command(app, *RECIPE, *WHERE, *MEDIA, *ENGINES)
def lint(
    output: Output,
    given: Given,
    *,
    sample: int = SAMPLE_ROWS,
    check_all: Annotated[bool, typer.Option("--all", help="Check every row.")] = False,
    only: list[str] | None = None,
    ignore: list[str] | None = None,
    fail_on: Literal["error", "warning", "info", "never"] = "error",
    list_rules: bool = False,
) -> None:
    """Find what is wrong with rows before they are prepared.

    Args:
        sample: How many rows are checked; always the same.
        only: Run this rule alone. Repeatable, or with commas.
        ignore: Leave out this rule. Repeatable, or with commas.
        fail_on: The least severe finding that makes exit code 1.
        list_rules: List the rules.
    """
    from tokenmill.inspect.lint.run import lint as look

    if list_rules:
        _show_rules(output)
        return
    report = look(
        **recipe_arguments(given),
        sample=None if check_all else sample,
        only=_names(only),
        ignore=_names(ignore),
        progress=output.progress,
    )
    output.result(report.document(), lambda: _show_findings(output, report))
    if report.fails(fail_on):
        raise typer.Exit(1)


def _names(given: list[str] | None) -> list[str]:
    return [name.strip() for item in given or () for name in item.split(",") if name.strip()]


def _show_rules(output: Output) -> None:
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


def _show_findings(output: Output, report: LintReport) -> None:
    from rich.text import Text

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


RENDERED = tuple(
    RECIPE_OPTIONS[name] for name in ("chat_template", "template_kwargs", "date", "thinking_opener")
)


RolloutFormat = Literal["auto", "openai", "rollout", "miles", "skyrl", "verl", "trl", "slime"]


@command(app, *TOKENIZER, *RENDERED, *WHERE, *ENGINES)
def trace(
    output: Output,
    given: Given,
    dump: list[str],
    *,
    format: RolloutFormat = "auto",  # noqa: A002 - a name of the contract
    fail_on: Literal["structure", "text", "retokenized"] | None = None,
    findings: int = 20,
) -> None:
    """Check recorded rollouts against the chat template and the tokenizer.

    Args:
        dump: Files of recorded rollouts, globs.
        format: Format of the rows; auto looks at each row's columns.
        fail_on: The least grave class that makes exit code 1.
        findings: How many findings are shown; --json has all.
    """
    from tokenmill.inspect.drift import check_rollouts

    report = check_rollouts(dump, format=format, progress=output.progress, **given)
    output.result(report.document(), lambda: _show_rollouts(output, report, findings))
    judged = report.trajectories - sum(report.rejected.values())
    if report.fails(fail_on) or (report.rejected and judged <= 0):
        raise typer.Exit(1)


def _show_rollouts(output: Output, report: RolloutReport, most: int) -> None:
    from rich.text import Text

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


COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "bold red"}
TRIED = TOKENIZER[0]._replace(help="Directory, tokenizer.json or hub id to try engines with.")


@command(app, TRIED, *TOKENIZER[1:], *CACHE)
def doctor(output: Output, given: Given, sources: list[str] | None = None) -> None:
    """Check engines, cache, disk, settings and Ray, and say what to do.

    Args:
        sources: Sources that are to be prepared.
    """
    from tokenmill.inspect.doctor import examine

    given["describe_ray"] = _describe_ray
    checks = examine(sources or (), given.pop("tokenizer", None), **given)
    failed = [check for check in checks if check.status == "fail"]
    document = {"ok": not failed, "checks": [check.document() for check in checks]}
    output.result(document, lambda: _show_checks(output, checks))
    if failed:
        raise typer.Exit(1)


def _describe_ray() -> dict[str, Any]:
    """Ask Ray, which is loaded only for this."""
    from tokenmill.integrations.ray import describe

    return describe()


def _show_checks(output: Output, checks: list[Check]) -> None:
    from rich.text import Text

    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.status:<7}", style=COLOURS[check.status])
        line.append(f" {check.name:<{width}}  ", style="bold")
        line.append(harmless(one_line(check.detail, 300)))
        output.screen.print(line)
        output.screen.print(Text(f"{'':<{width + 10}}→ {harmless(check.remedy)}", style="dim"))
    failed = sum(check.status == "fail" for check in checks)
    output.say(f"{failed} of {len(checks)} checks failed" if failed else "ready")
