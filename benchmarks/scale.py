"""A million slices: time and memory of plan, commit and open.

Eight terabytes of raw rows as sparse files, a million stand-in slices (see `benchmarks.simulated`).
One process prepares them (every slice is found, so this is plan, look, commit and open), another
opens the store and reads random rows. Beside it the constants of docs/internals/scale.md:
file-system calls of building one slice, counted by strace on real builds of two sizes, and seconds
per gigabyte of checking ``lengths.bin`` on first use.

``TOKENMILL_BENCH_SLICES`` makes it smaller.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import tokenmill
from benchmarks.report import Report
from benchmarks.simulated import BLOCK, ROWS, TOKENIZER, make_slices, make_sources, planned

SLICES = int(os.environ.get("TOKENMILL_BENCH_SLICES", 1_000_000))
MIB = 1 << 20
RANDOM_ROWS = 1000

MEMORY = """
def memory():
    with open("/proc/self/status") as lines:
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines if "kB" in line}
    return {"peak": fields["VmHWM"] * 1024, "anonymous": fields["RssAnon"] * 1024}
"""

PREPARE = (
    MEMORY
    + """
import json, sys, time
from pathlib import Path
from benchmarks.simulated import arguments_of, planned
from tokenmill.build.calls import run_recipe

sources, cache = Path(sys.argv[1]), Path(sys.argv[2])
begun = time.perf_counter()
wanted = planned(sources, cache)
plan = time.perf_counter() - begun
given = arguments_of(sources, cache)
begun = time.perf_counter()
done = run_recipe(given.pop("sources"), given.pop("tokenizer"), **given)
prepare = time.perf_counter() - begun
print(json.dumps({"plan": plan, "prepare": prepare, "cpu": time.process_time(), "hit": done.hit,
                  "slices": wanted.slices, "built": done.build_stats.slices_built,
                  "path": str(done.store.path), **memory()}))
"""
)

OPEN = (
    MEMORY
    + """
import json, random, sys, time
from tokenmill import open_store

imported = memory()
begun = time.perf_counter()
store = open_store(sys.argv[1])
opened = time.perf_counter() - begun
after = memory()
rng = random.Random(5)
chosen = [rng.randrange(len(store)) for _ in range(int(sys.argv[2]))]
begun = time.perf_counter()
tokens = sum(len(store[i].input_ids) + int(store[i].loss_mask[0]) for i in chosen)
rows = time.perf_counter() - begun
origin = store[chosen[0]].origin
print(json.dumps({"open": opened, "rows": rows / len(chosen), "tokens": tokens,
                  "count": len(store), "origin": [origin.row, origin.offset],
                  "before": imported, "opened": after, "served": memory()}))
"""
)


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)
        measured = simulate(home, SLICES)
        prepared, opened = measured["prepared"], measured["opened"]
        note = f"{SLICES:,} slices, {SLICES * BLOCK / 1e12:.1f} TB of raw rows"
        per_slice = 1e6 / SLICES
        report.figure("plan", prepared["plan"], "s", note=note)
        report.figure("plan, look at every slice, commit, open", prepared["prepare"], "s",
                      at_most=1800, note=note)  # fmt: skip
        report.figure("the same, per slice", prepared["prepare"] * per_slice, "µs")
        report.figure("processor time of both, per slice", prepared["cpu"] * per_slice, "µs")
        report.figure("a hit", measured["hit"]["prepare"], "s")
        report.figure("coordinator, peak resident", prepared["peak"] / MIB, "MiB", at_most=400)
        report.figure("open_store", opened["open"], "s", at_most=1.0)
        report.figure("reader after open, resident", opened["opened"]["peak"] / MIB, "MiB",
                      at_most=200)  # fmt: skip
        report.figure("reader after open, private", opened["opened"]["anonymous"] / MIB, "MiB")
        report.figure("reader after random rows, resident", opened["served"]["peak"] / MIB, "MiB",
                      at_most=200)  # fmt: skip
        report.figure("a random row of a slice not open yet", opened["rows"] * 1e6, "µs")
        for name, size in measured["files"].items():
            report.figure(f"{name}, per slice", size / SLICES, "bytes")
        shutil.rmtree(home / "cache")
        for name, count in sorted(calls_per_slice(home).items(), key=lambda one: -one[1]):
            report.figure(f"system calls per slice built: {name}", count, "calls")


def simulate(home: Path, slices: int) -> dict[str, Any]:
    """Create, prepare (twice) and open a store of stand-in slices; return the measurements."""
    cache = home / "cache"
    sources = make_sources(home / "sources", cache, slices)
    make_slices(planned(sources, cache), cache)
    prepared = _child(PREPARE, str(sources), str(cache))
    assert (prepared["hit"], prepared["slices"], prepared["built"]) == (False, slices, 0)
    store = Path(prepared["path"])
    opened = _child(OPEN, str(store), str(RANDOM_ROWS))
    assert opened["count"] == slices * ROWS
    return {
        "prepared": prepared,
        "hit": _child(PREPARE, str(sources), str(cache)),
        "opened": opened,
        "files": {path.name: path.stat().st_size for path in sorted(store.iterdir())},
    }


def _child(program: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    detail: dict[str, Any] = json.loads(done.stdout)
    return detail


def calls_per_slice(home: Path, few: int = 8, many: int = 24) -> Counter[str]:
    """Return the file-system calls per additional slice; empty without strace."""
    if shutil.which("strace") is None:
        return Counter()
    counted = [_calls(home / str(files), files) for files in (few, many)]
    difference = Counter(counted[1])
    difference.subtract(counted[0])
    return Counter({name: count / (many - few) for name, count in difference.items() if count > 0})


def _calls(home: Path, files: int) -> Counter[str]:
    """Calls by name that name a file of the cache, or a descriptor of one (strace -y)."""
    rng = random.Random(files)
    home.mkdir()
    cache, log = home / "cache", home / "strace.log"
    for number in range(files):
        words = " ".join(rng.choices(["red", "green", "blue", "seven", "eight"], k=20))
        row = {"messages": [{"role": "user", "content": f"{number} {words}"},
                            {"role": "assistant", "content": words}]}  # fmt: skip
        (home / f"part-{number:03}.jsonl").write_text(json.dumps(row) + "\n")
    command = tokenmill("prepare", f"{home}/part-*.jsonl", "--tokenizer", str(TOKENIZER), "--json",
                        "--tokenizer-backend", "file", "--executor", "inline",
                        "--cache-dir", str(cache))  # fmt: skip
    traced = ["strace", "-f", "-y", "-qq", "-e", "trace=%file,%desc", "-o", str(log), *command]
    # What the row index of each small file costs is a source's, not a slice's: it is made before.
    indexed = tokenmill("rows", f"{home}/part-*.jsonl", "--json")
    environment = {**os.environ, "TOKENMILL_CACHE_DIR": str(cache)}
    subprocess.run(indexed, check=True, capture_output=True, env=environment)
    subprocess.run(traced, check=True, capture_output=True)
    named = re.compile(rf"^\d+\s+(\w+)\(.*{re.escape(str(cache))}/(slices|staging|stores)")
    found = (named.match(line) for line in log.read_text(errors="replace").splitlines())
    return Counter(match[1] for match in found if match)
