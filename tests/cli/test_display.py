"""Text output: correct tables, and no control characters from data."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.build.making import conversations, write_rows
from tests.cli.harness import QUICK, Shell
from tokenmill import open_store
from tokenmill.cli import main
from tokenmill.store import Store

HOSTILE = "a\x1b[31mred\x07\x9b2Jgone\u202eback\rover"


def control_characters(text: str) -> list[str]:
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_control_characters_of_data_are_escaped(shell: Shell, tmp_path: Path) -> None:
    row = conversations(1)[0]
    row["messages"][1]["content"] = HOSTILE
    row["note"] = HOSTILE
    answer = {"role": "assistant", "content": "y"}
    bad = {"messages": [{"role": f"narrator{HOSTILE[:20]}", "content": "x"}, answer]}
    source = write_rows(tmp_path / "hostile\x1b[2J.jsonl", [row, bad])
    prepared = shell("prepare", source, *QUICK, "--keep-columns", "note")
    assert prepared.code == 0
    assert "narrator" in prepared.err
    assert not control_characters(prepared.err)
    shown = shell("inspect", prepared.out.strip())
    assert "a␛[31mred␇" in shown.out
    assert not control_characters(shown.out)
    assert not control_characters(shell("stats", prepared.out.strip()).out)
    whole = shell("inspect", prepared.out.strip(), "--json")
    assert whole.json["extra"]["note"] == HOSTILE, "--json prints the unchanged text"


def test_characters_of_several_tokens_are_shown_whole(shell: Shell, tmp_path: Path) -> None:
    row = conversations(1)[0]
    row["messages"][1]["content"] = "は揺れ"
    prepared = shell("prepare", write_rows(tmp_path / "a.jsonl", [row]), *QUICK)
    path = prepared.out.strip()
    assert "⟦は揺れ<|im_end|>⟧" in shell("inspect", path).out
    shown = shell("inspect", path, "--json").json
    assert "は揺れ" in "".join(shown["pieces"])
    first = shown["pieces"].index("")  # of several tokens for a character
    ids = shown["ids"][: first + 1]
    cut = {"input_ids": ids, "loss_mask": [0] * first + [1]}
    prepared = shell(
        "prepare", write_rows(tmp_path / "b.jsonl", [cut]), *QUICK, "--format", "tokens"
    )
    assert re.search(r"⟦(\\x[0-9a-f]{2})+⟧", shell("inspect", prepared.out.strip()).out)


def test_control_characters_of_a_damaged_store_are_escaped(
    shell: Shell, store: Path, tmp_path: Path
) -> None:
    cache = shutil.copytree(store.parent.parent, tmp_path / "copy")
    manifest = cache / "stores" / store.name / "manifest.json"
    whole = manifest.read_bytes()
    at = whole.index(b'"digest":"') + len(b'"digest":"')
    manifest.write_bytes(whole[:at] + "\x9b2J\u202e".encode() + whole[at:])
    listed = shell("cache", "list", "--cache-dir", cache)
    assert "DAMAGED" in listed.out
    assert not control_characters(listed.out)
    manifest.write_bytes(whole[:-20])
    listed = shell("cache", "list", "--cache-dir", cache)
    assert (listed.code, "not a manifest" in listed.out) == (0, True)
    [entry] = shell("cache", "list", "--cache-dir", cache, "--json").json["entries"]
    assert "not a manifest" in entry["error"]


def test_long_detail_is_cut_to_a_line(shell: Shell, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "y"}
    bad = {"messages": [{"role": "narrator\n" * 90, "content": "x"}, answer]}
    source = write_rows(tmp_path / "long.jsonl", [*conversations(1), bad])
    lines = shell("prepare", source, *QUICK).err.splitlines()
    assert len(lines) == 7
    assert lines[4].endswith("…")


def test_stats_tables_show_the_numbers(shell: Shell, store: Path) -> None:
    out, opened = shell("stats", store).out, open_store(store)
    assert f"20 rows, {int(opened.lengths.sum()):,} tokens" in out
    assert "3 rejected" in out
    assert re.search(rf"^tokens .* {int(opened.lengths.max())}$", out, re.MULTILINE)
    assert re.search(r"^assistant +20 ", out, re.MULTILINE)
    assert re.search(r"chat\.jsonl +20 ", out)


def test_commands_accept_a_store_without_rows(shell: Shell, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "bad.jsonl", ["{"])
    path = shell("prepare", source, *QUICK, "--json").json["path"]
    assert "0 rows, 0 tokens" in shell("stats", path).out
    assert shell("stats", path, "--json").json["percentiles"] == {}
    assert shell("verify", path, "--json").json["ok"]
    assert shell("inspect", path, "--json").code == 2
    assert shell("stats", path, "--pack", "9", "--json").json["packing"][0]["packs"] == 0


def test_prepare_reports_trimmed_turns(shell: Shell, tmp_path: Path) -> None:
    turns = conversations(1)[0]["messages"]
    source = write_rows(tmp_path / "trim.jsonl", [{"messages": [*turns, turns[0]]}])
    trimmed = shell("prepare", source, *QUICK, "--trailing", "trim").err
    assert "1 conversations ended with a user turn" in trimmed
    rejected = shell("prepare", source, *QUICK).err
    assert "trailing_user" in rejected
    assert "note:" not in rejected


def test_prepare_reports_derived_slices_and_cache_hits(shell: Shell, chat: Path) -> None:
    assert "1 of 1 slices built" in shell("prepare", chat, *QUICK).err
    hit = shell("prepare", chat, *QUICK, "--json")
    limit = int(Store(hit.json["path"]).lengths.max()) - 1
    derived = shell("prepare", chat, *QUICK, "--max-length", str(limit)).err
    assert "0 of 1 slices built, 1 derived" in derived
    assert "cache hit in" in shell("prepare", chat, *QUICK).err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tokenmill pr", ["prepare", "prompts"]),
        ("tokenmill prepare --exec", ["--executor"]),
        ("tokenmill prepare --executor ", ["local", "inline", "ray"]),
        ("tokenmill prepare --overlong ", ["drop", "truncate"]),
        ("tokenmill export --mask la", ["labels"]),
    ],
)
def test_shell_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, offered: Any
) -> None:
    monkeypatch.setenv("_TOKENMILL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    with pytest.raises(SystemExit, match=r"^0$"):
        main([])
    assert capsys.readouterr().out.split() == offered


def test_serve_says_how_to_reach_the_page_from_another_machine(
    shell: Shell, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tokenmill.inspect.page.serve.serve",
        lambda viewer, port, ready: ready("http://127.0.0.1:4711/secret/", 4711),
    )
    answer = shell("inspect", store, "--serve")
    assert answer.out.strip() == "http://127.0.0.1:4711/secret/"
    assert re.search(r"^From another machine: ssh -L 4711:127\.0\.0\.1:4711 \S+$", answer.err, re.M)
