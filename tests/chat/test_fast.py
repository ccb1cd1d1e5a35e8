"""The fast engine never changes a result: battery, equality, audits, fallback."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.templates import ALL, CHATML, INST, THINKING
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.fast import AUDIT_ONE_IN, FIRST_AUDITED, FastTemplate, audited
from tokenmill.chat.tame import is_tame
from tokenmill.chat.template import ReferenceTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def rows(count: int, text: str = "answer") -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f"{text} {i}"},
            ]
        }
        for i in range(count)
    ]


def same(left: Any, right: Any) -> None:
    assert left.texts == right.texts
    assert left.spans == right.spans
    assert left.turns == right.turns
    assert left.source == right.source
    assert [(i, p, e.reason, e.message) for i, p, e in left.rejected] == [
        (i, p, e.reason, e.message) for i, p, e in right.rejected
    ]


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("train_on", ["all_assistant_messages", "everything"])
def test_fast_and_reference_give_the_same(name: str, train_on: str) -> None:
    data = [
        *rows(9),
        *rows(3, "  spaced "),
        *rows(3, "<think>hm</think>\n"),
        *rows(2, "\x1c odd \x1c"),
        {"messages": [{"role": "system", "content": "S"}, *rows(1)[0]["messages"]]},
        {"messages": []},
        *rows(200, "ünïcode 你好 \U0001f389"),
    ]
    spec = ChatSpec(train_on=train_on)
    quick = Renderer(spec, ALL[name], SPECIAL).render(data)
    slow = Renderer(spec, ALL[name], SPECIAL, fast=False).render(data)
    same(quick, slow)
    assert slow.notes["renderer"] == "jinja2"
    if name != "generation_macro":
        assert quick.notes["renderer"] == "minijinja"
        assert quick.notes["rows_fast"] > 190


def test_fast_texts_are_rendered_once_by_one_engine() -> None:
    result = Renderer(ChatSpec(), CHATML).render(rows(500))
    assert result.notes["rows_reference"] == 1  # the one the layout was learned from
    assert result.notes["rows_fast"] == 499
    assert result.notes["audited"] >= FIRST_AUDITED - 1
    assert "mismatches" not in result.notes


def test_audit_takes_the_first_rows_and_a_sample_by_content() -> None:
    assert all(audited(i, "x") for i in range(FIRST_AUDITED))
    chosen = [i for i in range(20_000) if audited(1000, f"text {i}")]
    assert 0.5 < len(chosen) * AUDIT_ONE_IN / 20_000 < 1.5
    assert chosen == [i for i in range(20_000) if audited(77, f"text {i}")]


def lying(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the fast engine print something else, after it has passed its battery."""
    honest = FastTemplate.render_many

    def render_many(self: FastTemplate, talks: Any) -> list[str | None]:
        return [text and change(text) for text in honest(self, talks)]

    monkeypatch.setattr(FastTemplate, "render_many", render_many)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("question", "QUESTION"),
        lambda text: text + "\n",
        lambda text: text[:-1],
        lambda text: text.replace("7", "8"),
        lambda text: None,
    ],
)
@pytest.mark.parametrize("train_on", ["all_assistant_messages", "everything"])
def test_fast_engine_that_lies_is_never_believed(
    monkeypatch: pytest.MonkeyPatch, change: Any, train_on: str
) -> None:
    spec = ChatSpec(train_on=train_on)
    expected = Renderer(spec, CHATML, fast=False).render(rows(100))
    lying(monkeypatch, change)
    same(Renderer(spec, CHATML).render(rows(100)), expected)


def test_difference_seen_by_an_audit_redoes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lie that both the engine and the learned glue tell is seen by the audit alone."""
    honest = ReferenceTemplate.render
    calls = []

    def render(self: ReferenceTemplate, messages: Any, tools: Any = None, **options: Any) -> str:
        calls.append(1)
        text = honest(self, messages, tools, **options)
        return text.replace("<|im_end|>", "<|END|>") if len(calls) > 60 else text

    renderer = Renderer(ChatSpec(), CHATML)
    renderer.render(rows(3))
    monkeypatch.setattr(ReferenceTemplate, "render", render)
    calls.extend([1] * 60)
    result = renderer.render(rows(50))
    assert result.notes["mismatches"] == 1
    assert result.notes["renderer"] == "jinja2"
    assert len(result.texts) == 50
    assert all("<|END|>" in text for text in result.texts)


def test_battery_keeps_templates_out_that_the_engines_read_differently() -> None:
    html = ReferenceTemplate(CHATML.replace("{{ m.content }}", "{{ m.content | e }}"), {}, None)
    assert is_tame(html.tree)  # so it is the battery that says no
    quoted = [{"role": "user", "content": '"x" isn\'t <y>'}]
    assert FastTemplate(html, None).render(quoted) != html.render(quoted)
    assert FastTemplate.of(html, None) is None
    assert FastTemplate.of(ReferenceTemplate(INST, SPECIAL, None), None) is not None
    assert FastTemplate.of(ReferenceTemplate(THINKING, SPECIAL, None), None) is not None


def test_one_refused_row_does_not_disturb_its_neighbours() -> None:
    data = rows(130)
    data[70]["messages"].insert(0, {"role": "system", "content": "S"})
    result = Renderer(ChatSpec(), INST, SPECIAL).render(data)
    assert [(i, e.reason) for i, _, e in result.rejected] == [(70, "template_error")]
    assert len(result.texts) == 129


def test_batches_of_any_size_give_the_same_rows() -> None:
    data = rows(300)
    whole = Renderer(ChatSpec(), THINKING).render(data)
    renderer = Renderer(ChatSpec(), THINKING)
    for size in (1, 7, 64, 65):
        texts, spans = [], []
        for first in range(0, 300, size):
            part = renderer.render(data[first : first + size])
            texts += part.texts
            spans += part.spans
        assert texts == whole.texts
        assert spans == whole.spans
