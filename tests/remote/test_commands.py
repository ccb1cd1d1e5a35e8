"""Tests of `tokenmill push`, `pull` and of commands that read a remote store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.build.making import conversations, write_rows
from tests.cli.harness import QUICK, Shell
from tests.remote.servers import RangeServer
from tests.sources.make import as_lines as lines
from tokenmill import open_store
from tokenmill.errors import SourceMissing
from tokenmill.inspect.page.serve import Viewer
from tokenmill.sources import discover

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
    assert json.dumps(answer.error["message"]).count("contains store") == 1


@pytest.mark.parametrize("named", ["http", "hub", "hub url"])
def test_inspecting_a_store_fetches_no_url_of_it_unless_allowed(
    shell: Shell, web: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """A store may be untrusted, and its proof may name any URL."""
    (web.root / "rows.jsonl").write_bytes(b'{"messages": 7}\n' + lines(conversations(3)))
    url = web.url("rows.jsonl")
    made = shell("prepare", url, *QUICK).out.strip()
    asked: list[str] = []

    def hub_commit(name: str, *arguments: object) -> None:
        asked.append(name)
        raise SourceMissing("not there", path=name)

    monkeypatch.setattr(discover, "hub_commit", hub_commit)
    if named != "http":
        proof = Path(made) / "proof.json"
        other = "evil/data:train" if named == "hub" else "hf://datasets/evil/data/x.jsonl"
        proof.write_bytes(proof.read_bytes().replace(url.encode(), other.encode()))
    web.reset()
    page = tmp_path / "page.html"
    looks = (["--html", page], ["--rule", "rejected"], ["--origin", f"{Path(url).name}:1"])
    for flags in looks if named == "http" else looks[:2]:
        assert shell("inspect", made, *flags).code == 0
        assert (web.requests, asked) == ([], []), flags
        monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / f"cache{len(flags[0])}"))
        allowed = shell("inspect", made, *flags, "--fetch-sources")
        assert allowed.code == 0
        assert web.requests if named == "http" else asked
        web.reset()
        asked.clear()
    shown = shell("inspect", made, "--rule", "rejected", "--json").json["rows"][0]["raw"]
    assert shown["text"] is None
    assert "--fetch-sources" in shown["note"]
    if named == "http":
        flags = ("--rule", "rejected", "--fetch-sources", "--json")
        assert shell("inspect", made, *flags).json["rows"][0]["raw"]["text"] == '{"messages": 7}'
        viewer = Viewer(open_store(made))
        web.reset()
        for raw in (viewer.raw, viewer.rejected_raw):
            assert raw({"number": "0"})["text"] is None
        assert web.requests == []
