"""Groups in `inspect` and `stats`."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.build.test_groups import kto, pair, ranked
from tests.cli.harness import Shell
from tokenmill.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    rows = [pair(1), kto(2), ranked(3), pair(5)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    return tm.prepare(str(source), str(TOKENIZER), cache_dir=tmp_path / "cache", **INLINE)


def test_answers_are_shown_side_by_side(shell: Shell, store: Store) -> None:
    group = store.groups[-1]
    document = shell("inspect", store.path, "--group", "-1", "--json").json
    assert document["group"] == 3
    assert [row["ids"] for row in document["rows"]] == [r.input_ids.tolist() for r in group.rows]
    assert (document["prompt_tokens"], document["margin"]) == (group.prompt_tokens, group.margin)
    shown = shell("inspect", store.path, "--group", "3").out
    line = next(line for line in shown.splitlines() if "chosen, row" in line)
    assert line.index("chosen, row") < line.index("rejected, row")
    answers = next(line for line in shown.splitlines() if "⟦yes" in line)
    assert "⟦no" in answers
    assert f"margin {group.margin:g}" in shown
    assert "wanted, row" in shell("inspect", store.path, "--group", "1").out
    assert "rank 1, row" in shell("inspect", store.path, "--group", "2").out
    assert shell("inspect", store.path, "--group", "4").code == 2


def test_stats_count_groups(shell: Shell, store: Store) -> None:
    counts = shell("stats", store.path, "--json").json["groups"]
    assert (counts["preference"], counts["kto"], counts["ranked"]) == (2, 1, 1)
    assert "groups: " in shell("stats", store.path).out
