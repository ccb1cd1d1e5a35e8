"""A trainer's process: opens the stores, loads a state, consumes batches, reports.

A *job* is one JSON line; so is the report. ``python -m tests.consistency.child`` runs one job in
a fresh interpreter. With ``--nursery`` it stays, and gives every job a process of its own by
fork, before any store is open: as new as the other, without the time to import.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.consistency.cases import loader_of, run_of
from tests.consistency.corpus import Corpus
from tests.programs import environment


def digest(batch: dict[str, Any]) -> str:
    """One value for all arrays of a batch: names, types, shapes, bytes."""
    hasher = hashlib.blake2b(digest_size=12)
    for name in sorted(batch):
        value = np.asarray(batch[name])
        hasher.update(f"{name} {value.dtype.str} {value.shape};".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    return hasher.hexdigest()


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job."""
    loader: Any = loader_of(Corpus(Path(job["root"])), job["case"], **job["geometry"])
    if job.get("torch") is not None:
        from tokenmill.integrations.torch import DataLoader

        loader = DataLoader(loader, **job["torch"])
    if job.get("state") is not None:
        loader.load_state_dict(job["state"])
    batches: list[str] = []
    take = job.get("take")
    if take != 0:
        for batch in run_of(loader, job["case"], job.get("epochs")):
            batches.append(digest(batch))
            if job.get("log"):
                # What a trainer does between steps: remember where it is.
                record = {"batch": batches[-1], "state": loader.state_dict()}
                with open(job["log"], "a") as log:
                    log.write(json.dumps(record) + "\n")
            if len(batches) == take:
                break
    if job.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"batches": batches, "state": loader.state_dict(), "pid": os.getpid()}


def print_report(job: dict[str, Any]) -> int:
    print(json.dumps(serve(job)))
    return 0


def in_fresh_interpreter(job: dict[str, Any], **more: str) -> dict[str, Any]:
    """Run one job in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.consistency.child"],
        input=json.dumps(job), capture_output=True, text=True, timeout=100, env=environment(**more),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


class Nursery:
    """Runs every job in a new process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.consistency.child", "--nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the nursery died"
        report = json.loads(line)
        assert "error" not in report, report
        return dict(report)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _jobs() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        if line == "\n":  # an end that no copy of the pipe in some forked process can hold up
            return
        yield json.loads(line)


def _main() -> None:
    if "--nursery" not in sys.argv:
        print_report(json.loads(sys.stdin.read()))
        return
    importlib.import_module("numpy.ma")  # by numpy on first use: in every child anew
    gc.freeze()  # what is imported is nothing that a child's collector would have to walk through
    for job in _jobs():
        child = os.fork()
        if child == 0:
            try:
                report = serve(job)
            except BaseException as error:  # a report is better than a silent pipe
                report = {"error": repr(error)}
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main()
