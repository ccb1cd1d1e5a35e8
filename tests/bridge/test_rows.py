"""expand="append": rows as rollouts of the same conversations have them, each turn trained once.

Two judges. The oracle of `rollouts` says from plain renders which turns one text can hold and what
that text is; and a bridge that is given each row's trained tokens as samples must make the row.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tokenmill as tm
from tests.bridge.rollouts import Play, Step, steps, talk_of, tokenizer_of
from tests.chat.conversations import DATE, ODD, SPECIAL, VARIABLES, zoo
from tests.chat.loop_oracle import Refused
from tests.chat.templates import ALL, CHATML, HABITS, THINKING
from tokenmill.chat import ChatSpec, Renderer, Rendering

SHORT = {case: row for case, row in ODD.items() if "long" not in case}
SHARE = 16


def renderer_of(name: str, source: str, renderer: str = "auto") -> Renderer:
    spec = ChatSpec(date=DATE, expand="append", template_kwargs=VARIABLES.get(name))
    return Renderer(spec, source, SPECIAL, renderer=renderer)


def stretches(turns: list[Step]) -> list[list[Step]]:
    """The turns that one text holds, by the plain renders."""
    held: list[list[Step]] = []
    for step in turns:
        if held and step.prompt.startswith(held[-1][-1].stands):
            held[-1].append(step)
        else:
            held.append([step])
    return held


def trained(made: Rendering) -> list[str]:
    """What is trained, stretch by stretch."""
    pairs = zip(made.texts, made.spans, strict=True)
    return [text[start:end] for text, spans in pairs for start, end in spans or ()]


def judge_rows(play: Play, renderer: Renderer, rows: dict[str, Any]) -> int:
    """Compare every row of every conversation with both judges; how many rows there were."""
    judged = 0
    turns_spec = msgspec.structs.replace(renderer.spec, expand="turns")
    by_turns = Renderer(turns_spec, play.template.source, SPECIAL)
    for case, row in rows.items():
        found = talk_of(row)
        if found is None or found[0][-1]["role"] != "assistant" or "train" in case:
            continue
        try:
            turns = list(steps(play.template, *found))
        except Refused:
            continue
        made = renderer.render([row])
        if made.rejected or found[0][0]["role"] == "assistant" or case == "weights":
            continue  # what is lost or unproven is judged in tests/chat
        where = f"{play.name} × {case}"
        assert all(step.opens for step in turns), where
        held = stretches(turns)
        assert trained(made) == trained(by_turns.render([row])), where
        if play.template.says_itself:
            continue  # its author says where a turn ends
        assert made.texts == [members[-1].stands for members in held], where
        assert made.spans == [
            [(len(step.prompt), len(step.stands)) for step in members] for members in held
        ], where
        for text, members in zip(made.texts, held, strict=True):
            roll(play, where, text, members, *found)
            judged += 1
    return judged


def roll(
    play: Play, where: str, text: str, members: list[Step], messages: list[Any], tools: Any
) -> None:
    """Let the bridge go through a row's turns, with the row's own tokens as samples."""
    whole = play.encode(text)
    play.bridge.forget()
    ids = play.bridge.prompt(messages[: members[0].turn], tools)
    for step, following in pairwise(members):
        place = play.boundary(text, len(step.stands))
        if place is None or whole[: len(ids)] != ids:
            return  # a token lies across the seam
        answer = messages[step.turn + 1 : following.turn]
        ids = play.bridge.extend(whole[:place], answer, sampled=messages[step.turn])
        if play.boundary(text, len(following.prompt)) is not None:
            assert whole[: len(ids)] == ids, where


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_rows_of_every_habit_are_rollouts(renderer: str) -> None:
    judged = 0
    for number, (name, source) in enumerate({**ALL, **HABITS}.items()):
        rows = dict(list(SHORT.items())[number % 4 :: 4])
        judged += judge_rows(Play(name, source), renderer_of(name, source, renderer), rows)
    assert judged > 200


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_of_the_zoo_are_rollouts(shared: Path) -> None:
    judged = 0
    for number, (name, source) in enumerate(zoo(shared).items()):
        rows = dict(list(SHORT.items())[number % SHARE :: SHARE])
        judged += judge_rows(Play(name, source), renderer_of(name, source), rows)
    assert judged > 250


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_rows_of_the_whole_zoo_are_rollouts(shared: Path) -> None:
    for name, source in zoo(shared).items():
        judge_rows(Play(name, source), renderer_of(name, source), SHORT)


TALK = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First.", "reasoning_content": "Hm, one."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second.", "reasoning_content": "Hm, two."},
]
PLAIN = [{"role": turn["role"], "content": turn["content"]} for turn in TALK]


def prepare(tmp_path: Path, template: str, talk: list[Any], **options: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    tokenizer = tokenizer_of(template).reference
    return tm.prepare(
        tmp_path / "rows.jsonl", tokenizer, chat_template=template, expand="append",
        num_workers=0, **options,
    )  # fmt: skip


def shown(store: Any, template: str) -> list[list[str]]:
    """Per row, its trained stretches as text."""
    tokenizer = tokenizer_of(template)
    found = []
    for row in store:
        runs: list[list[int]] = []
        for before, mask, number in zip(
            [0, *row.loss_mask], row.loss_mask, row.input_ids, strict=False
        ):
            if mask and not before:
                runs.append([])
            if mask:
                runs[-1].append(int(number))
        found.append([tokenizer.decode(run) for run in runs])
    return found


def test_each_turn_is_trained_once_with_its_thinking(tmp_path: Path) -> None:
    store = prepare(tmp_path, THINKING, TALK)
    assert [row.part for row in store] == [0, 1]
    assert shown(store, THINKING) == [
        ["Hm, one.\n</think>\n\nFirst.<|im_end|>"],
        ["Hm, two.\n</think>\n\nSecond.<|im_end|>"],
    ]
    assert (len(store), store.rejected) == (2, {})


def test_turns_that_go_on_are_one_row(tmp_path: Path) -> None:
    store = prepare(tmp_path, CHATML, PLAIN)
    assert shown(store, CHATML) == [["First.<|im_end|>", "Second.<|im_end|>"]]
    assert store[0].input_ids[-1] == tokenizer_of(CHATML).reference.token_to_id("<|im_end|>")


def test_turn_that_no_model_would_be_prompted_for_is_rejected_with_both_texts(
    tmp_path: Path,
) -> None:
    template = HABITS["newline before the prompt"]
    with pytest.raises(tm.RowError, match="no model would be given") as caught:
        prepare(tmp_path, template, PLAIN, on_bad_row="raise")
    assert caught.value.reason == "mask_unproven"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"turn_end": "turn"}, "end-of-turn"),
        ({"train_on": "everything"}, "choose one"),
        ({"format": "text"}, "needs conversations"),
        ({"format": "preference"}, "choose one"),
    ],
)
def test_options_that_contradict_it_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(tm.UsageError, match=words):
        ChatSpec(expand="append", **options)
