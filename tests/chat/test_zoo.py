"""Every stored template × real and odd conversations, each character checked by the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.conversations import CORPORA, DATE, ODD, Row, corpus_rows, zoo
from tests.chat.loop_oracle import TemplateRaised
from tests.chat.scoring import Score, expected_samples, oracle, sample, score
from tests.chat.templates import ALL, HABITS
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.render import PromptRequest
from tokenmill.errors import RowError

SHARE = 8  # of the rows, `make test` checks one in so many, under one template of four

SPECS = {
    "stop": ChatSpec(date=DATE),
    "turn": ChatSpec(date=DATE, turn_end="turn"),
    "expand": ChatSpec(date=DATE, expand="turns"),
    "last": ChatSpec(date=DATE, train_on="last_assistant_message"),
    "opener": ChatSpec(date=DATE, thinking_opener="trained"),
}


def share(rows: dict[str, Row], number: int, of: int) -> dict[str, Row]:
    return dict(list(rows.items())[number % of :: of])


def hold(total: Score, due: int, proven: float = 0.99) -> None:
    shown = "\n".join(total.reports[:40])
    assert not total.violated, f"{dict(total.violated)}\n{shown}"
    assert sum(total.unsure.values()) <= 0.01 * total.pairs, "\n".join(total.notes[:40])
    assert total.due >= due, "the harness has too few cases to check"
    unproven = "\n".join(total.notes[:40])
    assert total.proven >= proven * total.due, f"{dict(total.unproven)} of {total.due}\n{unproven}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_zoo_masks_are_right(shared: Path) -> None:
    rows = sample(shared, 2)
    total = Score()
    for number, (name, source) in list(enumerate(zoo(shared).items()))[::4]:
        total.add(score(name, source, share(rows, number, SHARE)))
    hold(total, due=170)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["turn", "expand", "last", "opener"])
def test_zoo_masks_are_right_under_other_recipes(shared: Path, form: str) -> None:
    """One in ten templates, others for every recipe: compiling them takes the time."""
    rows = {case: row for case, row in ODD.items() if "long" not in case}
    total = Score()
    for number, (name, source) in enumerate(zoo(shared).items()):
        if number % 10 == list(SPECS).index(form):
            total.add(score(name, source, share(rows, number, SHARE), spec=SPECS[form]))
    hold(total, due=50, proven=0.98)


@pytest.mark.parametrize("form", ["stop", "turn"])
def test_masks_of_every_habit_are_right(form: str) -> None:
    rows = {case: row for case, row in ODD.items() if "long" not in case}
    total = Score()
    for number, (name, source) in enumerate({**ALL, **HABITS}.items()):
        total.add(score(name, source, share(rows, number, 3), spec=SPECS[form]))
    # One of them prints tool results in the assistant's own step: those rows are rejected.
    hold(total, due=200, proven=0.98)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_zoo_prompts_equal_jinja2(shared: Path) -> None:
    """`Renderer.prompts`, batched or one by one, gives what the template prints, or its refusal.

    Of templates that `test_zoo_masks_are_right` leaves out.
    """
    rows = sample(shared, 1)
    compared = 0
    for number, (name, source) in list(enumerate(zoo(shared).items()))[1::4]:
        template = oracle(name, source)
        talks = [
            PromptRequest(job.messages, job.tools)
            for row in share(rows, number, SHARE).values()
            for job in expected_samples(row, SPECS["stop"])
        ]
        expected: list[str | None] = []
        for messages, tools, _ in talks:
            try:
                expected.append(template.plain(messages, tools, add_generation_prompt=True))
            except TemplateRaised:
                expected.append(None)
        for renderer in ("auto", "jinja2"):
            maker = Renderer(ChatSpec(date=DATE), source, template.given, renderer=renderer)
            made = maker.prompts([*talks, *talks])
            texts = [None if isinstance(text, RowError) else text for text in made]
            assert texts == [*expected, *expected], name
        compared += sum(text is not None for text in expected)
    assert compared > 150


@pytest.mark.soak
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("form", sorted(SPECS))
def test_zoo_masks_are_right_everywhere(shared: Path, form: str) -> None:
    total = Score()
    for name, source in {**zoo(shared), **ALL, **HABITS}.items():
        total.add(score(name, source, sample(shared, 30), spec=SPECS[form]))
    hold(total, due=10000)


@pytest.mark.soak
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("corpus", CORPORA)
def test_zoo_masks_are_right_on_every_row(shared: Path, corpus: str) -> None:
    total = Score()
    rows = {f"{corpus} {n}": row for n, row in enumerate(corpus_rows(shared, corpus, None))}
    for name, source in zoo(shared).items():
        total.add(score(name, source, rows))
    hold(total, due=1)
