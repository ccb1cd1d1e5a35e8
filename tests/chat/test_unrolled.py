"""Whole conversations as one path: every outcome is the general way's, byte for byte.

The general way (`traced`, `turns`) is judged by oracles of its own (`test_zoo`, `test_outcomes`).
Here each row goes both ways: after rows like it, so that its path is known, and with nothing known.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chat.conversations import DATE, ODD, SPECIAL, VARIABLES, Row, say, turns, zoo
from tests.chat.judge import make_renderer, sample
from tests.chat.templates import ALL, HABITS
from tests.chat.test_outcomes import outcomes
from tests.chat.test_zoo import SPECS as ZOO_SPECS
from tokenmill.chat import ChatSpec, unrolled
from tokenmill.chat.shapes import Conversation, read

# What templates ask of a text: is it there, is it blank, does it think, does it begin with a tag.
TEXTS = (
    "Plain words.", "", "  \n", "\n\nLed by lines.\n", "<think>\nHm.\n</think>\n\nSo.",
    "so</think>", "<think>open", "<tool_response>\nfound\n</tool_response>", "assistant", "s",
    "None", "<|im_end|>", "[INST] no [/INST]", "{{ braces }}", "é ☃ \u2028 end",
)  # fmt: skip
ORDERS = ("ua", "sua", "uaua", "suaua", "uaa", "a", "au", "dua", "uasua", "ssua", "uta")
SPECS = {**ZOO_SPECS, "everything": ChatSpec(date=DATE, train_on="everything")}


def odd_texts() -> list[Row]:
    """Conversations of roles and texts in which every message says every odd thing once."""
    found = []
    for order in ORDERS:
        for place in range(len(order)):
            for text in TEXTS:
                messages = [
                    {"role": message["role"], "content": message["content"]}
                    for message in turns(order)
                ]
                messages[place]["content"] = text
                found.append({"messages": messages})
    return found


def is_simple(row: Row) -> bool:
    """Whether a row is roles and texts alone."""
    try:
        found = read(row, ChatSpec())
    except Exception:
        return False
    return isinstance(found, Conversation) and found.simple and not found.tools


def never(self: unrolled.Unrolled, *_: Any) -> None:
    """In place of `settle`: nothing is known, and nothing learned."""
    self.worth_learning = False


def both_ways(
    name: str, source: str, rows: list[Row], spec: ChatSpec, patch: pytest.MonkeyPatch
) -> Counter[str]:
    """Render rows with their paths known, and the general way; how many took which."""
    variables = {**SPECIAL, **VARIABLES.get(name, {})}
    taken: Counter[str] = Counter()
    settle = unrolled.Unrolled.settle

    def counted(self: unrolled.Unrolled, *given: Any) -> Any:
        found = settle(self, *given)
        taken["general" if found is None else "unrolled"] += 1
        return found

    patch.setattr(unrolled, "WORTH_IT", 1)
    renderer = make_renderer(spec, source, variables)
    renderer.render(rows)
    patch.setattr(unrolled.Unrolled, "settle", counted)
    known = outcomes(renderer.render(rows), len(rows))
    patch.setattr(unrolled.Unrolled, "settle", never)
    general = outcomes(make_renderer(spec, source, variables).render(rows), len(rows))
    patch.undo()
    for row, found, wanted in zip(rows, known, general, strict=True):
        assert found == wanted, f"{name}: {row}"
    for template in renderer._templates.values():
        for known in template.unrolled.values():
            assert not known.differed, f"{name}: {known.differed[0]}"
    return taken


def test_known_path_is_taken_however_much_went_along_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing adds up from row to row: a limit belongs to one conversation."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content.strip() }}</m>{% endfor %}"
    asked, answered = turns("ua")
    answered = {**answered, "content": 200 * "Hm. "}
    rows: list[Row] = [{"messages": [asked, answered]}] * 40
    monkeypatch.setattr("tokenmill.chat.program.MOST_SIZE", 20_000)
    taken = both_ways("stripped", source, rows, ChatSpec(train_on="everything"), monkeypatch)
    assert taken == {"unrolled": len(rows)}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["none first", "empty first"])
@pytest.mark.parametrize("question", ["tools is not none", "tools", "tools is iterable"])
def test_no_tools_and_an_empty_list_of_tools_are_two_things(
    question: str, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        f"{{% if {question} %}}[tools {{{{ tools | tojson }}}}]{{% endif %}}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</m>{% endfor %}"
    )
    pair: list[Row] = [{"messages": turns("ua")}, {"messages": turns("ua"), "tools": []}]
    rows = 5 * [pair[place] for place in order]
    taken = both_ways("tools", source, rows, ChatSpec(train_on="everything"), monkeypatch)
    assert taken == {"unrolled": len(rows)}
    made = make_renderer(ChatSpec(train_on="everything"), source, SPECIAL).render(rows)
    wanted = make_renderer(ChatSpec(train_on="everything"), source, SPECIAL, "jinja2").render(rows)
    assert made.texts == wanted.texts


KEYS = {
    "items": "{% for m in messages %}{% for k, v in m.items() %}<{{ k }}>{{ v }}{% endfor %}</m>",
    "keys": "{% for m in messages %}{% for k in m %}<{{ k }}>{{ m[k] }}{% endfor %}</m>",
    "first": "{% for m in messages %}<{{ m | first }}>{{ m.content }}</m>",
    "list": "{% for m in messages %}<{{ (m | list)[0] }}>{{ m.content }}</m>",
    "whole": "{% for m in messages %}{{ m }}</m>",
    "json": "{% for m in messages %}{{ m | tojson }}</m>",
    "equal": "{% for m in messages %}{{ m == messages[1] }}{{ m.content }}</m>",
    "in": "{% for m in messages %}{{ 'Yes.' in m.values() }}{{ m.content }}</m>",
}
"""Templates that look at messages as a whole, where the order of keys or a text may have a say."""


@pytest.mark.parametrize("name", KEYS)
def test_messages_looked_at_as_a_whole_go_the_general_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unrolled, "WORTH_IT", 1)
    source = KEYS[name] + "{% endfor %}"
    asked, answered = (
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Yes."},
    )
    turned = [dict(reversed(message.items())) for message in (asked, answered)]
    other = [asked, {"role": "assistant", "content": "No."}]
    rows = [{"messages": messages} for messages in ([asked, answered], turned, other)]
    spec = ChatSpec(train_on="everything")
    for order in ([0, 0, 1, 2], [1, 1, 0, 2], [2, 2, 1, 0]):
        some = [rows[place] for place in order]
        made = make_renderer(spec, source, SPECIAL).render(some)
        wanted = make_renderer(spec, source, SPECIAL, "jinja2").render(some)
        assert outcomes(made, len(some)) == outcomes(wanted, len(some))


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


def calling_rows() -> list[Row]:
    """Rows of few outlines: the first of each is ordinary, the others go along its path."""
    tool = {"type": "function", "function": {"name": "look", "description": "Looks."}}
    lists: list[Any] = [[tool], [tool, {**tool, "strict": 1}], [{**tool, "strict": True}], [], None]
    rows: list[Row] = []
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
def test_rows_with_calls_are_what_the_general_way_makes_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = calling_rows()
    for spec in (SPECS["stop"], SPECS["turn"], SPECS["last"], SPECS["everything"]):
        taken = both_ways(name, CALLING[name], rows, spec, monkeypatch)
        if name == "takes null":
            assert taken["unrolled"] > taken.total() / 2, taken


def test_paths_of_rows_with_calls_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a row that JSON can say keeps it from its path."""
    rows = [row for row in calling_rows() if _is_json(row) and "not JSON" not in str(row)]
    for source in (CALLS, TAKES_NULL):
        taken = both_ways("calls", source, rows, SPECS["stop"], monkeypatch)
        assert taken == {"unrolled": len(rows)}


