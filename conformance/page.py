"""``docs/conformance.md`` from judged rows: pure text, made by no hand.

A `Host` is a driver's account: `Judged` rows, its version, why it was not run. `render` gives the
page; every kind of finding comes with its count and with the first row that shows it, and the rows
that a host has right and we do not are listed as well.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.goldens import Golden
from conformance.judge import CONTENT_FAULTS, FAULTS, MASK_FAULTS, NOTES, Verdict

OURS = "tokenmill"
IDS = {
    "tail": "ids differ in the tail only",
    "retokenized": "the same text in other tokens",
    "other": "another text than the model's own render",
}
EXCERPT = 150
_PATH = re.compile(r"(?<!\w)/[\w./-]+")  # places of the machine that ran it say nothing
MOST_REFUSALS = 4
"""Messages of a host that are quoted; the rest is counted."""


@dataclass
class Judged:
    """One row of one template, as a host answered it."""

    template: str
    case: str
    error: str | None = None
    verdict: Verdict | None = None
    difference: str = ""

    @property
    def clean(self) -> bool:
        """Served, and nothing is wrong with it."""
        return self.verdict is not None and self.verdict.clean


@dataclass
class Host:
    """One driver's account."""

    name: str
    how: str
    trains: str
    version: str
    not_run: str | None = None
    timing: dict[str, Any] | None = None
    rows: list[Judged] = field(default_factory=list)

    @property
    def verdicts(self) -> list[Verdict]:
        """Of the rows that it serves."""
        return [row.verdict for row in self.rows if row.verdict is not None]

    def count(self, kinds: Sequence[str]) -> int:
        """Rows with a fault among some kinds."""
        return sum(bool(verdict.kinds(kinds)) for verdict in self.verdicts)

    def ids(self, kind: str) -> int:
        """Rows whose ids compare so."""
        return sum(verdict.ids == kind for verdict in self.verdicts)

    def summary(self) -> str:
        """One line for whoever waits."""
        if self.not_run:
            return f"not run: {self.not_run}"
        clean = sum(row.clean for row in self.rows)
        return f"{len(self.rows)} rows, {len(self.verdicts)} served, {clean} clean"


@dataclass
class OwnTests:
    """A host's own test file, run on its own classes and on ours."""

    host: str
    file: str
    replaced: str
    passed_alone: int = 0
    """With the host's own classes, on the same machine."""
    failed_alone: int = 0
    skipped: int = 0
    passed: int | None = None
    """With ours; None where nothing is replaced."""
    reached: int = 0
    """Of these, tests that came to something of ours."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Tests that fail with ours and not with the host's own, each with whose it is."""
    not_run: str | None = None
    keywords: str = ""
    """Which tests of the file, as pytest's ``-k`` takes it; empty for all."""


INTRODUCTION = """\
# Conformance: what each trainer's own code makes of the same rows

This page is written by `make conformance HOSTS=DIR`, where `DIR` holds checkouts of the trainers;
nothing of theirs is in this repository, and what is missing there is skipped by name. Each
trainer's own preparation code runs unmodified, on a CPU, in a process of its own; a GPU library
that it only imports is replaced by an empty module. Ours is run and judged in the same way. What
was seen by hand, with more rows, is told in [hosts](hosts.md).

**Rows.** {rows} conversations for each of {templates} chat templates: constructed shapes, and real
rows cut behind their last answer. Rows that the model's own template refuses are left out. Unique
words are planted at both ends of every text of every message, so that it can be seen whose text a
token holds.

**Ids** are compared with what transformers renders and encodes for the whole conversation. Where
templates differ in what they take (arguments of calls as objects or as JSON text, null contents as
null or as empty text), the form counts of which the template prints the most. *Tail*: ids differ
only behind the last answer (an end-of-text token, a newline, another header).

**Masks** are judged on the trainer's own ids. They are wrong if a trained token holds a word of
another role, a word of an answer that was not to be trained, or the template's text before an
answer or between turns; if a word of an answer is not trained; or if the token that ends an answer
is not. Not counted, but listed with the findings: trained white space before an answer, and what is
trained right behind a closer.

**Content** is lost if a word of the model's own render is not in the ids, or if the template itself
drops a word (a call, reasoning of the last answer, a system message) and the row is served all the
same. A word is doubled if the ids have it more often than the render, and added if the render drops
it (thinking in the history) and the ids have it.

**Refused** rows are rows without ids: an error, a filter, a rejection. To refuse is no fault by
itself; what is trained wrong is.

{setup}
"""

ATTENTION = """\
In excerpts ⟦ and ⟧ stand around what is trained, ↵ is a newline, ¦ a vertical bar, and `Zqv…kx` are
planted words. Of ids, the model's own text stands before ≠ and the host's behind it.
"""


def _code(text: str) -> str:
    """Text as it stands, in one cell of a table."""
    text = text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"
    for char, shown in {"\n": "↵", "|": "¦", "`": "'", "\r": "↵"}.items():
        text = text.replace(char, shown)
    return f"`{text}`"


