"""The oracle itself: its renders, its owners, and the violations that it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.chat.conversations import DATE, ODD, SPECIAL, say, turns, zoo
from tests.chat.hostile_templates import HOSTILE
from tests.chat.hostile_templates import rows as odd_rows
from tests.chat.loop_oracle import OracleTemplate, TemplateRaised
from tests.chat.mask_oracle import check_mask
from tests.chat.scoring import expected_samples, oracle, score
from tests.chat.templates import ALL, CHATML, GENERATION, HABITS, THINKING
from tests.chat.turn_oracle import Conversation
from tokenmill.chat import ChatSpec, Renderer, Rendering


def check_against_transformers(
    name: str, ours: OracleTemplate, talks: Iterable[Any]
) -> Counter[str]:
    """The oracle's jinja2 prints the same as `apply_chat_template`, or raises like it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    found: Counter[str] = Counter()
    for messages, tools in talks:
        given = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            text = render_jinja_template(
                [given], tools=tools, chat_template=ours.source, **ours.given
            )[0][0]
        except Exception:
            with pytest.raises(TemplateRaised):
                ours.plain(messages, tools)
            found["refused"] += 1
            continue
        assert ours.plain(messages, tools) == text, name
        found["compared"] += 1
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "one_in",  # compiling the templates takes the time
    [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)],
)
def test_renders_equal_transformers(
    shared: Path, one_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils as theirs

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2026, 11, 15)

    monkeypatch.setattr(theirs, "datetime", Clock)
    total: Counter[str] = Counter()
    templates = list(enumerate({**zoo(shared), **ALL, **HABITS}.items()))
    for number, (name, source) in templates[::one_in]:
        rows = list(ODD.values())[number % 40 :: 40]
        talks = [
            (job.messages, job.tools) for row in rows for job in expected_samples(row, ChatSpec())
        ]
        total += check_against_transformers(name, oracle(name, source), talks)
    assert total["compared"] > 10 * total["refused"] > 0


@pytest.mark.slow
def test_hostile_templates_equal_transformers() -> None:
    for name, source in HOSTILE.items():
        if name not in ("lipsum", "random", "date"):
            talks = [(row["messages"], row.get("tools")) for row in odd_rows(name, 1)]
            check_against_transformers(name, OracleTemplate(source, SPECIAL, DATE), talks)


def owners(source: str, messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
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
SKIPPED = [say("s", 0), say("u", 1, ""), say("a", 2, "stop"), say("u", 3), say("a", 4)]
NESTED = {
    "empty and skipped": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "[{{ m.content }}]{% if m.content == 'stop' %}{% break %}{% endif %}{% endfor %}end"
    ),
    "loop in a loop": (
        "{% for m in messages %}({% for n in messages %}{{ n.role[0] }}{% endfor %}){% endfor %}"
    ),
    "captures": (
        "{% macro all() %}{% for m in messages %}<{{ m.content }}>{% endfor %}{% endmacro %}"
        "{% set kept %}{{ all() }}{% endset %}{% filter upper %}x{{ kept }}{% endfilter %}"
    ),
}


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
        ("empty and skipped", SKIPPED, [("1", "[]"), ("2", "[stop]"), (".", "end")]),
        ("loop in a loop", QUESTION,  # the innermost owns; of two messages no assistant does
         [("0", "(u"), (".", "a"), ("0", ")"), ("1", "("), ("0", "u"), ("1", "a)")]),
        ("captures", QUESTION, [(".", "X"), ("0", "<Q>"), ("1", "<A>")]),
    ],
)  # fmt: skip
def test_owners(name: str, messages: list[dict[str, Any]], pieces: list[tuple[str, str]]) -> None:
    assert owners({**HABITS, **NESTED}[name], messages) == pieces


def test_template_that_reads_its_capture_is_not_checked() -> None:
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = "{% set kept %}" + loop + "{% endset %}{{ kept|length }}"
    assert OracleTemplate(source, SPECIAL).owned(QUESTION) is None
    talk = Conversation(OracleTemplate(source, SPECIAL), QUESTION, None)
    assert check_mask(talk, "2", [(0, 1)]).unsure


def test_texts_with_sentinels_are_checked() -> None:
    odd = [
        {"role": "user", "content": "\U00100000"},
        {"role": "assistant", "content": "\U00104001"},
    ]
    pieces = owners("{% for m in messages %}{{ m.content }}{% endfor %}", odd)
    assert pieces == [("0", "\U00100000"), ("1", "\U00104001")]
    both = [{"role": "user", "content": "\U00100000\U000f0000"}]
    assert OracleTemplate(CHATML, SPECIAL).owned(both) is None


