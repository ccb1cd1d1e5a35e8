"""Run a command and sample its memory from ``/proc``, or limit this process to one core.

`watched` reports the peak resident size of the parent, the peak private memory (resident minus
shared, so without mapped files) of any one child, and of all descendants together the CPU time and
the peak proportional memory (PSS), in which a page of n processes counts 1/n for each.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S = 0.05


@dataclass
class Watched:
    """Time, output and memory of one run."""

    seconds: float
    stdout: str
    parent_peak: int
    worker_private_peak: int
    workers_pss_peak: int = 0  # only with `measure_pss`: reading it takes time
    cpu_seconds: float = 0.0


def watched(
    command: Sequence[str], env: dict[str, str] | None = None, *, measure_pss: bool = False
) -> Watched:
    """Run a command to its end; raise with its output if it fails."""
    os.sync()  # so that this run does not write earlier data
    cpu = _cpu_of_children()
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    private_peak = 0
    peak = pss_peak = 0
    while process.poll() is None:
        peak = max(peak, _peak_resident(process.pid))
        workers = _descendants(process.pid)
        for worker in workers:
            private_peak = max(private_peak, private(worker))
        if measure_pss:
            pss_peak = max(pss_peak, sum(map(_proportional, workers)))
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    stdout, stderr = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{stderr}")
    return Watched(seconds, stdout, peak, private_peak, pss_peak, _cpu_of_children() - cpu)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Limit this process to one core, like a worker, inside the context."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def tokenmill(*arguments: str) -> list[str]:
    """Return the command line of tokenmill in this environment."""
    return [sys.executable, "-m", "tokenmill", *arguments]


def _peak_resident(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def private(pid: int) -> int:
    """Return the resident memory of a process without mapped files; 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _descendants(pid: int) -> list[int]:
    """Return children and grandchildren: servers, and the workers that they forked."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(child) for child in text.split()]
    return children + [grandchild for child in children for grandchild in _descendants(child)]
