"""Every stored template × conversations: ids as the whole render has them, or a refusal.

The bridge's ids, and the rows of ``expand="append"``. `make test` takes a seeded sample of the
pairs and random conversations under templates of our own, `make soak` all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conversations import ODD, TOOLS, corpus_rows, zoo
from tests.chat.templates import ALL, HABITS
from tests.rl.rollouts import Play, check_rows, renderer_of
from tokenmill.tokenizers.loading import load

TEMPLATES, ROWS = 16, 9  # of each, `make test` plays one in so many
SHORT = {case: row for case, row in ODD.items() if "long" not in case}
CORPORA = ("drone_tool_calls", "glaive_tools_sharegpt", "tau_bench_trajectories", "think_traces",
           "reason_tool_use", "smilechat_zh")  # fmt: skip


def judge(
    templates: Mapping[str, str], rows: Callable[[int], dict[str, Any]], equal: int, refused: int
) -> None:
    plays = []
    judged = 0
    for number, (name, source) in enumerate(templates.items()):
        plays.append(play := Play(name, source))
        play.rows(rows(number))
        judged += check_rows(play, renderer_of(name, source), rows(number))
    wrong = [report for play in plays for report in play.wrong]
    counts = sum((play.counts for play in plays), Counter[str]())
    print(f"{len(plays)} templates, {judged} rows of expand=append, {dict(counts)}")
    assert not wrong, f"{len(wrong)} wrong, {dict(counts)}\n" + "\n".join(wrong[:30])
    assert counts["message equal"] >= equal, counts
    assert counts["text equal"] >= 0.9 * counts["message equal"], counts
    assert counts["message refused"] >= refused, counts
    assert counts["append-only True"] >= equal / 2
    assert counts["append-only unknown"] <= 0.1 * counts["append-only True"]
    assert judged >= equal / 2


def test_zoo_continues_as_printed_or_raises(shared: Path) -> None:
    rows = list(SHORT.items())
    some = {n: source for n, source in zoo(shared).items() if crc32(n.encode()) % TEMPLATES == 1}
    judge(some, lambda number: dict(rows[number % ROWS :: ROWS]), equal=30, refused=10)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_whole_zoo_continues_as_printed_or_raises(shared: Path) -> None:
    rows: dict[str, Any] = dict(SHORT)
    for corpus in CORPORA:
        for number, row in enumerate(corpus_rows(shared, corpus, 4)):
            rows[f"{corpus} {number}"] = row
    judge(zoo(shared), lambda _: rows, equal=4000, refused=1500)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_real_tokenizers_continue_as_printed(shared: Path) -> None:
    """Their own templates, special tokens and seams: bytes, metaspace, tokens that strip."""
    plays = []
    for place in sorted((shared / "tokenizers").glob("*/chat_template.jinja")):
        tokenizer = load(place.parent / "tokenizer.json", chat_template=place)
        if "plain" not in tokenizer.table.spelling:
            plays.append(play := Play(place.parent.name, place.read_text("utf-8"), tokenizer))
            play.rows(SHORT)
    wrong = [report for play in plays for report in play.wrong]
    print(f"{len(plays)} tokenizers, {dict(sum((play.counts for play in plays), Counter()))}")
    assert not wrong, "\n".join(wrong[:30])
    assert sum(play.counts["message equal"] for play in plays) > 400


OWN = {name: Play(f"own/{name}", source) for name, source in {**ALL, **HABITS}.items()}
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["Hello.", " spaced \n", "", "<|im_end|>", "<think>\nHm.\n</think>\n\nYes.", "你好 👋🏽",
         "<tool_call>{}</tool_call>", "</think>x", "\n\n", "<|end|> and on", "a<b>c"]
    ),
)  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(TEXTS)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(TEXTS)})
    for number in range(draw(st.integers(1, 3))):
        turn: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            turn["reasoning_content"] = draw(TEXTS)
        if draw(st.booleans()):
            function = {"name": "get_weather", "arguments": {"city": draw(TEXTS)}}
            turn["tool_calls"] = [{"id": f"call{number:05}", "type": "function"}]
            turn["tool_calls"][0]["function"] = function
            answer = {"role": "tool", "name": "get_weather", "tool_call_id": f"call{number:05}"}
        else:
            answer = {"role": draw(st.sampled_from(["user", "tool"]))}
        messages += [turn, {**answer, "content": draw(TEXTS)}]
    return messages


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=12)
@given(messages=conversations(), tools=st.sampled_from([None, TOOLS]))
def test_random_conversations_continue_as_printed_or_raise(
    name: str, messages: list[dict[str, Any]], tools: Any
) -> None:
    play = OWN[name]
    play.wrong.clear()
    play.conversation("random", messages, tools)
    assert not play.wrong, "\n".join(play.wrong)
