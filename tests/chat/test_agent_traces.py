"""Agent traces: one run in every format gives the same messages; the rest is rejected by reason.

The rows follow the public schemas: ATIF 1.8, verifiers' results, OpenAI's Responses, NeMo Gym's
rollouts and Anthropic's Messages.
"""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tokenmill.chat.agent_traces import AGENT_TRACES
from tokenmill.chat.shapes import Conversation, read_row
from tokenmill.chat.spec import ChatSpec
from tokenmill.errors import RowError

Row = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Look up.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
ARGUMENTS = json.dumps(CALL["arguments"])

MESSAGES: list[Row] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "I need a tool.",
     "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "content": "4 degrees", "tool_call_id": "c1", "name": "weather"},
    {"role": "assistant", "content": "It is cold."},
]  # fmt: skip

ITEMS = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]}],
    "output": [
        {"type": "reasoning", "id": "r1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "I need a tool."}]},
        {"type": "message", "id": "m1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "id": "f1", "call_id": "c1", "name": "weather",
         "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": "4 degrees"},
        {"type": "message", "id": "m2", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "It is cold.", "annotations": []}]},
    ],
}  # fmt: skip
RESPONSES_TOOL = {"type": "function", "strict": None, **FUNCTION}

ROWS: dict[str, Row] = {
    "atif": {
        "schema_version": "ATIF-v1.8", "session_id": "s",
        "agent": {"name": "a", "version": "1", "tool_definitions": [TOOL]},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Oslo?"}]},
            {"step_id": 3, "source": "agent", "message": "Let me see.",
             "reasoning_content": "I need a tool.",
             "tool_calls": [{"tool_call_id": "c1", "function_name": "weather",
                             "arguments": {"city": "Oslo"}}],
             "observation": {"results": [{"source_call_id": "c1", "content": "4 degrees"}]}},
            {"step_id": 4, "source": "agent", "message": "It is cold.", "metrics": {"cost_usd": 0}},
        ],
    },
    "verifiers": {
        "example_id": 3, "reward": 1.0, "metrics": {}, "is_completed": True,
        "tool_defs": [{**FUNCTION, "strict": None}], "prompt": MESSAGES[:2],
        "completion": [
            {**MESSAGES[2], "tool_calls": [
                json.dumps({"id": "c1", "name": "weather", "arguments": ARGUMENTS})]},
            *MESSAGES[3:],
        ],
    },
    "responses": {**ITEMS, "instructions": "Be brief.", "tools": [RESPONSES_TOOL]},
    "nemo_gym": {
        "responses_create_params": {"input": ITEMS["input"], "instructions": "Be brief.",
                                    "tools": [RESPONSES_TOOL]},
        "response": {"object": "response", "output": ITEMS["output"]}, "reward": 0.5,
    },
    "anthropic": {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "weather", "description": "Look up.", "input_schema": PARAMETERS}],
        "messages": [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I need a tool.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1",
                 "content": [{"type": "text", "text": "4 degrees"}]}]},
            {"role": "assistant", "content": "It is cold."},
        ],
    },
}  # fmt: skip


def read(row: Row, **options: Any) -> Conversation:
    found = read_row(copy.deepcopy(row), ChatSpec(**options))
    assert isinstance(found, Conversation)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_one_run_in_every_format_gives_the_same_messages(name: str) -> None:
    assert set(ROWS) == set(AGENT_TRACES)
    found = read(ROWS[name])
    assert found.shape == name
    assert found.messages == MESSAGES
    assert found.tools == [TOOL]
    assert not found.notes
    assert found.completion == (2 if name in ("verifiers", "responses", "nemo_gym") else 0)
    named = read(ROWS[name], format=name)
    assert (named.messages, named.tools) == (found.messages, found.tools)


def changed(row: str | Row, path: str, value: Any) -> Row:
    """A row with another value at a path of keys and indices; None removes it."""
    row = copy.deepcopy(ROWS[row] if isinstance(row, str) else row)
    *parents, last = [int(key) if key.lstrip("-").isdigit() else key for key in path.split(".")]
    place: Any = row
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    elif last == "+":
        place.append(value)
    else:
        place[last] = value
    return row


