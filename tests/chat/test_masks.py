"""Odd rows on templates of every kind: an exact mask, or a rejection with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.conversations import SPECIAL
from tests.chat.templates import (
    ALL,
    CHATML,
    GENERATION,
    GENERATION_MACRO,
    HABITS,
    INST,
    RETURNING,
    STANDING,
    THINKING,
    TRIMMING,
)
from tokenmill.chat import ChatSpec, Renderer, Rendering
from tokenmill.errors import UsageError

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}


def turns(*contents: Any) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(contents)
    ]


def render(template: Any, *rows: Any, **options: Any) -> Rendering:
    rows = tuple(row if isinstance(row, dict) else {"messages": row} for row in rows)
    return Renderer(ChatSpec(**options), template, SPECIAL).render(rows)


def trained(result: Rendering, index: int = 0) -> list[str]:
    spans = result.spans[index]
    assert spans is not None
    return [result.texts[index][a:b] for a, b in spans]


def reasons(result: Rendering) -> list[str]:
    return [error.reason for *_, error in result.rejected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["one<|im_end|>", "two<|im_end|>"]),
        ("thinking", ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]),
        ("trimming", ["one<|eot_id|>", "two<|eot_id|>"]),
        ("inst", [" one</s>", " two</s>"]),
        ("unclosed", ["one", "two"]),
        ("returning", ["<|message|>one<|end|>", "<|message|>two<|return|>"]),
        ("standing", ["one<|over|>", "two<|over|>"]),
        ("generation", ["one<|im_end|>", "two<|im_end|>"]),
        ("generation_macro", ["one<|im_end|>", "two<|im_end|>"]),
    ],
)
def test_mask_of_every_template(name: str, expected: list[str]) -> None:
    rows = [turns("a", "one", "b", "two")] * 3
    result = render(ALL[name], *rows, thinking_opener="trained")
    for index in range(3):
        assert trained(result, index) == expected
    assert bool(result.notes.get("rows_without_closer")) == (name == "unclosed")


@pytest.mark.parametrize("opener", ["prompt", "trained"])
def test_thinking_opener_option(opener: str) -> None:
    closed = THINKING.replace("assistant\\n<think>\\n' }}", "assistant\\n' }}")
    assert closed != THINKING
    for template in (THINKING, closed):
        made = render(template, turns("a", "one", "b", "two"), thinking_opener=opener)
        given = template == THINKING and opener == "prompt"
        answer = "\n</think>\n\ntwo<|im_end|>"
        assert trained(made)[-1] == (answer if given else f"<think>\n{answer}")


def test_turn_end_turn_runs_to_the_next_turn_but_clips_no_generation_block() -> None:
    talk = turns("a", "one", "b", "two")
    assert trained(render(CHATML, talk, turn_end="turn")) == ["one<|im_end|>\n", "two<|im_end|>\n"]
    assert trained(render(STANDING, talk, turn_end="turn")) == ["one<|over|>", "two<|over|>"]
    assert trained(render(GENERATION, talk, turn_end="turn")) == ["one<|im_end|>", "two<|im_end|>"]


def test_turns_partition_the_text_by_role() -> None:
    talk = [{"role": "system", "content": "S"}, *turns("a", "one", "b", "two")]
    result = render(CHATML, talk)
    text, position, parts = result.texts[0], 0, []
    for role, end in result.turns[0]:
        parts.append((role, text[position:end]))
        position = end
    assert position == len(text)
    assert parts == [
        ("system", "<|im_start|>system\nS<|im_end|>\n"),
        ("user", "<|im_start|>user\na<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\none<|im_end|>\n"),
        ("user", "<|im_start|>user\nb<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\ntwo<|im_end|>\n"),
    ]


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("empty", ["", "  ", "\n\n"])
def test_empty_assistant_text_trains_its_end_of_turn_or_is_rejected(name: str, empty: str) -> None:
    result = render(ALL[name], turns("Hi", empty, "More", "two"), turns("Hi", "one", "More", empty))
    for index in range(len(result.texts)):
        runs = trained(result, index)
        text = "".join(runs)
        assert "Hi" not in text
        assert "More" not in text
        for run in runs:
            assert not run.startswith(("<|im_start|>", "<|start_header", "<|turn|>", "[INST"))
    assert set(reasons(result)) <= {"mask_unproven", "no_trained_tokens"}
    if name in ("chatml", "trimming", "generation"):
        assert reasons(result) == []
        assert trained(result)[0].strip() in ("<|im_end|>", "<|eot_id|>")


def test_thinking_may_be_dropped_from_history_but_not_from_the_last_turn() -> None:
    think = "<think>\nhm\n</think>\n\n"
    result = render(THINKING, turns("a", f"{think}one", "b", f"{think}two"))
    assert trained(result) == ["one<|im_end|>", "hm\n</think>\n\ntwo<|im_end|>"]
    talk = turns("a", "one")
    talk[1]["reasoning_content"] = "hm"
    assert trained(render(THINKING, talk)) == ["hm\n</think>\n\none<|im_end|>"]
    assert reasons(render(CHATML, talk)) == ["template_drops_content"]


def test_text_before_thinking_that_is_dropped_rejects_the_row() -> None:
    result = render(THINKING, turns("a", "said before <think>hm</think> one"))
    assert reasons(result) == ["template_drops_content"]


def test_tool_calls_are_trained_or_the_row_is_rejected() -> None:
    talk = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "It is blue."},
    ]
    runs = trained(render(THINKING, talk, talk))
    assert runs[0] == (
        '\n<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call><|im_end|>'
    )
    assert reasons(render(CHATML, talk)) == ["template_drops_content"]
    talk[1]["tool_calls"] = [{"function": {"name": "look", "arguments": {}}}]
    assert reasons(render(CHATML, talk)) == ["template_drops_content"]
    assert "look" in trained(render(THINKING, talk))[0]
    assert reasons(render(CHATML, talk, train_on="everything")) == []


def test_text_that_the_template_prints_nowhere_rejects_the_row() -> None:
    deaf = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
    assert reasons(render(deaf, turns("a", "one"))) == ["template_drops_content"]


def test_text_that_the_template_rewrites_is_unproven() -> None:
    for change in ("upper", "replace('n', 'm')", "truncate(3)", "reverse"):
        loud = CHATML.replace("m.content", f"m.content | {change}")
        found = reasons(render(loud, turns("a", "one and some more words")))
        assert found in (["mask_unproven"], ["template_drops_content"])
    twice = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")
    assert trained(render(twice, turns("a", "one")), 0) == ["oneone<|im_end|>"]


@pytest.mark.parametrize("result", ["blue", ""])
def test_result_that_the_template_prints_in_the_turn_of_the_call_is_not_trained(
    result: str,
) -> None:
    talk = [*turns("w?", "I look."), {"role": "tool", "content": result}, *turns("x", "Blue.")[1:]]
    assert not any("result" in part for part in trained(render(HABITS["looks ahead"], talk)))
    assert trained(render(HABITS["looks ahead"], turns("w?", "I look."))) == ["I look.<|end|>"]


def test_template_that_prints_the_answer_in_the_users_turn_is_unproven() -> None:
    leaky = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
        "{{ messages[loop.index0 + 1].content }}{% endif %}<bot>ok{% endfor %}"
    )
    assert reasons(render(leaky, turns("a", "one"))) == ["mask_unproven"]


@pytest.mark.parametrize("flag", [{"step_loss_mask": 0}, {"train": False}, {"weight": 0}])
@pytest.mark.parametrize("template", [CHATML, GENERATION, GENERATION_MACRO, INST, RETURNING])
def test_flagged_turns_stay_untrained(template: str, flag: dict[str, Any]) -> None:
    talk = turns("a", "one", "b", "two", "c", "three")
    talk[3] |= flag
    runs = trained(render(template, talk))
    assert len(runs) == 2
    assert "two" not in "".join(runs)
    kept = [{**message, "train": True, "weight": 1} for message in turns("a", "one")]
    assert "one" in trained(render(template, kept))[0]
    alone = turns("a", "one")
    alone[1] |= flag
    assert reasons(render(template, alone)) == ["no_trained_tokens"]


@pytest.mark.parametrize("template", [CHATML, GENERATION, THINKING, TRIMMING, STANDING])
def test_last_assistant_message_trains_the_last_alone(template: str) -> None:
    talk = turns("a", "one", "b", "two")
    runs = trained(render(template, talk, train_on="last_assistant_message"))
    assert len(runs) == 1
    assert "two" in runs[0]


def test_expand_makes_one_row_per_turn_with_its_thinking() -> None:
    think = "<think>\nhm{}\n</think>\n\n"
    talk = turns("a", think.format(1) + "one", "b", think.format(2) + "two", "c", "three")
    result = render(THINKING, turns("x", "y"), talk, expand="turns")
    assert result.source == [0, 1, 1, 1]
    assert result.part == [0, 0, 1, 2]
    assert [trained(result, i) for i in (1, 2, 3)] == [
        ["hm1\n</think>\n\none<|im_end|>"],
        ["hm2\n</think>\n\ntwo<|im_end|>"],
        ["\n</think>\n\nthree<|im_end|>"],
    ]
    talk[1]["train"] = False
    assert render(THINKING, talk, expand="turns").part == [1, 2]


def test_trailing_user_is_rejected_or_trimmed_and_counted() -> None:
    talk = turns("a", "one", "b")
    rejected = render(CHATML, talk, turns("a", "one"))
    assert reasons(rejected) == ["trailing_user"]
    assert rejected.notes["trailing_user"] == 1
    trimmed = render(CHATML, talk, trailing="trim")
    assert trimmed.texts == render(CHATML, talk[:2]).texts
    assert trimmed.notes["trimmed_trailing"] == 1
    assert reasons(render(CHATML, turns("a"), trailing="trim")) == ["no_trained_tokens"]
    whole = render(CHATML, talk, train_on="everything")
    assert whole.texts[0].endswith("<|im_start|>user\nb<|im_end|>\n")
    assert whole.spans == [None]


def test_trailing_tool_turns_are_trimmed() -> None:
    talk = [*turns("a", "one"), {"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}]
    result = render(CHATML, talk)
    assert result.texts == render(CHATML, talk[:2]).texts
    assert result.notes["trimmed_tool_turns"] == 1
    assert "y" in render(CHATML, talk, train_on="everything").texts[0]


def test_error_of_the_template_rejects_the_row_with_its_message() -> None:
    result = render(
        INST, [{"role": "system", "content": "S"}, *turns("a", "one")], turns("a", "one")
    )
    assert reasons(result) == ["template_error"]
    assert "only user and assistant" in result.rejected[0][2].message
    assert result.source == [1]


def test_named_templates_are_chosen_as_transformers_chooses() -> None:
    named = {"default": CHATML, "tool_use": TRIMMING}
    talk = turns("a", "one")
    result = render(named, {"messages": talk}, {"messages": talk, "tools": [{"name": "f"}]})
    assert trained(result, 0) == ["one<|im_end|>"]
    assert trained(result, 1) == ["one<|eot_id|>"]
    with pytest.raises(UsageError, match="tool_use"):
        render({"tool_use": CHATML}, talk)
