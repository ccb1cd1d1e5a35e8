"""Tests of `--help`: order, panels and choices."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

import tokenmill.cli.commands  # noqa: F401 - declares them
from tests.cli.harness import Shell
from tokenmill._core.options import declared
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.cli.app import app
from tokenmill.cli.help import COMMANDS, OPTIONS
from tokenmill.data.packs import METHODS, OVERSIZE
from tokenmill.data.prompt_rows import PromptSpec
from tokenmill.data.stream import ORDERS
from tokenmill.exports.export_files import FORMATS, LAYOUTS, MASKS
from tokenmill.inspect.lint.rules import FAIL_ON
from tokenmill.inspect.row import RULES
from tokenmill.rl.formats import FORMATS as ROLLOUT_FORMATS
from tokenmill.rl.verdict import CLASSES
from tokenmill.store.sidecars import PER

DECLARED = {
    name: option.choices
    for struct in (Recipe, RunOptions, PromptSpec)
    for name, option in declared(struct).items()
    if option.choices
}
PACKS = {"method": METHODS, "oversize": OVERSIZE}
OWN = {
    "attach": {"per": PER},
    "export": {"format": FORMATS, "mask": MASKS, "layout": LAYOUTS, "order": ORDERS, **PACKS},
    "inspect": {"rule": RULES},
    "lint": {"fail_on": FAIL_ON},
    "stats": PACKS,
    "check-rollouts": {"format": ("auto", *ROLLOUT_FORMATS), "fail_on": CLASSES[:0:-1]},
}


def all_commands() -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    commands = dict(root.commands)
    commands |= {f"cache {name}": item for name, item in commands.pop("cache").commands.items()}
    return commands


@pytest.mark.parametrize("name", all_commands())
def test_help_lists_the_choices_of_the_library(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # one line for each option
    shown = shell(*name.split(), "--help").out
    assert shown.strip().startswith(f"Usage: tokenmill {name}")
    choices = {}
    for line in shown.splitlines():
        flag = re.search(r"--([\w-]+) ", line)
        listed = re.search(r" [<[]([\w-]+(?:\|[\w-]+)+)[>\]]|One of ([\w-]+(?:, [\w-]+)+)\.", line)
        if flag and listed:
            choices[flag[1].replace("-", "_")] = re.split(r"\||, ", listed[1] or listed[2])
    flags = {flag.name for flag in all_commands()[name].params}
    known = {**DECLARED, **OWN.get(name, {})}
    assert choices == {flag: list(known[flag]) for flag in known if flag in flags}
    assert " | " not in shown, "choices written into the help by hand"


def test_commands_are_ordered_by_use_with_one_line_each(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = shell("--help").out
    lines = shown[shown.index("Main commands") :].splitlines()
    first_words = [line.split()[1] for line in lines if line.startswith("│")]
    assert first_words == [name for names in COMMANDS.values() for name in names]


def test_help_of_prepare_starts_with_examples_and_common_options(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = shell("prepare", "--help").out
    assert len(re.findall(r"^ +tokenmill prepare", shown, re.MULTILINE)) == 3
    assert re.findall(r"─ ([\w: ]+) ─", shown) == ["Arguments", *OPTIONS], "an option has no panel"
    common = [name for panel in list(OPTIONS)[:5] for name in OPTIONS[panel]]
    flags = re.findall(r"^│ --([\w-]+) ", shown, re.MULTILINE)
    assert flags[:10] == [name.replace("columns", "column").replace("_", "-") for name in common]
    assert "…" not in shown, "a cut word"