def complaints(
    source: str, messages: list[dict[str, Any]], spans: list[str], **options: Any
) -> list[str]:
    """Return the oracle's verdict if exactly these pieces of the render are trained."""
    talk = Conversation(OracleTemplate(source, SPECIAL), messages, None)
    assert talk.found is not None
    text, position, places = talk.found.text, 0, []
    for span in spans:
        start = text.index(span, position)
        position = start + len(span)
        places.append((start, position))
    verdict = check_mask(talk, text, places, **options)
    assert not verdict.unsure
    return [violation.kind for violation in verdict.violations]


TWICE = turns("uaua")
FIRST, SECOND = TWICE[1]["content"], TWICE[3]["content"]
ENDED = f"{SECOND}<|im_end|>"
THOUGHT = "</think>\n\nA<|im_end|>"
BY_THE_NEXT, TALK = HABITS["closed by the next"], [*QUESTION, *QUESTION]
GOES_ON = [*QUESTION, {"role": "assistant", "content": "B"}]


@pytest.mark.parametrize(
    ("source", "messages", "spans", "options", "kinds"),
    [
        (CHATML, TWICE, [f"{FIRST}<|im_end|>", ENDED], {}, []),
        (CHATML, TWICE, [f"assistant\n{FIRST}<|im_end|>", ENDED], {}, ["trained: header"]),
        (CHATML, TWICE, [f"\n{FIRST}<|im_end|>", ENDED], {}, ["trained: header"]),
        (CHATML, TWICE, [f"{FIRST}<|im_end|>\n", ENDED], {}, ["trained: after the end of turn"]),
        (CHATML, TWICE, [f"{FIRST}<|im_end|>\n<|im_start|>user", ENDED], {},
         ["trained: after the end of turn", "trained: another turn"]),
        (CHATML, TWICE, ["user0x0", f"{FIRST}<|im_end|>", ENDED], {}, ["trained: another turn"]),
        (CHATML, TWICE, [f"{FIRST}<|im_end|>", SECOND], {}, ["untrained: own part"]),
        (CHATML, TWICE, [f"{FIRST[1:]}<|im_end|>", ENDED], {}, ["untrained: own part"]),
        (CHATML, TWICE, [f"{FIRST}<|im_end|>"], {}, ["untrained: own part"] * 3),
        (CHATML, TWICE, [ENDED], {"trained": [3]}, []),
        (CHATML, TWICE, [f"{FIRST}<|im_end|>", ENDED], {"trained": [3]}, ["trained: another turn"]),
        (CHATML, TWICE, [f"{FIRST}<|im_end|>\n", f"{ENDED}\n"], {"turn_end": "turn"}, []),
        (THINKING, QUESTION, [f"<think>\n\n{THOUGHT}"], {}, []),
        (THINKING, QUESTION, [THOUGHT], {}, ["untrained: thinking opener"]),
        (THINKING, QUESTION, [THOUGHT], {"thinking_opener": "prompt"}, []),
        (THINKING, QUESTION, [f"<think>\n\n{THOUGHT}"], {"thinking_opener": "prompt"},
         ["trained: thinking opener"]),
        (GENERATION, QUESTION, ["A<|im_end|>"], {}, []),
        (GENERATION, QUESTION, ["A"], {}, ["untrained: generation block"]),
        (GENERATION, QUESTION, ["\nA<|im_end|>"], {}, ["trained: another turn"]),
        # An end-of-turn token in the next step may be trained, the next header not.
        (BY_THE_NEXT, TALK, ["A<|assistant_end|>", "A"], {}, []),
        (BY_THE_NEXT, TALK, ["A", "A"], {}, []),
        (BY_THE_NEXT, TALK, ["A<|assistant_end|><|user_start|>", "A"], {},
         ["trained: another turn"]),
        # A header after the end-of-turn token of the turn before.
        (BY_THE_NEXT, GOES_ON, ["B"], {"trained": [2]}, []),
        (BY_THE_NEXT, GOES_ON, ["<|assistant_start|>B"], {"trained": [2]}, ["trained: header"]),
    ],
)  # fmt: skip
def test_every_kind_of_violation_is_found(
    source: str,
    messages: list[dict[str, Any]],
    spans: list[str],
    options: dict[str, Any],
    kinds: list[str],
) -> None:
    assert complaints(source, messages, spans, **options) == kinds


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
        ("eos or prompt", "A<|end|>\n</s>", ["trained: after the end of turn", "trained: no turn"]),
        ("last outside", "A<|end|>", []),
        ("last outside", "<|assistant|>A<|end|>", ["trained: header"]),
        ("numbers", "A<|end|>", []),
        ("numbers", "A", ["untrained: own part"]),
        ("macro", "A<|stop|>", []),
        ("added up", "A\n\n<sep>", []),
        ("closed by the next", "A", []),
    ],
)  # fmt: skip
def test_headers_and_ends_of_turns(name: str, span: str, kinds: list[str]) -> None:
    assert complaints(HABITS[name], QUESTION, [span]) == kinds


def test_score_counts_wrong_masks_and_failed_audits(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert found.violated == {"trained: after the end of turn": 1, "differs from the reference": 1}
