"""Render the generated part of ``docs/internals/conformance.md``.

Every kind of finding is shown with its count and its first row. Rows that another trainer gets
right and tokenmill does not are listed, too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

from conformance.checks import CONTENT_FAULTS, FAULTS, MASK_FAULTS, NOTES, RowResult
from conformance.goldens import Golden

OURS = "tokenmill"
IDS = {
    "tail": "ids differ in the tail only",
    "retokenized": "the same text in other tokens",
    "other": "another text than the model's own render",
}
EXCERPT = 150
WIDTH = 100
GENERATED = "<!-- `make conformance` writes the rest of this page. -->"
_PATH = re.compile(r"(?<!\w)/[\w./-]+")  # paths of the machine that ran it
MAX_REFUSALS = 4
"""Error messages that are quoted per trainer; the others are counted."""


@dataclass
class CheckedRow:
    """The result of one row with one template."""

    template: str
    case: str
    error: str | None = None
    result: RowResult | None = None
    difference: str = ""

    @property
    def is_correct(self) -> bool:
        return self.result is not None and self.result.is_correct


@dataclass
class TrainerReport:
    name: str
    how: str
    trains: str
    version: str
    not_run: str | None = None
    timing: dict[str, Any] | None = None
    rows: list[CheckedRow] = field(default_factory=list)

    @property
    def results(self) -> list[RowResult]:
        return [row.result for row in self.rows if row.result is not None]

    def count(self, kinds: Sequence[str]) -> int:
        """Return the number of rows with a fault of one of these kinds."""
        return sum(bool(result.kinds(kinds)) for result in self.results)

    def ids(self, kind: str) -> int:
        return sum(result.ids == kind for result in self.results)

    def summary(self) -> str:
        if self.not_run:
            return f"not run: {self.not_run}"
        correct = sum(row.is_correct for row in self.rows)
        return f"{len(self.rows)} rows, {len(self.results)} served, {correct} correct"


@dataclass
class OwnTests:
    """Results of a trainer's own test file, with its own classes and with ours."""

    trainer: str
    file: str
    replaced: str
    passed_alone: int = 0
    """With the trainer's own classes, on the same machine."""
    failed_alone: int = 0
    skipped: int = 0
    passed: int | None = None
    """With ours; None if nothing is replaced."""
    reached: int = 0
    """Passed tests that used one of our classes."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Tests that fail only with ours, each with the reason."""
    not_run: str | None = None
    keywords: str = ""
    """Argument of pytest's ``-k``; empty runs all tests."""


INTRODUCTION = """\
{generated}

## Automatic comparison

**Rows.** {rows} conversations for each of {templates} chat templates: constructed formats, and real
rows that end with their last answer. Rows that the model's own template refuses are left out.
Unique words are inserted at both ends of every text of every message, so that each token can be
assigned to a message.

**Ids** are compared with what transformers renders and encodes for the whole conversation.
Templates differ in the form they accept (tool-call arguments as objects or as JSON text, null
contents as null or as empty text); the form that prints the most words counts. *Tail*: ids differ
only after the last answer (an end-of-text token, a newline, another header).

**Masks** are checked on the trainer's own ids. They are wrong if a trained token contains a word of
another role, a word of an answer that should not be trained, or the template's text before an
answer or between turns; if a word of an answer is not trained; or if the end-of-turn token of an
answer is not trained. Not counted, but listed: trained white space before an answer, and trained
text right after an end-of-turn token.

**Content** is lost if a word of the model's own render is not in the ids, or if the template itself
drops a word (a call, reasoning of the last answer, a system message) and the row is served anyway.
A word is doubled if the ids contain it more often than the render, and added if the render drops it
(thinking in the history) and the ids contain it.

**Refused** rows have no ids: an error, a filter, a rejection. Refusing a row is not an error.

{setup}
"""

LEGEND = """\
In excerpts, ⟦ and ⟧ enclose what is trained, ↵ is a newline, ¦ a vertical bar, and `Zqv…kx` are
inserted words. For ids, the model's own text is before ≠ and the trainer's after it.
"""


def _code(text: str) -> str:
    """Return text as code that fits into a cell of a table."""
    text = text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"
    for char, shown in {"\n": "↵", "|": "¦", "`": "'", "\r": "↵"}.items():
        text = text.replace(char, shown)
    return f"`{text}`"


