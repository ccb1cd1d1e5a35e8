"""Every stored template × nine kinds of conversation: proven or rejected, none wrong (T22)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chat.oracle import CASES, SPECIAL, complaints
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.template import GENERATION_TAG, ReferenceTemplate
from tokenmill.errors import RowError

DATE = "2026-11-15"


def zoo(shared: Path) -> list[Path]:
    return sorted((shared / "templates").glob("*/*.jinja"))


def accepts(template: ReferenceTemplate, case: str) -> str | None:
    messages, tools = CASES[case]
    try:
        return template.render(messages, tools)
    except RowError:
        return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("turn_end", ["stop", pytest.param("turn", marks=pytest.mark.slow)])
def test_zoo_every_pair_is_proven_or_rejected_by_name(
    shared: Path, turn_end: str, record_property: pytest.RecordProperty
) -> None:
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    table: list[str] = []
    for path in zoo(shared):
        source = path.read_text()
        renderer = Renderer(ChatSpec(date=DATE, turn_end=turn_end), source, SPECIAL)
        template = ReferenceTemplate(source, SPECIAL, DATE)
        line = []
        for case, (messages, tools) in CASES.items():
            text = accepts(template, case)
            row = {"messages": messages, "tools": tools}
            result = renderer.render([row, row])  # learned from the first, compared for the second
            if text is None:
                outcomes["refused by the template"] += 1
                assert {error.reason for *_, error in result.rejected} == {"template_error"}
                continue
            if result.rejected:
                reason = result.rejected[0][2].reason
                outcomes[reason] += 1
                line.append(f"{case}: {reason}")
                assert reason in ("template_drops_content", "mask_unproven"), (path.name, case)
                continue
            outcomes["proven"] += 1
            assert result.texts == [text, text], (path.name, case)
            assert result.spans[0] == result.spans[1]
            assert result.turns[0] == result.turns[1]
            assert result.turns[0][-1][1] == len(text)
            spans = result.spans[0]
            assert spans is not None
            found = complaints(
                messages, text, spans, says_itself=bool(GENERATION_TAG.search(source))
            )
            if turn_end == "turn":
                found = [f for f in found if "closer" not in f]
            wrong += [f"{path.name} × {case}: {complaint}" for complaint in found]
        table.append(f"{path.name:<56} {'; '.join(line) or 'all proven'}")
    record_property("outcomes", dict(outcomes))
    print("\n".join(table), f"\n{dict(outcomes)}")
    assert wrong == [], "\n".join(wrong)
    accepted = sum(outcomes.values()) - outcomes["refused by the template"]
    assert outcomes["proven"] >= 0.9 * accepted, outcomes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_zoo_fast_engine_equals_reference(shared: Path) -> None:
    fast = 0
    for path in zoo(shared):
        source = path.read_text()
        slow = Renderer(ChatSpec(date=DATE), source, SPECIAL, fast=False)
        quick = Renderer(ChatSpec(date=DATE), source, SPECIAL)
        rows = [{"messages": m, "tools": t} for m, t in CASES.values()] * 3
        expected, got = slow.render(rows), quick.render(rows)
        fast += got.notes["renderer"] == "minijinja"
        assert got.texts == expected.texts
        assert got.spans == expected.spans
        assert got.turns == expected.turns
        assert got.source == expected.source
        assert [(i, p, e.reason) for i, p, e in got.rejected] == [
            (i, p, e.reason) for i, p, e in expected.rejected
        ]
    assert fast >= 30  # most templates do run fast; the rest is merely slower
