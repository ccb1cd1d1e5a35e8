"""Reference pages list every public name, command, error, reason and lint rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import tokenmill
from tokenmill import errors
from tokenmill.cli import app, commands  # noqa: F401 - registers the commands
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
def test_every_error_and_reason_has_a_section(name: str) -> None:
    text = sections("reference/errors.md").get(name, "")
    assert len(text.split()) > 15, f"{name} needs a section with a remedy"


def test_every_section_is_an_error_or_a_reason() -> None:
    known = {*CLASSES, *errors.REASONS, "Errors", "Reasons of rejection"}
    assert set(sections("reference/errors.md")) == known


def test_lint_page_lists_every_rule_with_its_severity() -> None:
    table = sections("guides/lint.md")["Rules"]
    listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, flags=re.M))
    assert listed == {rule.name: rule.severity for rule in RULES.values()}


def test_api_page_lists_every_public_name() -> None:
    text = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    listed = {path.rpartition(".")[2] for path in re.findall(r"^::: (.+)$", text, flags=re.M)}
    assert set(tokenmill.__all__) - listed == {"TokenmillError"}  # listed with its module, errors


def test_command_line_page_lists_every_command() -> None:
    text = (DOCS / "reference/command-line.md").read_text(encoding="utf-8")
    table = "".join(re.findall(r"^\| (`.+?) \|", text, flags=re.M))
    group: typer.core.TyperGroup = typer.main.get_command(app.app)  # type: ignore[assignment]
    assert [name for name in group.commands if f"`{name}" not in table] == []
