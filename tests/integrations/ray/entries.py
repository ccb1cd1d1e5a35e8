"""Entry points for Ray's tests, imported by name in the workers."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.build import slices
from tokenmill.build.tasks import finish
from tokenmill.errors import SourceMissing

Work = Callable[[dict[str, Any]], dict[str, Any]]

_opened = 0
LOG = "TOKENMILL_TEST_LOG"  # directory in which workers note what they began and finished


def open_flaky(options: dict[str, Any]) -> Work:
    def work(payload: dict[str, Any]) -> dict[str, Any]:
        with open(options["mark"], "ab") as file:
            file.write(b".")
        attempts = Path(options["mark"]).stat().st_size
        if attempts <= payload["times"]:
            try:
                raise OSError(errno.ESTALE, "Stale file handle")
            except OSError as error:
                raise SourceMissing(f"gone (attempt {attempts})", path="a.jsonl") from error
        return {"attempts": attempts}

    return work


def open_counting(options: dict[str, Any]) -> Work:
    global _opened
    _opened += 1

    def work(payload: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        cores = sorted(os.sched_getaffinity(0))
        return {"opened": _opened, "pid": os.getpid(), "cores": cores}

    return work


def open_sleeper(options: dict[str, Any]) -> Work:
    log = Path(options["log"])

    def work(payload: dict[str, Any]) -> dict[str, Any]:
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        (log / f"started-{name}").touch()
        try:
            until = time.monotonic() + payload["s"]
            while time.monotonic() < until:  # Ray interrupts between two steps of Python
                time.sleep(0.05)
        finally:
            (log / f"cleaned-{name}").touch()
        return {}

    return work


def open_builder(options: dict[str, Any]) -> Work:
    """The real builder, slowed down and with a log of what was begun where, and finished."""
    log, build = Path(os.environ[LOG]), slices.open_builder(options)

    def work(payload: dict[str, Any]) -> dict[str, Any]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        name = f"{payload['key']}-{node}-{os.getpid()}-{time.monotonic_ns()}"
        (log / f"began-{name}").touch()
        time.sleep(0.4)
        result = finish(build(payload))
        (log / f"done-{name}").touch()
        return result

    return work
