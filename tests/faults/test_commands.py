"""T01, T02, T19, T20 with real commands: strace, dying workers and parents (P1, P4, P11)."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import (
    Findings,
    Outcome,
    Zygote,
    compile_shim,
    environment,
    require_strace,
    start_command,
)
from tests.faults.world import committed, picture, prepare_arguments, write_sources

SYSTEM_CALLS = ("openat", "write", "fsync", "link", "rename")
LOCAL = ("--executor", "local", "--num-workers", "2")


def traced(arguments: list[str], log: Path, *expressions: str) -> subprocess.CompletedProcess[str]:
    given = [part for text in expressions for part in ("-e", text)]
    command = ["strace", "-f", "-qq", "-o", str(log), *given]
    command += [sys.executable, "-m", "tokenmill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment())


def kill_at(zygote: Zygote, clean: Clean, cache: Path, call: str, nth: int) -> bool:
    """SIGKILL at the n-th system call of a real command; False when it has fewer."""
    arguments = prepare_arguments(clean.sources, cache, "--executor", "inline")
    inject = f"inject={call}:signal=SIGKILL:when={nth}"
    done = traced(arguments, cache.with_suffix(".log"), f"trace={call}", inject)
    zygote.judge(cache)
    assert picture(cache).items() <= clean.picture.items()
    before = committed(cache)
    again = zygote.one(arguments)
    assert again.exit == 0, again.stderr
    assert again.said["slices_built"] == clean.said["slices"] - len(before)  # type: ignore[operator]
    assert picture(cache) == clean.picture
    shutil.rmtree(cache)
    return done.returncode != 0


def steps_in_cache(clean: Clean, cache: Path, call: str) -> list[int]:
    """Numbers of those calls of a command that touch its cache; the others are mostly imports."""
    log = cache.with_suffix(".log")
    arguments = prepare_arguments(clean.sources, cache, "--executor", "inline")
    done = traced(arguments, log, f"trace={call}", "decode-fds=path")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(cache)
    lines = log.read_text().splitlines()
    # strace counts the calls of each thread for itself; the command's own is the first to appear.
    called = re.compile(rf"{lines[0].split()[0]}\s+{call}\(")
    calls = [line for line in lines if called.match(line)]
    return [number for number, line in enumerate(calls, 1) if str(cache) in line]


@pytest.mark.parametrize(("call", "nth"), [("fsync", 31), ("link", 8)])
def test_command_killed_at_a_system_call_leaves_miss_or_whole(
    zygote: Zygote, clean: Clean, tmp_path: Path, call: str, nth: int
) -> None:
    require_strace()
    assert kill_at(zygote, clean, tmp_path / "cache", call, nth)


@pytest.mark.soak
@pytest.mark.parametrize("call", SYSTEM_CALLS)
def test_command_killed_at_every_system_call_leaves_miss_or_whole(
    zygote: Zygote, smallest: Clean, tmp_path: Path, call: str
) -> None:
    require_strace()
    findings, cache, killed = Findings(), tmp_path / "cache", 0
    for nth in steps_in_cache(smallest, cache, call):
        with findings.of(f"{call} number {nth}"):
            killed += kill_at(zygote, smallest, cache, call, nth)
        shutil.rmtree(cache, ignore_errors=True)
    findings.conclude()
    # Other calls may come and go between runs (a line of progress); nearly all must have struck.
    print(f"{killed} commands killed")
    assert killed >= 0.9 * findings.tried > 0


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


class Larger:
    """Sources whose preparation takes long enough to be disturbed."""

    def __init__(self, zygote: Zygote, directory: Path) -> None:
        self.sources = write_sources(directory / "sources", files=30, rows=60, seed=4)
        outcome = zygote.one(prepare_arguments(self.sources, directory / "cache"))
        assert outcome.exit == 0, outcome.stderr
        self.picture = picture(directory / "cache")
        self.slices: int = outcome.said["slices"]


@pytest.fixture(scope="module")
def larger(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Larger:
    return Larger(zygote, tmp_path_factory.mktemp("larger"))


@pytest.fixture
def commands() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands started by a test; ended with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for command in started:
        command.kill()
        command.communicate()


def finish(command: subprocess.Popen[str], seconds: float = 100) -> Outcome:
    stdout, stderr = command.communicate(timeout=seconds)
    return Outcome(command.returncode, False, 0, stdout, stderr)


class Running(NamedTuple):
    """A command that has published a few slices."""

    command: subprocess.Popen[str]
    workers: list[psutil.Process]
    cache: Path


@pytest.fixture
def running(larger: Larger, tmp_path: Path, commands: list[subprocess.Popen[str]]) -> Running:
    cache = tmp_path / "cache"
    command = start_command(prepare_arguments(larger.sources, cache, *LOCAL))
    commands.append(command)
    wait_for(lambda: len(committed(cache)) >= 3)
    return Running(command, workers_of(command), cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGSEGV, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)],
    ids=lambda n: n.name,
)
def test_lost_worker_costs_its_slice_a_retry_and_no_byte(
    larger: Larger, running: Running, number: signal.Signals
) -> None:
    command, workers, cache = running
    os.kill(workers[0].pid, number)
    outcome = finish(command)
    assert outcome.exit == 0, outcome.stderr
    assert picture(cache) == larger.picture


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
        assert "SIGKILL" in outcome.said["error"]["message"]
    zygote.judge(cache)
    assert committed(cache)
    again = zygote.one(prepare_arguments(clean.sources, cache))
    assert again.exit == 0, again.stderr
    assert picture(cache) == clean.picture


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_workers_of_an_ended_command_are_gone_and_a_rerun_finishes(
    zygote: Zygote, larger: Larger, running: Running, number: signal.Signals
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
    zygote.judge(cache)
    done = committed(cache)
    again = zygote.one(prepare_arguments(larger.sources, cache))
    assert again.exit == 0, again.stderr
    assert again.said["slices_built"] == larger.slices - len(done)
    assert picture(cache) == larger.picture
    shared = [path for path in Path("/dev/shm").iterdir() if path.is_file()]
    assert not [path for path in shared if "tokenmill" in path.name]


@pytest.mark.soak
def test_fifty_killed_commands_redo_at_most_what_was_under_way(
    zygote: Zygote, larger: Larger, tmp_path: Path, commands: list[subprocess.Popen[str]]
) -> None:
    shim, rng = compile_shim(), random.Random(11)
    if shim is None:
        pytest.skip("needs gcc, to compile the shim that counts what workers read")
    cache, log = tmp_path / "cache", tmp_path / "opened"
    more = {"LD_PRELOAD": str(shim), "TOKENMILL_OPENED": f"{log}|{larger.sources}/"}
    arguments = prepare_arguments(larger.sources, cache, *LOCAL)

    def start() -> subprocess.Popen[str]:
        commands.append(start_command(arguments, **more))
        return commands[-1]

    redone, under_way = 0, 0
    for kill in range(50):
        command = start()
        if kill % 5:  # while slices are built
            awaited = rng.randrange(larger.slices)
            wait_for(lambda n=awaited: len(committed(cache)) >= n)
            time.sleep(rng.uniform(0, 0.05))
        else:  # at any moment
            time.sleep(rng.uniform(0, 4))
        workers = workers_of(command)
        command.kill()
        command.communicate()
        wait_for(lambda workers=workers: all(map(is_gone, workers)), 5)
        zygote.judge(cache)
        under_way += 0 < len(committed(cache)) < larger.slices
        outcome = finish(start())
        assert outcome.exit == 0, outcome.stderr
        assert picture(cache) == larger.picture
        parents = {str(command.pid) for command in commands}
        read = [line for line in log.read_text().splitlines() if line.split()[0] not in parents]
        again = len(read) - larger.slices
        assert 0 <= again <= 2
        redone += again
        shutil.rmtree(cache)
        log.unlink()
    print(f"{redone} slices redone in 50 kills, {under_way} of them in the middle of the build")
    assert under_way > 10
