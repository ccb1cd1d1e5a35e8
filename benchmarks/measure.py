"""Running a command and watching its memory.

`watched` runs a command to its end and samples the process and its children twenty times a second
from ``/proc``: peak resident size of the parent, peak private memory (resident minus shared) of any
one child. Private memory is what promise P12 speaks of: pages of mapped files are not.

`one_core` holds this process to one core, as a worker is, and lets it go again.
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
    """What one run took."""

    seconds: float
    stdout: str
    parent_peak: int
    worker_private_peak: int


def watched(command: Sequence[str], env: dict[str, str] | None = None) -> Watched:
    """Run a command and watch it; a failure is an error with its output."""
    os.sync()  # what others wrote before must not be paid for by this run
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    most = 0
    peak = 0
    while process.poll() is None:
        peak = max(peak, _peak_resident(process.pid))
        for child in _children(process.pid):
            most = max(most, private(child))
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    stdout, stderr = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{stderr}")
    return Watched(seconds, stdout, peak, most)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """One process, one core, as a worker runs; rooms that come later get all cores again."""
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
    """The command line of tokenmill in this environment."""
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
    """Resident memory of a process without pages of mapped files; 0 where it is not known."""
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
