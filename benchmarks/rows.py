"""Rows compared with `datasets` on the same file: opening, single rows, streaming, memory.

5,000,000 generated rows (``{"text", "label", "metadata"}``, about 487 MB) and a tenth of them.
Every opening is measured in a new process: peak memory is VmHWM minus that of the imported library,
and no side warms the other's cache. Both find the file in the page cache.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Report

ROWS = 5_000_000
WORDS = [f"w{number}" for number in range(1000)]
RANDOM_ROWS = 1_000_000
TURNS = 50  # tokenmill and the peer run in turn; the median counts
PEER_SHARE = 20  # the peer reads a twentieth; its cost per row does not depend on the number
OPENS = 3  # new processes for each side, alternating; the best counts

_COMMON = """
import json, os, random, sys, time
def peak():
    with open("/proc/self/status") as table:
        return next(int(line.split()[1]) for line in table if line.startswith("VmHWM")) / 1024
def indices(rows, count, seed=17):
    chance = random.Random(seed)
    return [chance.randrange(rows) for _ in range(count)]
path, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
answer = {}
"""

_OURS_OPEN = """
import msgspec, numpy, xxhash
import tokenmill.sources.rows, tokenmill.sources.lines
from tokenmill.sources.rows import open_rows
before = peak()
start = time.perf_counter()
rows = open_rows(path, cache_dir=cache)
answer["seconds"] = time.perf_counter() - start
answer["memory"] = peak() - before
answer["rows"] = len(rows)
print(json.dumps(answer))
"""

_PEER_OPEN = """
os.environ["HF_HUB_OFFLINE"] = "1"
import datasets
datasets.disable_progress_bars()
before = peak()
start = time.perf_counter()
data = datasets.load_dataset("json", data_files=path, cache_dir=cache, split="train")
answer["seconds"] = time.perf_counter() - start
answer["memory"] = peak() - before
answer["rows"] = len(data)
print(json.dumps(answer))
"""

# Both sides alternate in one process, so that other load affects both, and CPU time counts, because
# nothing here waits for a disk.
_READ = """
os.environ["HF_HUB_OFFLINE"] = "1"
import datasets, msgspec
from itertools import islice
from tokenmill.sources.rows import open_rows
datasets.disable_progress_bars()
rows = open_rows(path, cache_dir=cache)
data = datasets.load_dataset("json", data_files=path, cache_dir=sys.argv[4], split="train")
turns, share = int(sys.argv[5]), int(sys.argv[6])
decode, pread, fd = msgspec.json.Decoder(dict).decode, os.pread, os.open(path, os.O_RDONLY)
spent = {}

def timed(name, work, number):
    start = time.process_time()
    work()
    spent.setdefault(name, []).append((time.process_time() - start) / number)

def random_of(source, chosen):
    for index in chosen:
        source[index]

def bare(spans):
    for length, offset in spans:
        decode(pread(fd, length, offset))

def consume(iterator, number):
    for _ in islice(iterator, number):
        pass

