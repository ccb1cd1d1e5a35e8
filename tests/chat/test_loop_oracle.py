"""The oracle before anyone is judged by it: its renders, its owners, what it calls wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.chat import mask_oracle
from tests.chat.conversations import DATE, ODD, SPECIAL, VARIABLES, turns, zoo
from tests.chat.hostile_templates import HOSTILE
from tests.chat.hostile_templates import rows as odd_rows
from tests.chat.judge import conversation_of, oracle, score, wanted
from tests.chat.loop_oracle import OracleTemplate, Refused
from tests.chat.mask_oracle import judge
from tests.chat.templates import ALL, CHATML, GENERATION, HABITS, THINKING
from tests.chat.turn_oracle import Conversation, thinking_at_end
from tokenmill.chat import ChatSpec, Renderer, Rendering

LETTERS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}


def compare_with_transformers(
    templates: list[tuple[int, tuple[str, str]]], patch: pytest.MonkeyPatch
) -> None:
    """The oracle's jinja2 prints what `apply_chat_template` prints, or refuses where it does."""
    from transformers.utils import chat_template_utils as theirs

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2026, 11, 15)

    patch.setattr(theirs, "datetime", Clock)
    cases = list(ODD.values())
    compared = refused = 0
    for number, (name, source) in templates:
        variables = {**SPECIAL, **VARIABLES.get(name, {})}
        ours = OracleTemplate(source, variables, DATE)
        for row in cases[number % 40 :: 40]:
            for job in wanted(row, ChatSpec()):
                try:
                    text = theirs.render_jinja_template(
                        [job.messages], tools=job.tools, chat_template=source, **variables
                    )[0][0]
                except Exception:
                    with pytest.raises(Refused):
                        ours.plain(job.messages, job.tools)
                    refused += 1
                    continue
                assert ours.plain(job.messages, job.tools) == text, name
                compared += 1
    assert compared > 10 * refused > 0


def every_template(shared: Path) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate({**zoo(shared), **ALL, **HABITS}.items()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_renders_are_those_of_transformers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in three templates: compiling them takes the time."""
    compare_with_transformers(every_template(shared)[::3], monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_renders_of_every_template_are_those_of_transformers(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_with_transformers(every_template(shared), monkeypatch)


@pytest.mark.slow
def test_hostile_templates_are_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for name, source in HOSTILE.items():
        if name in ("lipsum", "random", "date"):
            continue
        ours = OracleTemplate(source, SPECIAL, DATE)
        for row in odd_rows(name, 1):
            messages, tools = row["messages"], row.get("tools")
            try:
                text = render_jinja_template(
                    [messages], tools=tools, chat_template=source, **SPECIAL
                )[0][0]
            except Exception:
                with pytest.raises(Refused):
                    ours.plain(messages, tools)
                continue
            assert ours.plain(messages, tools) == text, name


def owners(source: str, messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A render in pieces, each with its owner: the message's number, or a dot for nobody."""
    found = Conversation(OracleTemplate(source, SPECIAL), messages, None).found
    assert found is not None
    pairs = zip(found.owner, found.text, strict=True)
    return [
        ("." if who < 0 else str(who), "".join(character for _, character in run))
        for who, run in groupby(pairs, key=lambda pair: pair[0])
    ]


CALLED = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "C"},
    {"role": "tool", "content": "R"},
    {"role": "assistant", "content": "A"},
]
QUESTION = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    ("name", "messages", "pieces"),
    [
        ("newline before the prompt", QUESTION,
         [("0", "<|header|>user<|/header|>\n\nQ<|eot|>"),
          ("1", "<|header|>assistant<|/header|>\n\nA<|eot|>")]),
        ("numbers", QUESTION, [("0", "<|user|>Q<|end|>"), ("1", "<|assistant|>A<|end|>")]),
        ("added up", QUESTION, [("0", "user: Q\n\n<sep>"), ("1", "assistant: A\n\n<sep>")]),
        ("looks ahead", CALLED,
         [("0", "<|user|>Q<|end|>"), ("1", "<|assistant|>C<|end|>"), ("2", "<|tool|>R<|end|>"),
          ("3", "<|assistant|>A<|end|>")]),
        ("closed by the next", [*QUESTION, *QUESTION],
         [("0", "<|user_start|>Q<|user_end|>"), ("1", "<|assistant_start|>A"),
          ("2", "<|assistant_end|><|user_start|>Q<|user_end|>"), ("3", "<|assistant_start|>A")]),
        ("last outside", QUESTION, [("0", "<|user|>Q<|end|>"), ("1", "<|assistant|>A<|end|>")]),
        ("header by the user", QUESTION,
         [(".", "<s>"), ("0", "USER: Q ASSISTANT:"), ("1", " A</s>")]),
        ("prompt in the loop", QUESTION,
         [("0", "<|user|>\nQ</s>\n"), ("1", "<|assistant|>\nA</s>\n")]),
        ("eos or prompt", QUESTION,
         [("0", "<|user|>\nQ<|end|>\n"), ("1", "<|assistant|>\nA<|end|>\n"), (".", "</s>")]),
        ("macro", QUESTION, [("0", "<|user|>Q<|end|>"), ("1", "<|assistant|>A<|stop|>")]),
    ],
)  # fmt: skip
def test_owners(name: str, messages: list[dict[str, Any]], pieces: list[tuple[str, str]]) -> None:
    assert owners(HABITS[name], messages) == pieces


