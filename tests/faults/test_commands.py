"""Real commands that are killed at a system call, and whose workers or parents die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.faults.conftest import Clean, build_cleanly
from tests.faults.tools import (
    Zygote,
    compile_shim,
    environment,
    finish,
    require_strace,
    start_command,
)
from tests.faults.world import committed, image, prepare_arguments
from tests.sampling import sampled

LOCAL = ("--executor", "local", "--num-workers", "2")


@pytest.mark.parametrize(("call", "nth"), [("fsync", 31), ("link", 8)])
def test_command_killed_at_a_system_call_leaves_miss_or_whole(
    zygote: Zygote, clean: Clean, tmp_path: Path, call: str, nth: int
) -> None:
    require_strace()
    cache = tmp_path / "cache"
    arguments = prepare_arguments(clean.sources, cache)
    inject = f"inject={call}:signal=SIGKILL:when={nth}"
    command = ["strace", "-f", "-qq", "-o", str(tmp_path / "log"), "-e", f"trace={call}"]
    command += ["-e", inject, sys.executable, "-m", "tokenmill", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode != 0
    zygote.read_back(cache)
    assert image(cache).items() <= clean.image.items()
    before = committed(cache)
    again = zygote.one(arguments)
    assert again.exit == 0, again.stderr
    assert again.result["slices_built"] == clean.result["slices"] - len(before)  # type: ignore[operator]
    assert image(cache) == clean.image


def workers_of(command: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        children = psutil.Process(command.pid).children(recursive=True)
        return [child for child in children if "worker_main" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@pytest.fixture(scope="module")
def larger(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return build_cleanly(zygote, tmp_path_factory.mktemp("larger"), files=30, rows=60)


@pytest.fixture
def commands() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for command in started:
        command.kill()
        command.communicate()


class Running(NamedTuple):
    command: subprocess.Popen[str]
    workers: list[psutil.Process]
    cache: Path


@pytest.fixture
def running(larger: Clean, tmp_path: Path, commands: list[subprocess.Popen[str]]) -> Running:
    cache = tmp_path / "cache"
    command = start_command(prepare_arguments(larger.sources, cache, *LOCAL))
    commands.append(command)
    wait_for(lambda: len(committed(cache)) >= 3)
    return Running(command, workers_of(command), cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.soak) for n in (signal.SIGSEGV, signal.SIGSTOP)),
    ],
    ids=lambda n: n.name,
)
def test_lost_worker_costs_its_slice_a_retry_and_no_byte(
    larger: Clean, running: Running, number: signal.Signals
) -> None:
    command, workers, cache = running
    os.kill(workers[0].pid, number)
    outcome = finish(command)
    assert outcome.exit == 0, outcome.stderr
    assert image(cache) == larger.image


@pytest.mark.slow
def test_workers_that_always_die_are_a_typed_error_and_what_is_done_stays(
    zygote: Zygote, clean: Clean, tmp_path: Path, commands: list[subprocess.Popen[str]]
) -> None:
    shim, cache = compile_shim(), tmp_path / "cache"
    if shim is None:
        pytest.skip("needs gcc, to compile the shim that kills workers")
    # Every worker dies when it has published four files of slices: in the middle of its second.
    fault = f"link|{cache}/slices|5|0|kill|0"
    more = {"LD_PRELOAD": str(shim), "TOKENMILL_FAULT": fault}
    arguments = prepare_arguments(clean.sources, cache, *LOCAL)
    command = start_command(arguments, **more)
    commands.append(command)
    outcome = finish(command)
    # Each life finishes a slice, so the build may get through; else it says who died and how.
    if outcome.exit:
        assert outcome.error == "WorkerError"
        assert "SIGKILL" in outcome.result["error"]["message"]
    zygote.read_back(cache)
    assert committed(cache)
    again = zygote.one(prepare_arguments(clean.sources, cache))
    assert again.exit == 0, again.stderr
    assert image(cache) == clean.image


@pytest.mark.parametrize(
    "number", sampled([signal.SIGINT, signal.SIGKILL], 2), ids=lambda n: n.name
)
def test_workers_of_an_ended_command_are_gone_and_a_rerun_finishes(
    zygote: Zygote, larger: Clean, running: Running, number: signal.Signals
) -> None:
    command, workers, cache = running
    assert workers
    command.send_signal(number)
    outcome = finish(command, 20)
    if number == signal.SIGINT:
        assert outcome.exit == 130
        assert "run the same command again" in outcome.stderr
        assert len(list((cache / "staging").iterdir())) <= 2  # of the killed workers
    wait_for(lambda: all(map(is_gone, workers)), 5)
    zygote.read_back(cache)
    done = committed(cache)
    again = zygote.one(prepare_arguments(larger.sources, cache))
    assert again.exit == 0, again.stderr
    assert again.result["slices_built"] == larger.result["slices"] - len(done)  # type: ignore[operator]
    assert image(cache) == larger.image
    shared = [path for path in Path("/dev/shm").iterdir() if path.is_file()]
    assert not [path for path in shared if "tokenmill" in path.name]
