"""Eight ranks that call `prepare` at the same time, as under torchrun, compared with one call.

Every rank calls `prepare` with the same arguments and gets the same store, without a barrier. The
figure is CPU time (user and system) of all processes: eight ranks with one worker each, compared
with one process with eight workers, into an empty cache. Every rank starts Python, opens the
sources and loads the tokenizer; slices are shared.
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
        ratios, extra, alone = [], [], []
        for number in range(REPEAT):
            one, slices = _prepare(source, home / f"one-{number}", 1)
            eight, built = _prepare(source, home / f"eight-{number}", RANKS)
            ratios.append(eight / one)
            extra.append(built / slices)
            alone.append(one)
    note = f"median of {REPEAT}, {SIZE // 1_000_000} MB, {slices} slices"
    report.figure("one prepare, 8 workers", statistics.median(alone), "CPU s", note=note)
    report.figure(
        "8 simultaneous prepares / one, CPU time", statistics.median(ratios), "x", at_most=1.25
    )
    report.figure("slices built by 8 / slices", statistics.median(extra), "x")


def _prepare(source: Path, cache: Path, ranks: int) -> tuple[float, int]:
    """Return the CPU seconds of all ranks and the number of slices that they built."""
    command = tokenmill(
        "prepare", str(source), "--tokenizer", str(shared() / "tokenizers" / "qwen3"), "--json",
        "--cache-dir", str(cache), "--num-workers", str(RANKS // ranks),
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