def test_owner_of_an_empty_text_and_of_skipped_messages() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "[{{ m.content }}]{% if m.content == 'stop' %}{% break %}{% endif %}{% endfor %}end"
    )
    talk = turns("suaua")
    talk[1]["content"] = ""
    talk[2]["content"] = "stop"
    assert owners(source, talk) == [("1", "[]"), ("2", "[stop]"), (".", "end")]


def test_owner_is_the_innermost_message_and_of_two_no_assistant() -> None:
    source = (
        "{% for m in messages %}({% for n in messages %}{{ n.role[0] }}{% endfor %}){% endfor %}"
    )
    pieces = [("0", "(u"), (".", "a"), ("0", ")"), ("1", "("), ("0", "u"), ("1", "a)")]
    assert owners(source, QUESTION) == pieces


def test_owner_survives_captures() -> None:
    source = (
        "{% macro all() %}{% for m in messages %}<{{ m.content }}>{% endfor %}{% endmacro %}"
        "{% set kept %}{{ all() }}{% endset %}{% filter upper %}x{{ kept }}{% endfilter %}"
    )
    assert owners(source, QUESTION) == [(".", "X"), ("0", "<Q>"), ("1", "<A>")]


def test_a_template_that_looks_at_what_it_captured_is_not_judged() -> None:
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = "{% set kept %}" + loop + "{% endset %}{{ kept|length }}"
    assert OracleTemplate(source, SPECIAL).owned(QUESTION) is None
    talk = Conversation(OracleTemplate(source, SPECIAL), QUESTION, None)
    assert judge(talk, "2", [(0, 1)]).unsure


def test_texts_that_hold_sentinels_are_judged_all_the_same() -> None:
    odd = [
        {"role": "user", "content": "\U00100000"},
        {"role": "assistant", "content": "\U00104001"},
    ]
    pieces = owners("{% for m in messages %}{{ m.content }}{% endfor %}", odd)
    assert pieces == [("0", "\U00100000"), ("1", "\U00104001")]
    both = [{"role": "user", "content": "\U00100000\U000f0000"}]
    assert OracleTemplate(CHATML, SPECIAL).owned(both) is None


@pytest.mark.parametrize(
    ("prompt", "length"),
    [
        ("<|im_start|>assistant\n", 22),
        ("<|im_start|>assistant\n<think>\n", 22),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", 22),
        ("<|start|>assistant<|channel|>analysis<|message|>", 18),
        ("<|turn>model\n<|channel>thought\n<channel|>", 13),
        ("<|START|><|START_THINKING|><|END_THINKING|>", 9),
        ("[ASSISTANT][THINK]", 11),
        ("<|Assistant|></think>", 21),
        ("Think of it: ", 13),
        ("<think>no</think> more", 22),
    ],
)
def test_thinking_that_a_prompt_opens(prompt: str, length: int) -> None:
    assert thinking_at_end(prompt) == length


