"""The commands `rows`, `lint`, `check-rollouts` and `doctor`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.help import RecipeCommand
from tokenmill.cli.options import (
    CACHE,
    MEDIA,
    RECIPE,
    RECIPE_OPTIONS,
    REFERENCE,
    RUN_OPTIONS,
    TOKENIZER,
    WHERE,
    Flags,
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


READ_AGAIN = RUN_OPTIONS["force_recache"]._replace(help="Read the files again, not the cache.")


@command(app, *CACHE, READ_AGAIN)
def rows(
    output: Output,
    flags: Flags,
    sources: Sources,
    *,
    row: int | None = None,
    scan: bool = False,
) -> None:
    """Count the rows of files, or show one.

    Args:
        row: Show this row; negative numbers count from the end.
        scan: Parse every row and count the bad ones.
    """
    from tokenmill.sources.rows import open_rows

    start = time.perf_counter()
    opened = open_rows(sources, **flags)
    document: dict[str, Any] = {
        "rows": len(opened),
        "bytes": sum(file.bytes for file in opened.files),
        "files": len(opened.files),
    }
    if scan:
        values = (value for _, value in opened.scan())
        document["bad"] = Counter(error.reason for error in values if isinstance(error, RowError))
    document["seconds"] = round(time.perf_counter() - start, 3)
    output.partial.update(document)
    if row is None:
        output.result(document, lambda: _show_totals(output, document))
    else:
        _show_source_row(output, opened, row)


def _show_totals(output: Output, document: dict[str, Any]) -> None:
    output.message(
        f"{document['rows']:,} rows in {document['files']:,} files, "
        f"{document['bytes']:,} bytes, {document['seconds']} s"
    )
    for reason, count in document.get("bad", {}).items():
        output.message(f"  {count:,} {reason}")


def _show_source_row(output: Output, opened: Rows, row: int) -> None:
    """Print the row's own bytes on stdout, its origin on stderr."""
    if not -len(opened) <= row < len(opened):
        raise UsageError(f"--row {row} is out of range: there are {len(opened):,} rows")
    origin = opened.origin(row)
    if not output.as_json:
        byte = "" if origin.offset is None else f"byte {origin.offset:,}, "
        output.message(f"{origin} (row {origin.row:,}, {byte}{origin.length:,} bytes)")
        raw = opened.raw(row)
        # Control characters must not reach a terminal; a program gets the bytes.
        escaped = harmless(raw.decode("utf-8", "backslashreplace"))
        typer.echo(escaped if sys.stdout.isatty() else raw)
    output.partial["origin"] = origin._asdict()
    value = opened[row]  # raises for a bad row
    output.result({**output.partial, "row": value}, lambda: None)


MAX_PLACES = 5  # of a finding; --json prints more


@command(app, *RECIPE, *WHERE, *MEDIA, *REFERENCE, cls=RecipeCommand)
def lint(
    output: Output,
    flags: Flags,
    *,
    sample: int = SAMPLE_ROWS,
    check_all: Annotated[bool, typer.Option("--all", help="Check every row.")] = False,
    only: list[str] | None = None,
    ignore: list[str] | None = None,
    fail_on: Literal["error", "warning", "info", "never"] = "error",
    list_rules: bool = False,
) -> None:
    """Find problems in rows before you prepare them.

    Args:
        sample: Number of rows to check; the same rows every time.
        only: Run only this rule. Repeatable, or with commas.
        ignore: Skip this rule. Repeatable, or with commas.
        fail_on: Exit with code 1 for findings of at least this severity.
        list_rules: List the rules.
    """
    from tokenmill.inspect.lint.run import lint as run_lint

    if list_rules:
        _show_rules(output)
        return
    report = run_lint(
        **recipe_arguments(flags),
        sample=None if check_all else sample,
        only=_names(only),
        ignore=_names(ignore),
        progress=output.progress,
    )
    output.result(report.document(), lambda: _show_findings(output, report))
    if report.fails(fail_on):
        raise typer.Exit(1)


def _names(values: list[str] | None) -> list[str]:
    return [name.strip() for value in values or () for name in value.split(",") if name.strip()]


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
        output.line(*head, style=colours[finding.severity])
        lines = [finding.detail if not finding.places else f"{finding.places[0]}: {finding.detail}"]
        if finding.excerpt:
            lines.append(f"| {finding.excerpt}")
        if len(finding.places) > 1:
            shown = ", ".join(map(str, finding.places[1:MAX_PLACES]))
            more = finding.count - min(len(finding.places), MAX_PLACES)
            lines.append(f"also {shown}{f' and {more:,} more' if more > 0 else ''}")
        for line in [*lines, f"→ {finding.hint}"]:
            output.line(f"    {one_line(line, 240)}")
    counts = {severity: len(report.of(severity)) for severity in ("error", "warning", "info")}
    total = ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in counts.items() if n)
    checked = f"{report.rows_checked:,} of {report.rows:,} rows"
    output.message(f"{total or 'nothing found'} in {checked}; {report.seconds:.1f} s")
    if report.sample is not None:
        output.message(f"sample of {report.sample['rows']:,} rows; --all checks every row")


