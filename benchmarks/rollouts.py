"""Recorded rollouts: checking compared with a plain script, and opening a large dump.

Trajectories of about 4,000 tokens are long conversations with calls and results, under the template
and tokenizer of qwen2.5; a third have sampled ids with another tokenization. The plain script
parses, runs `apply_chat_template`, encodes and compares the ids; it finds only whether they differ.
Both load their tokenizer in advance and run on one core. The dump of 100,000 small trajectories is
opened in new processes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.rl.faults import TOOLS, words
from tests.rl.simulated import World

from benchmarks.data import shared
from benchmarks.measure import one_core
from benchmarks.peers import load_auto
from benchmarks.report import Report, seconds

TRAJECTORIES = 240
TOKENS = 4000
DUMP = 100_000
PER_MINUTE = 5_000

_OPEN = """
import json, sys, time
def peak():
    with open("/proc/self/status") as table:
        return next(int(line.split()[1]) for line in table if line.startswith("VmHWM")) / 1024
import msgspec, numpy, xxhash
import tokenmill.sources.rows, tokenmill.sources.lines, tokenmill.rl.formats
from tokenmill.rl.formats import read_rollouts
from tokenmill.sources.rows import open_rows
before = peak()
start = time.perf_counter()
rows = open_rows(sys.argv[1], cache_dir=sys.argv[2])
opened = time.perf_counter() - start
for number in range(0, len(rows), len(rows) // 1000):
    read_rollouts(rows[number])
print(json.dumps({"seconds": opened, "memory": peak() - before, "rows": len(rows)}))
"""


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with one_core():
            _check(report, Path(directory))
        _open(report, Path(directory))


def _conversation(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": words(rng, 40)},
        {"role": "user", "content": words(rng, 60)},
    ]
    for number in range(8):
        call = {"name": "look", "arguments": {"where": words(rng, 3)}}
        calls = [{"id": f"call{number:05d}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": words(rng, 30), "tool_calls": calls},
            {"role": "tool", "name": "look", "content": words(rng, 70)},
        ]
    return [*messages, {"role": "assistant", "content": words(rng, 30)}]


def _check(report: Report, directory: Path) -> None:
    from tokenmill._core.collector import without_collector
    from tokenmill.chat import ChatSpec
    from tokenmill.chat.template import ReferenceTemplate
    from tokenmill.inspect.drift import check_rows
    from tokenmill.rl.verdict import RolloutChecker
    from tokenmill.sources.block import read_block
    from tokenmill.sources.rows import open_rows
    from tokenmill.tokenizers.loading import load

    path = str(shared() / "tokenizers" / "qwen2.5")
    tokenizer = load(path, backend="file")
    assert isinstance(tokenizer.template, str)
    template = ReferenceTemplate(tokenizer.template, tokenizer.special_tokens, None)
    world = World(tokenizer, template)
    rng = random.Random(0)
    rows = []
    for number in range(TRAJECTORIES):
        share = 0.02 if number % 3 == 0 else 0.0
        row = world.sample(_conversation(rng), TOOLS, share=share)
        assert row is not None
        rows.append(row)
    tokens = sum(len(row["token_ids"]) for row in rows) / len(rows)
    report.figure("tokens of a trajectory", tokens, "tokens", at_least=TOKENS * 0.9)
    dump = directory / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    opened = open_rows(str(dump), cache_dir=directory / "cache")
    blocks = list(opened.blocks())
    checker = RolloutChecker(tokenizer, ChatSpec(format="messages"))
    tokenizer.table.piece(0)
    counts: dict[str, int] = {}

    def ours() -> None:
        counts.clear()
        with without_collector():
            for block in blocks:
                for name, count in check_rows(checker, read_block(block), "auto")["counts"].items():
                    counts[name] = counts.get(name, 0) + count

    auto = load_auto(path)

    def plain() -> int:
        equal = 0
        with dump.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                text = auto.apply_chat_template(row["messages"], row["tools"], tokenize=False)
                ids = auto(text, add_special_tokens=False)["input_ids"]
                equal += ids[: len(row["token_ids"])] == row["token_ids"]
        return equal

    ours()
    if counts.get("structure") or counts.get("text"):
        raise AssertionError(f"Clean rollouts have findings: {counts}")
    spent = seconds(ours)
    peer = seconds(plain)
    report.figure(
        "trajectories checked per minute, one core",
        60 * len(rows) / spent,
        "trajectories",
        at_least=PER_MINUTE,
    )
    report.ratio("checking a trajectory / render, encode, compare", ours=spent, peer=peer)


def _open(report: Report, directory: Path) -> None:
    rng = random.Random(1)
    dump = directory / "large.jsonl"
    with dump.open("w", encoding="utf-8") as file:
        for number in range(DUMP):
            ids = [rng.randrange(1000) for _ in range(120)]
            mask = [0] * 40 + [1] * 80
            row = {"token_ids": ids, "loss_mask": mask, "reward": number % 7, "group": number // 8}
            file.write(json.dumps(row) + "\n")
    answers = []
    for _ in range(3):  # the first builds the index
        command = [sys.executable, "-c", _OPEN, str(dump), str(directory / "cache")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        answers.append(json.loads(done.stdout))
    first, later = answers[0], min(answers[1:], key=lambda answer: answer["seconds"])
    report.figure("opening 100,000 trajectories for the first time", first["seconds"], "s",
                  at_most=1)  # fmt: skip
    report.figure("opening them again", later["seconds"], "s", at_most=1)
    report.figure("memory, with a thousand of them read", later["memory"], "MiB", at_most=64)