def _table(head: Sequence[str], rows: Iterator[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _share(count: int) -> str:
    return f"**{count}**" if count else "0"


def _overview(ran: Sequence[Host]) -> list[str]:
    def line(host: Host) -> list[object]:
        return [
            host.name,
            host.version,
            len(host.rows),
            len(host.rows) - len(host.verdicts),
            host.ids("same"),
            host.ids("tail"),
            _share(host.ids("other") + host.ids("retokenized")),
            _share(host.count(MASK_FAULTS)),
            _share(host.count(CONTENT_FAULTS)),
            sum(row.clean for row in host.rows),
        ]

    head = ("host", "version or commit", "rows", "refused", "ids the same", "tail", "ids wrong",
            "masks wrong", "content lost, doubled or added", "right in all")  # fmt: skip
    return _table(head, (line(host) for host in ran))


def _by_template(ran: Sequence[Host]) -> list[str]:
    templates = list(dict.fromkeys(row.template for host in ran for row in host.rows))

    def line(host: Host) -> list[object]:
        cells: list[object] = [host.name]
        for template in templates:
            rows = [row for row in host.rows if row.template == template]
            served = sum(row.verdict is not None for row in rows)
            counted = f"{sum(row.clean for row in rows)} / {served} / {len(rows)}"
            cells.append(counted if rows else "not run")
        return cells

    return _table(["host", *templates], (line(host) for host in ran))


def _findings(host: Host) -> Iterator[tuple[str, int, Judged, str]]:
    """Kind, rows, the first row, and what is to be seen there."""
    found: dict[str, list[tuple[Judged, str]]] = defaultdict(list)
    for row in host.rows:
        if row.verdict is None:
            continue
        if row.verdict.ids != "same":
            found[row.verdict.ids].append((row, row.difference))
        for fault in row.verdict.faults + row.verdict.notes:
            if not found[fault.kind] or found[fault.kind][-1][0] is not row:
                found[fault.kind].append((row, fault.excerpt))
    for kind in (*IDS, *FAULTS, *NOTES):
        if found[kind]:
            yield kind, len(found[kind]), *found[kind][0]


def _tell(host: Host) -> list[str]:
    names = {**IDS, **FAULTS, **{kind: f"(not counted) {text}" for kind, text in NOTES.items()}}
    trained = "every answer" if host.trains == "every" else "the last answer"
    lines = [f"### {host.name}", "", f"{host.version}. {host.how}; {trained} is to be trained.", ""]
    findings = list(_findings(host))
    if findings:
        lines += _table(
            ("finding", "rows", "a row that shows it", "there"),
            (
                (names[kind], count, f"{row.template}, {row.case}", _code(excerpt))
                for kind, count, row, excerpt in findings
            ),
        )
    refused = Counter(row.error for row in host.rows if row.error)
    if refused:
        shown = refused.most_common(MOST_REFUSALS)
        rest = sum(refused.values()) - sum(count for _, count in shown)
        lines += [f"Refused, {sum(refused.values())} rows:", ""]
        for error, count in shown:
            first = next(row for row in host.rows if row.error == error)
            lines.append(f"- {count}, as {first.template}, {first.case}: {_code(error)}")
        lines += [f"- {rest} with other words"] if rest else []
        lines.append("")
    return lines


def _we_are_wrong(ran: Sequence[Host]) -> list[str]:
    ours = next((host for host in ran if host.name == OURS), None)
    if ours is None:
        return []
    wrong = {(row.template, row.case): row for row in ours.rows if not row.clean}
    better: dict[tuple[str, str], list[str]] = defaultdict(list)
    for host in ran:
        for row in host.rows:
            if row.clean and (row.template, row.case) in wrong:
                better[row.template, row.case].append(host.name)
    lines = ["## Where a host is right and tokenmill is not", ""]
    if not better:
        return [*lines, "No row of this run is right in all with a host and refused or wrong here.",
                ""]  # fmt: skip

    def what(row: Judged) -> str:
        if row.error is not None:
            return f"refused: {_code(row.error)}"
        verdict = row.verdict or Verdict()
        return ", ".join([verdict.ids, *(fault.kind for fault in verdict.faults)])

    lines += _table(
        ("template", "row", "here", "right with"),
        (
            (*place, what(wrong[place]), ", ".join(dict.fromkeys(names)))
            for place, names in better.items()
        ),
    )
    return lines


def _times(ran: Sequence[Host]) -> list[str]:
    ours = next((host.timing for host in ran if host.name == OURS and host.timing), None)

    def line(host: Host) -> list[object]:
        if host.timing is None:
            return [host.name, "refuses some of them", "", "", ""]
        more = max(host.timing["seconds"] - host.timing["first"], 1e-9)
        rate = (host.timing["rows"] - 1) / more
        beside = ""
        if ours:
            ratio = more / max(ours["seconds"] - ours["first"], 1e-9)
            beside = f"{ratio:.1f}×"
        first, grown = host.timing["first"], host.timing["grown"]
        return [host.name, f"{first:.2f}", f"{rate:,.0f}", beside, f"{max(grown, 0) / 2**20:.0f}"]

    rows = next((host.timing["rows"] for host in ran if host.timing), 0)
    return [
        "## Time and memory",
        "",
        f"{rows} plain rows of one answer on Qwen 2.5, in one process, without imports and without "
        "loading the tokenizer. Processor time, since the machine is shared. *First row*: what a "
        "call costs before its first row; tokenmill identifies and probes the tokenizer and "
        "publishes a store. Hosts that work on the rows one after another have no such cost. "
        "Behind it, too, so few rows say little of tokenmill, which compares its fast ways with "
        "the plain ones on the first rows of every build: speed on real amounts is measured in "
        "[benchmarks](benchmarks.md). *MiB more*: the peak over what the process held before.",
        "",
        *_table(
            ("host", "first row, s", "rows a second behind it", "time beside ours", "MiB more"),
            map(line, ran),
        ),
    ]


def _tests(tests: Sequence[OwnTests]) -> list[str]:
    if not tests:
        return []
    lines = [
        "## Their own tests on our classes",
        "",
        "The hosts' test files, unmodified, first with their own classes (*own*: tests that pass, "
        "and that fail here for want of a GPU, of a model or of another version), then with ours "
        "in the named place (*ours*). *Reach ours*: of those that pass, the tests that come to "
        "what was replaced. `-k` leaves out tests of what ours does not have, of libraries that "
        "are not at hand (sglang's tools), and repetitions of the chosen ones. Tests that fail "
        "with ours alone are listed below, each with whose it is.",
        "",
    ]

    def line(one: OwnTests) -> list[object]:
        chosen = f" with `-k '{one.keywords}'`" if one.keywords else ""
        place = [one.host, f"`{one.file}`{chosen}", one.replaced]
        if one.not_run:
            return [*place, f"not run: {_PATH.sub('…', one.not_run)}", "", "", "", ""]
        own = [one.passed_alone, one.failed_alone]
        if one.passed is None:
            return [*place, *own, "", "", ""]
        return [*place, *own, one.passed, one.reached, _share(len(one.failures))]

    head = ("host", "tests", "replaced", "own: pass", "own: fail", "ours: pass", "reach ours",
            "fail with ours alone")  # fmt: skip
    lines += _table(head, map(line, tests))
    for one in tests:
        for name, why in one.failures:
            lines.append(f"- {one.host}, `{name.rpartition('.')[2]}`: {why}")
    return [*lines, ""]


def _goldens(goldens: Sequence[Golden] | str) -> list[str]:
    lines = ["## Goldens that others made", ""]
    if isinstance(goldens, str):
        return [*lines, f"Not run: {goldens}.", ""]
    agreed = sum(golden.found == golden.stated for golden in goldens)
    refused = sum(golden.found is None for golden in goldens)
    lines += [
        "`renderers` states of conversations whether a template leaves standing what it printed "
        "once more messages follow, and `Bridge.rewrite` answers the same of any template. "
        f"{len(goldens)} cases are of templates that are at hand and of settings that the template "
        f"itself knows: {agreed} answers are the same, {refused} conversations are refused here, "
        f"{len(goldens) - agreed - refused} answers differ. `Bridge` also asks that an answer "
        "stands right behind its own generation prompt, which the corpus does not.",
        "",
    ]
    differing = [golden for golden in goldens if golden.found != golden.stated]
    if differing:
        names = {True: "stands", False: "is rewritten", None: "refused"}
        lines += _table(
            ("case", "renderers", "here", "what is seen here"),
            (
                (golden.case, names[golden.stated], names[golden.found],
                 _code(golden.detail) if golden.detail else "")
                for golden in differing
            ),
        )  # fmt: skip
    return lines


def render(
    hosts: Sequence[Host],
    tests: Sequence[OwnTests],
    rows: int,
    setup: str = "",
    goldens: Sequence[Golden] | str = (),
) -> str:
    """The whole page."""
    ran = [host for host in hosts if not host.not_run]
    missing = [host for host in hosts if host.not_run]
    templates = {row.template for host in ran for row in host.rows}
    lines = [INTRODUCTION.format(rows=rows, templates=len(templates), setup=setup)]
    lines += ["## The hosts", "", *_overview(ran)]
    if missing:
        lines += ["Not run:", ""]
        lines += [f"- {host.name}: {host.not_run}" for host in missing] + [""]
    lines += ["## By template", "", "Right in all / served / given.", "", *_by_template(ran)]
    lines += _we_are_wrong(ran)
    lines += ["## Findings", "", ATTENTION]
    for host in ran:
        lines += _tell(host)
    lines += _times(ran) + _tests(tests)
    lines += _goldens(goldens) if goldens else []
    return "\n".join(lines).rstrip() + "\n"
