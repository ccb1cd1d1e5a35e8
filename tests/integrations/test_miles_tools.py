"""How miles and its sglang rewrite messages and tools for a template."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import open_prompts, write_rows
from tests.integrations import stand_in_sglang
from tokenmill.data.prompt_rows import PromptMaker, PromptSpec, shape_row
from tokenmill.errors import RowError, UsageError
from tokenmill.integrations.miles.conventions import MILES, SLIME, ServedTools

FUNCTION = {"parameters": {"b": 1, "a": 2}, "name": "add", "description": "adds", "extra": 1}
TOOLS: list[Any] = [
    FUNCTION,
    {"type": "function", "function": FUNCTION},
    {"function": {"name": "add", "strict": True}, "defer_loading": True},
    {"type": "custom", "function": {"name": "add", "defer_loading": False}},
]
VERSIONS: dict[str, Any] = {
    "none": None,
    "2025-06": stand_in_sglang.Tool,
    "2025-09": stand_in_sglang.NamedTool,
    "2026-04": stand_in_sglang.DeferredTool,
    "0.5.23": stand_in_sglang.OrderedTool,
}
SPEC = {"tool_key": "tools", "apply_chat_template": True, "convention": MILES}
TEMPLATE = "{{ tools | tojson }}"


def eager_tools(tool_class: Any, tools: list[Any]) -> list[Any]:
    wrapped = [tool if "function" in tool else {"function": tool} for tool in tools]
    return [tool_class.model_validate(tool).model_dump() for tool in wrapped]


@pytest.mark.parametrize("version", VERSIONS)
def test_tools_are_what_the_installed_class_makes_of_them(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in_sglang.install(monkeypatch, VERSIONS[version])
    wanted = json.dumps(eager_tools(VERSIONS[version] or stand_in_sglang.Tool, TOOLS))
    assert ("defer_loading" in wanted) == (version in ("2026-04", "0.5.23"))
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "hi", "tools": TOOLS}])
    (prompt,) = open_prompts(rows, chat_template=TEMPLATE, **SPEC)
    assert prompt.prompt == wanted
    assert prompt.tools == prompt.metadata["tools"] == TOOLS  # as the row has them


class NameFirst(stand_in_sglang.OrderedTool):
    """Writes keys in an order of its own, which is the one that most tools have anyway."""

    @classmethod
    def model_validate(cls, tool: Any) -> stand_in_sglang.Tool:
        made = super().model_validate(tool)
        written = made.dumped["function"]
        order = ["name", "description", "parameters", *written]
        made.dumped["function"] = {name: written[name] for name in order}
        return made


def test_key_depends_on_the_output_of_the_class_not_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "hi", "tools": TOOLS}])

    def opened(tool_class: Any, **other: Any) -> Any:
        stand_in_sglang.install(monkeypatch, tool_class)
        return open_prompts(rows, chat_template=TEMPLATE, **{**SPEC, **other})

    keys = {opened(tool_class).key for tool_class in (*VERSIONS.values(), NameFirst)}
    assert len(keys) == len(VERSIONS) + 1
    alike = type("AnotherName", (stand_in_sglang.DeferredTool,), {})
    assert opened(alike).hit
    # Where no tool can reach a template, sglang is not part of the key.
    for other in ({"tool_key": None}, {"apply_chat_template": False}, {"convention": SLIME}):
        one, two = (opened(tool_class, **other).key for tool_class in (None, alike))
        assert one == two


def test_tool_that_the_class_refuses_is_a_rejected_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in_sglang.install(monkeypatch, stand_in_sglang.DeferredTool)
    tools = [[{"function": {"description": "nameless"}}], ["add"], [FUNCTION]]
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "hi", "tools": one} for one in tools])
    prompts = open_prompts(rows, chat_template=TEMPLATE, **SPEC)
    assert prompts.rejected == {"bad_shape": 2}
    assert len(prompts) == 1


def test_sglang_without_its_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_sglang.install(monkeypatch, stand_in_sglang.Tool)
    del sys.modules[stand_in_sglang.PROTOCOL].Tool  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"protocol\.Tool"):
        ServedTools()
    monkeypatch.delitem(sys.modules, stand_in_sglang.PROTOCOL)
    with pytest.raises(UsageError, match=r"protocol\.Tool"):
        PromptSpec(**SPEC)  # type: ignore[arg-type]


def test_worker_with_another_class_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_sglang.install(monkeypatch, stand_in_sglang.DeferredTool)
    serialized = PromptSpec(**SPEC).as_dict()  # type: ignore[arg-type]
    stand_in_sglang.install(monkeypatch, stand_in_sglang.NamedTool)
    spec = PromptSpec(**serialized)
    maker = PromptMaker(spec, TEMPLATE, {})
    assert maker.text(shape_row({"text": "hi"}, spec)) == "null"
    with pytest.raises(UsageError, match="same version"):
        maker.texts([shape_row({"text": "hi", "tools": TOOLS}, spec)])


def eager_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        if message["role"] != "assistant":
            continue
        if message.get("content") is None:
            message["content"] = ""
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function")
            if function and isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
    return messages


CALLS: list[Any] = [
    [{"function": {"name": "f", "arguments": '{"b": 1, "a": NaN}'}}],
    [{"function": {"name": "f", "arguments": "[1]"}}, {"function": {"name": "f"}}],
    [{"function": {"name": "f", "arguments": {"a": 1}}, "id": "x"}],
    [{"name": "f", "arguments": "{}"}, {"function": None}],
    {"function": {"name": "f", "arguments": "{}"}},
    None,
]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_messages_reach_the_template_as_miles_rewrites_them(role: str) -> None:
    spec = PromptSpec(apply_chat_template=True, convention=MILES)
    maker = PromptMaker(spec, "{{ messages | string }}", {})
    for content in ({}, {"content": None}, {"content": ""}, {"content": "x"}):
        for calls in ({}, *({"tool_calls": one} for one in CALLS)):
            messages = [{"role": role, **content, **calls}]
            row = shape_row({"text": messages}, spec)
            made = eager_messages(messages)  # transformers drops what is null
            wanted = str([{k: v for k, v in m.items() if v is not None} for m in made])
            assert maker.text(row) == wanted
            assert maker.texts([row]) == [wanted]


@pytest.mark.parametrize("wrong", ["{", "", '{"a": 1} and more', "[" * 100_000])
def test_arguments_that_miles_would_stop_at_are_a_rejected_row(wrong: str) -> None:
    spec = PromptSpec(apply_chat_template=True, convention=MILES)
    call = {"function": {"name": "f", "arguments": wrong}}
    row = shape_row({"text": [{"role": "assistant", "tool_calls": [call]}]}, spec)
    with pytest.raises(RowError, match="not valid JSON"):
        PromptMaker(spec, "{{ messages }}", {}).text(row)
