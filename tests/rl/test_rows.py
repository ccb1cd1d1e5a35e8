"""expand="append": rows as rollouts of the same conversations have them, each turn trained once.

They are compared with the oracle of `rollouts`, and with a bridge that samples their tokens.
"""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.chat.conversations import ODD
from tests.chat.templates import ALL, CHATML, HABITS, THINKING
from tests.rl.rollouts import Play, check_rows, renderer_of, tokenizer_of
from tokenmill.chat import ChatSpec


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_rows_of_every_template_are_rollouts(renderer: str) -> None:
    judged = 0
    for number, (name, source) in enumerate({**ALL, **HABITS}.items()):
        rows = dict(list(ODD.items())[number % 8 :: 8])
        rows = {case: row for case, row in rows.items() if "long" not in case}
        play = Play(name, source)
        judged += check_rows(play, renderer_of(name, source, renderer), rows)
        assert not play.wrong, "\n".join(play.wrong)
    assert judged > 100


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
        runs = groupby(zip(row.loss_mask, row.input_ids, strict=True), key=itemgetter(0))
        found.append([tokenizer.decode(number for _, number in run) for bit, run in runs if bit])
    return found


def test_each_turn_is_trained_once_with_its_thinking(tmp_path: Path) -> None:
    store = prepare(tmp_path, THINKING, TALK)
    assert [row.part for row in store] == [0, 1]
    assert shown(store, THINKING) == [
        ["Hm, one.\n</think>\n\nFirst.<|im_end|>"],
        ["Hm, two.\n</think>\n\nSecond.<|im_end|>"],
    ]
    assert (len(store), store.rejected) == (2, {})


@pytest.mark.parametrize("rows", [[{"x": 1}], [{"x": 1}, {"messages": PLAIN}]])
def test_invalid_row_is_rejected_at_any_position(rows: list[Any]) -> None:
    rendering = renderer_of("chatml", CHATML, "auto").render(rows)
    assert [(row, part, error.reason) for row, part, error in rendering.rejected] == [
        (0, 0, "bad_shape")
    ]
    assert rendering.source == [1] * (len(rows) - 1)


def test_turns_that_continue_one_another_are_one_row(tmp_path: Path) -> None:
    store = prepare(tmp_path, CHATML, PLAIN)
    assert shown(store, CHATML) == [["First.<|im_end|>", "Second.<|im_end|>"]]
    assert store[0].input_ids[-1] == tokenizer_of(CHATML).reference.token_to_id("<|im_end|>")


def test_turn_without_a_generation_prompt_is_rejected_with_both_texts(
    tmp_path: Path,
) -> None:
    template = HABITS["newline before the prompt"]
    with pytest.raises(tm.errors.RowError, match="is not a generation prompt") as caught:
        prepare(tmp_path, template, PLAIN, max_rejected=0)
    assert caught.value.reason == "mask_unproven"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"turn_end": "turn"}, "end-of-turn"),
        ({"train_on": "everything"}, "cannot be combined"),
        ({"format": "text"}, "needs conversations"),
        ({"format": "preference"}, "groups of answers"),
    ],
)
def test_conflicting_options_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(tm.errors.UsageError, match=words):
        ChatSpec(expand="append", **options)
