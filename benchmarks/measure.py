"""Run a command and sample its memory from ``/proc``, or limit this process to one core.

`watched` reports the peak resident size of the parent and the peak private memory (resident minus
shared, so without mapped files) of any one child.
"""

from __future__ import annotations

import contextlib
import os
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


def watched(command: Sequence[str], env: dict[str, str] | None = None) -> Watched:
    """Run a command to its end; raise with its output if it fails."""
    os.sync()  # so that this run does not write earlier data
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    private_peak = 0
    peak = 0
    while process.poll() is None:
        peak = max(peak, _peak_resident(process.pid))
        for child in _children(process.pid):
            private_peak = max(private_peak, private(child))
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    stdout, stderr = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{stderr}")
    return Watched(seconds, stdout, peak, private_peak)


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


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]
