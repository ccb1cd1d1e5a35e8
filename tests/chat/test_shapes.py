"""Rows of every shape become the same conversation; what is none is rejected with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chat.templates import CHATML, THINKING
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.shapes import Conversation, Plain, read
from tokenmill.errors import RowError, UsageError

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
TOOL = {"name": "f"}


def messages(row: Any, **options: Any) -> list[dict[str, Any]]:
    found = read(row, ChatSpec(**options))
    assert isinstance(found, Conversation)
    return found.messages


HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, HELLO[1]]}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": HELLO}, {}),
        ({"conversations": HELLO}, {}),
        ({"talk": HELLO}, {"columns": {"messages": "talk"}}),
        ({"conversations": SHARED}, {}),
        ({"messages": SHARED}, {}),
        ({"instruction": "Hi", "output": "Hello"}, {}),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, {}),
        ({"instruction": "Hi", "input": None, "output": "Hello"}, {}),
        ({"prompt": HELLO[:1], "completion": HELLO[1:]}, {}),
        ({"prompt": HELLO[:1], "completion": "Hello"}, {}),
        ({"prompt": "Hi", "completion": HELLO[1:]}, {}),
        ({"q": HELLO[:1], "a": HELLO[1:]}, {"columns": {"prompt": "q", "completion": "a"}}),
        (asked({"type": "text", "text": "Hi"}), {}),
        (asked({"type": "text", "value": "H"}, {"type": "text", "text": "i"}), {}),
    ],
)
def test_shape_every_spelling_gives_one_conversation(row: Any, options: dict[str, Any]) -> None:
    assert messages(row, **options) == HELLO


def test_shape_system_column_leads_only_where_there_is_none() -> None:
    assert messages({"messages": HELLO, "system": "S"})[0] == {"role": "system", "content": "S"}
    own = [{"role": "system", "content": "own"}, *HELLO]
    assert messages({"messages": own, "system": "S"}) == own
    assert messages({"messages": HELLO, "system": ""}) == HELLO
    assert messages({"messages": HELLO, "sys": "S"}, columns={"system": "sys"})[0]["content"] == "S"


def test_shape_alpaca_input_is_joined_by_a_blank_line() -> None:
    row = {"instruction": "Sum", "input": "1 2", "output": "3"}
    assert messages(row)[0] == {"role": "user", "content": "Sum\n\n1 2"}


def odd_call(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, {}),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {}),
        ({"role": "tool", "content": {"sky": "blue"}}, {}),
        *(
            ({"role": "assistant", "content": "", "tool_calls": [odd_call(text)]}, {})
            for text in ("[1]", "not json", '"text"', "3")
        ),
        ({"role": "tool", "content": "x", "tool_call_id": "7", "name": "f", "odd": [1, None]}, {}),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "reasoning", "value": "hm"},
                    {"type": "text", "value": "Hello"},
                    {"type": "tool_call", "value": json.dumps(CALL["function"])},
                ],
            },
            {"content": "Hello", "reasoning_content": "hm", "tool_calls": [CALL]},
        ),
        (
            {"role": "user", "content": [{"type": "document"}, {"type": "text", "value": "Hi"}]},
            {"content": [{"type": "document"}, {"type": "text", "text": "Hi"}]},
        ),
    ],
)
def test_shape_of_one_message(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert messages({"messages": [HELLO[0], given]})[1] == {**given, **read}


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        CALL,
        json.dumps([CALL]),
        '{"type": "function", "function": {"name": "look", "arguments": "{\\"at\\": \\"sky\\"}"}}',
        [{"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}],
    ],
)
@pytest.mark.parametrize("content", ["", None])
def test_shape_tool_calls_in_every_spelling_are_and_render_alike(calls: Any, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    row = {"messages": [HELLO[0], turn, {"role": "tool", "content": "blue"}, HELLO[1]]}
    assert messages(row)[1]["tool_calls"] == [CALL]
    plain = {"messages": [row["messages"][0], {**turn, "tool_calls": [CALL], "content": ""}]}
    plain["messages"] += row["messages"][2:]
    result = Renderer(ChatSpec(), THINKING).render([row, plain])
    assert result.texts[0] == result.texts[1]
    assert result.spans[0] == result.spans[1]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        *((tools, [TOOL]) for tools in ([TOOL], TOOL, json.dumps([TOOL]), json.dumps(TOOL))),
        *((tools, None) for tools in (None, "", "  ")),
    ],
)
def test_shape_tools_in_every_spelling_are_one_list(tools: Any, expected: Any) -> None:
    found = read({"messages": HELLO, "tools": tools}, ChatSpec())
    assert isinstance(found, Conversation)
    assert found.tools == expected


def test_shape_sharegpt_function_calls_and_observations() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "w?"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
            {"from": "observation", "value": "blue"},
            {"from": "gpt", "value": "It is blue."},
        ]
    }
    assert messages(row) == [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "It is blue."},
    ]


@pytest.mark.parametrize(
    "row",
    [
        7,
        [],
        {},
        {"messages": []},
        {"messages": "text"},
        {"messages": [1]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": 3, "content": "x"}]},
        {"messages": [{"role": "", "content": "x"}]},
        {"conversations": [{"from": "stranger", "value": "x"}]},
        {"text": 3, "messages": None},
        {"conversations": [{"from": "function_call", "value": "no json"}]},
        {"instruction": "x", "output": 3},
        {"instruction": "x", "input": 3, "output": "y"},
        {"prompt": 3, "completion": "x"},
        {"prompt": [], "completion": "x"},
        {"messages": HELLO, "tools": 3},
        {"messages": HELLO, "tools": "no json"},
        {"messages": HELLO, "tools": [3]},
        {"messages": HELLO, "system": 3},
        {"messages": [HELLO[0], {"role": "assistant", "content": "", "tool_calls": "no json"}]},
        {"messages": [HELLO[0], {"role": "assistant", "content": "", "tool_calls": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [3]}]},
    ],
)
def test_shape_invalid_rows_are_rejected(row: Any) -> None:
    result = Renderer(ChatSpec(), CHATML).render([row, {"messages": HELLO}])
    assert [(index, part, error.reason) for index, part, error in result.rejected] == [
        (0, 0, "bad_shape")
    ]
    assert result.source == [1]


def test_text_gets_its_eos_once_and_is_trained_whole() -> None:
    renderer = Renderer(ChatSpec(), None, {"eos_token": "</s>"})
    result = renderer.render([{"text": "a b"}, {"text": "a b</s>"}])
    assert result.texts == ["a b</s>", "a b</s>"]
    assert result.spans == [None, None]
    assert result.turns == [[("text", 7)], [("text", 7)]]
    plain = Renderer(ChatSpec(append_eos=False), None).render([{"text": "a"}, {"text": ""}])
    assert plain.texts == ["a"]
    assert [error.reason for *_, error in plain.rejected] == ["no_trained_tokens"]


def test_pair_of_strings_trains_the_completion() -> None:
    renderer = Renderer(ChatSpec(), CHATML, {"eos_token": "</s>"})
    result = renderer.render([{"prompt": "2+2=", "completion": "4"}])
    assert result.texts == ["2+2=4</s>"]
    assert result.spans == [[(4, 9)]]
    assert result.turns == [[("prompt", 4), ("completion", 9)]]


def test_pair_of_messages_trains_only_the_completions_assistants() -> None:
    row = {"prompt": [*HELLO, HELLO[0]], "completion": [{"role": "assistant", "content": "Again"}]}
    result = Renderer(ChatSpec(), CHATML).render([row])
    spans = result.spans[0]
    assert spans is not None
    assert [result.texts[0][a:b] for a, b in spans] == ["Again<|im_end|>"]
    both = Renderer(ChatSpec(train_on="all_assistant_messages"), CHATML).render([row])
    assert len(both.spans[0] or []) == 2


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"train_on": "completion"}, {"messages": HELLO}),
        ({"train_on": "completion"}, {"text": "x"}),
        ({"train_on": "all_assistant_messages"}, {"text": "x"}),
        ({"train_on": "last_assistant_message"}, {"prompt": "x", "completion": "y"}),
    ],
)
def test_impossible_train_on_is_a_usage_error(options: Any, row: Any) -> None:
    renderer = Renderer(ChatSpec(**options), CHATML, {"eos_token": "</s>"})
    with pytest.raises(UsageError, match="train_on="):
        renderer.render([row])


@pytest.mark.parametrize(
    "options",
    [
        {"format": "xml"},
        {"train_on": "some"},
        {"turn_end": "never"},
        {"expand": "all"},
        {"trailing": "keep"},
        {"date": "15.11.2026"},
        {"date": "2026-13-01"},
        {"format": "messages", "train_on": "completion"},
        {"format": "text", "train_on": "completion"},
        {"format": "text", "expand": "turns"},
        {"train_on": "everything", "expand": "turns"},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": [1]},
        {"columns": {"text": ""}},
    ],
)
def test_spec_rejects_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ChatSpec(**options)


def test_conversations_without_a_template_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="chat_template"):
        Renderer(ChatSpec(), None).render([{"messages": HELLO}])


def test_plain_row_has_its_shape() -> None:
    assert read({"text": "x"}, ChatSpec()) == Plain("text", "", "x")
    with pytest.raises(RowError, match="columns are other"):
        read({"other": 1}, ChatSpec())


def test_parse_error_keeps_its_position_and_message() -> None:
    refused = RowError("not valid JSON", reason="bad_json", row=7)
    given = [{"messages": HELLO}, refused, {"messages": HELLO}]
    for renderer in ("auto", "jinja2"):
        result = Renderer(ChatSpec(), CHATML, renderer=renderer).render(given, [1, 2, 3])
        assert result.source == [0, 2]
        assert result.rejected == [(1, 0, refused)]
