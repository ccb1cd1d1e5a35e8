"""The bundled rows: whole conversations of every kind, and written by the script beside them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = PROJECT / "src" / "tokenmill" / "examples"
FILES = ("conversations.jsonl", "dirty.jsonl", "prompts.jsonl")


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / name).read_bytes().split(b"\n") if line]


@pytest.fixture(scope="module")
def conversations() -> list[dict[str, Any]]:
    return rows_of("conversations.jsonl")


def test_rows_written_again_are_the_same_bytes(tmp_path: Path) -> None:
    script = PROJECT / "scripts" / "make_examples.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes(), name


def test_conversations_are_whole_and_end_with_the_assistant(
    conversations: list[dict[str, Any]],
) -> None:
    assert len({row["id"] for row in conversations}) == len(conversations) == 300
    for row in conversations:
        turns = row["messages"]
        roles = [turn["role"] for turn in turns if turn["role"] != "system"]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert turns[-1]["content"].strip()
        assert "system" not in [turn["role"] for turn in turns[1:]]
        # A role follows itself only where several tools answer at once.
        assert all(a != b or a == "tool" for a, b in itertools.pairwise(roles)), row


def test_tool_results_answer_the_calls_before_them(conversations: list[dict[str, Any]]) -> None:
    calls = 0
    for row in conversations:
        offered = {tool["function"]["name"] for tool in row.get("tools", ())}
        open_calls: dict[str, str] = {}
        for turn in row["messages"]:
            if turn["role"] == "tool":
                assert open_calls.pop(turn["tool_call_id"]) == turn["name"]
                continue
            assert not open_calls, f"{row['id']}: a call was never answered"
            for call in turn.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                assert isinstance(
                    json.loads(arguments) if isinstance(arguments, str) else arguments, dict
                )
                assert call["function"]["name"] in offered
                open_calls[call["id"]] = call["function"]["name"]
                calls += 1
        assert not open_calls
    assert calls > 50


def test_conversations_hold_every_kind_the_demo_shows(conversations: list[dict[str, Any]]) -> None:
    kinds: Counter[str] = Counter()
    for row in conversations:
        turns = row["messages"]
        text = json.dumps(turns, ensure_ascii=False)
        calls = [call for turn in turns for call in turn.get("tool_calls", ())]
        spelled = {type(call["function"]["arguments"]).__name__ for call in calls}
        kinds.update({f"arguments as {kind}" for kind in spelled})
        thought = [
            i for i, t in enumerate(turns) if "<think>" in t["content"] or "reasoning_content" in t
        ]
        kinds["system"] += turns[0]["role"] == "system"
        kinds["single turn"] += len(turns) == 2
        kinds["several turns"] += [t["role"] for t in turns].count("user") > 1
        kinds["tools, none called"] += bool(row.get("tools")) and not calls
        kinds["several calls at once"] += any(len(t.get("tool_calls", ())) > 1 for t in turns)
        kinds["thinking inline"] += "<think>" in text
        kinds["thinking apart"] += "reasoning_content" in text
        kinds["thinking in the history"] += bool(thought) and thought[0] < len(turns) - 1
        kinds["thinking before a call"] += any(
            "reasoning_content" in t and "tool_calls" in t for t in turns
        )
        kinds["code"] += "```" in text
        for script, low, high in (
            ("Chinese", "\u4e00", "\u9fff"), ("Arabic", "\u0600", "\u06ff"),
            ("Cyrillic", "\u0400", "\u04ff"), ("Devanagari", "\u0900", "\u097f"),
            ("kana", "\u3040", "\u30ff"), ("emoji", "\U0001f300", "\U0001faff"),
        ):  # fmt: skip
            kinds[script] += any(low <= letter <= high for letter in text)
        kinds["ß"] += "ß" in text
    assert min(kinds.values()) >= 2, kinds


def test_dirty_holds_good_rows_among_bad_ones() -> None:
    lines = (EXAMPLES / "dirty.jsonl").read_text(encoding="utf-8").splitlines()
    parsed: list[Any] = []
    for line in lines:
        try:
            parsed.append(json.loads(line)["messages"])
        except json.JSONDecodeError:
            parsed.append("not JSON")
    ends = [(t[0]["role"], t[-1]["role"]) for t in parsed if isinstance(t, list)]
    assert ends.count(("user", "assistant")) == 2
    assert len(lines) == 6
    assert "not JSON" in parsed


def test_prompts_have_text_label_and_metadata() -> None:
    prompts = rows_of("prompts.jsonl")
    assert len(prompts) == 50
    assert [prompt["metadata"]["number"] for prompt in prompts] == list(range(50))
    for prompt in prompts:
        assert set(prompt) == {"text", "label", "metadata"}
        assert int(prompt["label"]) > 0


def test_numbers_in_the_rows_are_true(conversations: list[dict[str, Any]]) -> None:
    """Recompute the equations the rows state, so that a slip in the script cannot hide."""
    compute = ImmutableSandboxedEnvironment().compile_expression
    side = r"(\d[\d ()×*/+-]*(?<! ))"
    equations = 0
    for row in conversations:
        for turn in row["messages"]:
            text = f"{turn['content']} {turn.get('reasoning_content', '')}"
            for sides in re.findall(f"{side} = {side}", text):
                if any(part.count("(") != part.count(")") for part in sides):
                    continue
                left, right = (compute(part.replace("×", "*"))() for part in sides)
                assert left == right, (row["id"], sides)
                equations += 1
    assert equations > 80
