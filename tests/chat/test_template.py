# ruff: noqa: E501 - templates on one line are easier to compare
"""The reference renderer: transformers' behaviour, a pinned date, and hostile templates."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conversations import CORPORA, ODD, SPECIAL, corpus_rows, zoo
from tests.chat.hungry_templates import HUNGRY
from tests.chat.templates import CHATML, DATED
from tokenmill.chat import ChatSpec, Renderer, program, sandbox
from tokenmill.chat.program import NotTraced
from tokenmill.chat.sandbox import BASE_SIZE, BASE_STEPS
from tokenmill.chat.template import ReferenceTemplate, tojson
from tokenmill.chat.trace import TracedTemplate
from tokenmill.errors import RowError, TemplateError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def render(source: str, messages: Any = TALK, **variables: Any) -> str:
    return ReferenceTemplate(source, variables, "2026-11-15").render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': '<é&>', 'b': [1.0, none]} | tojson }}", '{"a": "<é&>", "b": [1.0, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ bos_token }}|{{ extra }}|{{ missing }}", "<s>|7|"),
        ("{{ strftime_now('%d %b %Y %A %B %%a %p %H:%M') }}", "15 Nov 2026 Sunday November %a AM 00:00"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(x=1)['x'] }}", "21"),
        ("{{ 'a' ~ 1 ~ none ~ missing }}{{ 'x' * 3 }}{{ '%s-%d' % ('a', 3) }}", "a1Nonexxxa-3"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user,assistant"),
        ("{{ 'a,b'.split(',') | last }}{{ 'abc'[::-1] }}{{ '  x '.strip() }}", "bcbax"),
    ],
)  # fmt: skip
def test_reference_prints_what_transformers_prints(source: str, text: str) -> None:
    assert render(source, bos_token="<s>", extra=7) == text


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner),
)


@given(VALUES)
def test_tojson_equals_json_dumps(value: Any) -> None:
    assert tojson(value) == json.dumps(value, ensure_ascii=False)
    assert tojson(value, True, 1) == json.dumps(value, indent=1)


def test_reasoning_is_aliased_as_transformers_does() -> None:
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    for key in ("reasoning_content", "thinking", "reasoning"):
        assert render(source, [{"role": "assistant", "content": "", key: "hm"}]) == "hm|hm"


def test_missing_date_is_an_error_with_a_remedy() -> None:
    with pytest.raises(TemplateError, match="date='2026-11-15'"):
        Renderer(ChatSpec(), DATED).render([{"messages": TALK}])
    pinned = Renderer(ChatSpec(date="2026-11-15"), DATED).render([{"messages": TALK}])
    assert pinned.texts[0].startswith("15 Nov 2026, Sunday\n")
    text = Renderer(ChatSpec(format="text", append_eos=False), DATED).render([{"text": "x"}])
    assert text.texts == ["x"]  # this template is not used


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_error_of_endless_recursion_does_not_depend_on_the_caller(renderer: str) -> None:
    kind = (
        "{% macro kind(x) %}{% if x.items %}{{ 'list[' + kind(x) + ']' }}{% endif %}{% endmacro %}"
    )
    rows = [{"messages": [{"role": "assistant", "content": "x"}]}]

    def refusal(depth: int) -> str:
        if depth:
            return refusal(depth - 1)
        made = Renderer(ChatSpec(), kind + CHATML + "{{ kind({}) }}", renderer=renderer)
        return str(made.render(rows).rejected[0][2])

    assert {refusal(depth) for depth in range(8)} == {
        "the template exceeds a limit of Python: recursion is too deep"
    }


def divide_limits(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    for name in ("BASE_STEPS", "BASE_SIZE"):
        monkeypatch.setattr(sandbox, name, getattr(sandbox, name) // parts)
    for name in ("MAX_WORK", "MAX_SIZE"):
        monkeypatch.setattr(program, name, getattr(program, name) // parts)


WAITING = [name for name in sorted(HUNGRY) if name.startswith(("grow", "nested", "once"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WAITING[::3], "block sets", "forking macro", "squares"])
def test_hostile_template_behind_a_condition_is_bounded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded path has the same limits."""
    divide_limits(monkeypatch, 16)
    source = "{% if messages[0].content == 'now' %}" + HUNGRY[name] + "{% endif %}" + CHATML
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "x"}]}
        for word in ("one", "two", "now", "four")
    ]
    result = Renderer(ChatSpec(date="2026-11-15"), source).render(rows)
    assert result.source == [0, 1, 3]
    assert [(i, e.reason) for i, _, e in result.rejected] == [(2, "limit")]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ (messages | first).update(a=1) }}",
        "{% set ns = namespace(_x=1) %}", "{{ cycler.__init__.__globals__ }}", "{{ lipsum(9) }}",
        "{{ [1, 2] | random }}", "{% include 'x' %}", "{% import 'x' as y %}", "{{ 1 / 0 }}",
        "{{ '{0.__class__.__mro__}'.format('a') | length > 20 and raise_exception('x') }}",
    ],
)  # fmt: skip
def test_sandbox_raises_template_errors(source: str) -> None:
    result = Renderer(ChatSpec(), source + CHATML).render([{"messages": TALK}])
    assert [error.reason for *_, error in result.rejected] in (["template_error"], [])
    if not result.rejected:  # the sandbox prints nothing for undefined values
        assert "class" not in result.texts[0].split("<|im_start|>")[0]


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% if %}{% endif %}", "{% generation %}x"]
)
def test_template_that_does_not_compile_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match="line 1"):
        Renderer(ChatSpec(), source)