IMAGE = {"type": "input_image", "image_url": "data:,"}


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("atif", "steps.0.source", "robot", "the source is 'robot'"),
        ("atif", "steps.2.observation.results.0.source_call_id", "c9", "'c9', which is not in"),
        ("atif", "steps.2.observation.results.0.content", None, "a result has no content"),
        ("atif", "steps.1.observation", {"results": [{"content": "x"}]}, "context of the agent"),
        ("atif", "steps.1.tool_calls", [{"tool_call_id": "c0"}], "context of the agent"),
        ("atif", "steps.2.observation", "4 degrees", "observation must be an object, not str"),
        ("responses", "request", "[]", "request must be an object, not str"),
        ("atif", "steps.1.message", [{"type": "audio", "source": {}}], "'audio'"),
        ("atif", "steps.2.tool_calls.+", {"tool_call_id": "c1", "function_name": "x"}, "id 'c1'"),
        ("atif", "steps.2.tool_calls", [5], "'tool_calls' must be a list of objects"),
        ("atif", "agent.tool_definitions", [{"type": "web_search"}], "has no parameters"),
        ("verifiers", "completion.0.tool_calls", [5], "a tool call must be an object"),
        ("verifiers", "prompt.0", {"content": "no role"}, "role must be text"),
        ("responses", "output.0.encrypted_content", "gAAA", "encrypted; remove it"),
        ("responses", "output.0.type", "web_search_call", "'web_search_call'"),
        ("responses", "output.1.content.0", {"type": "refusal", "refusal": "No."}, "'refusal'"),
        ("responses", "output.0", ITEMS["output"][2], "another order"),
        ("responses", "output.3.call_id", "c9", "'c9', which is not in"),
        ("responses", "input.0.content.0", IMAGE, "'input_image'"),
        ("responses", "previous_response_id", "resp_1", "that it does not contain"),
        ("nemo_gym", "response.output.0", [5], "must be a list of objects"),
        ("anthropic", "messages.1.content.0", {"type": "redacted_thinking", "data": "x"}, "encryp"),
        ("anthropic", "messages.1.content.1", {"type": "server_tool_use"}, "'server_tool_use'"),
        ("anthropic", "messages.1.content.+", {"type": "text", "text": "x"}, "another order"),
        ("anthropic", "messages.1.tool_calls", [CALL], "cannot express"),
        ("anthropic", "messages.1.role", "user", "role 'user' has a part 'thinking'"),
        ("anthropic", "messages.2.role", "assistant", "role 'assistant' has a part 'tool_result'"),
        ("anthropic", "messages.0.role", 5, "role must be text"),
        ("anthropic", "tools.+", {"type": "bash_20250124", "name": "bash"}, "has no parameters"),
    ],
)
def test_what_messages_cannot_express_is_rejected(
    name: str, path: str, value: Any, words: str
) -> None:
    with pytest.raises(RowError, match=words) as it:
        read(changed(name, path, value))
    assert it.value.reason == ("bad_media" if value is IMAGE or "audio" in words else "bad_shape")


def trained(found: Conversation) -> list[bool]:
    return [m.get("train", True) for m in found.messages if m["role"] == "assistant"]


@pytest.mark.parametrize("name", ROWS)
def test_missing_prompts_and_tools_are_reported_and_taken_from_columns(name: str) -> None:
    row = copy.deepcopy(ROWS[name])
    for part in (row, row.get("agent", {}), row.get("responses_create_params", {})):
        for key in ("tools", "tool_defs", "tool_definitions", "system", "instructions"):
            part.pop(key, None)
    del (row["steps"] if name == "atif" else row["prompt"] if name == "verifiers" else [0])[0]
    found = read(row)
    assert sorted(found.notes) == ["no_system_prompt", "no_tool_definitions"]
    found = read({**row, "system": "Be brief.", "tools": [TOOL]})
    assert (found.messages, found.tools, list(found.notes)) == (MESSAGES, [TOOL], [])


CUT = {"role": "assistant", "content": "It", "stop_reason": "max_tokens"}


