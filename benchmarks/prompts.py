"""RL prompts compared with an eager dataset: start-up with an existing index, memory, a new limit.

1,000,000 generated rows (prompt, label, metadata; about 220 MB). The peer parses every line with
`json` and creates one sample object per row with the fields of miles and slime. Real eager datasets
also render and tokenize at every start, which takes minutes, so this peer is a lower bound. Ours
also filters by length, from the stored lengths. Both are measured in new processes, without
imports. Private memory is the growth after opening, shuffling and reading a thousand prompts.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data import shared
from benchmarks.report import Report

ROWS = int(os.environ.get("TOKENMILL_BENCH_PROMPTS", "1000000"))
OPENS = 3  # new processes of ours, the best counts; the slow peer gets one
LIMITS = (64, 80)

_COMMON = """
import gc, json, os, random, sys, time
def private():
    gc.collect()
    with open("/proc/self/smaps_rollup") as table:
        return sum(int(line.split()[1]) for line in table if line.startswith("Private_")) / 1024
path, cache, tokenizer, limit = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
chosen = random.Random(3)
answer = {}
"""

_OURS = """
import tokenmill.data.prompts
from tokenmill import PromptDataset
before = private()
start = time.perf_counter()
prompts = PromptDataset(path, tokenizer, max_length=limit, prompt_key="prompt", label_key="label",
                        apply_chat_template=True, tokenizer_backend="file", cache_dir=cache)
answer["seconds"] = time.perf_counter() - start
prompts.shuffle(1)
for _ in range(1000):
    prompts[chosen.randrange(len(prompts))]
answer.update(memory=private() - before, kept=len(prompts), hit=prompts.hit)
print(json.dumps(answer))
"""

_PEER = """
from dataclasses import dataclass, field
@dataclass
class Sample:
    group_index: int = None
    index: int = None
    prompt: object = ""
    tokens: list = field(default_factory=list)
    multimodal_inputs: dict = None
    response: str = ""
    response_length: int = 0
    label: str = None
    reward: float = None
    loss_mask: list = None
    weight_versions: list = field(default_factory=list)
    rollout_log_probs: list = None
    remove_sample: bool = False
    status: str = "pending"
    metadata: dict = field(default_factory=dict)
    train_metadata: dict = None
before = private()
start = time.perf_counter()
samples = []
with open(path, encoding="utf-8") as lines:
    for line in lines:
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["prompt"]}]
        samples.append(Sample(prompt=prompt, label=row["label"], metadata=row["metadata"]))
answer["seconds"] = time.perf_counter() - start
random.Random(43).shuffle(samples)
for _ in range(1000):
    samples[chosen.randrange(len(samples))]
answer.update(memory=private() - before, kept=len(samples))
print(json.dumps(answer))
"""


def write_rows(path: Path, rows: int) -> None:
    """Write word problems of varying length."""
    chance = random.Random(11)
    things = ["apples", "boxes", "miles", "coins", "pages", "tiles", "seats", "stamps"]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            a, b = chance.randrange(2, 99), chance.randrange(2, 99)
            thing = things[number % 8]
            text = f"There are {a} shelves with {b} {thing} each. " * (1 + number % 5)
            text += f"How many {thing} are there in all? Answer with a number."
            metadata = {"source": "generated", "number": number, "kind": "multiply"}
            row = {"prompt": text, "label": str(a * b), "metadata": metadata}
            file.write(json.dumps(row) + "\n")


def child(program: str, *arguments: Any) -> dict[str, Any]:
    """Return the JSON output of a program in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMON + program, *map(str, arguments)],
        capture_output=True, text=True, env=os.environ,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run(report: Report) -> None:
    tokenizer = shared() / "tokenizers" / "qwen3"
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as scratch:
        path, cache = Path(scratch, "prompts.jsonl"), Path(scratch, "cache")
        write_rows(path, ROWS)
        built = child(_OURS, path, cache, tokenizer, LIMITS[0])
        note = f"{built['seconds']:.1f} s, rendered and encoded, workers included"
        report.figure("length index, built", ROWS / built["seconds"], "rows/s", note=note)
        opened = [child(_OURS, path, cache, tokenizer, LIMITS[1]) for _ in range(OPENS)]
        assert all(answer["hit"] for answer in opened)
        peer = child(_PEER, path, cache, tokenizer, LIMITS[1])
        assert peer["kept"] == ROWS
        ours = min(answer["seconds"] for answer in opened)
        report.figure("start-up on a known index, another limit", 1000 * ours, "ms",
                      note=f"{opened[0]['kept']:,} of {ROWS:,} rows kept")  # fmt: skip
        report.figure("start-up, eager dataset, without rendering", peer["seconds"], "s")
        report.ratio("start-up, eager dataset / tokenmill", ours=ours, peer=peer["seconds"],
                     at_least=100)  # fmt: skip
        memory = max(answer["memory"] for answer in opened)
        report.figure("private memory, eager dataset", peer["memory"], "MiB")
        report.figure("private memory, tokenmill, 1,000 prompts read", memory, "MiB")
        report.figure("private memory, eager dataset / tokenmill", peer["memory"] / memory, "x",
                      at_least=30)  # fmt: skip
