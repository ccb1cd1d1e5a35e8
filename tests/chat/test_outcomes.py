"""A row's outcome depends on the row and the recipe alone, whatever was rendered before it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.chat.conversations import DATE, ODD, SPECIAL, VARIABLES, Row, zoo
from tests.chat.hostile_templates import rows as odd_rows
from tests.chat.scoring import expected_samples, sample
from tests.chat.templates import ALL, HABITS
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.render import PromptRequest, clear_templates
from tokenmill.errors import RowError

Outcome = list[tuple[Any, ...]]

NEIGHBOURS = (
    "plain",
    "several turns",
    "tools",
    "arguments: an empty object",
    "arguments: a number",
    "empty later user",
    "an empty result",
    "consecutive assistants",
    "tool after no call",
    "assistant alone",
    "assistant first",
    "assistant after system",
)
"""Cases whose outcome once depended on other rows."""


def outcomes(rendering: Any, count: int) -> list[Outcome]:
    found: list[Outcome] = [[] for _ in range(count)]
    parts = zip(
        rendering.source,
        rendering.part,
        rendering.texts,
        rendering.spans,
        rendering.turns,
        strict=True,
    )
    for source, part, text, spans, turns in parts:
        found[source].append((part, text, spans, turns))
    for source, part, error in rendering.rejected:
        found[source].append((part, error.reason, error.message))
    return [sorted(outcome, key=lambda made: made[0]) for outcome in found]


def prompted(renderer: Renderer, talks: list[PromptRequest]) -> list[Any]:
    return [
        (made.reason, made.message) if isinstance(made, RowError) else made
        for made in renderer.prompts(talks)
    ]


def rendered(renderer: Renderer, rows: list[Row]) -> list[Any]:
    return outcomes(renderer.render(rows), len(rows))


def check(
    name: str, source: str, rows: list[Any], seed: int, spec: ChatSpec, render: Any = rendered
) -> None:
    variables = {**SPECIAL, **VARIABLES.get(name, {})}

    def fresh(renderer: str = "auto") -> Renderer:
        clear_templates()
        return Renderer(spec, source, variables, renderer=renderer)

    chance = random.Random(seed)
    alone = [render(fresh(), [row])[0] for row in rows]
    companies: dict[str, list[int]] = {
        "in order": list(range(len(rows))),
        "shuffled": chance.sample(range(len(rows)), len(rows)),
        "backwards": list(reversed(range(len(rows)))),
        "repeated": [n for n in range(len(rows)) for _ in range(3)],
    }
    for company, order in companies.items():
        got = render(fresh(), [rows[n] for n in order])
        assert got == [alone[n] for n in order], f"{name}: {company}"
    assert render(fresh("jinja2"), rows) == alone, f"{name}: renderer='jinja2'"
    seasoned = fresh()
    for number in chance.choices(range(len(rows)), k=2 * len(rows)):
        got = render(seasoned, [rows[number]])[0]
        assert got == alone[number], f"{name}: one by one after others"


@pytest.fixture(scope="module")
def templates(shared: Path) -> dict[str, str]:
    return {**zoo(shared), **ALL, **HABITS}


@pytest.fixture(scope="module")
def real_rows(shared: Path) -> dict[str, Row]:
    return {case: row for case, row in sample(shared, 6).items() if "very long" not in case}


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(36000)]),
    ],
)
def test_outcome_depends_on_the_row_alone(
    templates: dict[str, str], real_rows: dict[str, Row], examples: int
) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        phases=(Phase.generate,),  # a failure names its template and rows; shrinking takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        name=st.sampled_from(sorted(templates)),
        cases=st.lists(st.sampled_from(sorted(real_rows)), min_size=1, max_size=5, unique=True),
        neighbours=st.lists(st.sampled_from(NEIGHBOURS), min_size=1, max_size=3, unique=True),
        odd=st.integers(0, 10**6),
        expand=st.sampled_from(["none", "none", "none", "turns"]),
    )
    def examine(name: str, cases: list[str], neighbours: list[str], odd: int, expand: str) -> None:
        chosen = [*(real_rows[case] for case in cases), *(ODD[case] for case in neighbours)]
        chosen += odd_rows(odd, 2)
        check(name, templates[name], chosen, odd, ChatSpec(date=DATE, expand=expand))

    examine()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_outcome_is_the_same_in_either_order(templates: dict[str, str]) -> None:
    rows = [ODD[case] for case in NEIGHBOURS]
    for name, source in list(templates.items())[::6]:  # `make soak` runs them all
        variables = {**SPECIAL, **VARIABLES.get(name, {})}
        there, back = (
            rendered(Renderer(ChatSpec(date=DATE), source, variables), rows[::step])[::step]
            for step in (1, -1)
        )
        assert dict(zip(NEIGHBOURS, there, strict=True)) == dict(
            zip(NEIGHBOURS, back, strict=True)
        ), name


@pytest.mark.soak
@pytest.mark.timeout(36000)
def test_outcome_of_every_odd_case_under_every_template(templates: dict[str, str]) -> None:
    for number, (name, source) in enumerate(templates.items()):
        rows = list(ODD.values())
        random.Random(number).shuffle(rows)
        check(name, source, rows, number, ChatSpec(date=DATE))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prompt_depends_on_the_conversation_alone(
    templates: dict[str, str], real_rows: dict[str, Row]
) -> None:
    chance = random.Random(13)
    for name in chance.sample(sorted(templates), 4):
        talks = [
            PromptRequest(job.messages, job.tools)
            for row in chance.sample(sorted(real_rows), 12)
            for job in expected_samples(real_rows[row], ChatSpec())
        ]
        check(name, templates[name], talks, 13, ChatSpec(date=DATE), prompted)


FAILS_ON_NULL = """
{%- for message in messages %}
{%- if message.content is not defined %}{{ raise_exception("no content") }}{% endif %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}|
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_rejection_does_not_depend_on_recorded_errors(renderer: str) -> None:
    """The template raises an error on null content, and drops the argument of the call."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    row = {"messages": [{"role": "user", "content": "q"}, answer]}
    clear_templates()
    chat = Renderer(ChatSpec(), FAILS_ON_NULL, {}, renderer=renderer)
    first, *later = (outcomes(chat.render([row]), 1) for _ in range(3))
    assert first[0][0][1] == "template_drops_content"
    assert later == [first, first]
