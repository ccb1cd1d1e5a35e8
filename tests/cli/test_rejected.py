"""What `prepare` says about rejected rows, and the file with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.build.making import conversation, conversations, write_rows
from tests.cli.harness import QUICK, Shell
from tokenmill.inspect.rejected import rejected_by_file
from tokenmill.store import Store


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{n}?"} for n, role in enumerate(roles)]}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    good = [*conversations(5), turns("user", "assistant", "user"), {"messages": 7}]
    bad = [turns("user", "assistant", "user")] * 3
    return [write_rows(tmp_path / "some.jsonl", good), write_rows(tmp_path / "all.jsonl", bad)]


def test_summary_counts_rejected_rows_by_reason_and_file(shell: Shell, sources: list[Path]) -> None:
    some, every = sources
    answer = shell("prepare", *sources, *QUICK)
    lines = [line.strip() for line in answer.err.splitlines()]
    assert lines[0].startswith("5 rows, ")
    assert lines[1] == "5 of 10 rows rejected (50.0%):"
    assert lines[2] == "4  trailing_user  --trailing trim drops the last turn and keeps the row"
    assert lines[3] == f"{every}: 3 of 3 rejected"
    assert lines[4].startswith(f"{every}:1: turn 2: the conversation ends with a user turn")
    assert lines[5] == f"{some}: 1 of 7 rejected"
    assert lines[7].startswith("1  bad_shape      set --format or --column")
    assert f"next: tokenmill inspect {answer.out.strip()}" in lines
    assert "add --rejected FILE to write all rejected rows" in lines


def test_counts_by_file_add_up(sources: list[Path], shell: Shell) -> None:
    # One file twice is one file with the rows of both.
    store = Store(shell("prepare", *sources, sources[0], *QUICK, "--json").json["path"])
    found = rejected_by_file(store)
    counts = {reason: sum(file.count for file in files) for reason, files in found.items()}
    assert counts == store.rejected
    assert {(f.path, f.count, f.source_rows) for files in found.values() for f in files} == {
        (str(sources[0]), 2, 14), (str(sources[1]), 3, 3),
    }  # fmt: skip


def test_rejected_rows_are_written_with_reason_place_and_turn(
    shell: Shell, sources: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "rejected.jsonl"
    for _ in ("built", "a cache hit"):
        answer = shell("prepare", *sources, *QUICK, "--rejected", file)
        assert f"5 rejected rows written to {file}" in answer.err
        documents = [json.loads(line) for line in file.read_text().splitlines()]
        store = Store(answer.out.strip())
        assert [(d["path"], d["line"], d["reason"], d["detail"]) for d in documents] == [
            (origin.path, origin.line, reason, detail)
            for origin, reason, detail in store.rejected_rows()
        ]
    trailing, shape, *_ = documents
    assert (trailing["turn"], trailing["message"]) == (2, {"role": "user", "content": "2?"})
    assert (shape["turn"], shape["message"]) == (None, None)
    assert json.loads(shape["text"]) == {"messages": 7}
    refused = shell("prepare", *sources, *QUICK, "--rejected", tmp_path / "no" / "file")
    assert refused.code == 2
    assert "--rejected must be in a directory" in refused.err


@pytest.mark.parametrize("name", ["assitant", "Assistant"])
def test_misspelt_role_is_named(shell: Shell, tmp_path: Path, name: str) -> None:
    answered = turns("user", name, "user", "assistant")
    rows = [turns("user", name), answered, conversation(1), turns("user", "narrator", "assistant")]
    source = write_rows(tmp_path / "a.jsonl", rows)
    answer = shell("prepare", source, *QUICK)
    expected = f"turn 1 has the role '{name}'; did you mean 'assistant'?"
    assert f"{source}:1: no assistant turn of this row is trained; {expected}" in answer.err
    assert "note: 2 conversations have a role that is nearly" in answer.err
    found = shell("lint", source, *QUICK, "--json").json["findings"]
    [finding] = [finding for finding in found if finding["rule"] == "misspelt_role"]
    assert (finding["count"], finding["detail"]) == (2, expected)


def test_message_that_cannot_be_read_is_named_by_its_turn(shell: Shell, tmp_path: Path) -> None:
    rows = [
        {"messages": [*conversation(1)["messages"], {"content": "x"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "robot", "value": "b"}]},
    ]
    source = write_rows(tmp_path / "a.jsonl", [*rows, conversation(2)])
    store = Store(shell("prepare", source, *QUICK).out.strip())
    first, second = (detail for _, _, detail in store.rejected_rows())
    assert first.startswith("turn 2: a message has no role")
    assert second.startswith("turn 1: a turn is from 'robot'")


def test_summary_is_coloured_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, shell: Shell, sources: list[Path]
) -> None:
    assert "\x1b[" not in shell("prepare", *sources, *QUICK).err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32m5 rows" in shell("prepare", *sources, *QUICK).err