RENDERED = tuple(
    RECIPE_OPTIONS[name]
    for name in (
        "chat_template",
        "chat_template_kwargs",
        "encoder",
        "encoder_kwargs",
        "date",
        "thinking_opener",
    )
)


RolloutFormat = Literal[
    "auto", "openai", "atif", "nemo_gym", "verifiers", "rollout", "miles", "skyrl", "verl", "trl",
    "slime"
]  # fmt: skip


@command(app, *TOKENIZER, *RENDERED, *WHERE, *REFERENCE, name="check-rollouts")
def check(
    output: Output,
    flags: Flags,
    dump: list[str],
    *,
    format: RolloutFormat = "auto",  # noqa: A002 - a name of the contract
    fail_on: Literal["structure", "text", "retokenized"] | None = None,
    findings: int = 20,
) -> None:
    """Compare recorded rollouts with template and tokenizer.

    Args:
        dump: Files of recorded rollouts, or globs.
        format: Format of the rows; auto detects it for each row.
        fail_on: Exit with code 1 for findings of at least this class.
        findings: Number of findings to show; --json prints all.
    """
    from tokenmill.inspect.drift import check_rollouts

    report = check_rollouts(dump, format=format, progress=output.progress, **flags)
    output.result(report.document(), lambda: _show_rollouts(output, report, findings))
    checked = report.trajectories - sum(report.rejected.values())
    if report.fails(fail_on) or (report.rejected and checked <= 0):
        raise typer.Exit(1)


def _show_rollouts(output: Output, report: RolloutReport, max_findings: int) -> None:
    colours = {"structure": "bold red", "text": "yellow", "retokenized": "cyan"}
    for finding in report.findings[:max_findings]:
        location = [f"{k} {finding[k]}" for k in ("turn", "token") if finding[k] is not None]
        where = ", ".join([str(finding["origin"]), *location])
        head = f"{finding['class']}: ", (finding["kind"], "bold"), f"  {where}"
        output.line(*head, style=colours[finding["class"]])
        lines = [f"expected  {finding['expected']}", f"found     {finding['found']}"]
        lines += [finding["detail"]] if finding["detail"] else []
        for line in lines:
            output.line(f"    {one_line(line, 240)}")
    if (more := len(report.findings) + report.findings_left_off - max_findings) > 0:
        output.message(f"and {more:,} more findings")
    for origin, reason, detail in report.rejected_rows[:max_findings]:
        output.message(f"{origin}: rejected ({reason}): {one_line(detail, 200)}")
    for cause, count in report.unchecked.items():
        output.message(f"{count:,} trajectories not checked: {cause}")
    for warning, count in report.warnings.items():
        output.message(f"{count:,} trajectories: {warning}")
    counts = ", ".join(f"{count:,} {name}" for name, count in report.counts.items())
    rejected = sum(report.rejected.values())
    counts += f", {report.truncated:,} cut off" if report.truncated else ""
    counts += f", {rejected:,} rejected" if rejected else ""
    output.message(f"{report.trajectories:,} trajectories: {counts}; {report.seconds:.1f} s")


COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "bold red"}
TESTED = TOKENIZER[0]._replace(help="Tokenizer to test the engines with.")


@command(app, TESTED, *TOKENIZER[1:], *CACHE)
def doctor(output: Output, flags: Flags, sources: list[str] | None = None) -> None:
    """Check engines, cache, disk, settings and Ray.

    Args:
        sources: Files that you want to prepare.
    """
    from tokenmill.inspect.doctor import examine

    flags["describe_ray"] = _describe_ray
    with output.stderr.status("checking") as status:  # shown on a terminal only
        flags["report"] = lambda name: status.update(f"checking: {name}")
        checks = examine(sources or (), flags.pop("tokenizer", None), **flags)
    failed = [check for check in checks if check.status == "fail"]
    document = {"ok": not failed, "checks": [check.document() for check in checks]}
    output.result(document, lambda: _show_checks(output, checks))
    if failed:
        raise typer.Exit(1)


def _describe_ray() -> dict[str, Any]:
    from tokenmill.integrations.ray import describe

    return describe()


def _show_checks(output: Output, checks: list[Check]) -> None:
    """Print the worst problems first; checks without a problem share the last line."""
    from tokenmill.inspect.doctor import STATUSES

    found = [check for check in checks if check.status != "ok"]
    width = max((len(check.name) for check in found), default=0)
    for check in sorted(found, key=lambda check: -STATUSES.index(check.status)):
        parts = f"{check.status:<7}", (f" {check.name:<{width}}  ", "bold")
        output.line(*parts, one_line(check.detail, 300), style=COLOURS[check.status])
        output.line(f"{'':<{width + 10}}→ {check.remedy}", style="dim")
    fine = ", ".join(check.name for check in checks if check.status == "ok")
    output.line(("ok      ", COLOURS["ok"]), fine)
    failed = sum(check.status == "fail" for check in checks)
    output.message(f"{failed} of {len(checks)} checks failed" if failed else "ready")