def _is_json(row: Row) -> bool:
    """Whether JSON says a row as it is."""
    text = json.dumps(row, allow_nan=True)
    return "NaN" not in text and "Infinity" not in text and json.loads(text) == row


def test_limits_count_tools_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that the general way leaves to the reference is left to it here, too."""
    rows = calling_rows()[:2]
    for size in (10, 40_000):
        row = calling_rows()[0]
        row["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"a": size * "b"}
        rows.append(row)
        rows.append({**calling_rows()[0], "tools": [{"name": size * "b"}]})
    monkeypatch.setattr("tokenmill.chat.program.MOST_SIZE", 20_000)
    monkeypatch.setattr(unrolled, "MOST_SIZE", 60_000)
    taken = both_ways("calls", CALLS, rows, SPECS["stop"], monkeypatch)
    assert taken == {"unrolled": 4, "general": 2}


def every_template(shared: Path) -> dict[str, str]:
    return {**zoo(shared), **ALL, **HABITS}


def compare_both_ways(shared: Path, form: str, every: int, patch: pytest.MonkeyPatch) -> None:
    """Every so many-th template, others in every form: of four, each is tried in one or two."""
    rows = [*ODD.values(), *sample(shared, 2).values()]
    texts = [row for row in rows if is_simple(row)]
    others = [row for row in rows if not is_simple(row)]
    odd = odd_texts()
    taken: Counter[str] = Counter()
    taken_by_others: Counter[str] = Counter()
    first = list(SPECS).index(form) % every
    for number, (name, source) in list(enumerate(every_template(shared).items()))[first::every]:
        share = 4 if form == "stop" else 16
        some = [*texts[number % 2 :: 2], *odd[number % share :: share]]
        taken += both_ways(name, source, some, SPECS[form], patch)
        taken_by_others += both_ways(name, source, others[number % 4 :: 4], SPECS[form], patch)
    assert taken["unrolled"] > taken.total() / 3, taken
    assert taken_by_others["unrolled"] > taken_by_others.total() / 10, taken_by_others


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", SPECS)
def test_unrolled_paths_equal_the_general_way(
    shared: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_both_ways(shared, form, 4, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", SPECS)
def test_unrolled_paths_of_every_template_equal_the_general_way(
    shared: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_both_ways(shared, form, 1, monkeypatch)
