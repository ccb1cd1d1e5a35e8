"""What a row's columns become, and what becomes of rows that are no prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import PROMPTS, open_prompts, write_rows
from tokenmill.data.prompt_rows import PromptMaker, PromptSpec, shape_row
from tokenmill.errors import RowError, SourceError, TemplateError, UsageError
from tokenmill.integrations.miles import MILES, SLIME

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def shaped(row: dict[str, Any], **spec: Any) -> Any:
    return shape_row(row, PromptSpec(**spec))


def test_label_of_any_type_is_kept_as_the_row_has_it(tmp_path: Path) -> None:
    labels = ["07", 7, 7.5, None, True, ["a"], {"b": 1}]
    lines = [{"text": "x", "label": label} for label in labels]
    rows = write_rows(tmp_path / "r.jsonl", [*lines, {"text": "no label"}])
    prompts = open_prompts(rows, label_key="label")
    served = [prompt.label for prompt in prompts]
    assert prompts.rejected == {"bad_shape": 1}
    assert served == labels
    assert [type(label) for label in served] == [type(label) for label in labels]


@pytest.mark.parametrize(
    ("written", "tools"),
    [
        *((one, [TOOL]) for one in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)])),
        *((one, None) for one in (None, "", " ", "null")),
    ],
)
def test_tools_in_any_writing_are_a_list_and_in_the_metadata(written: Any, tools: Any) -> None:
    row = shaped({"text": "x", "tools": written, "metadata": {"a": 1}}, tool_key="tools")
    assert row.tools == tools
    assert row.metadata == ({"a": 1, "tools": tools} if tools else {"a": 1})


@pytest.mark.parametrize(
    ("written", "read"),
    [(None, {}), ({}, {}), ("", {}), ({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1})],
)
def test_metadata_in_any_writing_is_a_dict(written: Any, read: dict[str, Any]) -> None:
    assert shaped({"text": "x", "metadata": written}).metadata == read
    assert shaped({"text": "x"}).metadata == {}


def test_string_prompt_becomes_a_user_turn_only_where_a_conversation_is_needed() -> None:
    turn = [{"role": "user", "content": "x"}]
    assert shaped({"text": "x"}).prompt == "x"
    assert shaped({"text": "x"}, apply_chat_template=True).prompt == turn
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert shaped({"text": "x"}, multimodal_keys={"image": "images"}).prompt == parts


def test_placeholders_of_several_kinds_take_their_items_in_order() -> None:
    row = {
        "text": "a<image><video>b<image>",
        "images": ["1.png", {"type": "image", "image": "2.png", "max_pixels": 9}],
        "videos": "v.mp4",
    }
    (message,) = shaped(row, multimodal_keys={"video": "videos", "image": "images"}).prompt
    assert message["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "1.png"},
        {"type": "video", "video": "v.mp4"},
        {"type": "text", "text": "b"},
        {"type": "image", "image": "2.png", "max_pixels": 9},
    ]


def test_parts_that_a_row_wrote_itself_stay_as_they_are() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what is <image>?"}]
    row = {"text": [{"role": "user", "content": content}], "images": ["1.png"]}
    assert shaped(row, multimodal_keys={"image": "images"}).prompt[0]["content"] == content


@pytest.mark.parametrize(
    ("text", "images", "counts"),
    [
        ("<image><image>", ["1.png"], "2 <image> placeholders in the prompt, but 1 items"),
        ("none", ["1.png"], "0 <image> placeholders in the prompt, but 1 items"),
        ("<image>", None, "1 <image> placeholders in the prompt, but 0 items"),
    ],
)
def test_count_mismatch_of_media_names_both_counts(
    tmp_path: Path, text: str, images: Any, counts: str
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"text": text, "images": images}])
    keys = {"image": "images"}
    prompts = open_prompts(rows, multimodal_keys=keys)
    ((origin, reason, detail),) = prompts.rejected_rows()
    assert (origin.line, reason) == (1, "bad_shape")
    assert counts in detail
    with pytest.raises(SourceError, match="no prompt left"):
        prompts.take(1)


def test_rows_that_are_no_prompts_are_counted_with_reason_and_origin(tmp_path: Path) -> None:
    lines = [
        {"text": "one"}, '{"text": ', "", {"other": 1}, {"text": 5},
        {"text": [{"from": "human", "value": "hi"}]}, {"text": "two", "tools": "not json"},
        {"text": "three", "metadata": [1]}, {"text": []}, "[1]",
        {"text": "a very long prompt " * 20}, {"text": "four"},
    ]  # fmt: skip
    rows = write_rows(tmp_path / "r.jsonl", lines)
    prompts = open_prompts(rows, tool_key="tools", apply_chat_template=True, max_length=60)
    assert [(prompt.messages or [])[0]["content"] for prompt in prompts] == ["one", "four"]
    assert sum(prompts.rejected.values()) + len(prompts) == prompts.source_rows == 11
    found = list(prompts.rejected_rows())
    assert [origin.line for origin, _, _ in found] == [2, 4, 5, 6, 7, 8, 9, 10, 11]
    reasons = [reason for _, reason, _ in found]
    assert reasons[0] == "bad_json"
    assert reasons[1:7] == ["bad_shape"] * 6
    assert reasons[8] == "overlong"
    assert "no role" in found[3][2]
    assert prompts.rejected["overlong"] == 1
    for origin, _, _ in found:
        with open(str(origin.path), "rb") as file:
            file.seek(origin.offset or 0)
            assert file.read(origin.length).startswith((b"{", b"["))


def test_template_that_refuses_a_row_rejects_that_row_alone(tmp_path: Path) -> None:
    template = "{% if 'no' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}ok"
    rows = write_rows(tmp_path / "r.jsonl", [{"text": "yes"}, {"text": "no"}, {"text": "yes"}])
    prompts = open_prompts(rows, apply_chat_template=True, chat_template=template)
    assert [prompt.row for prompt in prompts] == [0, 2]
    assert prompts.rejected == {"template_error": 1}
    assert "not this" in next(prompts.rejected_rows())[2]


def test_messages_without_a_template_have_no_length_and_are_not_filtered(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "long " * 50}]
    rows = write_rows(tmp_path / "r.jsonl", [{"text": talk}, {"text": "long " * 50}])
    prompts = open_prompts(rows, max_length=5)
    assert [prompt.prompt for prompt in prompts] == [talk, "long " * 50]
    assert [prompt.length is None for prompt in prompts] == [True, False]
    # As in the eager datasets the first prompt decides: behind a text, texts are filtered.
    other = write_rows(tmp_path / "o.jsonl", [{"text": "a"}, {"text": "long " * 50}])
    assert len(open_prompts(other, max_length=5)) == 1


def test_date_that_a_template_asks_for_must_be_pinned(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}"
    rows = write_rows(tmp_path / "r.jsonl", [{"text": "hi"}])
    with pytest.raises(TemplateError, match="date="):
        open_prompts(rows, apply_chat_template=True, chat_template=template)
    prompts = open_prompts(
        rows, apply_chat_template=True, chat_template=template, date="2026-11-15"
    )
    assert prompts[0].prompt == "15 November 2026: hi"


def test_conventions_differ_only_in_calls_and_tools() -> None:
    template = "{{ messages[1].tool_calls[0].function.arguments | string }}|{{ tools | tojson }}"
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    row = {"text": messages, "tools": [{"name": "add", "parameters": {}, "description": "adds"}]}
    plain = json.dumps(row["tools"])
    function = {"description": "adds", "name": "add", "parameters": {}, "strict": False}
    served = json.dumps([{"type": "function", "function": function}])
    wanted = {"": f"{{'a': 1}}|{plain}", SLIME: f'{{"a":1}}|{plain}', MILES: f"{{'a': 1}}|{served}"}
    for convention, text in wanted.items():
        spec = PromptSpec(tool_key="tools", apply_chat_template=True, convention=convention)
        maker = PromptMaker(spec, template, {})
        one = shape_row(row, spec)
        assert maker.text(one) == text
        assert maker.texts([one, one]) == [text, text]
        assert one.metadata["tools"] == row["tools"]


def test_miles_convention_tries_bare_functions_where_wrapped_ones_are_refused() -> None:
    template = (
        "{% if tools[0].function %}{{ raise_exception('bare') }}{% endif %}{{ tools[0].name }}"
    )
    row = {"text": "hi", "tools": [TOOL]}
    for convention, text in ((MILES, "add"), ("", None)):
        spec = PromptSpec(tool_key="tools", apply_chat_template=True, convention=convention)
        maker = PromptMaker(spec, template, {})
        one = shape_row(row, spec)
        (made,) = maker.texts([one])
        if text is None:
            assert isinstance(made, RowError)
            with pytest.raises(RowError, match="bare"):
                maker.text(one)
        else:
            assert made == maker.text(one) == text


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_length": 0}, {"max_length": True}, {"seed": -1},
        {"prompt_key": ""}, {"multimodal_keys": {"smell": "x"}}, {"convention": "verl"},
        {"date": "today"}, {"apply_chat_template_kwargs": {"add_generation_prompt": False}},
        {"num_workers": -1}, {"executor": "carrier pigeon"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_argument_is_a_usage_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        open_prompts(PROMPTS, **wrong)


class Camera:
    """A processor that counts a hundred tokens for an image."""

    def to_dict(self) -> dict[str, Any]:
        return {"per_image": 100}

    def extract_media(self, messages: Any) -> dict[str, Any]:
        parts = [part for message in messages for part in message["content"]]
        return {"images": [part["image"] for part in parts if "image" in part] or None}

    def __call__(self, text: str, images: Any = None) -> dict[str, Any]:
        if "broken.png" in (images or ()):
            raise OSError("truncated image")
        return {"input_ids": [[0] * (len(text) + 100 * len(images or ()))]}


def test_processor_measures_prompts_with_media_and_serves_their_inputs(tmp_path: Path) -> None:
    template = "{% for p in messages[0].content %}{{ p.text or '<|image|>' }}{% endfor %}"
    images = {"see <image>": ["1.png"], "plain": [], "<image>": ["broken.png"],
              "<image><image>": ["1.png", "2.png"]}  # fmt: skip
    lines = [{"text": text, "images": own} for text, own in images.items()]
    rows = write_rows(tmp_path / "r.jsonl", lines)
    arguments: dict[str, Any] = {
        "processor": Camera(), "multimodal_keys": {"image": "images"},
        "apply_chat_template": True, "chat_template": template,
    }  # fmt: skip
    prompts = open_prompts(rows, max_length=150, **arguments)
    assert [prompt.row for prompt in prompts] == [0, 1]
    assert prompts[0].length == len("see <|image|>") + 100
    assert prompts[0].multimodal_inputs == {"images": ["1.png"]}
    assert prompts[1].multimodal_inputs == {"images": None}
    assert prompts.rejected == {"bad_shape": 1, "overlong": 1}
    again = open_prompts(rows, max_length=1000, **arguments)
    assert (again.hit, again.measured, len(again)) == (True, 0, 3)
    assert not open_prompts(rows, **{**arguments, "processor": None}).hit
