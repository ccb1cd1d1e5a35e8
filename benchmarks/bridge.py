"""Going on with a rollout: one `extend` beside rendering and encoding the conversation anew.

Agent runs of the shared data (20 to 60 turns with tools), Qwen 2.5, played turn by turn: what the
assistant says in the run is sampled in the tokens of its text, what answers it is appended. The
peer renders and encodes all of the conversation so far with transformers, which is what a loop that
keeps messages does at every turn. Ids are compared on the way. Bridge and peer work on the same
turns, in turns, on one core, and seconds are the processor's: a turn is too short for the clock of
a shared machine. The first runs teach the bridge its paths.
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
    """Messages of agent runs, arguments of calls as objects."""
    found = []
    for line in (shared() / "corpora" / "tau_bench_trajectories.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        for message in messages:
            message["content"] = message.get("content") or ""
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append(messages)
    return found


def run(report: Report) -> None:
    """Play the runs both ways."""
    from transformers import AutoTokenizer

    import tokenmill as tm

    place = str(shared() / "tokenizers" / "qwen2.5")
    tokenizer = AutoTokenizer.from_pretrained(place)
    bridge = tm.Bridge(place, tokenizer_backend="file")
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
    report.figure("whole conversation anew, transformers", 1e6 * theirs / turns, "us")
    report.ratio("whole conversation anew / one extend", ours=ours, peer=theirs, at_least=3)


def _play(
    bridge: Any, tokenizer: Any, messages: list[dict[str, Any]]
) -> list[tuple[float, float, int]]:
    """Seconds of both ways, and tokens so far, of every turn that something answers."""
    found: list[tuple[float, float, int]] = []
    turns = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
    ids = bridge.prompt(messages[: turns[0]])
    for k, following in zip(turns, turns[1:], strict=False):  # noqa: RUF007 - the last is left out
        spoken = tokenizer.apply_chat_template(messages[: k + 1], tokenize=False)
        before = tokenizer.apply_chat_template(
            messages[:k], tokenize=False, add_generation_prompt=True
        )
        sampled = tokenizer.encode(spoken[len(before) :].rstrip(), add_special_tokens=False)
        given = ids + sampled
        start = time.process_time()
        ids = bridge.extend(given, messages[k + 1 : following])
        spent = time.process_time() - start
        start = time.process_time()
        whole = tokenizer.apply_chat_template(
            messages[:following], add_generation_prompt=True, return_dict=False
        )
        found.append((spent, time.process_time() - start, len(ids)))
        assert ids == whole, f"other ids after turn {k}"
    return found