def complaints(
    source: str, messages: list[dict[str, Any]], spans: list[str], **options: Any
) -> list[str]:
    """What the oracle says when exactly these pieces of the render are trained."""
    talk = Conversation(OracleTemplate(source, SPECIAL), messages, None)
    assert talk.found is not None
    text, position, places = talk.found.text, 0, []
    for span in spans:
        start = text.index(span, position)
        position = start + len(span)
        places.append((start, position))
    verdict = judge(talk, text, places, **options)
    assert not verdict.unsure
    return [violation.kind for violation in verdict.violations]


TWICE = turns("uaua")
FIRST, SECOND = TWICE[1]["content"], TWICE[3]["content"]


@pytest.mark.parametrize(
    ("spans", "kinds"),
    [
        ([f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"], []),
        ([f"assistant\n{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"], ["trained: header"]),
        ([f"\n{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"], ["trained: header"]),
        ([f"{FIRST}<|im_end|>\n", f"{SECOND}<|im_end|>"], ["trained: after the closer"]),
        (
            [f"{FIRST}<|im_end|>\n<|im_start|>user", f"{SECOND}<|im_end|>"],
            ["trained: after the closer", "trained: another turn"],
        ),
        (["user0x0", f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"], ["trained: another turn"]),
        ([f"{FIRST}<|im_end|>", SECOND], ["untrained: own part"]),
        ([f"{FIRST[1:]}<|im_end|>", f"{SECOND}<|im_end|>"], ["untrained: own part"]),
        ([f"{FIRST}<|im_end|>"], ["untrained: own part"] * 3),
    ],
)  # fmt: skip
def test_every_kind_of_violation_is_seen(spans: list[str], kinds: list[str]) -> None:
    assert complaints(CHATML, TWICE, spans) == kinds


def test_a_turn_that_is_not_to_be_trained() -> None:
    answer = f"{SECOND}<|im_end|>"
    assert complaints(CHATML, TWICE, [answer], trained=[3]) == []
    found = complaints(CHATML, TWICE, [f"{FIRST}<|im_end|>", answer], trained=[3])
    assert found == ["trained: another turn"]


def test_turn_end_turn_allows_what_follows_the_closer() -> None:
    spans = [f"{FIRST}<|im_end|>\n", f"{SECOND}<|im_end|>\n"]
    assert complaints(CHATML, TWICE, spans, turn_end="turn") == []


def test_thinking_opener_of_the_prompt() -> None:
    own = f"</think>\n\n{QUESTION[1]['content']}<|im_end|>"
    opened = [f"<think>\n\n{own}"]
    assert complaints(THINKING, QUESTION, opened) == []
    assert complaints(THINKING, QUESTION, [own]) == ["untrained: thinking opener"]
    assert complaints(THINKING, QUESTION, [own], thinking_opener="prompt") == []
    found = complaints(THINKING, QUESTION, opened, thinking_opener="prompt")
    assert found == ["trained: thinking opener"]


def test_generation_blocks_are_taken_at_their_word() -> None:
    assert complaints(GENERATION, QUESTION, ["A<|im_end|>"]) == []
    assert complaints(GENERATION, QUESTION, ["A"]) == ["untrained: generation block"]
    assert complaints(GENERATION, QUESTION, ["\nA<|im_end|>"]) == ["trained: another turn"]


@pytest.mark.parametrize(
    ("name", "span", "kinds"),
    [
        ("newline before the prompt", "A<|eot|>", []),
        ("newline before the prompt", "assistant<|/header|>\n\nA<|eot|>", ["trained: header"]),
        ("header by the user", " A</s>", []),
        ("header by the user", " ASSISTANT: A</s>", ["trained: another turn"]),
        ("prompt in the loop", "A</s>", []),
        ("prompt in the loop", "<|assistant|>\nA</s>", ["trained: header"]),
        ("eos or prompt", "A<|end|>", []),
        ("eos or prompt", "A<|end|>\n</s>", ["trained: after the closer", "trained: no turn"]),
        ("last outside", "A<|end|>", []),
        ("last outside", "<|assistant|>A<|end|>", ["trained: header"]),
        ("numbers", "A<|end|>", []),
        ("numbers", "A", ["untrained: own part"]),
        ("macro", "A<|stop|>", []),
        ("added up", "A\n\n<sep>", []),
        ("closed by the next", "A", []),
    ],
)  # fmt: skip
def test_headers_and_closers_of_many_habits(name: str, span: str, kinds: list[str]) -> None:
    assert complaints(HABITS[name], QUESTION, [span]) == kinds


def test_a_closer_in_the_next_step_may_be_trained_the_next_opener_not() -> None:
    source, talk = HABITS["closed by the next"], [*QUESTION, *QUESTION]
    assert complaints(source, talk, ["A<|assistant_end|>", "A"]) == []
    assert complaints(source, talk, ["A", "A"]) == []
    wrong = complaints(source, talk, ["A<|assistant_end|><|user_start|>", "A"])
    assert wrong == ["trained: another turn"]


def test_a_header_behind_the_closer_of_the_turn_before() -> None:
    source, talk = HABITS["closed by the next"], [*QUESTION, {"role": "assistant", "content": "B"}]
    assert complaints(source, talk, ["B"], trained=[2]) == []
    wrong = complaints(source, talk, ["<|assistant_start|>B"], trained=[2])
    assert wrong == ["trained: header"]


def faulty(text: str, spans: list[tuple[int, int]], chance: random.Random) -> Iterator[Any]:
    """Masks that are wrong in one place, and the one that is given."""
    yield spans
    number = chance.randrange(len(spans))
    start, end = spans[number]
    least = spans[number - 1][1] if number else 0
    most = spans[number + 1][0] if number + 1 < len(spans) else len(text)
    for first, last in (
        (start - 1, end),
        (start + 1, end),
        (start, end - 1),
        (start, end + 1),
        (start - chance.randrange(2, 30), end),
        (start, end + chance.randrange(2, 30)),
        (start, end - chance.randrange(2, 14)),
        (start, start),
        (least, start),
    ):
        first, last = max(first, least), min(last, most)
        kept = [(first, last)] if first < last else []
        yield [*spans[:number], *kept, *spans[number + 1 :]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("turn_end", ["stop", "turn"])
def test_short_cuts_change_no_verdict(
    shared: Path, turn_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts found by one render, and masks seen to be clean at one look, against the long way."""
    chance = random.Random(13)
    spec = ChatSpec(date=DATE, turn_end=turn_end)
    verdicts = complained = 0
    templates = {**zoo(shared), **ALL, **HABITS}
    for name, source in list(templates.items())[turn_end == "turn" :: 2]:
        template = oracle(name, source)
        rows = chance.sample(list(ODD.values()), 2)
        made = Renderer(spec, source, template.given).render(rows)
        jobs = [wanted(row, spec) for row in rows]
        for number, text, spans in zip(made.source, made.texts, made.spans, strict=True):
            job = jobs[number][0]
            masks = list(faulty(text, list(spans or ()), chance))
            found = []
            for shortened in (True, False):
                with monkeypatch.context() as patch:
                    if not shortened:
                        patch.setattr(Conversation, "_plain_prompt", lambda *_: None)
                        patch.setattr(mask_oracle, "_clean", lambda *_: False)
                    talk = conversation_of(template, job)
                    assert isinstance(talk, Conversation)
                    asked: dict[str, Any] = {"trained": job.trained, "turn_end": turn_end}
                    asked["thinking_opener"] = spec.thinking_opener
                    found.append([judge(talk, text, mask, **asked) for mask in masks])
            assert found[0] == found[1], name
            verdicts += len(masks)
            complained += sum(bool(verdict.violations) for verdict in found[0])
    assert verdicts > 500
    assert verdicts / 2 < complained < verdicts


def test_score_sees_wrong_masks_and_failed_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    render = Renderer.render

    def wrong(self: Renderer, rows: Any) -> Rendering:
        made = render(self, rows)
        made.spans[0] = [(start, end + 1) for start, end in made.spans[0] or ()]
        made.note("mismatches")
        return made

    rows = {"plain": ODD["plain"], "system": ODD["system"]}
    assert not score("chatml", CHATML, rows).violated
    monkeypatch.setattr(Renderer, "render", wrong)
    found = score("chatml", CHATML, rows)
    assert found.violated == {"trained: after the closer": 1, "differs from the reference": 1}