L, E = "{% for i in range(60) %}", "{% endfor %}"
N = "{% set n = namespace(x='aa') %}"
GROWING = [
    "{% macro m(x,n) %}{% if n %}{{ m(x~x, n-1) }}{% else %}{{x}}{% endif %}{% endmacro %}{{ m('ab',60) }}",
    "{% macro d(x) %}{{x}}{{x}}{% endmacro %}" + N + L + "{% set n.x = d(n.x) %}" + E,
    N + L + "{% set y = n.x %}{% set n.x = y ~ y %}" + E,
    "{% set n=namespace(x='a',y='b') %}"
    + L
    + "{% set n.x = n.y ~ n.x %}{% set n.y = n.x ~ n.y %}"
    + E,
    N + L + "{% set n.x = [n.x|join, n.x|join] %}" + E,
    N + L + "{% set n.x %}{% for j in range(2) %}{{ n.x }}{% endfor %}{% endset %}" + E,
    N + L + "{% set y = dict(a=n.x, b=n.x) %}{% set n.x = y.a ~ y.b %}" + E,
    N + L + "{% set y = {'a':n.x, 'b':n.x} %}{% set n.x = y['a'] ~ y['b'] %}" + E,
    N + L + "{% set y = {'a':n.x} %}{% set n.x = y['a'] ~ y['a'] %}" + E,
    N + L + "{% set n.x = n.x|tojson %}" + E,
    N + L + "{% set n.x = {'a':n.x,'b':n.x} %}" + E + "{{n.x}}",
    N + L + "{% set y = (n.x, n.x) %}{% set n.x = y|string %}" + E,
    N + L + "{% with y = n.x %}{% set n.x = y ~ y %}{% endwith %}" + E,
    N + L + "{% set n.x = n['x'] ~ n['x'] %}" + E,
    N + L + "{% set m = n %}{% set n.x = m.x ~ m.x %}" + E,
    "{% macro d() %}{{caller()}}{{caller()}}{% endmacro %}"
    + N
    + L
    + "{% set n.x %}{% call d() %}{{n.x}}{% endcall %}{% endset %}"
    + E,
    N + L + "{% set n.x %}{% filter replace('a','aa') %}{{n.x}}{% endfilter %}{% endset %}" + E,
    N + L + "{% set n.x = n.x if false else n.x ~ n.x %}" + E,
    N + L + "{% set n.x = [n.x,n.x]|map('string')|list %}" + E + "{{n.x}}",
    N + L + "{% set a, b = n.x, n.x %}{% set n.x = a ~ b %}" + E,
    N + L + "{% for y in [n.x] %}{% set n.x = y ~ y %}{% endfor %}" + E,
    N + L + "{% set k = namespace(z=n.x) %}{% set n.x = k.z ~ k.z %}" + E,
    "{% macro g(m) %}{% set m.x = m.x ~ m.x %}{% endmacro %}" + N + L + "{{ g(n) }}" + E,
    N + L + "{% set n.x = (n.x, n.x)|first ~ (n.x,)|last %}" + E,
    "{% set x='aa' %}" + "{% set x = x ~ x %}" * 60,
    "".join(f"{{% set x{i + 1} = x{i} ~ x{i} %}}" for i in range(60)),
    N + L + "{% set n.x = n.x|default('') ~ n.x|d('') %}" + E,
]


