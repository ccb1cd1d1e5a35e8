"""Rows with several answers: every side is an ordinary conversation; all count or none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conversations import DATE, zoo
from tests.chat.loop_oracle import TemplateRaised
from tests.chat.scoring import oracle
from tests.chat.templates import ALL, CHATML
from tokenmill.chat import ChatSpec, Renderer, Rendering
from tokenmill.chat.shapes import AnswerGroup, read_row
from tokenmill.errors import RowError, UsageError

Message = dict[str, Any]
TOKENS = {"eos_token": "</s>", "bos_token": "<s>"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}]
ASKED = [user("What is up?")]
LONGER = [user("Hello."), says("Good day."), user("What is up?")]

FORMS: dict[str, tuple[dict[str, Any], list[Message], list[list[Message]]]] = {
    "messages": (
        {"prompt": ASKED, "chosen": [says("The sky.")], "rejected": [says("Nothing.")]},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
    "text answers after messages": (
        {"prompt": ASKED, "chosen": "The sky.", "rejected": "Nothing."},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
    "messages after a text": (
        {"prompt": "What is up?", "chosen": [says("The sky.")], "rejected": says("Nothing.")},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
    "whole conversations": (
        {"chosen": [*LONGER, says("The sky.")], "rejected": [*LONGER, says("Nothing.")]},
        LONGER, [[says("The sky.")], [says("Nothing.")]]),
    "whole conversations beside their prompt": (
        {"prompt": "What is up?", "chosen": [*ASKED, says("The sky.")],
         "rejected": [*ASKED, says("Nothing.")]},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
    "several turns": (
        {"prompt": LONGER, "chosen": [says("The sky.")], "rejected": [says("Nothing.")]},
        LONGER, [[says("The sky.")], [says("Nothing.")]]),
    "thinking": (
        {"prompt": ASKED, "chosen": [says("The sky.", reasoning_content="Look up.")],
         "rejected": [says("Nothing.", reasoning_content="Look down.")]},
        ASKED, [[says("The sky.", reasoning_content="Look up.")],
                [says("Nothing.", reasoning_content="Look down.")]]),
    "one thinks": (
        {"prompt": ASKED, "chosen": [says("<think>\nLook up.\n</think>\n\nThe sky.")],
         "rejected": [says("Nothing.")]},
        ASKED, [[says("<think>\nLook up.\n</think>\n\nThe sky.")], [says("Nothing.")]]),
    "tools": (
        {"prompt": ASKED, "chosen": [says("", tool_calls=[CALL])], "rejected": [says("Nothing.")],
         "tools": TOOLS},
        ASKED, [[says("", tool_calls=[CALL])], [says("Nothing.")]]),
    "system": (
        {"prompt": ASKED, "chosen": [says("The sky.")], "rejected": [says("Nothing.")],
         "system": "Be brief."},
        [{"role": "system", "content": "Be brief."}, *ASKED],
        [[says("The sky.")], [says("Nothing.")]]),
    "kto": (
        {"prompt": ASKED, "completion": [says("The sky.")], "label": False},
        ASKED, [[says("The sky.")]]),
    "ranked": (
        {"prompt": ASKED, "responses": ["Nothing.", "The sky.", "Birds."], "scores": [1, 3.5, 2]},
        ASKED, [[says("The sky.")], [says("Birds.")], [says("Nothing.")]]),
    "ranked by place": (
        {"prompt": ASKED, "completions": [[says("The sky.")], [says("Nothing.")]]},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
    "sharegpt": (
        {"prompt": [{"from": "human", "value": "What is up?"}],
         "chosen": {"from": "gpt", "value": "The sky."},
         "rejected": {"from": "gpt", "value": "Nothing."}},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
    "instruction": (
        {"instruction": "What is up?", "chosen": "The sky.", "rejected": "Nothing."},
        ASKED, [[says("The sky.")], [says("Nothing.")]]),
}  # fmt: skip
"""A row, and what its conversations are: the prompt and each answer."""


def outcome(rendering: Rendering) -> list[Any]:
    return list(zip(rendering.texts, rendering.spans, rendering.turns, strict=True))


def alone(renderer: Renderer, row: dict[str, Any], prompt: Any, answers: list[Any]) -> Rendering:
    more = {name: row[name] for name in ("tools",) if name in row}
    return renderer.render([{"prompt": prompt, "completion": one, **more} for one in answers])


def compare_sides(name: str, source: str, cases: list[str]) -> int:
    """Compare the sides under one template; return the number of accepted groups."""
    template = oracle(name, source)
    renderer = Renderer(ChatSpec(date=DATE), source, template.given)
    accepted = 0
    for case in cases:
        row, prompt, answers = FORMS[case]
        grouped = renderer.render([row])
        single = alone(renderer, row, prompt, answers)
        if single.rejected:
            [(_, _, error)] = grouped.rejected
            assert error.reason in {other.reason for _, _, other in single.rejected}, (name, case)
            continue
        texts = [text for text, _, _ in outcome(single)]
        if len(texts) > 1 and len(set(texts)) == 1:  # the difference is not printed
            assert grouped.rejected[0][2].reason == "bad_group"
            continue
        assert not grouped.rejected, (name, case, grouped.rejected)
        assert outcome(grouped) == outcome(single), (name, case)
        assert grouped.part == list(range(len(answers)))
        start = min(spans[0][0] for spans in grouped.spans if spans)
        same = len({text[:start] for text in grouped.texts}) == 1
        assert grouped.groups[0].one_prompt == same
        for text, answer in zip(grouped.texts, answers, strict=True):
            if not any("tool_calls" in message for message in answer):
                try:
                    assert text == template.plain([*prompt, *answer], row.get("tools"))
                except TemplateRaised as refusal:
                    raise AssertionError(f"{name} × {case}: {refusal}") from refusal
        accepted += 1
    return accepted


def test_sides_are_ordinary_rows_under_every_habit() -> None:
    cases = list(FORMS)
    habits = enumerate(ALL.items())
    accepted = sum(compare_sides(name, source, cases[n % 3 :: 3]) for n, (name, source) in habits)
    assert accepted > 2 * len(ALL)


@pytest.mark.parametrize(
    ("one_in", "share", "least"), [(7, 5, 0), pytest.param(1, 1, 500, marks=pytest.mark.soak)]
)
def test_sides_are_ordinary_rows_under_real_templates(
    shared: Path, one_in: int, share: int, least: int
) -> None:
    cases = list(FORMS)
    some = list(enumerate(zoo(shared).items()))[::one_in]
    accepted = sum(
        compare_sides(name, source, cases[n % share :: share]) for n, (name, source) in some
    )
    assert accepted > max(least, len(some))


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
@pytest.mark.parametrize("prompt", ["What is up? ", None])
def test_texts_are_joined_and_closed(prompt: str | None, renderer: str) -> None:
    row = {"prompt": prompt, "chosen": "The sky.", "rejected": "Nothing."}
    expected = ["What is up? The sky.</s>", "What is up? Nothing.</s>"]
    start = len("What is up? ")
    if prompt is None:  # the space at the end belongs to the answers
        row = {"chosen": expected[0], "rejected": expected[1]}
        start -= 1
    rendering = Renderer(ChatSpec(), None, TOKENS, renderer=renderer).render([row])
    assert rendering.texts == expected
    assert rendering.spans == [[(start, len(text))] for text in expected]
    assert rendering.groups[0].labels == (1, 0)


PAIR = {"prompt": ASKED, "chosen": [says("a")], "rejected": [says("b")]}
BAD: dict[str, dict[str, Any]] = {
    "one side empty": {**PAIR, "rejected": []},
    "one side null": {**PAIR, "chosen": None},
    "one side of blanks": {"prompt": "x", "chosen": " \n", "rejected": "b"},
    "one side an empty message": {**PAIR, "chosen": [says("")]},
    "no assistant in one side": {**PAIR, "chosen": [{"role": "tool", "content": "x"}]},
    "no difference": {**PAIR, "rejected": [says("a")]},
    "no difference in texts": {"prompt": "x", "chosen": "b", "rejected": "b"},
    "other prompts": {"chosen": [user("x"), says("a")], "rejected": [user("y"), says("b")]},
    "another prompt": {"prompt": "z", "chosen": [user("x"), says("a")],
                       "rejected": [user("x"), says("b")]},
    "half a conversation": {"prompt": "x", "chosen": [user("x"), says("a")], "rejected": "b"},
    "one goes on": {"chosen": [user("x"), says("a")],
                    "rejected": [user("x"), says("a"), user("y"), says("b")]},
    "a margin that is no number": {**PAIR, "margin": "0.5"},
    "a margin that is not finite": {**PAIR, "margin": float("inf")},
    "a margin above float32": {**PAIR, "margin": 1e39},
    "a margin below float32": {**PAIR, "margin": -1e39},
    "a margin above float64": {**PAIR, "margin": 10**400},
    "a margin that float32 rounds to 0": {**PAIR, "margin": 1e-60},
    "a score above float32": {**PAIR, "score_chosen": 3.5e38, "score_rejected": 1},
    "a score that float32 rounds to 0": {**PAIR, "score_chosen": 1, "score_rejected": -1e-46},
    "ranked scores above float32": {"prompt": "x", "responses": ["a", "b"], "scores": [1, 1e300]},
    "one score": {**PAIR, "score_chosen": 1.0},
    "a label that is no boolean": {"prompt": "x", "completion": "a", "label": 1},
    "no label": {"prompt": "x", "completion": "a"},
    "an empty completion": {"prompt": "x", "completion": "", "label": True},
    "scores of another length": {"prompt": "x", "responses": ["a", "b"], "scores": [1]},
    "scores that are no numbers": {"prompt": "x", "responses": ["a", "b"], "scores": [1, True]},
    "one answer": {"prompt": "x", "responses": ["a"]},
    "an empty answer": {"prompt": "x", "responses": ["a", ""]},
    "no difference among answers": {"prompt": "x", "responses": ["a", "a", "a"]},
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_groups_are_rejected(case: str) -> None:
    row = BAD[case]
    kind = "ranked" if "responses" in row else "kto" if "completion" in row else "preference"
    good = {"prompt": "x", "chosen": "a", "rejected": "b", "completion": "a", "label": True,
            "responses": ["a", "b"]}  # fmt: skip
    renderer = Renderer(ChatSpec(format=kind), CHATML, TOKENS)  # type: ignore[arg-type]
    rendering = renderer.render([good, row, good])
    [(index, part, error)] = rendering.rejected
    assert (index, part, error.reason) == (1, 0, "bad_group")
    assert set(rendering.source) == {0, 2}
    assert len(rendering.groups) == 2


def test_one_rejected_side_rejects_the_group() -> None:
    source = CHATML + "{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}"
    rendering = Renderer(ChatSpec(), source, TOKENS).render([PAIR])
    assert not rendering.texts
    assert not rendering.groups
    [(_, _, error)] = rendering.rejected
    assert error.reason == "template_error"
    assert error.message.startswith("rejected: ")


def test_scores_and_margin_are_read() -> None:
    renderer = Renderer(ChatSpec(), CHATML, TOKENS)
    rows = [{**PAIR, "margin": 1, "score_chosen": 7.5, "score_rejected": -2}, FORMS["ranked"][0],
            FORMS["kto"][0]]  # fmt: skip
    facts = list(renderer.render(rows).groups.values())
    assert [(one.labels, one.scores, one.margin) for one in facts] == [
        ((1, 0), (7.5, -2.0), 1.0), ((-1, -1, -1), (3.5, 2.0, 1.0), None), ((0,), None, None),
    ]  # fmt: skip


def test_prompt_that_is_printed_differently_is_noted() -> None:
    source = "{% if messages[-1].content == 'a' %}!{% endif %}" + CHATML
    rendering = Renderer(ChatSpec(), source, TOKENS).render([PAIR, {**PAIR, "chosen": "c"}])
    assert [one.one_prompt for one in rendering.groups.values()] == [False, True]
    assert rendering.notes["prompts_differ"] == 1


@pytest.mark.parametrize(("row", "shape"), [
    ({"messages": [user("x"), says("a")], "chosen": "a", "rejected": "b"}, "messages"),
    ({"prompt": "x", "completion": "a", "label": 1}, "prompt_completion"),
    ({"prompt": "x", "completion": "a", "label": True}, "kto"),
    ({"prompt": "x", "completion": "a"}, "prompt_completion"),
    ({"instruction": "x", "output": "a"}, "alpaca"),
])  # fmt: skip
def test_auto_detects_groups(row: dict[str, Any], shape: str) -> None:
    assert read_row(row, ChatSpec()).shape == shape


def test_groups_cannot_be_expanded_or_trained_on_everything() -> None:
    with pytest.raises(UsageError, match="groups of answers"):
        ChatSpec(format="preference", expand="turns")
    rows = [PAIR, {"messages": [user("x"), says("a")]}]
    rendering = Renderer(ChatSpec(expand="turns"), CHATML, TOKENS).render(rows)
    [(index, _, error)] = rendering.rejected
    assert (index, error.reason, rendering.source) == (0, "bad_group", [1])
    with pytest.raises(UsageError, match="completion, last_assistant_message"):
        ChatSpec(format="kto", train_on="everything")


@given(st.lists(st.text("ab ", min_size=1, max_size=5), min_size=2, max_size=4))
def test_common_prefix_of_texts_is_the_prompt(texts: list[str]) -> None:
    """By the plainest means: character by character, all texts at once."""
    shared = "".join(
        column[0]
        for column in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*texts, strict=False))
    )
    shared = shared[:-1] if shared.endswith(" ") else shared
    row = {"instruction": None, "responses": texts}
    try:
        group = read_row(row, ChatSpec(format="ranked"))
    except RowError as error:
        assert error.reason == "bad_group"
        assert any(not text[len(shared) :].strip() for text in texts)
        return
    assert isinstance(group, AnswerGroup)
    assert {(side.prompt, side.prompt + side.text) for side in group.sides} == {  # type: ignore[union-attr]
        (shared, text) for text in texts
    }