ours_stream, peer_stream = iter(rows), iter(data)
for turn in range(turns):
    chosen = indices(len(rows), count // turns, turn)
    few = chosen[: len(chosen) // share]
    spans = [(place.length, place.offset) for place in map(rows.origin, few)]
    timed("random", lambda: random_of(rows, chosen), len(chosen))
    timed("peer random", lambda: random_of(data, few), len(few))
    timed("bare random", lambda: bare(spans), len(spans))
    timed("stream", lambda: consume(ours_stream, len(chosen)), len(chosen))
    timed("peer stream", lambda: consume(peer_stream, len(few)), len(few))
    if turn % 5 == 0:
        batch = few[:1000]
        timed("batch", lambda: rows.batch(batch), len(batch))
        timed("peer batch", lambda: data[batch], len(batch))
for name, times in spent.items():
    answer[name] = sorted(times)[len(times) // 2]
print(json.dumps(answer))
"""


def generate(path: Path, rows: int) -> None:
    """Write rows of about 97 bytes each."""
    chance = random.Random(4)
    with path.open("w") as file:
        for first in range(0, rows, 10_000):
            file.writelines(
                f'{{"text": "row {number} {" ".join(chance.choices(WORDS, k=4))}", "label": '
                f'{number % 7}, "metadata": {{"source": "made", "k": {number % 9973}}}}}\n'
                for number in range(first, min(first + 10_000, rows))
            )


def measure(code: str, *arguments: object) -> dict[str, Any]:
    """Run one side in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMON + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "TOKENMILL_CACHE_DIR": "/nonexistent"},
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as name:
        where = Path(name)
        large, small = where / "large.jsonl", where / "small.jsonl"
        generate(large, ROWS)
        generate(small, ROWS // 10)
        report.figure("size of the file", large.stat().st_size / 1e6, "MB")
        time.sleep(0.5)  # a file that was just written does not count as stable yet
        for path in (large, small):  # both sides find it in the page cache
            while_reading = path.open("rb")
            while while_reading.read(1 << 22):
                pass
            while_reading.close()
        _compare(report, where, large, small)


def _compare(report: Report, where: Path, large: Path, small: Path) -> None:
    first, peers = [], []
    for attempt in range(OPENS):
        first.append(measure(_OURS_OPEN, large, where / f"ours{attempt}", 0))
        peers.append(measure(_PEER_OPEN, large, where / f"peer{attempt}", 0))
    assert first[0]["rows"] == peers[0]["rows"] == ROWS
    cache = where / "ours0"
    second = [measure(_OURS_OPEN, large, cache, 0) for _ in range(OPENS)]
    small_first = measure(_OURS_OPEN, small, where / "small", 0)
    small_second = measure(_OURS_OPEN, small, where / "small", 0)
    reads = measure(_READ, large, cache, RANDOM_ROWS, where / "peer0", TURNS, PEER_SHARE)

    def best(runs: list[dict[str, Any]], name: str) -> float:
        return min(float(one[name]) for one in runs)

    opened, peer_opened = best(first, "seconds"), best(peers, "seconds")
    report.figure("first open, ours", opened, "s")
    report.figure("first open, datasets.load_dataset('json')", peer_opened, "s")
    report.ratio("first open, 5M rows", ours=opened, peer=peer_opened, at_least=8)
    memory = max(one["memory"] for one in first)
    report.figure("first open, peak memory, 5M rows", memory, "MiB", at_most=16)
    report.figure("first open, peak memory, 0.5M rows", small_first["memory"], "MiB")
    growth = max(memory - small_first["memory"], 0.0)
    report.figure("first open, memory grown from 0.5M to 5M rows", growth, "MiB", at_most=2)
    report.figure("first open, peak memory, datasets", best(peers, "memory"), "MiB")
    report.figure("second open, 5M rows", 1000 * best(second, "seconds"), "ms", at_most=20)
    report.figure("second open, peak memory, 5M rows", second[0]["memory"], "MiB")
    growth = max(second[0]["memory"] - small_second["memory"], 0.0)
    report.figure("second open, memory grown from 0.5M to 5M rows", growth, "MiB", at_most=2)
    for name, title, floor in (
        ("random", "1M random rows[i]", 8.0),  # every row costs at least one pread
        ("batch", "random rows in batches of 1000", None),
        ("stream", "streaming in order", 5.0),
    ):
        ours, peer = reads[name], reads[f"peer {name}"]
        report.figure(f"{title}, ours", 1e6 * ours, "µs/row")
        report.figure(f"{title}, datasets", 1e6 * peer, "µs/row")
        report.ratio(title, ours=ours, peer=peer, at_least=floor)
    limit = reads["peer random"] / reads["bare random"]
    report.figure("the same for bare pread and msgspec", limit, "x", note="the limit for rows[i]")
    share = 100 * reads["bare random"] / reads["random"]
    report.figure("1M random rows[i], of bare pread and msgspec", share, "%", at_least=70)
