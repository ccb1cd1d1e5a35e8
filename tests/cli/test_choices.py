"""Choices are choices: help, completion and refusals know the same as the library."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from tests.cli.harness import Shell
from tokenmill._core.options import declared
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.cli import commands  # noqa: F401 - declares them
from tokenmill.cli.app import app
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
    "trace": {"format": ("auto", *ROLLOUT_FORMATS), "fail_on": CLASSES[:0:-1]},
}


def all_commands() -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    found = dict(root.commands)
    found |= {f"cache {name}": item for name, item in found.pop("cache").commands.items()}
    return found


@pytest.mark.parametrize("name", all_commands())
def test_choices_of_a_command_are_those_of_the_library(shell: Shell, name: str) -> None:
    shown = shell(*name.split(), "--help").out
    assert shown.startswith(f"Usage: tokenmill {name}")
    told = re.findall(r"^  --([\w-]+) [<[]([\w-]+(?:\|[\w-]+)+)[>\]]", shown, re.MULTILINE)
    flags = {flag.name for flag in all_commands()[name].params}
    known = {**DECLARED, **OWN.get(name, {})}
    assert {flag.replace("-", "_"): tuple(choices.split("|")) for flag, choices in told} == {
        flag: choices for flag, choices in known.items() if flag in flags
    }
    assert " | " not in shown, "choices written into the help by hand"
