"""Rows of each framework, read as trajectories; unknown columns become metadata."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.cli.harness import QUICK, Shell
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.rl.formats import FORMATS, read_rollouts
from tokenmill.rl.trajectory import Trajectory

QUESTION = [{"role": "user", "content": "Hi"}]

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rollout": (
        {"messages": [*QUESTION, {"role": "assistant", "content": "Yo"}], "token_ids": [1, 2, 3],
         "loss_mask": [0, 0, 1], "logprobs": [-0.5], "reward": 1, "group": "g", "step": 4,
         "version": 2, "env": "shop"},
        {"ids": [1, 2, 3], "mask": [0, 0, 1], "logprobs": [0, 0, -0.5], "reward": 1.0, "group": "g",
         "step": 4, "version": 2, "metadata": {"env": "shop"}, "turns": 2},
    ),
    "miles": (
        {"tokens": [1, 2, 3, 4], "response_length": 2, "loss_mask": [1, 0], "prompt": "Hi",
         "rollout_log_probs": [-0.25, -1.0], "reward": {"score": 0.5, "format": 1},
         "group_index": 7, "index": 30, "weight_versions": ["5", "6"], "response": "Yo",
         "status": "truncated", "rollout_id": 9, "metadata": {"env": "shop"}},
        {"ids": [1, 2, 3, 4], "mask": [0, 0, 1, 0], "logprobs": [0, 0, -0.25, 0], "reward": 0.5,
         "group": 7, "step": 9, "version": "6", "prompt_length": 2, "truncated": True,
         "metadata": {"env": "shop", "index": 30, "reward": {"score": 0.5, "format": 1}}},
    ),
    "skyrl": (
        {"prompt_token_ids": [1, 2], "response_ids": [3, 4], "loss_mask": [1, 1],
         "rollout_logprobs": [-1.0, -2.0], "reward": [0.0, 1.0], "stop_reason": "length",
         "trajectory_id": {"instance_id": "p1", "repetition_id": 3}, "env_class": "gsm8k"},
        {"ids": [1, 2, 3, 4], "mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -2], "reward": 1.0,
         "group": "p1", "truncated": True, "prompt_length": 2,
         "metadata": {"token_rewards": [0.0, 1.0], "env_class": "gsm8k"}},
    ),
    "verl": (
        {"input": "user\nHi\nassistant\n", "output": "Yo", "gts": "Yo", "score": 0.75, "step": 3},
        {"ids": None, "reward": 0.75, "step": 3, "metadata": {"gts": "Yo"}},
    ),
    "trl": (
        {"step": 2, "prompt": QUESTION, "completion": [{"role": "assistant", "content": "Yo"}],
         "accuracy_reward": 0.5, "format_reward": 0.25, "advantage": -1.0},
        {"ids": None, "reward": 0.75, "step": 2, "turns": 2, "advantages": -1.0},
    ),
    "openai": (
        {"request": {"messages": QUESTION}, "step": 1, "reward": 2.0,
         "response": {"id": "c1", "prompt_token_ids": [1, 2], "choices": [
             {"token_ids": [3, 4], "finish_reason": "stop",
              "message": {"role": "assistant", "content": "Yo", "tool_calls": None},
              "logprobs": {"content": [{"token": "Y", "logprob": -0.5},
                                       {"token": "o", "logprob": -1.5}]}}]}},
        {"ids": [1, 2, 3, 4], "mask": [0, 0, 1, 1], "logprobs": [0, 0, -0.5, -1.5], "reward": 2.0,
         "group": "c1", "step": 1, "turns": 2, "prompt_length": 2},
    ),
}  # fmt: skip


def detail(trajectory: Trajectory) -> dict[str, Any]:
    ids, mask, logprobs = trajectory.ids, trajectory.mask, trajectory.logprobs
    return {
        **vars(trajectory),
        "ids": None if ids is None else ids.tolist(),
        "mask": None if mask is None else mask.tolist(),
        "logprobs": None if logprobs is None else logprobs.tolist(),
        "turns": len(trajectory.messages or ()),
        "truncated": trajectory.truncated,
    }


@pytest.mark.parametrize("name", ROWS)
def test_format_of_a_row_is_detected_and_read(name: str) -> None:
    row, expected = ROWS[name]
    [trajectory] = read_rollouts(row).trajectories
    assert trajectory.format == name
    found = detail(trajectory)
    assert {key: found[key] for key in expected} == expected
    [named] = read_rollouts(row, name).trajectories
    assert str(detail(named)) == str(found)


def test_every_format_has_a_row_here() -> None:
    traces = ("atif", "verifiers", "nemo_gym")  # test_agent_traces.py
    assert set(FORMATS) == {*ROWS, *traces, "slime"}
    with pytest.raises(UsageError, match="must be one of auto, "):
        read_rollouts({}, "other")


def test_vllm_tokens_spelled_as_ids_are_read() -> None:
    content = [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -1.0}]
    row = {"prompt_token_ids": [1], "choices": [{"logprobs": {"content": content}}]}
    [trajectory] = read_rollouts(row).trajectories
    assert trajectory.ids is not None
    assert trajectory.ids.tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "not a rollout of a known format; its columns are text"),
        ({"token_ids": [1, "x"], "loss_mask": [0, 1]}, "'token_ids' must be a list of token ids"),
        ({"token_ids": [1.5], "loss_mask": [1]}, "'token_ids' must be a list of token ids"),
        ({"token_ids": [-1], "loss_mask": [1]}, "not a token id"),
        ({"token_ids": [[1]], "loss_mask": [1]}, "'token_ids' must be a list of token ids"),
        ({"token_ids": [1], "loss_mask": "1"}, "'loss_mask' must be a list"),
        ({"token_ids": [1], "loss_mask": [1], "messages": [7]}, "messages with roles"),
        ({"token_ids": [1], "loss_mask": [1], "reward": "good"}, "'reward' must be a number"),
        ({"token_ids": [1], "loss_mask": [1], "step": 1.5}, "'step' must be an integer"),
        ({"tokens": [1, 2], "response_length": 3}, "'response_length' is 3, of 2 tokens"),
        ({"trajectories": []}, "non-empty"),
    ],
)
def test_row_that_is_not_a_rollout_raises(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        read_rollouts(row)


def test_reward_and_group_of_zero_are_read() -> None:
    choices = [{"message": {"role": "assistant", "content": "Yo"}, "reward": 0.0}]
    row = {"choices": choices, "id": "c1", "reward": 2.0, "group": 0}
    [trajectory] = read_rollouts(row).trajectories
    assert (trajectory.reward, trajectory.group) == (0.0, 0)


NAN = float("nan")


@pytest.mark.parametrize(
    ("columns", "reward", "warning"),
    [
        ({"reward": 1.0, "accuracy_reward": 0.5}, 1.0, ""),
        ({"reward": 0.0, "other": 2.0}, 0.0, ""),
        ({"accuracy_reward": 0.5, "format_reward": 0.25}, 0.75, ""),
        ({"accuracy_reward": 0.5, "format_reward": NAN, "tag_reward": None}, 0.5, ""),
        ({"rewards/accuracy": 0.5, "rewards/length": -1, "note": "x"}, -0.5, ""),
        ({"length_reward_func": 0.5, "completion_length": 7}, 0.5, ""),
        ({"note": "x", "flags": [1.0], "empty": None}, None, ""),
        ({"correctness": 1.0}, None, "the reward is unknown: correctness may"),
        ({"correctness": 1, "style": NAN, "no_rewarding": 2.5}, None,
         "the reward is unknown: correctness, no_rewarding may"),
        ({"accuracy_reward": 0.5, "overlong_punishment": -0.5}, 0.5,
         "part of the reward may be missing: overlong_punishment may"),
        ({"rewards": [1, 2]}, None, "the reward is unknown: rewards may"),
        ({"rewards": {"a": 1.0}, "b_reward": 1.0}, 1.0, "part of the reward may be missing: rew"),
        ({"total_reward": 3.0, "a_reward": 1.0, "b_reward": 2.0}, 3.0, "total_reward is used as"),
        ({"rewards/overall": 3.0, "rewards/a": 1.0}, 3.0, "rewards/overall is used as"),
        ({"total_reward": 3.0, "style": 1.0}, 3.0, "part of the reward may be missing: style"),
        ({"summary_reward": 3.0, "a_reward": 1.0}, 4.0, ""),
    ],
)  # fmt: skip
def test_reward_of_trl_rows(columns: dict[str, Any], reward: float | None, warning: str) -> None:
    row = {"prompt": "Hi", "completion": "Yo", "step": 3, "advantage": 0.5, **columns}
    [trajectory] = read_rollouts(row).trajectories
    assert trajectory.reward == reward
    assert trajectory.warning[: len(warning)] == warning
    assert bool(trajectory.warning) == bool(warning)


def test_reward_column_of_trl_must_be_a_number() -> None:
    for value in (10**400, float("inf"), "good", [1.0], True):
        with pytest.raises(RowError, match="'my_reward' must be"):
            read_rollouts({"prompt": "Hi", "completion": "Yo", "my_reward": value, "b_reward": 1.0})


def test_unknown_rewards_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "Hi", "completion": "Yo", "prompt_ids": [5], "completion_ids": [6]}
    rows = [{**row, "correctness": 1.0}, {**row, "correctness": 0.0}, {**row, "reward": 1.0}]
    dump = write_rows(tmp_path / "rows.jsonl", rows)
    report = tm.check_rollouts(dump, str(TOKENIZER), **INLINE)
    [(warning, count)] = report.warnings.items()
    assert (count, warning[:36]) == (2, "the reward is unknown: correctness m")
    assert report.document()["warnings"] == report.warnings
    shown = Shell(capsys)("check-rollouts", dump, *QUICK)
    assert "2 trajectories: the reward is unknown: correctness may be rewards" in shown.err
    for _ in range(2):  # a cached store, too
        with pytest.warns(UserWarning, match="2 rows: the reward is unknown: correctness"):
            store = tm.from_rollouts(dump, str(TOKENIZER), cache_dir=tmp_path / "cache", **INLINE)
    assert [row.extra["reward"] for row in store] == [None, None, 1.0]
    kinds = [[finding["kind"] for finding in row.extra["findings"]] for row in store]
    assert ["warning" in found for found in kinds] == [True, True, False]


COLUMNS = sorted(
    {name for row, _ in ROWS.values() for name in row}
    | {"tree", "trajectories", "choices", "completion_ids", "prompt_ids", "accuracy_reward"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.just(10**400) | st.floats()
    | st.sampled_from(["", "x", "token_id:7", "token_id:x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "message", "messages", "token_ids", "loss_mask",
                         "logprobs", "token", "logprob", "parent", "reward", "choices"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300)
@given(
    row=st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=6),
    known=st.sampled_from([row for row, _ in ROWS.values()]),
    name=st.sampled_from(["auto", *FORMATS]),
)
def test_any_row_is_read_or_raises(row: Any, known: Any, name: str) -> None:
    for tried in (row, {**known, **row}):
        with contextlib.suppress(RowError):
            assert read_rollouts(tried, name).trajectories


def test_rollouts_without_ids_are_checked_by_their_texts(tmp_path: Path) -> None:
    doubled = "<|im_start|>user\nHi<|im_end|>\n" + 2 * "<|im_start|>assistant\n"
    rows = [{"input": "user\nHi\nassistant\n", "output": "Yo", "score": 1.0},
            {"input": doubled, "output": "Yo", "score": 1.0}]  # fmt: skip
    dump = tmp_path / "1.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = tm.check_rollouts(dump, str(TOKENIZER), **INLINE)
    assert report.unchecked == {"no token ids: only texts were recorded": 2}
    assert report.counts == {"equal": 0, "retokenized": 0, "text": 0, "structure": 1}
    [finding] = report.findings
    assert (finding["kind"], finding["row"]) == ("generation_prompt_doubled", 1)


def test_torch_dump_is_read_without_executing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sample = dict(ROWS["miles"][0], tokens=torch.tensor([1, 2, 3, 4]))
    sample.pop("rollout_id")
    torch.save({"rollout_id": 9, "samples": [sample, sample]}, tmp_path / "rollout_9.pt")
    report = tm.check_rollouts(tmp_path / "rollout_9.pt", str(TOKENIZER), **INLINE)
    assert report.trajectories == 2
    store = tm.from_rollouts(str(tmp_path / "*.pt"), str(TOKENIZER), **INLINE)
    assert [row.input_ids.tolist() for row in store] == [[1, 2, 3, 4]] * 2
    assert (store[0].extra["step"], store[0].extra["group"]) == (9, 7)
    assert np.allclose(store.sidecar("logprobs")[0], [0, 0, -0.25, 0])
    shutil.copy(tmp_path / "rollout_9.pt", tmp_path / "the_same.pt")
    assert len(tm.from_rollouts(str(tmp_path / "*.pt"), str(TOKENIZER), **INLINE)) == 4


class Opened:
    def __reduce__(self) -> Any:
        return (print, ("this was executed",))


def test_torch_dump_that_would_run_code_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"samples": [{"tokens": Opened()}]}, tmp_path / "bad.pt")
    with pytest.raises(SourceError, match="would execute code"):
        tm.check_rollouts(tmp_path / "bad.pt", str(TOKENIZER), **INLINE)
    assert "executed" not in capsys.readouterr().out
    torch.save([1, 2], tmp_path / "other.pt")
    with pytest.raises(SourceError, match="no list of samples"):
        tm.check_rollouts(tmp_path / "other.pt", str(TOKENIZER), **INLINE)
