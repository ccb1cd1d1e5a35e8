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
        # A program gets the bytes, a terminal what cannot steer it.
        steady = harmless(raw.decode("utf-8", "backslashreplace"))
        typer.echo(steady if sys.stdout.isatty() else raw)
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
    width, rules = max(map(len, RULES)), RULES.values()
    listed = [{"rule": r.name, "severity": r.severity, "about": r.about, "hint": r.hint}
              for r in rules]  # fmt: skip

    def show() -> None:
        for rule in rules:
            typer.echo(f"{rule.severity:<8} {rule.name:<{width}}  {rule.about}")

    output.result({"rules": listed}, show)


def _show_findings(output: Output, report: LintReport) -> None:
    colours = {"error": "bold red", "warning": "yellow", "info": "cyan"}
    for finding in report.findings:
        rows = "the tokenizer" if not finding.places else f"{finding.count:,} rows"
        rows = rows.replace("1 rows", "1 row") if finding.count == 1 else rows
        head = f"{finding.severity}: ", (finding.rule, "bold"), f"  {rows}"
        output.show(*head, style=colours[finding.severity])
        lines = [finding.detail if not finding.places else f"{finding.places[0]}: {finding.detail}"]
        if finding.excerpt:
            lines.append(f"| {finding.excerpt}")
        if len(finding.places) > 1:
            shown = ", ".join(map(str, finding.places[1:PLACES_SHOWN]))
            more = finding.count - min(len(finding.places), PLACES_SHOWN)
            lines.append(f"also {shown}{f' and {more:,} more' if more > 0 else ''}")
        for line in [*lines, f"→ {finding.hint}"]:
            output.show(f"    {one_line(line, 240)}")
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
    colours = {"structure": "bold red", "text": "yellow", "retokenized": "cyan"}
    for finding in report.findings[:most]:
        places = [f"{k} {finding[k]}" for k in ("turn", "token") if finding[k] is not None]
        at = ", ".join([str(finding["origin"]), *places])
        head = f"{finding['class']}: ", (finding["kind"], "bold"), f"  {at}"
        output.show(*head, style=colours[finding["class"]])
        lines = [f"expected  {finding['expected']}", f"found     {finding['found']}"]
        lines += [finding["detail"]] if finding["detail"] else []
        for line in lines:
            output.show(f"    {one_line(line, 240)}")
    if (more := len(report.findings) + report.findings_left_off - most) > 0:
        output.say(f"and {more:,} more findings")
    for origin, reason, detail in report.rejected_rows[:most]:
        output.say(f"{origin}: rejected for {reason}: {one_line(detail, 200)}")
    for why, count in report.unchecked.items():
        output.say(f"{count:,} trajectories: {why}")
    counts = ", ".join(f"{count:,} {name}" for name, count in report.counts.items())
    rejected = sum(report.rejected.values())
    counts += f", {report.truncated:,} cut off" if report.truncated else ""
    counts += f", {rejected:,} rejected" if rejected else ""
    output.say(f"{report.trajectories:,} trajectories: {counts}; {report.seconds:.1f} s")


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
    from tokenmill.integrations.ray import describe

    return describe()


def _show_checks(output: Output, checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        parts = f"{check.status:<7}", (f" {check.name:<{width}}  ", "bold")
        output.show(*parts, one_line(check.detail, 300), style=COLOURS[check.status])
        output.show(f"{'':<{width + 10}}→ {check.remedy}", style="dim")
    failed = sum(check.status == "fail" for check in checks)
    output.say(f"{failed} of {len(checks)} checks failed" if failed else "ready")
