"""Agent traces with recorded ids: every model call is checked, and trained once."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.chat.test_agent_traces import MESSAGES, ROWS, TOOL, VALUES, changed, places
from tokenmill.errors import RowError
from tokenmill.rl.formats import read_rollouts
from tokenmill.store import Row

FORMATS = ("atif", "verifiers", "nemo_gym")
Call = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The row that a sampler without mistakes would have recorded."""
    place = tmp_path_factory.mktemp("whole")
    path = write_rows(place / "rows.jsonl", [{"messages": MESSAGES, "tools": [TOOL]}])
    return tm.prepare(str(path), str(TOKENIZER), cache_dir=place / "cache", **INLINE)[0]


def calls_of(row: Row) -> list[Call]:
    """The prompt and the sampled ids of every model call."""
    ids = row.input_ids.tolist()
    edges = np.diff(row.loss_mask.astype(int), prepend=0, append=0)
    spans = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    return [(ids[:start], ids[start:end]) for start, end in spans]


def recorded(name: str, calls: list[Call]) -> dict[str, Any]:
    row = copy.deepcopy(ROWS[name])
    for number, (prompt, sampled) in enumerate(calls):
        logprobs = [-0.5] * len(sampled)
        if name == "atif":
            row["steps"][number + 2]["metrics"] = {
                "prompt_token_ids": prompt, "completion_token_ids": sampled, "logprobs": logprobs,
            }  # fmt: skip
        elif name == "nemo_gym":
            row["response"]["output"][(2, 4)[number]] |= {
                "prompt_token_ids": prompt, "generation_token_ids": sampled,
                "generation_log_probs": logprobs,
            }  # fmt: skip
        else:
            end = (2, 4)[number]
            row.setdefault("trajectory", []).append({
                "prompt": MESSAGES[:end], "completion": MESSAGES[end : end + 1],
                "tokens": {"prompt_ids": prompt, "prompt_mask": [0] * len(prompt),
                           "completion_ids": sampled, "completion_mask": [True] * len(sampled),
                           "completion_logprobs": logprobs, "is_truncated": False},
            })  # fmt: skip
    return {**row, "reward": 0.25, "group": "g"}


@pytest.mark.parametrize("name", FORMATS)
def test_recorded_traces_are_checked_and_trained_once(
    name: str, whole: Row, tmp_path: Path
) -> None:
    calls = calls_of(whole)
    assert len(calls) == 2
    wrong = [calls[0], ([*calls[1][0][:-3], 9, *calls[1][0][-3:]], calls[1][1])]
    rows = [recorded(name, calls), recorded(name, wrong), ROWS[name]]
    path = str(write_rows(tmp_path / "traces.jsonl", rows))
    arguments = {"tokenizer": str(TOKENIZER), "cache_dir": tmp_path / "cache"}
    report = tm.check_rollouts(path, **arguments)
    assert (report.counts["equal"], report.trajectories) == (3, 5)
    assert {(one["row"], one["trajectory"]) for one in report.findings} == {(1, 1)}
    assert sum(report.unchecked.values()) == 1
    store = tm.from_rollouts(path, max_rejected=1, **arguments, **INLINE)
    assert store.manifest["totals"]["rows_in"] == len(store) + 1 == 3
    end = len(calls[1][0]) + len(calls[1][1])  # the template prints a newline after it
    assert store[0].input_ids.tolist() == whole.input_ids[:end].tolist()
    assert store[0].loss_mask.tolist() == whole.loss_mask[:end].tolist()
    assert [row.extra["reward"] for row in store] == [0.25] * 2
    assert np.array_equal(store.sidecar("logprobs")[0], -0.5 * whole.loss_mask[:end])
    assert store[1].input_ids.tolist() == wrong[1][0] + wrong[1][1]
    sampled = store[1].input_ids[store[1].loss_mask == 1].tolist()
    assert sampled == calls[0][1] + calls[1][1]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_without_ids_reject_a_trace_of_which_others_have_ids(name: str, whole: Row) -> None:
    calls = calls_of(whole)
    row = recorded(name, [calls[0], (calls[1][0], [])])
    with pytest.raises(RowError, match="1 of 2 model calls have token ids"):
        read_rollouts(row)
    merged = recorded(name, calls)
    if name == "atif":
        merged["steps"][2]["llm_call_count"] = 2
        with pytest.raises(RowError, match="1 of 2 model calls have token ids"):
            read_rollouts(merged)
        merged["steps"][2] |= {"llm_call_count": 1, "is_copied_context": True}
        assert len(read_rollouts(merged).trajectories) == 1
    if name == "verifiers":
        del merged["trajectory"][1]
        with pytest.raises(RowError, match="1 of 2 model calls have token ids"):
            read_rollouts(merged)


@pytest.mark.parametrize(("name", "path"), [("atif", "steps.2.metrics"),
                                            ("verifiers", "trajectory.0.tokens")])  # fmt: skip
def test_recorded_ids_of_another_type_are_rejected(name: str, path: str, whole: Row) -> None:
    for value in ("[]", [1]):
        with pytest.raises(RowError, match="must be an object"):
            read_rollouts(changed(recorded(name, calls_of(whole)), path, value))


@given(data=st.data())
def test_damaged_recordings_are_read_or_rejected(data: Any) -> None:
    name = data.draw(st.sampled_from(FORMATS))
    row = recorded(name, [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])
    path = data.draw(st.sampled_from(places(row)))
    damaged = changed(row, path, data.draw(VALUES | st.just([[1], [2, 3]]) | st.just([2**80])))
    for format_ in ("auto", name):
        with contextlib.suppress(RowError):
            read_rollouts(damaged, format_)


@pytest.mark.parametrize("name", FORMATS)
def test_missing_tools_are_warned_of(name: str, whole: Row) -> None:
    row = recorded(name, calls_of(whole))
    for part in (row, row.get("agent", {}), row.get("responses_create_params", {})):
        for key in ("tools", "tool_defs", "tool_definitions"):
            part.pop(key, None)
    for trajectory in read_rollouts(row).trajectories:
        assert "undefined tools" in trajectory.warning
        assert trajectory.group == "g"
