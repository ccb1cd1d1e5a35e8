"""A trainer's process: opens the stores, loads a state, consumes batches, reports in JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.consistency.cases import loader_of, run_of
from tests.consistency.corpus import Corpus
from tests.faults.tools import Zygote
from tests.programs import environment


def digest(batch: dict[str, Any]) -> str:
    hasher = hashlib.blake2b(digest_size=12)
    for name in sorted(batch):
        value = np.asarray(batch[name])
        hasher.update(f"{name} {value.dtype.str} {value.shape};".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    return hasher.hexdigest()


def serve(job: dict[str, Any]) -> dict[str, Any]:
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


def in_new_process(zygote: Zygote, job: dict[str, Any]) -> dict[str, Any]:
    (done,) = zygote.run({"call": "tests.consistency.child:print_report", "argument": job})
    assert done.exit == 0, done
    return dict(done.result)


def in_fresh_interpreter(job: dict[str, Any], **more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.consistency.child"],
        input=json.dumps(job), capture_output=True, text=True, timeout=100, env=environment(**more),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    print_report(json.loads(sys.stdin.read()))
