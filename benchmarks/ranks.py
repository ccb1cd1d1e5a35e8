"""Eight ranks that call `prepare` at the same time, as under torchrun, compared with one call.

Every rank calls `prepare` with the same arguments and gets the same store, without a barrier. The
figure is CPU time (user and system) of all processes, compared with one process, into an empty
cache. Every rank starts Python and opens the sources. By default, the first rank builds; with one
worker stated for each rank, all load the tokenizer and share the slices, and the one process has
eight workers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.data import shared
from benchmarks.measure import tokenmill
from benchmarks.report import Report
from benchmarks.text import write_rows

SIZE = 800_000_000  # bytes of distinct rows: about a hundred slices
RANKS = 8
REPEAT = 3


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)
        source = home / "rows.jsonl"
        write_rows(source, SIZE)
        for workers, bound in ((0, 1.25), (RANKS, None)):
            ratios, extra, alone = [], [], []
            for number in range(REPEAT):
                caches = (home / f"{name}-{workers}-{number}" for name in ("one", "eight"))
                one, slices = _prepare(source, next(caches), 1, workers)
                eight, built = _prepare(source, next(caches), RANKS, workers // RANKS)
                ratios.append(eight / one)
                extra.append(built / slices)
                alone.append(one)
            suffix = ", one worker each" if workers else ""
            note = f"median of {REPEAT}, {SIZE // 1_000_000} MB, {slices} slices"
            report.figure(f"one prepare{suffix}", statistics.median(alone), "CPU s", note=note)
            report.figure(
                f"8 simultaneous prepares / one, CPU time{suffix}",
                statistics.median(ratios),
                "x",
                at_most=bound,
            )
            report.figure(f"slices built by 8 / slices{suffix}", statistics.median(extra), "x")


def _prepare(source: Path, cache: Path, ranks: int, workers: int) -> tuple[float, int]:
    """Return the CPU seconds of all ranks and the number of slices that they built."""
    command = tokenmill(
        "prepare", str(source), "--tokenizer", str(shared() / "tokenizers" / "qwen3"), "--json",
        "--cache-dir", str(cache), *(("--num-workers", str(workers)) if workers else ()),
    )  # fmt: skip
    before = _children_seconds()
    running = []
    for rank in range(ranks):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        env = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    summaries = [json.loads(process.communicate()[0]) for process in running]
    if len({one["path"] for one in summaries}) != 1:
        raise RuntimeError(f"ranks disagree: {summaries}")
    return _children_seconds() - before, sum(one["slices_built"] for one in summaries)


def _children_seconds() -> float:
    """Return user and system time of all finished descendants."""
    times = os.times()
    return times.children_user + times.children_system
