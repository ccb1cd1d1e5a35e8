"""`columns` maps roles to the columns of rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import prepare, write_rows
from tests.data.making import open_prompts
from tokenmill.data import prompt_lengths
from tokenmill.errors import UsageError
from tokenmill.integrations.miles import MILES

TALK = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi."}]
PAIR = {"prompt": "Say hi. ", "chosen": "Hi.", "rejected": "No."}


def rows_of(store: tm.Store) -> list[Any]:
    return [(row.input_ids.tolist(), row.weights.tolist()) for row in store]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK, "tools": [{"name": "f", "parameters": {}}], "system": "Be brief."},
        {"messages": TALK, "weight": 0.5},
        {"text": "Just a text."},
        {"prompt": "Say hi. ", "completion": "Hi."},
        {"prompt": "Say hi. ", "completion": "Hi.", "label": False},
        PAIR,
    ],
    ids=lambda row: "+".join(row),
)
def test_mapped_columns_give_the_rows_of_the_default_names(row: Any, tmp_path: Path) -> None:
    expected = prepare(write_rows(tmp_path / "a.jsonl", [row]))
    renamed = write_rows(tmp_path / "b.jsonl", [{f"my {role}": row[role] for role in row}])
    columns = {role: f"my {role}" for role in row}
    assert rows_of(prepare(renamed, columns=columns)) == rows_of(expected)
    assert prepare(tmp_path / "a.jsonl", columns={"text": "text"}).key == expected.key


def test_column_mapped_to_none_is_ignored(tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "a.jsonl", [{"messages": TALK}])
    more = write_rows(tmp_path / "b.jsonl", [{"messages": TALK, "system": "S", "weight": 7}])
    ignored = prepare(more, columns={"system": None, "weight": None})
    assert rows_of(ignored) == rows_of(prepare(plain)) != rows_of(prepare(more))
    pair = write_rows(tmp_path / "c.jsonl", [{**PAIR, "completion": "Hi."}])
    assert len(prepare(pair, columns={"chosen": None})) == 1


def test_unknown_role_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown roles .*mesages \(did you mean messages\?\)"):
        tm.Recipe("a.jsonl", "t", columns={"mesages": "chat"})


def test_column_that_the_first_rows_lack_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["{", {"chat": TALK, "id": 1}])
    with pytest.raises(UsageError, match=r"'talk' for the role 'messages'.* chat, id") as caught:
        prepare(source, columns={"messages": "talk"})
    assert caught.value.path == str(source)
    with caplog.at_level(logging.WARNING, "tokenmill.build"):
        store = prepare(source, columns={"messages": "chat", "tools": "functions"})
    assert len(store) == 1
    assert "'functions' for the role 'tools'" in caplog.text
    other = write_rows(tmp_path / "b.jsonl", [{"body": "A text."}])
    assert len(prepare([source, other], columns={"messages": "chat", "text": "body"})) == 2


def test_prompt_key_that_the_first_rows_lack_raises_before_rows_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"question": "Why?"}] * 3)
    monkeypatch.setattr(prompt_lengths, "_Build", None)
    with pytest.raises(UsageError, match=r"prompt_key='text' names a column .* are question"):
        open_prompts(source, cache_dir=tmp_path / "cache")
    with pytest.raises(UsageError, match=r"label_key='answer' names a column .* are question"):
        open_prompts(source, prompt_key="question", label_key="answer", cache_dir=tmp_path)


def test_optional_columns_that_the_first_prompts_lack_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"text": "Why?", "tools": []}])
    given = {"multimodal_keys": {"image": "photos"}, "cache_dir": tmp_path / "cache"}
    with caplog.at_level(logging.WARNING, "tokenmill.data"):
        assert len(open_prompts(source, tool_key="tols", **given)) == 1
    assert [record.getMessage().partition("names")[0] for record in caplog.records] == [
        f"{source}: multimodal_keys='photos' ", f"{source}: tool_key='tols' ",
    ]  # fmt: skip
    caplog.clear()
    open_prompts(source, tool_key="tools", cache_dir=tmp_path / "cache")
    open_prompts(source, tool_key="tols", convention=MILES, cache_dir=tmp_path / "cache")
    assert not caplog.records
