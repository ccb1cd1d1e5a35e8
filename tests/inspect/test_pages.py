"""The pages keep up: every error, reason and rule has its place and true severity."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenmill import errors
from tokenmill.inspect.lint.rules import RULES

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
CLASSES = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.TokenmillError)
]


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^#{2,3} (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", [*CLASSES, *errors.REASONS])
def test_troubleshooting_has_a_section_for_every_error_and_reason(name: str) -> None:
    text = sections("troubleshooting.md").get(name, "")
    assert len(text.split()) > 15, f"{name} has no section that says what to do"


def test_troubleshooting_names_nothing_that_is_not_there() -> None:
    known = {*CLASSES, *errors.REASONS, "Errors", "Reasons of rejection"}
    assert set(sections("troubleshooting.md")) == known


def test_lint_page_lists_every_rule_with_its_severity() -> None:
    table = sections("lint.md")["Rules"]
    listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, flags=re.M))
    assert listed == {rule.name: rule.severity for rule in RULES.values()}
