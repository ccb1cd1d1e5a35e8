"""`tokenmill push`, `pull` and the reading commands on a store elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.build.making import conversations, write_rows
from tests.cli.harness import QUICK, Shell
from tokenmill import open_store

KEYS = {"path", "rows", "bytes"}


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def test_store_is_prepared_pushed_read_and_pulled_by_commands(
    shell: Shell, s3: str, tmp_path: Path
) -> None:
    chat = write_rows(tmp_path / "chat.jsonl", conversations(20))
    made = shell("prepare", chat, *QUICK, "--json").json
    pushed = shell("push", made["path"], f"{s3}/chat", "--json")
    assert pushed.code == 0
    assert set(pushed.json) >= KEYS
    assert (pushed.json["path"], pushed.json["rows"]) == (f"{s3}/chat", 20)
    assert pushed.json["bytes"] > 0
    assert shell("push", made["path"], f"{s3}/chat").out.strip() == f"{s3}/chat"
    for command in ("verify", "stats", "inspect"):
        assert shell(command, f"{s3}/chat", "--json").code == 0
    assert shell("verify", f"{s3}/chat", "--json").json["ok"]
    pulled = shell("pull", f"{s3}/chat", "--out", tmp_path / "out", "--json").json
    assert set(pulled) >= KEYS
    assert pulled["path"] == str(tmp_path / "out")
    assert len(open_store(pulled["path"])) == 20
    parts = shell("cache", "list", "--json").json["parts"]
    assert parts["blocks"] > 0


def test_failures_of_push_and_pull_have_their_codes(shell: Shell, s3: str, tmp_path: Path) -> None:
    chat = write_rows(tmp_path / "chat.jsonl", conversations(20))
    made = shell("prepare", chat, *QUICK, "--json").json
    assert shell("pull", f"{s3}/nothing", "--json").error["type"] == "SourceMissing"
    assert shell("push", made["path"], "https://127.0.0.1:1/x", "--json").code == 2
    assert shell("push", made["path"], "nonsense://x/y", "--json").code == 2
    assert shell("push", made["path"], f"{s3}/chat").code == 0
    other = write_rows(tmp_path / "other.jsonl", conversations(5))
    second = shell("prepare", other, *QUICK, "--json").json
    answer = shell("push", second["path"], f"{s3}/chat", "--json")
    assert answer.code == 1
    assert answer.error["type"] == "CacheError"
    assert json.dumps(answer.error["message"]).count("holds store") == 1
