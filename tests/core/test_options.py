"""Tests of option declarations: validation, and agreement with signatures and docs."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import tokenmill as tm
from tests.build.making import TOKENIZER
from tests.programs import PROJECT
from tokenmill._core import fingerprint
from tokenmill._core.options import Options, declared
from tokenmill.build.calls import UNSET, run_recipe
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.build.tasks import Executor
from tokenmill.chat import ChatSpec
from tokenmill.data.prompt_rows import PromptSpec
from tokenmill.errors import UsageError
from tokenmill.integrations.trainers import VERBATIM

STRUCTS: dict[type[Options], tuple[Any, ...]] = {
    ChatSpec: (),
    Recipe: ("a.jsonl", TOKENIZER),
    RunOptions: (),
    PromptSpec: (),
}
OPEN = {
    "tokenizer",
    "processor",
    "chat_template",
    "executor",
    "encoder",
}  # objects of any kind, checked where they are used
EVERY = [(struct, name) for struct in STRUCTS for name in declared(struct) if name not in OPEN]
WRONG: tuple[Any, ...] = (object(), 3.5, -1, b"x", ["x", 7], {"x": 1, 2: 3}, "nonsense", "", True,
                           Path("x"))  # fmt: skip


@pytest.mark.parametrize(
    ("struct", "name"), EVERY, ids=lambda value: getattr(value, "__name__", value)
)
def test_wrong_value_is_refused_with_name_value_and_what_is_allowed(
    struct: type[Options], name: str
) -> None:
    option = declared(struct)[name]
    refused = 0
    for value in WRONG:
        given = {name: value}
        positional = (
            STRUCTS[struct] if name not in ("sources", "tokenizer") else STRUCTS[struct][1:]
        )
        if name == "sources":
            given["tokenizer"], positional = "t", ()
        try:
            made = struct(*positional, **given)
        except UsageError as error:
            refused += 1
            assert re.match(rf"{name} (must|is|names)\b", error.message), error.message
            assert repr(value) in error.message or repr((value,)) in error.message
            assert all(choice in error.message for choice in option.choices)
        else:
            assert not option.choices
            paths = Path if name in ("sources", "keep_columns", "cache_dir", "media_root") else str
            assert isinstance(value, str | int | float | bool | paths), f"{made} has {name}"
    assert refused >= 4


def test_signature_of_prepare_is_the_declaration() -> None:
    options = {**declared(Recipe, tm.prepare), **declared(RunOptions, tm.prepare)}
    written = inspect.signature(tm.prepare).parameters
    assert set(written) == {*options, "lazy", "progress"}
    assert written["lazy"].default is False
    types = get_type_hints(tm.prepare, localns={"Executor": Executor, "Store": tm.Store})
    declared_types = {**get_type_hints(Recipe), **get_type_hints(RunOptions)}
    for name, option in options.items():
        assert option.help, name
        if name in ("sources", "tokenizer"):
            continue
        assert written[name].default is UNSET, name
        assert written[name].kind is inspect.Parameter.KEYWORD_ONLY
        # Any sequence of columns is taken, and a tuple is kept; executors are no matter of options.
        if name not in ("keep_columns", "executor"):
            assert types[name] == declared_types[name], name


def test_api_page_states_the_defaults_of_prepare() -> None:
    page = (PROJECT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    stated = page.partition("Defaults of the options:")[2].partition("The others are None, False")[
        0
    ]
    options = (declared(Recipe) | declared(RunOptions)).values()
    defaults = {one.name: one.default for one in options if one.default not in (None, False, ())}
    del defaults["sources"]  # has none
    found = {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=(.+?)`", stated)}
    assert found == defaults


def test_defaults_of_prompts_are_the_declaration() -> None:
    written = inspect.signature(tm.PromptDataset).parameters
    for name, option in declared(PromptSpec).items():
        if name not in ("convention", "tool_form"):  # set by integrations
            assert written[name].default == option.default, name
        assert option.help, name


def test_prepare_refuses_other_names_as_python_does() -> None:
    with pytest.raises(
        TypeError, match=r"prepare\(\) got an unexpected keyword argument 'overlogn'"
    ):
        tm.prepare("a", "t", overlogn="drop")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"overlogn \(did you mean overlong\?\)"):
        run_recipe("a", "t", part="1/1", overlogn="drop")


EVERYTHING: dict[str, Any] = {
    "format": "messages", "columns": {"messages": "m", "tools": "f", "weight": None},
    "chat_template_kwargs": {"x": {"b": 1, "a": 2}},
    "date": "2026-11-15", "train_on": "last_assistant_message", "turn_end": "turn",
    "thinking_opener": "trained", "expand": "turns", "trailing": "trim", "append_eos": False,
    "max_length": 64, "overlong": "truncate", "keep_columns": ["id", "t"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "cfa35a591cf8e22187a41ca3d9d7595c2b7e9c66"),
        (EVERYTHING, "bfeeae94765899cffc4decb5f6a2715b443b2268"),
    ],
    ids=["defaults", "everything"],
)
def test_document_of_a_recipe_is_what_it_always_was(given: dict[str, Any], key: str) -> None:
    """Another document is another key: every store that is there would be built again."""
    document = tm.Recipe("a", "t", **given).document()
    assert fingerprint.key({**document, "version": 1, "renderer": 4}) == key


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "f51000a9e57948405f2057be66ca4ff1911c299e"),
        ({"multimodal_keys": {"video": "v", "image": "i"}, "apply_chat_template": True,
          "apply_chat_template_kwargs": {"b": {"z": 1, "a": 2}}, "convention": VERBATIM},
         "6717cd6e70d6ee6980dec7a5130795f56ad73d86"),
    ],
    ids=["defaults", "much"],
)  # fmt: skip
def test_document_of_prompts_is_what_it_always_was(given: dict[str, Any], key: str) -> None:
    document = PromptSpec(**given).document()
    assert fingerprint.key({**document, "version": 1, "renderer": 4}) == key


def test_recipe_takes_options_by_name_and_is_a_key_of_dicts() -> None:
    with pytest.raises(TypeError):
        Recipe("a.jsonl", "t", "auto")  # type: ignore[misc, arg-type]
    one, same = (Recipe(["a.jsonl"], "t", chat_template_kwargs={"x": [1]}) for _ in range(2))  # type: ignore[arg-type]
    assert {one: 1}[same] == 1
    assert one != Recipe(["b.jsonl"], "t")  # type: ignore[arg-type]
