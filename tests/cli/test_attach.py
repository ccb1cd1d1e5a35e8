"""The command `attach`, and sidecars in the output of other commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.harness import Shell
from tests.inspect.page.test_document import data_of
from tokenmill import Store, open_store
from tokenmill.inspect.page.document import row_document
from tokenmill.inspect.row import RowFacts


@pytest.fixture
def own(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "own"))
    shutil.copytree(store.parent.parent, tmp_path / "cache")
    return open_store(tmp_path / "cache" / "stores" / store.name)


def tokens_of(store: Store) -> list[list[float]]:
    return [[row + token / 64 for token in range(n)] for row, n in enumerate(store.lengths)]


def test_arrays_and_lines_are_attached(shell: Shell, own: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.arange(20.0))
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, tokens_of(own))))
    answer = shell(
        "attach", own.path, "reward", tmp_path / "r.npy", "--producer", "judge", "--json"
    )
    assert answer.code == 0, answer.err
    assert answer.json == {
        "path": str(own.sidecar("reward").path), "name": "reward", "producer": "judge",
        "per": "row", "rows": 20, "bytes": 80,
    }  # fmt: skip
    line = ("attach", own.path, "ref", tmp_path / "t.jsonl", "--producer", "m", "--per", "token")
    assert shell(*line).code == 0
    assert own.sidecar("reward").values.tolist() == list(range(20))
    assert own.sidecar("ref")[7].tolist() == tokens_of(own)[7]  # type: ignore[union-attr]
    np.save(tmp_path / "r.npy", np.arange(20.0) + 1)
    again = shell("attach", own.path, "reward", tmp_path / "r.npy", "--producer", "judge", "--json")
    assert (again.code, again.error["type"]) == (1, "NonDeterminismError")


@pytest.mark.parametrize(
    ("text", "per", "message", "line"),
    [
        ("1\n2\nx\n", "row", "expected a number", 3),
        ("1\n2\n", "row", "2 values for a store of 20 rows", None),
        ("[1, 2]\n", "token", "tokens, got 2 values", 1),
        ("7\n", "token", "expected a list of numbers", 1),
    ],
)
def test_bad_lines_are_reported_with_their_line_number(
    shell: Shell, own: Store, tmp_path: Path, text: str, per: str, message: str, line: int | None
) -> None:
    (tmp_path / "v.jsonl").write_text(text)
    command = ("attach", own.path, "reward", tmp_path / "v.jsonl", "--producer", "m", "--per", per)
    answer = shell(*command, "--json")
    assert answer.code == 2
    assert message in answer.error["message"]
    assert answer.error["line"] == line
    assert not own.sidecars


def test_unreadable_files_raise(shell: Shell, own: Store, tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(b"no array")
    for name, kind in (("v.npy", "UsageError"), ("gone.npy", "SourceMissing")):
        answer = shell("attach", own.path, "r", tmp_path / name, "--producer", "m", "--json")
        assert answer.error["type"] == kind


def test_stats_show_range_mean_and_missing_rows(shell: Shell, own: Store) -> None:
    own.attach("reward", np.arange(20.0), producer="judge")
    with own.attach_writer("ref", producer="m", per="token") as writer:
        writer.write(0, tokens_of(own)[0])
    done, waiting = shell("stats", own.path, "--json").json["sidecars"]
    assert done == {
        "name": "reward", "producer": "judge", "per": "row", "bytes": 80, "low": 0.0, "high": 19.0,
        "mean": 9.5, "infinite": 0, "missing": 0,
    }  # fmt: skip
    assert (waiting["name"], waiting["low"], waiting["missing"]) == ("ref", None, 19)
    shown = shell("stats", own.path).out
    assert "reward" in shown
    assert "judge" in shown
    assert "reward" in shell("cache", "list", "--cache-dir", own.path.parent.parent).out


def test_inspect_shows_values_of_rows_and_tokens(shell: Shell, own: Store) -> None:
    own.attach("reward", np.arange(20.0) / 8, producer="judge")
    own.attach("ref", tokens_of(own), producer="m", per="token")
    shown = shell("inspect", own.path, "--row", "3", "--json").json
    assert shown["sidecars"] == {"reward": 0.375, "ref": tokens_of(own)[3]}
    plain = shell("inspect", own.path, "--row", "3").out
    assert "reward: 0.375" in plain
    assert "‹" not in plain
    detail = shell("inspect", own.path, "--row", "3", "--values", "ref").out
    assert detail.count("‹") == own.lengths[3]
    assert "‹3.02›" in detail
    wrong = shell("inspect", own.path, "--values", "reward", "--json")
    assert wrong.code == 2
    assert "Attached: ref" in wrong.error["message"]
    own.attach("reward", np.zeros(20), producer="other")
    twice = shell("inspect", own.path, "--row", "3", "--json").json["sidecars"]
    assert twice["reward judge"] == 0.375
    assert twice["reward other"] == 0.0


def test_pages_contain_values_of_rows_and_tokens(shell: Shell, own: Store, tmp_path: Path) -> None:
    own.attach("reward", [*range(19), float("-inf")], producer="judge")
    own.attach("ref", tokens_of(own), producer="m", per="token")
    assert shell("inspect", own.path, "--html", tmp_path / "page.html").code == 0
    rows = data_of((tmp_path / "page.html").read_bytes())["rows"]
    attached = [row["attached"] for row in sorted(rows, key=lambda row: row["row"])]
    assert [row["reward"] for row in attached] == [*range(19), "-inf"]
    for number, row in enumerate(attached):
        assert row == row_document(RowFacts(own), number)["attached"]
        assert row["ref"] == [float(f"{value:.4g}") for value in tokens_of(own)[number]]


def test_verify_finds_damaged_sidecars(shell: Shell, own: Store) -> None:
    path = own.attach("reward", np.arange(20.0), producer="judge").path / "values.f32"
    path.write_bytes(path.read_bytes()[:-4])
    answer = shell("verify", own.path, "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    assert answer.json["errors"][0]["path"] == str(path)


def test_push_lists_sidecars_that_it_does_not_send(shell: Shell, own: Store) -> None:
    own.attach("reward", np.arange(20.0), producer="judge")
    answer = shell("push", own.path, "memory://attached/store")
    assert answer.code == 0, answer.err
    assert "sidecars not sent: reward" in answer.err