def _item(text: str) -> str:
    """Return an item of a list, wrapped."""
    return fill(
        f"- {text}",
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(head: Sequence[str], rows: Iterator[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _share(count: int) -> str:
    return f"**{count}**" if count else "0"


def _overview(ran: Sequence[TrainerReport]) -> list[str]:
    def line(report: TrainerReport) -> list[object]:
        return [
            report.name,
            report.version,
            len(report.rows),
            len(report.rows) - len(report.results),
            report.ids("same"),
            report.ids("tail"),
            _share(report.ids("other") + report.ids("retokenized")),
            _share(report.count(MASK_FAULTS)),
            _share(report.count(CONTENT_FAULTS)),
            sum(row.is_correct for row in report.rows),
        ]

    head = ("trainer", "version or commit", "rows", "refused", "ids equal", "tail", "ids wrong",
            "masks wrong", "content wrong", "all correct")  # fmt: skip
    return _table(head, (line(report) for report in ran))


def _by_template(ran: Sequence[TrainerReport]) -> list[str]:
    templates = list(dict.fromkeys(row.template for report in ran for row in report.rows))

    def line(report: TrainerReport) -> list[object]:
        cells: list[object] = [report.name]
        for template in templates:
            rows = [row for row in report.rows if row.template == template]
            served = sum(row.result is not None for row in rows)
            counted = f"{sum(row.is_correct for row in rows)} / {served} / {len(rows)}"
            cells.append(counted if rows else "not run")
        return cells

    return _table(["trainer", *templates], (line(report) for report in ran))


def _findings(report: TrainerReport) -> Iterator[tuple[str, int, CheckedRow, str]]:
    """Yield every kind of finding with its count, its first row and an excerpt."""
    found: dict[str, list[tuple[CheckedRow, str]]] = defaultdict(list)
    for row in report.rows:
        if row.result is None:
            continue
        if row.result.ids != "same":
            found[row.result.ids].append((row, row.difference))
        for fault in row.result.faults + row.result.notes:
            if not found[fault.kind] or found[fault.kind][-1][0] is not row:
                found[fault.kind].append((row, fault.excerpt))
    for kind in (*IDS, *FAULTS, *NOTES):
        if found[kind]:
            yield kind, len(found[kind]), *found[kind][0]


def _section(report: TrainerReport) -> list[str]:
    names = {**IDS, **FAULTS, **{kind: f"(not counted) {text}" for kind, text in NOTES.items()}}
    trained = "every answer" if report.trains == "every" else "the last answer"
    lines = [f"#### {report.name}", ""]
    lines += [fill(f"{report.version}. {report.how}; {trained} should be trained.", WIDTH), ""]
    findings = list(_findings(report))
    if findings:
        lines += _table(
            ("finding", "rows", "first row", "excerpt"),
            (
                (names[kind], count, f"{row.template}, {row.case}", _code(excerpt))
                for kind, count, row, excerpt in findings
            ),
        )
    refused = Counter(row.error for row in report.rows if row.error)
    if refused:
        shown = refused.most_common(MAX_REFUSALS)
        rest = sum(refused.values()) - sum(count for _, count in shown)
        lines += [f"Refused, {sum(refused.values())} rows:", ""]
        for error, count in shown:
            first = next(row for row in report.rows if row.error == error)
            lines.append(_item(f"{count}, first {first.template}, {first.case}: {_code(error)}"))
        lines += [f"- {rest} with other messages"] if rest else []
        lines.append("")
    return lines


def _rows_only_others_get_right(ran: Sequence[TrainerReport]) -> list[str]:
    ours = next((report for report in ran if report.name == OURS), None)
    if ours is None:
        return []
    wrong = {(row.template, row.case): row for row in ours.rows if not row.is_correct}
    better: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in ran:
        for row in report.rows:
            if row.is_correct and (row.template, row.case) in wrong:
                better[row.template, row.case].append(report.name)
    lines = ["### Rows that only other trainers get right", ""]
    if not better:
        return [*lines, "There are none in this run.",
                ""]  # fmt: skip

    def what(row: CheckedRow) -> str:
        if row.error is not None:
            return f"refused: {_code(row.error)}"
        result = row.result or RowResult()
        return ", ".join([result.ids, *(fault.kind for fault in result.faults)])

    lines += _table(
        ("template", "row", "tokenmill", "correct with"),
        (
            (*place, what(wrong[place]), ", ".join(dict.fromkeys(names)))
            for place, names in better.items()
        ),
    )
    return lines


def _times(ran: Sequence[TrainerReport]) -> list[str]:
    ours = next((report.timing for report in ran if report.name == OURS and report.timing), None)

    def line(report: TrainerReport) -> list[object]:
        if report.timing is None:
            return [report.name, "refuses some rows", "", "", ""]
        more = max(report.timing["seconds"] - report.timing["first"], 1e-9)
        rate = (report.timing["rows"] - 1) / more
        beside = ""
        if ours:
            ratio = more / max(ours["seconds"] - ours["first"], 1e-9)
            beside = f"{ratio:.1f}×"
        first, grown = report.timing["first"], report.timing["grown"]
        return [report.name, f"{first:.2f}", f"{rate:,.0f}", beside, f"{max(grown, 0) / 2**20:.0f}"]

    rows = next((report.timing["rows"] for report in ran if report.timing), 0)
    return [
        "### Time and memory",
        "",
        fill(
            f"{rows} plain rows of one answer on Qwen 2.5, in one process, without imports and "
            "without loading the tokenizer. Processor time, since the machine is shared. *First "
            "row*: the cost of a call up to its first row. tokenmill identifies and probes the "
            "tokenizer and publishes a store; trainers that process rows one by one have no such "
            "cost. It also compares its fast paths with the reference on the first rows of every "
            "build, so these numbers say little about real amounts of data; see "
            "[benchmarks](benchmarks.md). *MiB added*: the peak over the memory before the call.",
            WIDTH,
        ),
        "",
        *_table(
            ("trainer", "first row, s", "rows/s after it", "time / ours", "MiB added"),
            map(line, ran),
        ),
    ]


def _tests(tests: Sequence[OwnTests]) -> list[str]:
    if not tests:
        return []
    lines = [
        "### Their own tests on our classes",
        "",
        fill(
            "The trainers' test files, unmodified, first with their own classes (*own*; some tests "
            "fail because they need a GPU, a model or another version), then with ours as a "
            "replacement (*ours*). *Use ours*: tests that pass and use the replacement. `-k` "
            "leaves out tests of features that ours does not have, of libraries that are not "
            "installed (sglang's tools), and repetitions. Tests that fail only with ours are "
            "listed below with the reason.",
            WIDTH,
        ),
        "",
    ]

    def line(one: OwnTests) -> list[object]:
        chosen = f" with `-k '{one.keywords}'`" if one.keywords else ""
        place = [one.trainer, f"`{one.file}`{chosen}", one.replaced]
        if one.not_run:
            return [*place, f"not run: {_PATH.sub('…', one.not_run)}", "", "", "", ""]
        own = [one.passed_alone, one.failed_alone]
        if one.passed is None:
            return [*place, *own, "", "", ""]
        return [*place, *own, one.passed, one.reached, _share(len(one.failures))]

    head = ("trainer", "tests", "replaced", "own: pass", "own: fail", "ours: pass", "use ours",
            "fail only with ours")  # fmt: skip
    lines += _table(head, map(line, tests))
    for one in tests:
        for name, why in one.failures:
            lines.append(_item(f"{one.trainer}, `{name.rpartition('.')[2]}`: {why}"))
    return [*lines, ""]


def _goldens(goldens: Sequence[Golden] | str) -> list[str]:
    lines = ["### Golden files of `renderers`", ""]
    if isinstance(goldens, str):
        return [*lines, f"Not run: {goldens}.", ""]
    agreed = sum(golden.actual == golden.expected for golden in goldens)
    refused = sum(golden.actual is None for golden in goldens)
    lines += [
        fill(
            "`renderers` has a file that states for conversations whether a template keeps what it "
            "printed when more messages follow. `Bridge.rewrite` computes the same for any "
            f"template. {len(goldens)} cases have a template that is available and settings of "
            f"that template: {agreed} results are equal, {refused} conversations are refused here, "
            f"{len(goldens) - agreed - refused} results differ. `Bridge` also requires that an "
            "answer directly follows its own generation prompt, which the file does not.",
            WIDTH,
        ),
        "",
    ]
    differing = [golden for golden in goldens if golden.actual != golden.expected]
    if differing:
        names = {True: "kept", False: "rewritten", None: "refused"}
        lines += _table(
            ("case", "renderers", "tokenmill", "detail"),
            (
                (golden.case, names[golden.expected], names[golden.actual],
                 _code(golden.detail) if golden.detail else "")
                for golden in differing
            ),
        )  # fmt: skip
    return lines


def render(
    reports: Sequence[TrainerReport],
    tests: Sequence[OwnTests],
    rows: int,
    setup: str = "",
    goldens: Sequence[Golden] | str = (),
) -> str:
    """Return the generated part of the page."""
    ran = [report for report in reports if not report.not_run]
    missing = [report for report in reports if report.not_run]
    templates = {row.template for report in ran for row in report.rows}
    lines = [
        INTRODUCTION.format(
            generated=GENERATED, rows=rows, templates=len(templates), setup=fill(setup, WIDTH)
        )
    ]
    lines += ["### Overview", "", *_overview(ran)]
    if missing:
        lines += ["Not run:", ""]
        lines += [f"- {report.name}: {report.not_run}" for report in missing] + [""]
    lines += [
        "### By template",
        "",
        "Rows that are all correct / served / given.",
        "",
        *_by_template(ran),
    ]
    lines += _rows_only_others_get_right(ran)
    lines += ["### Findings", "", LEGEND]
    for report in ran:
        lines += _section(report)
    lines += _times(ran) + _tests(tests)
    lines += _goldens(goldens) if goldens else []
    return "\n".join(lines).rstrip() + "\n"
