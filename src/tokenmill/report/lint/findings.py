"""Findings: what was seen where, from the worker that saw it to the report a person reads.

Workers fill a `Collector` per block, `run_lint` merges them into a `LintReport`, which ``tokenmill
lint`` and `tokenmill.lint` give back. A `Collector` gathers *sightings* (a rule, the number of the
row, what was seen) for one block and gives them as plain values to travel: a count, the first few
rows and one example per rule, so that a block in which every row is bad is as small as one in which
none is. `Merged` adds the blocks up in the order of the rows, whichever came back first. A
`Finding` is one rule's outcome with origins; the `LintReport` holds them all and says whether
anything is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import check_one_of
from tokenmill.origin import Origin
from tokenmill.report.lint.rules import FAIL_ON, RULES, SEVERITIES

PLACES = 20  # rows named per finding; the count says how many there are
EXCERPT_CHARS = 120  # of the text around what was seen
DETAIL_CHARS = 300  # of what is said about an example


def excerpt(text: str, at: int = 0) -> str:
    """The text around a position, with … where it goes on."""
    start = max(0, at - EXCERPT_CHARS // 3)
    end = min(len(text), start + EXCERPT_CHARS)
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


class Collector:
    """The sightings of one block; each row counts once per rule.

    Args:
        rules: The rules that run; sightings of others are dropped.
    """

    def __init__(self, rules: frozenset[str]) -> None:
        self.rules = rules
        self._rows: dict[str, dict[int, tuple[str, str]]] = {}

    def add(self, rule: str, row: int, detail: str, shown: str = "") -> None:
        """Note that a rule was seen at a row of the block; the first sighting of a row counts."""
        if rule in self.rules:
            self._rows.setdefault(rule, {}).setdefault(row, (detail[:DETAIL_CHARS], shown))

    def has(self, rule: str, row: int) -> bool:
        """Whether a rule was already seen at a row."""
        return row in self._rows.get(rule, ())

    def document(self) -> dict[str, Any]:
        """Rule → count, first rows, and the detail and excerpt of the very first."""
        found = {}
        for rule, rows in self._rows.items():
            first = min(rows)
            detail, shown = rows[first]
            found[rule] = {
                "count": len(rows),
                "rows": sorted(rows)[:PLACES],
                "detail": detail,
                "excerpt": shown,
            }
        return found


@dataclass(slots=True)
class _Sum:
    """One rule over several blocks: its first rows, by position among all."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    detail: str = ""
    excerpt: str = ""


class Merged:
    """The sightings of all blocks, the same whatever the order in which they come."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def add(self, found: dict[str, Any], start: int = 0) -> None:
        """Add what `Collector.document` said of a block."""
        for rule, seen in found.items():
            total = self._sums.setdefault(rule, _Sum())
            rows = [start + row for row in seen["rows"]]
            total.count += seen["count"]
            if not total.rows or rows[0] < total.rows[0]:
                total.detail, total.excerpt = seen["detail"], seen["excerpt"]
            total.rows = sorted([*total.rows, *rows])[:PLACES]

    def findings(self, origin: Callable[[int], Origin]) -> list[Finding]:
        """One finding per rule."""
        return [
            Finding(rule, total.count, tuple(map(origin, total.rows)), total.detail, total.excerpt)
            for rule, total in self._sums.items()
        ]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule came to.

    Attributes:
        rule: Its name.
        count: Rows concerned; 1 for what is wrong with the tokenizer.
        places: Origins of the first of them; empty for the tokenizer. Those of columnar files do
            not know the length of the row (0): nobody reads a whole file for it.
        detail: What is wrong with the first.
        excerpt: A bit of it.
    """

    rule: str
    count: int
    places: tuple[Origin, ...]
    detail: str
    excerpt: str = ""

    @property
    def severity(self) -> str:
        """``error``, ``warning`` or ``info``."""
        return RULES[self.rule].severity

    @property
    def hint(self) -> str:
        """What to do about it."""
        return RULES[self.rule].hint

    def document(self) -> dict[str, Any]:
        """As ``tokenmill lint --json`` prints it."""
        first = self.places[0] if self.places else None
        return {
            "rule": self.rule,
            "severity": self.severity,
            "about": RULES[self.rule].about,
            "count": self.count,
            "place": None if first is None else str(first),
            "path": None if first is None else first.path,
            "line": None if first is None else first.line,
            "row": None if first is None else first.row,
            "offset": None if first is None else first.offset,
            "detail": self.detail,
            "excerpt": self.excerpt,
            "hint": self.hint,
            "places": [str(origin) for origin in self.places],
        }


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings worst first, then in the order of the rules."""
    order = list(RULES)
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), order.index(f.rule)))


@dataclass(frozen=True, slots=True)
class LintReport:
    """What lint found.

    Attributes:
        findings: Worst first.
        rows: Rows of the sources.
        rows_checked: Rows looked at.
        rules: The rules that ran.
        sample: How rows were chosen; None where all were looked at.
        near_duplicates: How near-duplicates were looked for; None where they were not.
        seconds: How long it took.
    """

    findings: tuple[Finding, ...]
    rows: int
    rows_checked: int
    rules: tuple[str, ...]
    sample: dict[str, Any] | None = None
    near_duplicates: dict[str, Any] | None = None
    seconds: float = 0.0

    def of(self, severity: str) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    def fails(self, on: str = "error") -> bool:
        """Whether anything is at least as bad as ``error``, ``warning`` or ``info``."""
        check_one_of("fail_on", on, FAIL_ON)
        worse: Sequence[str] = () if on == "never" else SEVERITIES[: SEVERITIES.index(on) + 1]
        return any(finding.severity in worse for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """The object that ``tokenmill lint --json`` prints."""
        return {
            "ok": not self.of("error"),
            "findings": [finding.document() for finding in self.findings],
            "errors": len(self.of("error")),
            "warnings": len(self.of("warning")),
            "infos": len(self.of("info")),
            "rows": self.rows,
            "rows_checked": self.rows_checked,
            "sampled": self.sample is not None,
            "sample": self.sample,
            "rules": list(self.rules),
            "near_duplicates": self.near_duplicates,
            "seconds": round(self.seconds, 3),
        }
