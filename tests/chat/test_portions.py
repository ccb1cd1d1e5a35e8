"""A batch is rendered in portions; each row gets what it gets in a batch of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.chat.conversations import SPECIAL, say
from tests.chat.templates import CHATML
from tokenmill.chat import ChatSpec, Renderer, Rendering
from tokenmill.chat.render import AUDIT_ONE_IN, PORTION
from tokenmill.chat.trace import TracedTemplate
from tokenmill.errors import RowError

TOOLS = [{"type": "function", "function": {"name": f"look{i}"}} for i in range(3)]
# It raises an error on null content and on a text, drops a text, and prints calls.
TEMPLATE = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}"
    "{% if m.content is not defined or m.content == 'raise' %}{{ raise_exception('no') }}"
    "{% endif %}"
    "{% if m.content == 'drop' %}{% continue %}{% endif %}",
).replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}",
)


def _rows(count: int) -> list[Any]:
    """Return rows of every kind in random order, each with its number in its texts."""
    chance = random.Random(7)
    calls = [{"type": "function", "function": {"name": "look1", "arguments": {"at": "sky"}}}]

    def row(i: int) -> Any:
        user, answer = say("u", 0, f"question {i}"), say("a", 1, f"answer {i}")
        long = [turn for j in range(i % 20) for turn in (say("u", j, f"{i}"), say("a", j, f"{j}"))]
        call = {"role": "assistant", "content": None, "tool_calls": calls}
        kinds: list[Any] = [
            {"messages": [user, answer]},
            {"messages": [*long, user, answer]},
            {"instruction": f"question {i}", "output": f"answer {i}"},
            {"conversations": [{"from": "human", "value": f"{i}"}, {"from": "gpt", "value": "a"}]},
            {"messages": [user, call, say("t", 2, f"{i}"), answer], "tools": TOOLS},
            {"prompt": f"question {i} ", "completion": f"answer {i}"},
            {"prompt": [user], "chosen": f"answer {i}", "rejected": f"nothing {i}"},
            {"messages": [user, answer], "weight": 0.5},
            # rejected:
            RowError(f"row {i} is not JSON", reason="bad_json"),
            {"column": i},
            {"messages": [user]},
            {"messages": [user, {"role": "assistant", "content": "drop"}]},
            {"messages": [user, {"role": "assistant", "content": "raise"}]},
            {"prompt": [user], "chosen": f"answer {i}", "rejected": "raise"},
        ]
        return chance.choice(kinds)

    return [row(i) for i in range(count)]


def _append(rendering: Rendering, other: Rendering, row: int) -> None:
    """Add the rendering of one row to that of the rows before it."""
    first = len(rendering.texts)
    for name in ("texts", "part", "spans", "roles", "ends"):
        getattr(rendering, name).extend(getattr(other, name))
    rendering.source += [row] * len(other.source)
    for name in ("groups", "weights"):
        values = getattr(other, name).items()
        getattr(rendering, name).update({first + number: value for number, value in values})
    rendering.unclosed += [first + number for number in other.unclosed]
    rendering.rejected += [(row, part, error) for _, part, error in other.rejected]
    for name, count in other.notes.items():
        if name != "renderer":
            rendering.note(name, int(count))


@pytest.mark.parametrize("expand", ["none", "turns", "append"])
def test_portions_change_no_row(expand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[str] = []
    audit = TracedTemplate.audit

    def record(self: TracedTemplate, run: Any, messages: Any, tools: Any) -> None:
        if not self.add_generation_prompt:
            audits.append(run.text)
        audit(self, run, messages, tools)

    monkeypatch.setattr(TracedTemplate, "audit", record)
    count = 5 * PORTION
    rows = _rows(count)
    digests = [AUDIT_ONE_IN * i if i % 5 == 0 else AUDIT_ONE_IN * i + 300 for i in range(count)]
    renderer = Renderer(ChatSpec(expand=expand), TEMPLATE, SPECIAL)
    renderer.render(rows)  # records all paths, which rows after it follow
    renderer.first_audited, audits[:] = 0, []
    expected = Rendering()
    for number, row in enumerate(rows):
        _append(expected, renderer.render([row], digests[number : number + 1]), number)
    alone, audits[:] = [*audits], []
    together = renderer.render(rows, digests)
    assert together.notes.pop("renderer") == "traced"
    lost, wanted = (
        [(*place, str(error)) for *place, error in each.rejected] for each in (together, expected)
    )
    assert lost == wanted
    assert len({number for number, *_ in lost}) > count // 5
    together.rejected, expected.rejected = [], []
    assert together == expected
    assert audits == alone
    assert count // 20 < len(audits) < count
    assert "null_as_empty" in together.notes
