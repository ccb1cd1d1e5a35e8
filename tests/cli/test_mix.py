"""``tokenmill mix``: planned shares are those that the loader serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import Shell
from tests.store.making import make_columns, make_store
from tokenmill.loader import Loader
from tokenmill.report.mixture_plan import open_mixture

RECIPE = """\
sources: {{chat: {chat}, code: stores/{code}}}
weights: {{chat: 0.9, code: 0.1}}
exhausted: stop
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    chat = make_store(tmp_path, [make_columns([5] * 80)], name="chat")
    code = make_store(tmp_path, [make_columns([9] * 50)], name="code")
    path = tmp_path / "mix.yaml"
    path.write_text(RECIPE.format(chat=chat.path, code=code.path.name))
    return path


def test_plan_says_what_the_loader_serves(shell: Shell, recipe: Path) -> None:
    answer = shell("mix", recipe, "--steps", "20", "--batch-size", "6", "--json")
    assert answer.code == 0
    planned = answer.json
    loader = Loader(open_mixture(recipe), batch_size=6)
    batches = loader.repeat()
    for stretch in planned["stretches"]:
        before = loader.served()
        for _ in range(stretch["first_step"], stretch["stop_step"]):
            next(batches)
        gave = {name: of["rows"] - before[name]["rows"] for name, of in loader.served().items()}
        total = sum(gave.values())
        assert stretch["shares"] == {name: round(n / total, 6) for name, n in gave.items()}
    assert planned["rows"] == {name: of["rows"] for name, of in loader.served().items()}
    assert planned["shares"]["chat"] == round(planned["rows"]["chat"] / 120, 6)
    assert sum(planned["rows"].values()) == planned["samples"] == 120


def test_plan_is_drawn_for_people(shell: Shell, recipe: Path) -> None:
    answer = shell("mix", recipe, "--steps", "100")
    assert answer.code == 0
    lines = answer.err.splitlines()
    assert all(line.count("█") > 40 for line in lines[:20])
    assert any("chat" in line and "%" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weights: {}", "stores by name"),
        ("sources: [a]", "stores by name"),
        ("sources: {a: x}\nweight: 1", "did you mean weights"),
        ("sources: {a: x}\nweights: 3", "by the name of a source"),
        ("- a", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_recipe_that_is_none_is_refused(shell: Shell, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    answer = shell("mix", path, "--steps", "3", "--json")
    assert answer.code == 2
    assert said in answer.json["error"]["message"]


def test_missing_recipe_is_named(shell: Shell, tmp_path: Path) -> None:
    answer = shell("mix", tmp_path / "none.yaml", "--steps", "3", "--json")
    assert answer.code != 0
    assert "none.yaml" in answer.json["error"]["path"]