def test_turns_that_the_model_did_not_end_or_sample_are_not_trained() -> None:
    for name, key, value in (
        ("verifiers", "is_truncated", True),
        ("responses", "status", "incomplete"),
        ("nemo_gym", "response.status", "incomplete"),
        ("anthropic", "response", CUT),
    ):
        found = read(changed(name, key, value))
        assert trained(found)[-2:] == [True, False]
        assert list(found.notes) == ["truncated_traces"]
    for key, value in (("is_copied_context", True), ("llm_call_count", 0)):
        assert trained(read(changed("atif", f"steps.2.{key}", value))) == [False, True]


def test_a_later_turn_may_use_the_id_of_a_call_again() -> None:
    row = copy.deepcopy(ROWS["atif"])
    row["steps"].insert(3, copy.deepcopy(row["steps"][2]))
    row["steps"][3]["tool_calls"][0]["function_name"] = "time"
    messages = read(row).messages
    assert [m["name"] for m in messages if m["role"] == "tool"] == ["weather", "time"]


def test_observations_without_a_call_are_user_turns_except_the_last() -> None:
    row = changed("atif", "steps.2.tool_calls", None)
    row["steps"][2]["observation"] = {"results": [{"content": "$ ls"}]}
    row["steps"][3]["observation"] = {"results": [{"content": "$"}]}
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert [message["role"] for message in read(row).messages] == roles
    marker = {"results": [{"subagent_trajectory_ref": []}]}
    row["steps"].append({"source": "system", "message": "handed off", "observation": marker})
    row["subagent_trajectories"] = [{}]
    found = read(row)
    assert [message["role"] for message in found.messages] == roles
    assert list(found.notes) == ["subagents_left_out"]


def test_messages_without_a_result_between_them_are_turns_of_their_own() -> None:
    output = [ITEMS["output"][-1]] * 2 + [{"role": "user", "content": []}]
    found = read({**ITEMS, "output": output}, format="responses")
    assert [message["content"] for message in found.messages[1:]] == ["It is cold."] * 2 + [""]
    blocks = [{"type": "text", "text": text} for text in "ab"]
    found = read(changed("anthropic", "messages.0.content", blocks))
    assert [message["content"] for message in found.messages[:2]] == ["Be brief.", "ab"]
    found = read(changed("anthropic", "messages.2.content.0.is_error", True))
    assert found.messages[3] == {**MESSAGES[3], "is_error": True}


def test_calls_without_text_have_null_content_for_templates_that_need_it() -> None:
    found = read(changed("atif", "steps.2.message", ""))
    assert [form.messages[2]["content"] for form in found.forms()][:2] == ["", None]


def test_blocks_of_openai_messages_stay_openais() -> None:
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yo"}]
    messages = [*MESSAGES[:2], {**MESSAGES[2], "content": parts}]
    found = read({"messages": messages})
    assert (found.shape, found.messages[2]["tool_calls"]) == ("messages", MESSAGES[2]["tool_calls"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "x", "c1", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text"]), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value: Any, path: str = "") -> list[str]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in pairs:
        own = f"{path}.{key}".lstrip(".")
        found += [own, *(places(inner, own) if isinstance(inner, dict | list) else [])]
    return found


@given(data=st.data())
def test_damaged_traces_are_read_or_rejected(data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(ROWS)))
    row = changed(name, data.draw(st.sampled_from(places(ROWS[name]))), data.draw(VALUES))
    for options in ({}, {"format": name}):
        with contextlib.suppress(RowError):
            read_row(row, ChatSpec(**options))


def test_every_row_is_prepared_or_rejected(tmp_path: Path) -> None:
    rows = [*ROWS.values(), changed("responses", "output.0.type", "compaction")]
    rows += [changed("atif", "agent.tool_definitions", None)]
    path = write_rows(tmp_path / "traces.jsonl", rows)
    store = tm.prepare(str(path), str(TOKENIZER), cache_dir=tmp_path / "cache", **INLINE)
    totals = store.manifest["totals"]
    assert (totals["rows_in"], totals["rows"], totals["rejected"]) == (7, 6, {"bad_shape": 1})
    texts = [row.text for row in store][:5]
    assert len(set(texts)) == 1
    for text in ("Be brief.", "Oslo?", "Let me see.", "4 degrees", "It is cold."):
        assert text in texts[0]
