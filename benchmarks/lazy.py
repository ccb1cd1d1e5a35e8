"""Rows tokenized on request: the first batch of a large file, throughput, and memory.

*First batch*: a new process opens an indexed JSONL of 5,000,000 rows with Qwen3 and fills a batch
of 64 rows, compared with a new process that prepares one row with the same known tokenizer.
*Throughput*: batches of 64 conversations of about 2 KB from alpaca_eval_en, in one process on one
core, compared with SkyRL's way on the same rows, in CPU time, because nothing here waits for a
disk. *Memory*: the growth of private memory while a
process serves 32,000 rows of the large file, after its first 32,000.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.data import corpora, shared
from benchmarks.measure import one_core, tokenmill, watched
from benchmarks.peers import load_auto, skyrl_rows
from benchmarks.report import Report

ROWS = int(os.environ.get("TOKENMILL_BENCH_LAZY", "5000000"))
BATCH, BATCHES, REPEAT = 64, 30, 3
TWO_KB = range(1500, 2500)  # bytes of a row

_OPEN = """
import sys
import tokenmill as tm
path, tokenizer, cache = sys.argv[1:]
data = tm.prepare(path, tokenizer, cache_dir=cache, lazy=True)
batches = tm.Loader(data, batch_size=64).repeat()
next(batches)
"""

_MEMORY = (
    _OPEN
    + """
import gc
def private():
    gc.collect()
    with open("/proc/self/smaps_rollup") as table:
        return sum(int(line.split()[1]) for line in table if line.startswith("Private_")) / 1024
for _ in range(500):
    next(batches)
before = private()
for _ in range(500):
    next(batches)
print(private() - before)
"""
)


def run(report: Report) -> None:
    tokenizer = str(shared() / "tokenizers" / "qwen3")
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)
        _large_file(report, home, tokenizer)
        with one_core():
            _throughput(report, home, tokenizer)


def _large_file(report: Report, home: Path, tokenizer: str) -> None:
    rows, one = home / "rows.jsonl", home / "one.jsonl"
    _write(rows, ROWS)
    _write(one, 1)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    arguments = [str(rows), tokenizer, str(home / "cache")]

    def process(program: str) -> float:
        return watched([sys.executable, "-c", program, *arguments], env).seconds

    report.figure("first batch, files not indexed, new process", process(_OPEN), "s")
    first = min(process(_OPEN) for _ in range(REPEAT))
    report.figure("first batch, indexed, new process", first, "s", note=f"{ROWS:,} rows")
    known = []
    for number in range(REPEAT):
        one.write_text(one.read_text().replace("question", f"question {number}"))
        command = tokenmill("prepare", str(one), "--tokenizer", tokenizer, "--json", "--cache-dir",
                            str(home / "cache"))  # fmt: skip
        known.append(watched(command, env).seconds)
    report.figure("one row prepared, known tokenizer, new process", min(known), "s")
    report.figure("first batch beyond that", first - min(known), "s", at_most=1)
    grown = watched([sys.executable, "-c", _MEMORY, *arguments], env)
    report.figure("growth of private memory", float(grown.stdout), "MiB", at_most=16)


def _throughput(report: Report, home: Path, tokenizer: str) -> None:
    import tokenmill as tm

    lines = corpora()[0].read_bytes().splitlines()
    lines = [line for line in lines if len(line) in TWO_KB]
    source = home / "two-kb.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    data = tm.prepare(source, tokenizer, cache_dir=home / "cache", lazy=True)
    batches = tm.Loader(data, batch_size=BATCH).repeat()
    for _ in islice(batches, 45):  # fastokens is loaded after 4 MiB
        pass
    ours = cpu_seconds(lambda: list(islice(batches, BATCHES))) / (BATCHES * BATCH)
    report.figure("batches of 64 rows of 2 KB, warm, one core", 1 / ours, "rows/s")
    sample = [json.loads(line) for line in lines[: 2 * BATCH]]
    auto = load_auto(tokenizer)
    skyrl_rows(auto, sample[:4])
    peer = cpu_seconds(lambda: skyrl_rows(auto, sample)) / len(sample)
    report.figure("SkyRL's way, row by row", 1 / peer, "rows/s")
    report.ratio("on request / SkyRL's way", ours=ours, peer=peer, at_least=10)


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of the fastest of some calls."""
    times = []
    for _ in range(REPEAT):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def _write(path: Path, rows: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            file.write(
                f'{{"messages": [{{"role": "user", "content": "question {number}: what is twice '
                f'{number % 9973}?"}}, {{"role": "assistant", "content": "Twice {number % 9973} is '
                f'{2 * (number % 9973)}."}}]}}\n'
            )
