"""Rollouts in a store: sampled ids with all recorded values."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, small_cuts, write_rows
from tests.cli.harness import QUICK, Shell
from tests.rl.faults import conversation
from tests.rl.simulated import APPENDING, Row, appending
from tokenmill.build.recorded import read_and_cut
from tokenmill.errors import RowError, UsageError
from tokenmill.store.collect import GRACE_S, collect, survey

CALL: dict[str, Any] = {**INLINE, "tokenizer": str(TOKENIZER), "chat_template": APPENDING}


def rollouts(count: int) -> list[Row]:
    world, _ = appending()
    found = []
    for number in range(count):
        messages = conversation(random.Random(number), tools=False, thoughts=bool(number % 2))
        row = world.sample(messages, None, share=0.3 * (number % 3))
        assert row is not None
        row |= {"group": f"g{number // 4}", "step": 12, "version": 3, "reward": number % 4 / 4,
                "env": {"name": "shop", "seed": number}}  # fmt: skip
        found.append(row)
    return found


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "dump.jsonl", rollouts(12))


def test_store_contains_the_recording(dump: Path) -> None:
    rows = rollouts(12)
    store = tm.from_rollouts(dump, keep_columns=["env"], **CALL)
    assert len(store) == 12
    for number, (row, served) in enumerate(zip(rows, store, strict=True)):
        assert served.input_ids.tolist() == row["token_ids"]
        assert served.loss_mask.tolist() == row["loss_mask"]
        assert np.allclose(store.sidecar("logprobs")[number], row["logprobs"])
        assert [role for role, _, _ in served.turns] == [m["role"] for m in row["messages"]]
        assert served.origin.line == number + 1
        extra = served.extra
        recorded = {name: extra[name] for name in ("group", "step", "version", "reward", "env")}
        assert recorded == {name: row[name] for name in recorded}
        assert extra["drift"] == ("retokenized" if extra["findings"] else "equal")
    assert store.sidecar("reward").values.tolist() == [row["reward"] for row in rows]
    assert sorted(sidecar.name for sidecar in store.sidecars) == ["logprobs", "reward", "step"]


def test_slices_parquet_and_a_second_run_are_equal(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    store = tm.from_rollouts(dump, **CALL)
    assert store.manifest["totals"]["slices"] > 1
    again = tm.from_rollouts(dump, **CALL)
    assert again.key == store.key
    pq.write_table(pa.Table.from_pylist(rollouts(12)), tmp_path / "dump.parquet")
    other = tm.from_rollouts(tmp_path / "dump.parquet", **CALL)
    for one in (again, other):
        assert [r.input_ids.tolist() for r in one] == [r.input_ids.tolist() for r in store]
        values = store.sidecar("logprobs").values
        assert np.array_equal(one.sidecar("logprobs").values, values)


def test_trees_give_a_row_for_each_leaf(tmp_path: Path) -> None:
    tree = [
        {"parent": None, "token_ids": [5, 6], "loss_mask": 0},
        {"parent": 0, "token_ids": [7, 8], "loss_mask": 1, "logprobs": [-1.0, -2.0]},
        {"parent": 1, "token_ids": [9], "loss_mask": 1, "logprobs": [-3.0], "reward": 1.0},
        {"parent": 1, "token_ids": [9, 10], "loss_mask": [0, 1], "logprobs": [-4.0], "reward": 0.0},
    ]
    bad = {"token_ids": [1, 2], "loss_mask": [1]}
    path = write_rows(tmp_path / "tree.jsonl", [{"tree": tree, "group": "g"}, bad])
    store = tm.from_rollouts(path, **CALL)
    assert [row.input_ids.tolist() for row in store] == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10]]
    assert [row.loss_mask.tolist() for row in store] == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    logprobs = [store.sidecar("logprobs")[n].tolist() for n in range(2)]
    assert logprobs == [[0, 0, -1, -2, -3], [0, 0, 0, 0, 0, -4]]
    assert store.sidecar("reward").values.tolist() == [1.0, 0.0]
    assert store[1].turns == [("context", 0, 2), ("assistant", 2, 4), ("context", 4, 5),
                              ("assistant", 5, 6)]  # fmt: skip
    assert store.rejected == {"bad_shape": 1}
    [(origin, _, detail)] = store.rejected_rows()
    assert (origin.line, detail) == (2, "mask_length: expected 2 numbers, got 1 numbers")


def test_rows_with_faults_are_rejected_with_their_reason(tmp_path: Path) -> None:
    good = rollouts(1)[0]
    rows: list[Any] = [
        good,
        {**good, "logprobs": good["logprobs"][:-1]},
        json.dumps({**good, "logprobs": [float("nan")] * len(good["token_ids"])}),
        {**good, "token_ids": [10**6, *good["token_ids"][1:]]},
        {"input": "text", "output": "alone"},
        "not JSON",
    ]
    store = tm.from_rollouts(write_rows(tmp_path / "a.jsonl", rows), **CALL)
    assert (len(store), store.rejected) == (1, {"bad_shape": 4, "bad_json": 1})
    details = [detail for _, _, detail in store.rejected_rows()]
    for words, detail in zip(
        ("logprobs_length", "logprobs_nonfinite", "the tokenizer's ids are below",
         "never encoded again", ""), details, strict=True,
    ):  # fmt: skip
        assert words in detail


def test_filter_by_recorded_values(dump: Path) -> None:
    view = tm.from_rollouts(dump, where="reward >= 0.75 and group != 'g1'", **CALL)
    assert [row.extra["group"] for row in view] == ["g0", "g2"]
    assert view.sidecar("reward").values.tolist() == [0.75, 0.75]
    drifted = tm.from_rollouts(dump, where="drift == 'retokenized'", **CALL)
    assert 0 < len(drifted) < 12
    with pytest.raises(UsageError, match="unknown name 'unknown'"):
        tm.from_rollouts(dump, where="unknown > 1", **CALL)
    with pytest.raises(UsageError, match="nested too deeply"):
        tm.from_rollouts(dump, where="not " * 150 + "reward", **CALL)


def test_best_and_worst_of_a_group_are_a_pair(dump: Path) -> None:
    rows = rollouts(12)
    store = tm.from_rollouts(dump, pairs="best_worst", **CALL)
    assert len(store.groups) == 3
    for number, group in enumerate(store.groups):
        best, worst = group.rows
        assert best.input_ids.tolist() == rows[4 * number + 3]["token_ids"]
        assert worst.input_ids.tolist() == rows[4 * number]["token_ids"]
        assert (group.labels, group.margin) == ((True, False), 0.75)
        assert list(group.scores or ()) == [0.75, 0.0]
    assert np.allclose(store.sidecar("logprobs")[0], rows[3]["logprobs"])
    batch = next(iter(tm.Loader(store, batch_size=2)))
    assert batch["chosen_logprobs"].shape == batch["chosen_input_ids"].shape


def test_pair_files_are_counted_and_collected_with_their_stores(dump: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = tm.from_rollouts(dump, pairs="best_worst", **{**CALL, "cache_dir": cache})
    [made] = (cache / "rollouts").iterdir()
    size = sum(path.stat().st_size for path in made.iterdir())
    assert survey(cache)["parts"]["rollouts"] == size
    later, name = time.time() + 2 * GRACE_S, f"rollouts/{made.name}"
    assert name not in collect(cache, now=later).marked  # a store's source
    pairs = [store.path.name]
    assert name not in collect(cache, stores=pairs, now=time.time()).marked  # just made
    assert name in collect(cache, stores=pairs, now=later).marked
    assert name in collect(cache, now=later + GRACE_S).removed
    assert not made.exists()


def test_invalid_options_of_rollouts_raise(dump: Path) -> None:
    for option in ({"train_on": "everything"}, {"expand": "turns"}):
        with pytest.raises(UsageError, match="cannot be set for rollouts"):
            tm.from_rollouts(dump, **{**CALL, **option})
    for name in ("messages", "rollouts", "", None, 3):
        with pytest.raises(UsageError, match="format must be one of auto, openai"):
            tm.from_rollouts(dump, format=name, **CALL)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be 'best_worst'"):
        tm.from_rollouts(dump, pairs="all", **CALL)  # type: ignore[arg-type]
    for rows in ("rollouts", "rollouts-miles"):
        with pytest.raises(UsageError, match="train_on"):
            tm.prepare(dump, format=rows, train_on="everything", **CALL)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="prepare checks them"):
            tm.lint(dump, format=rows, **CALL)


def test_rows_of_several_formats_are_read_as_the_named_one(tmp_path: Path) -> None:
    """The row has the columns of two formats, each with its own ids."""
    tokens = {"tokens": [5, 6, 7], "response_length": 1, "reward": 0.5}
    row = {**tokens, "token_ids": [8, 9], "loss_mask": [1], "logprobs": [-1.0], "group": 1}
    own = {**row, "loss_mask": [0, 1], "rollout_log_probs": [-2.0]}
    path = write_rows(tmp_path / "rows.jsonl", [{**row, "rollout_log_probs": [-2.0]}])
    by_name = tm.from_rollouts(path, format="miles", **CALL)
    assert by_name[0].input_ids.tolist() == [5, 6, 7]
    assert by_name.sidecar("logprobs")[0].tolist() == [0, 0, -2.0]
    assert len(tm.from_rollouts(path, format="slime", **CALL)) == 1
    path = write_rows(tmp_path / "own.jsonl", [own, {**own, "reward": 0.0}])
    for name in ("auto", "rollout"):
        assert tm.from_rollouts(path, format=name, **CALL)[0].input_ids.tolist() == [8, 9]
        pairs = tm.from_rollouts(path, format=name, pairs="best_worst", **CALL)
        assert pairs.groups[0].margin == 0.5


# The report and the command


def test_report_has_origins_and_counts(tmp_path: Path) -> None:
    rows: list[Any] = rollouts(6)
    rows[4]["loss_mask"] = [0, *rows[4]["loss_mask"][:-1]]
    del rows[4]["logprobs"]
    rows[2] = json.dumps({**rows[2], "logprobs": [float("nan")] * len(rows[2]["token_ids"])})
    rows.insert(3, {"text": "no rollout"})
    dump = write_rows(tmp_path / "dump.jsonl", rows)
    report = tm.check_rollouts(dump, **CALL)
    assert (report.rows, report.trajectories) == (7, 6)
    assert sum(report.counts.values()) == 6
    assert report.counts["structure"] == 2
    assert report.rejected == {"bad_shape": 1}
    assert report.rejected_rows[0][0].line == 4
    grave = [finding for finding in report.findings if finding["class"] == "structure"]
    assert [(f.kind, f.row, f.origin.line) for f in grave] == [
        ("logprobs_nonfinite", 2, 3), (grave[1].kind, 5, 6)]  # fmt: skip
    assert grave[1].kind.startswith("mask_")


def test_check_rollouts_json_and_exit_codes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dump: Path
) -> None:
    shell = Shell(capsys)
    call = (*QUICK, "--chat-template", APPENDING)
    answer = shell("check-rollouts", dump, *call, "--json")
    assert answer.code == 0
    assert {"counts", "findings", "trajectories", "seconds", "rejected"} <= set(answer.json)
    assert answer.json["trajectories"] == 12
    assert answer.json["counts"]["retokenized"] > 0
    assert {"class", "row", "turn", "token", "expected", "found", "origin"} <= set(
        answer.json["findings"][0]
    )
    assert shell("check-rollouts", dump, *call, "--fail-on", "retokenized").code == 1
    assert shell("check-rollouts", dump, *call, "--fail-on", "text").code == 0
    shown = shell("check-rollouts", dump, *call, "--findings", "1")
    assert "expected" in shown.out
    assert "12 trajectories" in shown.err
    broken = [{**row, "loss_mask": row["loss_mask"][1:]} for row in rollouts(1)]
    path = write_rows(tmp_path / "broken.jsonl", broken)
    assert shell("check-rollouts", path, *call, "--fail-on", "structure").code == 1
    assert shell("check-rollouts", write_rows(tmp_path / "none.jsonl", ["{}"]), *call).code == 1
    assert shell("check-rollouts", dump, *call, "--format", "other").code == 2


@pytest.mark.parametrize("rewards", [(1e39, 0), (1, -1e39), (1e-60, 0), (3e38, -3e38)])
def test_pairs_whose_rewards_float32_cannot_hold_are_rejected(rewards: tuple[float, float]) -> None:
    chosen, rejected = (
        {**row, "reward": reward} for row, reward in zip(rollouts(2), rewards, strict=True)
    )
    with pytest.raises(RowError, match="finite float32 number"):
        read_and_cut({"chosen": chosen, "rejected": rejected}, b"", "auto")


@pytest.mark.parametrize(
    "columns",
    [
        {"reward": 1e-300}, {"reward": 3.5e38}, {"reward": 10**400}, {"advantage": -1e300},
        {"advantages": [0, 1e-300, 1]}, {"step": 2**24 + 1}, {"step": -(2**24) - 1},
        {"step": 10**400}, {"step": 1e300}, {"prompt_length": 10**400},
    ],
    ids=lambda columns: str(columns)[:40],
)  # fmt: skip
def test_numbers_that_float32_cannot_hold_reject_their_row(
    tmp_path: Path, columns: dict[str, Any]
) -> None:
    row = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "reward": 1.5, "step": 2**24}
    path = write_rows(tmp_path / "rows.jsonl", [row, {**row, **columns}])
    store = tm.from_rollouts(path, **CALL)
    assert (len(store), store.rejected) == (1, {"bad_shape": 1})
    assert next(iter(columns)).rstrip("s") in next(store.rejected_rows())[2]
    assert store.sidecar("step").values.tolist() == [2**24]
