"""``tokenmill attach``, and what the other commands say of what is attached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import tokenmill as tm
from tests.cli.harness import Shell
from tests.inspect.page.test_document import data_of
from tokenmill import Store, open_store
from tokenmill.inspect.page.document import row_document
from tokenmill.inspect.row import RowFacts, store_tokenizer


@pytest.fixture
def own(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "own"))
    shutil.copytree(store.parent.parent, tmp_path / "cache")
    return open_store(tmp_path / "cache" / "stores" / store.name)


def tokens_of(store: Store) -> list[list[float]]:
    return [[row + place / 64 for place in range(n)] for row, n in enumerate(store.lengths)]


def test_arrays_and_lines_are_attached(shell: Shell, own: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.arange(20.0))
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, tokens_of(own))))
    said = shell("attach", own.path, "reward", tmp_path / "r.npy", "--made-by", "judge", "--json")
    assert said.code == 0, said.err
    assert said.json == {
        "path": str(own.sidecar("reward").path), "name": "reward", "made_by": "judge", "per": "row",
        "rows": 20, "bytes": 80,
    }  # fmt: skip
    line = ("attach", own.path, "ref", tmp_path / "t.jsonl", "--made-by", "m", "--per", "token")
    assert shell(*line).code == 0
    assert own.sidecar("reward").values.tolist() == list(range(20))
    assert own.sidecar("ref")[7].tolist() == tokens_of(own)[7]  # type: ignore[union-attr]
    np.save(tmp_path / "r.npy", np.arange(20.0) + 1)
    again = shell("attach", own.path, "reward", tmp_path / "r.npy", "--made-by", "judge", "--json")
    assert (again.code, again.error["type"]) == (1, "NonDeterminismError")


@pytest.mark.parametrize(
    ("text", "per", "message", "line"),
    [
        ("1\n2\nx\n", "row", "not a number", 3),
        ("1\n2\n", "row", "2 values for a store of 20 rows", None),
        ("[1, 2]\n", "token", "2 values for row 0, which has", 1),
        ("7\n", "token", "not a list of numbers", 1),
    ],
)
def test_bad_lines_are_told_with_their_place(
    shell: Shell, own: Store, tmp_path: Path, text: str, per: str, message: str, line: int | None
) -> None:
    (tmp_path / "v.jsonl").write_text(text)
    given = ("attach", own.path, "reward", tmp_path / "v.jsonl", "--made-by", "m", "--per", per)
    said = shell(*given, "--json")
    assert said.code == 2
    assert message in said.error["message"]
    assert said.error["line"] == line
    assert not own.sidecars


def test_files_that_are_none_are_refused(shell: Shell, own: Store, tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(b"no array")
    for name, kind in (("v.npy", "UsageError"), ("gone.npy", "SourceMissing")):
        said = shell("attach", own.path, "r", tmp_path / name, "--made-by", "m", "--json")
        assert said.error["type"] == kind


def test_stats_list_range_mean_and_what_is_missing(shell: Shell, own: Store) -> None:
    own.attach("reward", np.arange(20.0), made_by="judge")
    with tm.attach(own, "ref", made_by="m", per="token") as writer:
        writer.write(0, tokens_of(own)[0])
    done, waiting = shell("stats", own.path, "--json").json["sidecars"]
    assert done == {
        "name": "reward", "made_by": "judge", "per": "row", "bytes": 80, "low": 0.0, "high": 19.0,
        "mean": 9.5, "infinite": 0, "missing": 0,
    }  # fmt: skip
    assert (waiting["name"], waiting["low"], waiting["missing"]) == ("ref", None, 19)
    shown = shell("stats", own.path).out
    assert "reward" in shown
    assert "judge" in shown
    assert "reward" in shell("cache", "list", "--cache-dir", own.path.parent.parent).out


def test_inspect_shows_values_of_rows_and_tokens(shell: Shell, own: Store) -> None:
    own.attach("reward", np.arange(20.0) / 8, made_by="judge")
    own.attach("ref", tokens_of(own), made_by="m", per="token")
    found = shell("inspect", own.path, "--row", "3", "--json").json
    assert found["sidecars"] == {"reward": 0.375, "ref": tokens_of(own)[3]}
    plain = shell("inspect", own.path, "--row", "3").out
    assert "reward: 0.375" in plain
    assert "‹" not in plain
    told = shell("inspect", own.path, "--row", "3", "--values", "ref").out
    assert told.count("‹") == own.lengths[3]
    assert "‹3.02›" in told
    wrong = shell("inspect", own.path, "--values", "reward", "--json")
    assert wrong.code == 2
    assert "attached per token is: ref" in wrong.error["message"]
    own.attach("reward", np.zeros(20), made_by="other")
    twice = shell("inspect", own.path, "--row", "3", "--json").json["sidecars"]
    assert twice["reward judge"] == 0.375
    assert twice["reward other"] == 0.0


def test_pages_hold_values_of_rows_and_tokens(shell: Shell, own: Store, tmp_path: Path) -> None:
    own.attach("reward", [*range(19), float("-inf")], made_by="judge")
    own.attach("ref", tokens_of(own), made_by="m", per="token")
    assert shell("inspect", own.path, "--html", tmp_path / "page.html").code == 0
    rows = data_of((tmp_path / "page.html").read_bytes())["rows"]
    attached = [row["attached"] for row in sorted(rows, key=lambda row: row["row"])]
    assert [row["reward"] for row in attached] == [*range(19), "-inf"]
    tokenizer = store_tokenizer(own)
    for number, row in enumerate(attached):
        assert row == row_document(RowFacts(own), number, tokenizer)["attached"]
        assert row["ref"] == [float(f"{value:.4g}") for value in tokens_of(own)[number]]


def test_verify_finds_damage_in_what_is_attached(shell: Shell, own: Store) -> None:
    path = own.attach("reward", np.arange(20.0), made_by="judge").path / "values.f32"
    path.write_bytes(path.read_bytes()[:-4])
    said = shell("verify", own.path, "--json")
    assert (said.code, said.json["ok"]) == (1, False)
    assert said.json["errors"][0]["path"] == str(path)


def test_push_says_what_it_leaves_behind(shell: Shell, own: Store) -> None:
    own.attach("reward", np.arange(20.0), made_by="judge")
    said = shell("push", own.path, "memory://attached/store")
    assert said.code == 0, said.err
    assert "not sent: reward" in said.err
