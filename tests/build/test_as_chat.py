"""Prompts and answers that are plain strings: without a template, or as messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import TOKENIZER, prepare, run
from tokenmill.errors import SourceError

PROMPT, GOOD, BAD = "Say hi.", "Hi.", "No."
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # strings, and the same as messages
    "pair": (
        {"prompt": PROMPT, "completion": GOOD},
        {
            "prompt": [{"role": "user", "content": PROMPT}],
            "completion": [{"role": "assistant", "content": GOOD}],
        },
    ),
    "preference": (
        {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD},
        {
            "prompt": [{"role": "user", "content": PROMPT}],
            "chosen": [{"role": "assistant", "content": GOOD}],
            "rejected": [{"role": "assistant", "content": BAD}],
        },
    ),
    "kto": (
        {"prompt": PROMPT, "completion": GOOD, "label": True},
        {
            "prompt": [{"role": "user", "content": PROMPT}],
            "completion": [{"role": "assistant", "content": GOOD}],
            "label": True,
        },
    ),
    "ranked": (
        {"prompt": PROMPT, "responses": [GOOD, BAD], "system": "Be brief."},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": PROMPT},
            ],
            "responses": [GOOD, BAD],
        },
    ),
}


def tokens(store: tm.Store) -> list[Any]:
    return [(row.input_ids.tolist(), row.loss_mask.tolist()) for row in store]


@pytest.mark.parametrize("name", ROWS)
def test_strings_as_chat_are_user_and_assistant_messages(name: str, tmp_path: Path) -> None:
    strings, messages = ROWS[name]
    given = {"cache_dir": tmp_path, "format": "ranked" if name == "ranked" else "auto"}
    plain = prepare([strings], **given)
    chat = prepare([strings], as_chat=True, **given)
    assert tokens(chat) == tokens(prepare([messages], **given)) != tokens(plain)
    assert plain.tokenizer.decode(plain[0].input_ids.tolist()).startswith(PROMPT)


def test_rows_without_a_template_are_counted_in_the_summary(tmp_path: Path) -> None:
    rows = [strings for strings, _ in ROWS.values()] + [{"text": "abc"}, ROWS["pair"][1]]
    remarks = list(run(rows, cache_dir=tmp_path).remarks())
    assert len([one for one in remarks if one.startswith("4 rows are plain strings: ")]) == 1
    assert "--as-chat" in remarks[0]
    assert not list(run(rows, cache_dir=tmp_path, as_chat=True).remarks())


def test_lint_says_that_the_template_is_not_applied(tmp_path: Path) -> None:
    rows = [ROWS["pair"][0], ROWS["pair"][1], ROWS["preference"][0]]
    given = {"cache_dir": tmp_path, "tokenizer_backend": "file", "executor": "inline"}

    def found(**options: Any) -> list[int]:
        report = tm.lint(rows, str(TOKENIZER), **given, **options)
        return [
            place.row
            for finding in report.findings
            if finding.rule == "plain_strings"
            for place in finding.places
        ]

    assert found() == [0, 2]
    assert found(as_chat=True) == []


def test_strings_as_chat_need_a_prompt(tmp_path: Path) -> None:
    rows = [{"chosen": "One two", "rejected": "One three"}]
    assert len(prepare(rows, cache_dir=tmp_path)) == 2
    with pytest.raises(SourceError, match="no column 'prompt' in this row"):
        prepare(rows, cache_dir=tmp_path, as_chat=True)
