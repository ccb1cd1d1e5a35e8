"""Templates with unusual conditions on their texts: a fast path may skip them, but not differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.conversations import DATE, SPECIAL
from tests.chat.hostile_templates import HOSTILE, Row, rows
from tests.chat.loop_oracle import OracleTemplate, TemplateRaised
from tests.chat.scoring import score
from tests.chat.test_outcomes import outcomes
from tokenmill.chat import ChatSpec, Renderer

RANDOM = ("random", "lipsum")  # raises an error, unlike in jinja2
TRAIN_ALL = ChatSpec(date=DATE, train_on="everything")
MASKED = ChatSpec(date=DATE)
RENDERERS = ("auto", "jinja2")
GROUPS = 8  # so that several workers share the templates


def rendered(spec: ChatSpec, source: str, data: list[Row], renderer: str) -> list[Any]:
    try:
        made = Renderer(spec, source, SPECIAL, renderer=renderer).render(data)
    except Exception as error:
        return [repr(error)] * len(data)
    return outcomes(made, len(data))


def expected(name: str, source: str, data: list[Row]) -> list[str | None]:
    """Return jinja2's texts, None where it raises."""
    oracle = OracleTemplate(source, SPECIAL, DATE)
    texts: list[str | None] = []
    for row in data:
        try:
            texts.append(oracle.plain(row["messages"], row.get("tools")))
        except TemplateRaised:
            texts.append(None)
    if name in RANDOM:
        texts = [None if "a" in (m["content"] for m in row["messages"]) else text
                 for row, text in zip(data, texts, strict=True)]  # fmt: skip
    return texts


def differences(name: str, source: str, data: list[Row], renderers: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    texts = expected(name, source, data)
    for renderer in renderers:
        got = rendered(TRAIN_ALL, source, data, renderer)
        for row, text, outcome in zip(data, texts, got, strict=True):
            if text is None:
                right = isinstance(outcome, list) and outcome[0][1] in ("template_error", "limit")
            else:
                right = isinstance(outcome, list) and outcome[0][1] == text
                # Names that are not on the list raise, unlike in jinja2.
                right = right or "is not allowed here" in str(outcome)
            if not right:
                found.append(f"{name}, {renderer}: {outcome!r} where jinja2: {text!r} of {row}")
    quick, slow = (rendered(MASKED, source, data, renderer) for renderer in RENDERERS)
    for row, left, right in zip(data, quick, slow, strict=True):
        if left != right:
            found.append(f"{name}: {left!r} with shortcuts, {right!r} without, of {row}")
    return found


@pytest.mark.parametrize(
    ("count", "renderers"),
    [
        pytest.param(2, ("auto",), marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(900, RENDERERS, marks=[pytest.mark.soak, pytest.mark.timeout(36000)]),
    ],
)
@pytest.mark.parametrize("group", range(GROUPS))
def test_hostile_templates_equal_jinja2(group: int, count: int, renderers: tuple[str, ...]) -> None:
    wrong: list[str] = []
    for name, source in list(HOSTILE.items())[group::GROUPS]:
        wrong += differences(name, source, rows(name, count), renderers)[:2]
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(36000)
def test_masks_of_hostile_templates_contain_no_other_turn() -> None:
    wrong: list[str] = []
    for name, source in HOSTILE.items():
        data = {f"row {number}": row for number, row in enumerate(rows((name, "mask"), 60))}
        total = score(name, source, data)
        wrong += [report for report in total.reports if ": trained: " in report][:3]
    assert not wrong, "\n".join(wrong)
