"""Traced paths never change a result: recording, audits, fallback, cached tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.conversations import SPECIAL, say, turns
from tests.chat.templates import ALL, CHATML, HABITS, THINKING
from tests.chat.test_outcomes import outcomes
from tokenmill.chat import ChatSpec, Renderer, Rendering
from tokenmill.chat.program import NotTraced, Run
from tokenmill.chat.render import AUDIT_ONE_IN, FIRST_AUDITED, PromptRequest, audited, digest_of
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.trace import TracedTemplate, Tracer
from tokenmill.errors import UsageError

# Templates that look at messages as a whole, where the order of keys or a text may matter.
COMPLETE = {
    "items": "{% for m in messages %}{% for k, v in m.items() %}<{{ k }}>{{ v }}{% endfor %}</m>",
    "keys": "{% for m in messages %}{% for k in m %}<{{ k }}>{{ m[k] }}{% endfor %}</m>",
    "first": "{% for m in messages %}<{{ m | first }}>{{ m.content }}</m>",
    "list": "{% for m in messages %}<{{ (m | list)[0] }}>{{ m.content }}</m>",
    "whole": "{% for m in messages %}{{ m }}</m>",
    "json": "{% for m in messages %}{{ m | tojson }}</m>",
    "equal": "{% for m in messages %}{{ m == messages[1] }}{{ m.content }}</m>",
    "in": "{% for m in messages %}{{ 'answer 1' in m.values() }}{{ m.content }}</m>",
}
EVERY = {**ALL, **HABITS, **{name: source + "{% endfor %}" for name, source in COMPLETE.items()}}


def rows(count: int, text: str = "answer") -> list[dict[str, Any]]:
    return [
        {"messages": [say("u", 0, f"question {i}"), say("a", 1, f"{text} {i}")]}
        for i in range(count)
    ]


def same(left: Rendering, right: Rendering) -> None:
    count = 1 + max([*left.source, *right.source, *(index for index, *_ in left.rejected)])
    assert outcomes(left, count) == outcomes(right, count)


def traced(source: str, variables: dict[str, Any] | None = None) -> TracedTemplate:
    return TracedTemplate(ReferenceTemplate(source, variables or {}, None))


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize("train_on", ["all_assistant_messages", "everything"])
def test_traced_and_reference_give_the_same(name: str, train_on: str) -> None:
    turned = [
        {"messages": [dict(reversed(message.items())) for message in row["messages"]]}
        for row in rows(3)
    ]
    data = [
        *rows(9),
        *turned,
        *rows(3, "  spaced "),
        *rows(3, "<think>hm</think>\n"),
        *rows(2, "\x1c odd \x1c"),
        {"messages": [{"role": "system", "content": "S"}, *rows(1)[0]["messages"]]},
        {"messages": []},
        *rows(60, "ünïcode 你好 \U0001f389"),
    ]
    spec = ChatSpec(train_on=train_on)
    quick = Renderer(spec, EVERY[name], SPECIAL).render(data)
    slow = Renderer(spec, EVERY[name], SPECIAL, renderer="jinja2").render(data)
    same(quick, slow)
    assert slow.notes["renderer"] == "jinja2"
    assert "rows_traced" not in slow.notes
    if quick.texts:
        assert quick.notes["renderer"] == "traced"
        assert int(quick.notes["rows_traced"]) >= len(quick.texts)


def test_unknown_renderer_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="auto, jinja2"):
        Renderer(ChatSpec(), CHATML, renderer="fast")


def test_rows_with_equal_outcomes_share_a_path() -> None:
    template = traced(THINKING)
    for row in [*rows(200), *rows(100, "other")]:
        template.follow(row["messages"], None)
    assert template.recorded == 1
    template.follow(rows(1, "<think>hm</think>")[0]["messages"], None)
    assert template.recorded == 2


def test_audit_takes_the_first_rows_and_a_sample_by_the_whole_text() -> None:
    digests = [digest_of(f"text {i} and a common end" * 5) for i in range(20_000)]
    assert all(audited(i, 1) for i in range(FIRST_AUDITED))
    chosen = [i for i in range(20_000) if audited(1000, digests[i])]
    assert 0.5 < len(chosen) * AUDIT_ONE_IN / 20_000 < 1.5
    assert chosen == [i for i in range(20_000) if audited(77, digests[i])]


def change_output(monkeypatch: pytest.MonkeyPatch, template: TracedTemplate, change: Any) -> None:
    """Change the output of a program."""
    assert isinstance(template._tracer, Tracer)
    program = template._tracer.program
    honest = program.run

    def run(*given: Any) -> Run:
        made = honest(*given)
        made.out[:] = [change(fragment) for fragment in made.out]
        made.text = "".join(made.out)
        return made

    monkeypatch.setattr(program, "run", run)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("question", "QUESTION"),  # in a text, outside the glue
        lambda text: text.replace("answer", "ANSWER"),
        lambda text: text.replace("\n", "\n\n"),
        lambda text: text.replace("<|im_end|>", ""),
    ],
)
@pytest.mark.parametrize("train_on", ["all_assistant_messages", "everything"])
def test_program_with_wrong_output_is_disabled(
    monkeypatch: pytest.MonkeyPatch, change: Any, train_on: str
) -> None:
    spec = ChatSpec(train_on=train_on)
    renderer = Renderer(spec, CHATML)
    renderer.render(rows(3))  # recorded while its output was right
    expected = Renderer(spec, CHATML, renderer="jinja2").render(rows(100))
    change_output(monkeypatch, renderer._for(None).traced, change)
    result = renderer.render(rows(100))
    same(result, expected)
    assert result.notes["mismatches"] == 1
    assert result.notes["renderer"] == "jinja2"
    assert renderer.render(rows(5)).notes["renderer"] == "jinja2"  # and stays disabled


def test_path_is_recorded_only_if_it_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = ReferenceTemplate.render

    def render(self: ReferenceTemplate, *given: Any, **options: Any) -> str:
        return honest(self, *given, **options).replace("<|im_end|>", "<|END|>")

    template = traced(CHATML)
    monkeypatch.setattr(ReferenceTemplate, "render", render)
    with pytest.raises(NotTraced, match="differed"):
        template.follow(rows(1)[0]["messages"], None)
    assert template.differed


def test_untraced_row_is_counted_by_cause_with_its_line() -> None:
    source = "\n{% for m in messages recursive %}{{ m.content | reverse }}{% endfor %}"
    result = Renderer(ChatSpec(), source).render(rows(3))
    assert {e.reason for *_, e in result.rejected} == {"mask_unproven"}
    assert "a recursive loop (line 2 of the template)" in result.rejected[0][2].message
    assert result.notes["untraced:a recursive loop"] == 3
    whole = Renderer(ChatSpec(train_on="everything"), source).render(rows(3))
    assert len(whole.texts) == 3  # the reference's text needs no turns


def tool(parameters: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


TOOLS = tool({"a": 1, "b": True, "c": 1.0})
LISTING = (
    "{% for tool in tools %}{{ tool | tojson }}:{{ tool.function.parameters.b }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_tools_are_cached_by_their_exact_content() -> None:
    """Key order, 1, 1.0 and true, absent keys: other tools, though Python calls some equal."""
    variants = [
        TOOLS,
        tool({"b": True, "a": 1, "c": 1.0}),
        tool({"a": 1, "b": 1, "c": 1}),
        tool({"a": True, "b": 1.0}),
        [],
        TOOLS * 2,
    ]
    data = [{**row, "tools": variants[n % 6]} for n, row in enumerate(rows(60))]
    quick = Renderer(ChatSpec(), LISTING).render(data)
    slow = Renderer(ChatSpec(), LISTING, renderer="jinja2").render(data)
    same(quick, slow)
    assert len(quick.texts) == 60


@pytest.mark.slow
def test_template_with_many_conditions_compiles() -> None:
    questions = "".join(
        f"{{% if '{n}' in messages[0].content %}}x{n}{{% endif %}}" for n in range(110)
    )
    data = [*rows(20), *rows(2, "1 22 333 44")]
    quick = Renderer(ChatSpec(), questions + CHATML).render(data)
    same(quick, Renderer(ChatSpec(), questions + CHATML, renderer="jinja2").render(data))
    assert len(quick.texts) == 22


def test_one_object_twice_in_a_conversation_is_two_messages() -> None:
    message = {"role": "assistant", "content": "again"}
    row = {"messages": [{"role": "user", "content": "hi"}, message, message]}
    result = Renderer(ChatSpec(), CHATML).render([row])
    assert result.spans == [[(52, 67), (90, 105)]]


def test_prompts_of_a_wrong_program_come_from_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversations = [PromptRequest(row["messages"][:1]) for row in rows(40)]
    renderer = Renderer(ChatSpec(), CHATML)
    expected = [renderer.prompt(*asked) for asked in conversations]
    assert renderer.prompts(conversations) == expected
    paths = renderer._for(None).with_generation_prompt
    change_output(monkeypatch, paths, lambda text: text.replace("question", "QUESTION"))
    assert "QUESTION" in paths.follow(conversations[0].messages, None).text
    assert renderer.prompts(conversations) == expected
    assert renderer.renderer == "jinja2"
    assert Renderer(ChatSpec(), CHATML)._for(None) is not renderer._for(None)


CALLS_WITHOUT_CONTENT = (  # calls are printed only where there is no content
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is not defined %}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_null_content_is_left_out(renderer: str) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "here"}}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    data = [{"messages": [say("u", 0, "hi"), called]}]
    result = Renderer(ChatSpec(), CALLS_WITHOUT_CONTENT, renderer=renderer).render(data)
    assert result.texts == ['<|user|>hi<|end|><|assistant|>[look {"where": "here"}]<|end|>']
    assert "null_as_empty" not in result.notes
    result = Renderer(ChatSpec(train_on="everything"), CHATML, renderer=renderer).render(data)
    assert result.texts[0].endswith("<|im_start|>assistant\n<|im_end|>\n")
    assert "null_as_empty" not in result.notes
    # A template that fails without content gets empty text, and that is counted.
    joins = CHATML.replace("{{ m.content }}", "{{ m.content + '' }}")
    result = Renderer(ChatSpec(train_on="everything"), joins, renderer=renderer).render(data)
    assert result.texts[0].endswith("<|im_start|>assistant\n<|im_end|>\n")
    assert result.notes["null_as_empty"] == 1


CALLS_AS_TEXT = (  # and only where there is no content
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is not defined %}"
    "{% for c in m.tool_calls %}[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_arguments_are_text_for_a_template_that_fails_on_objects(renderer: str) -> None:
    written = '{"where":  "h\\u00e9re"}'  # as the row writes it, not as we would
    calls = [{"type": "function", "function": {"name": "look", "arguments": written}}]
    opened = {"role": "user", "content": "hi"}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "Yes."},
    ]
    data: list[dict[str, Any]] = [{"messages": [opened, answer]} for answer in answers]
    value = '{"name": "look", "arguments": {"where": "hére"}}'
    shared = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": value}]
    data.append({"conversations": shared})
    made = Renderer(ChatSpec(), CALLS_AS_TEXT, renderer=renderer).render(data)
    head = "<|user|>hi<|end|><|assistant|>"
    assert made.texts == [
        f"{head}[look {written}]<|end|>",
        f"{head}Yes.<|end|>",
        head + '[look {"where": "hére"}]<|end|>',
    ]
    assert made.notes["arguments_as_text"] == 2
    assert "null_as_empty" not in made.notes
    with_objects = Renderer(ChatSpec(), CALLS_WITHOUT_CONTENT, renderer=renderer).render(data)
    assert "arguments_as_text" not in with_objects.notes
    assert '{"where": "hére"}' in with_objects.texts[0]


FLAGGED = (  # what a loop over the tools prints of a message is that message's, at every row
    "{% macro list(flag) %}{% for tool in tools %}{{ tool.function.name }}={{ flag }};{% endfor %}"
    "{% endmacro %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ list(m.flag) }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("flags", [(1, True, 1), ("a", "b", "a"), ("a", False, "a")])
def test_tool_loops_are_cached_by_their_arguments(flags: tuple[Any, ...]) -> None:
    data = [
        {"messages": [{**m, "flag": flag} for m in row["messages"]], "tools": TOOLS}
        for row in rows(4)
        for flag in flags
    ]
    quick = Renderer(ChatSpec(), FLAGGED).render(data)
    same(quick, Renderer(ChatSpec(), FLAGGED, renderer="jinja2").render(data))
    assert len(quick.texts) == 12
    template = traced(FLAGGED)
    runs = [template.follow(row["messages"], row["tools"]) for row in data]
    for run, row in zip(runs, data, strict=True):
        printed = [run.out[place] for place in run.own]
        assert printed.count(str(row["messages"][0]["flag"])) == 2


def same_as_reference(source: str, data: list[dict[str, Any]], spec: ChatSpec) -> None:
    quick = Renderer(spec, source, SPECIAL).render(data)
    same(quick, Renderer(spec, source, SPECIAL, renderer="jinja2").render(data))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["none first", "empty first"])
@pytest.mark.parametrize("question", ["tools is not none", "tools", "tools is iterable"])
def test_no_tools_and_an_empty_list_of_tools_differ(question: str, order: list[int]) -> None:
    source = (
        f"{{% if {question} %}}[tools {{{{ tools | tojson }}}}]{{% endif %}}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</m>{% endfor %}"
    )
    pair: list[dict[str, Any]] = [{"messages": turns("ua")}, {"messages": turns("ua"), "tools": []}]
    same_as_reference(source, 5 * [pair[n] for n in order], ChatSpec(train_on="everything"))


CALLS = (
    "{% if tools %}[tools]{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content.strip() }}</think>{% endif %}"
    "{% if 'loud' in m.content %}!{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}[call]{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}</m>{% endfor %}"
)
"""Fails on null contents; prints the rest."""
TAKES_NULL = CALLS.replace("'loud' in m.content", "m.content and 'loud' in m.content").replace(
    "{{ m.content }}", "{{ m.content or '' }}"
)
SOMETIMES = TAKES_NULL.replace(
    "{% if m.content and 'loud' in m.content %}",
    "{% if m.content is none %}[null]{% endif %}"
    "{% if 'loud' not in messages[0].content and 'loud' in m.content %}",
)
"""Takes null contents only where the first message is loud."""
DROPS = CALLS.replace("call.function.arguments | tojson", "call.function.arguments | length")
ASKS_ARGUMENTS = CALLS.replace(
    "{{ call.function.arguments | tojson }}",
    "{% if call.function.arguments %}{{ call.function.arguments | tojson }}{% endif %}",
)
WANTS_TEXT = CALLS.replace(
    "{{ call.function.arguments | tojson }}",
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% endif %}",
)
CALLING = {
    "fails on null": CALLS,
    "takes null": TAKES_NULL,
    "sometimes fails on null": SOMETIMES,
    "drops arguments": DROPS,
    "asks for arguments": ASKS_ARGUMENTS,
    "wants arguments as text": WANTS_TEXT,
}
ARGUMENTS: tuple[Any, ...] = (
    {"city": "Rome", "days": 3}, {}, {"city": None, "warm": True}, {"far": [1.5, {"a": ["b"]}]},
    {"quoted": 'a "b"\n', "é": "☃"}, {"nan": float("nan")}, {"deep": [{"inf": float("inf")}]},
    {"pair": (1, 2)}, {None: "nothing"}, {1: "one"}, {True: 1.0}, {"big": 10**30},
)  # fmt: skip
"""Arguments as rows have them, and as nothing but Python can have them: not all are printed."""


def calling_rows() -> list[dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks."}}
    lists: list[Any] = [[tool], [tool, {**tool, "strict": 1}], [{**tool, "strict": True}], [], None]
    rows: list[dict[str, Any]] = []
    for number, arguments in enumerate((*ARGUMENTS, '{"city": "Rome"}', "not JSON")):
        for nulls in (False, True):
            call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
            said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
            said["content"] = None if nulls else ("", "Let me look.")[number % 2]
            answer = {**say("a", 3), "reasoning_content": ("Hm.", " \n", "")[number % 3]}
            asked = say("u", 0, ("Is it warm?", "Is it loud?")[number % 4 == 3])
            messages = [asked, said, {"role": "tool", "content": "Yes."}, answer]
            rows.append({"messages": messages, "tools": lists[number % len(lists)]})
            rows.append({"messages": messages, "tools": lists[number % 2]})
    return rows


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize(
    "spec", [{}, {"turn_end": "turn"}, {"train_on": "everything"}], ids=["stop", "turn", "all"]
)
def test_rows_with_calls_equal_the_reference(name: str, spec: dict[str, Any]) -> None:
    same_as_reference(CALLING[name], calling_rows(), ChatSpec(**spec))