@pytest.mark.parametrize("source", GROWING)
def test_growth_along_a_recorded_path_is_bounded(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path recorded with a loop of two items has the same limits for sixty."""
    divide_limits(monkeypatch, 16)
    by_length = source.replace("range(60)", "range(messages | length)").replace(
        "60)", "messages | length)"
    )
    few, many = ([{"role": r, "content": "x"} for r in ("user", "assistant")] * n for n in (1, 40))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = Renderer(ChatSpec(), by_length + CHATML).render([{"messages": few}] * 2)
    assert {error.reason for *_, error in result.rejected} <= {"limit", "mask_unproven"}
    result = Renderer(ChatSpec(), by_length + CHATML).render(
        [{"messages": few}, {"messages": many}]
    )
    reasons = [error.reason for *_, error in result.rejected]
    nothing = "x0" in source  # it doubles what is not there
    assert reasons[-1:] in ([[]] if nothing else [["limit"], ["mask_unproven"]])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def test_limits_allow_long_conversations() -> None:
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": f"turn {i} " * 200}
        for i in range(2000)
    ]
    assert len(render(CHATML, messages)) > 3_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heavy", "most"),
    [
        ("{% if missing %}{% endif %}" * 1500, 400),
        ("{% set x = 'a' * 90000 %}", 400),
        ("{% set x %}" + "y" * 50_000 + "{% endset %}", 400),
        ("{% for n in messages %}{% endfor %}", 1100),
        ("{% set x = messages | selectattr('role', 'equalto', 'system') | list %}", 400),
    ],
)
def test_traced_row_reaches_the_limits_of_the_reference(
    heavy: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations of a body are also counted on a recorded path."""
    divide_limits(monkeypatch, 8)
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + heavy + "{% endfor %}"
    talks = [[{"role": "user", "content": f"{n}"} for n in range(count)] for count in (2, 4, most)]
    for renderer in ("auto", "jinja2"):
        made = Renderer(ChatSpec(train_on="everything"), source, renderer=renderer)
        result = made.render([{"messages": messages} for messages in talks])
        assert [(i, e.reason) for i, _, e in result.rejected] == [(2, "limit")]


@pytest.mark.slow
def test_run_within_its_limits_is_within_those_of_the_reference(shared: Path) -> None:
    """`program` leaves a row to the reference at a tenth of its steps, a sixteenth of its size."""
    rows = [row for name in CORPORA for row in corpus_rows(shared, name, 2) if "messages" in row]
    rows += list(ODD.values())[::8]
    runs = 0
    for source in list(zoo(shared).values())[::16]:
        template = ReferenceTemplate(source, SPECIAL, "2026-11-15")
        traced = TracedTemplate(template)
        for row in rows:
            given = (row["messages"], row.get("tools"))
            try:
                run = traced.follow(*given)
                template.render(*given)
            except (NotTraced, RowError):
                continue
            counter = template.environment.counter
            assert BASE_STEPS - counter.steps <= 10 * run.work
            assert BASE_SIZE - counter.size <= 16 * run.size + (64 << 10)
            runs += 1
    assert runs > 100


def test_every_run_along_a_path_has_its_own_limits() -> None:
    source = "{% for m in messages %}{{ [m.content] | map('upper') | join }}{% endfor %}"
    traced = TracedTemplate(ReferenceTemplate(source, {}, None))
    for number in range(300):  # 800 kB each, as `upper` is counted
        run = traced.follow([{"role": "user", "content": f"{number}x" * 20_000}], None)
        assert run.text == f"{number}X" * 20_000
