"""Continuing a rollout: one `extend` compared with rendering and encoding the whole conversation.

Agent runs of the shared data (20 to 60 turns with tools), Qwen 2.5, replayed turn by turn: the
assistant's text counts as sampled, and the following messages are appended. The peer renders and
encodes the whole conversation with transformers at every turn, as a loop over messages does. The
ids must be equal. Bridge and peer alternate on the same turns, on one core, in CPU time, because a
turn is too short for wall time on a shared machine. The first runs record the bridge's paths.
"""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.data import shared
from benchmarks.measure import one_core
from benchmarks.report import Report

RUNS = 12
WARM = 4


def conversations() -> list[list[dict[str, Any]]]:
    """Return the messages of agent runs, with call arguments as objects."""
    result = []
    for line in (shared() / "corpora" / "tau_bench_trajectories.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        for message in messages:
            message["content"] = message.get("content") or ""
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        result.append(messages)
    return result


def run(report: Report) -> None:
    from transformers import AutoTokenizer

    import tokenmill as tm

    directory = str(shared() / "tokenizers" / "qwen2.5")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    bridge = tm.Bridge(directory, tokenizer_backend="file")
    ours = theirs = 0.0
    turns = longest = 0
    with one_core():
        for number, messages in enumerate(conversations()[: WARM + RUNS]):
            for spent, peer, size in _play(bridge, tokenizer, messages):
                if number >= WARM:
                    ours, theirs, turns = ours + spent, theirs + peer, turns + 1
                    longest = max(longest, size)
    note = f"{turns} turns, up to {longest:,} tokens"
    report.figure("one extend", 1e6 * ours / turns, "us", note=note)
    report.figure("whole conversation again, transformers", 1e6 * theirs / turns, "us")
    report.ratio("whole conversation again / one extend", ours=ours, peer=theirs, at_least=3)


def _play(
    bridge: Any, tokenizer: Any, messages: list[dict[str, Any]]
) -> list[tuple[float, float, int]]:
    """Return the seconds of both and the number of tokens for every turn but the last."""
    times: list[tuple[float, float, int]] = []
    turns = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
    ids = bridge.prompt(messages[: turns[0]])
    for k, following in zip(turns, turns[1:], strict=False):  # noqa: RUF007 - the last is left out
        rendered = tokenizer.apply_chat_template(messages[: k + 1], tokenize=False)
        before = tokenizer.apply_chat_template(
            messages[:k], tokenize=False, add_generation_prompt=True
        )
        sampled = tokenizer.encode(rendered[len(before) :].rstrip(), add_special_tokens=False)
        sampled_ids = ids + sampled
        start = time.process_time()
        ids = bridge.extend(sampled_ids, messages[k + 1 : following])
        spent = time.process_time() - start
        start = time.process_time()
        whole = tokenizer.apply_chat_template(
            messages[:following], add_generation_prompt=True, return_dict=False
        )
        times.append((spent, time.process_time() - start, len(ids)))
        assert ids == whole, f"other ids after turn {k}"
    return times
