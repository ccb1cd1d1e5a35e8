"""Whole programs: what happens to the workers of another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.build import entries
from tests.build.watching import is_gone, nothing_left, wait_until  # noqa: F401 - autouse

ENTRY = f"{entries.__name__}:open_worker"
ROOT = Path(__file__).resolve().parents[2]


def start_program(
    tmp_path: Path, body: str, *, name: str = "program.py", **environment: str
) -> subprocess.Popen[str]:
    """Run a user's script, which has no ``if __name__ == "__main__"``."""
    script = tmp_path / name
    script.write_text(
        "import os, sys, time, threading, signal\n"
        f"sys.path += {[str(ROOT / 'src'), str(ROOT)]!r}\n"  # what only this process knows
        f"open({str(tmp_path / 'runs')!r}, 'a').write('run\\n')\n"
        "from tokenmill.build.executors import LocalExecutor\n"
        "from tokenmill.build.tasks import Setup, Task\n"
        f"SETUP = Setup({ENTRY!r}, {{}})\n"
        f"PIDS = {str(tmp_path / 'pids')!r}\n"
        "os.makedirs(PIDS)\n" + body
    )
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker_pids(tmp_path: Path, count: int) -> list[int]:
    directory = tmp_path / "pids"
    assert wait_until(lambda: directory.is_dir() and len(os.listdir(directory)) >= count, 30)
    return [int(name) for name in os.listdir(directory)]


SLEEPERS = """
tasks = [Task(n, {"do": "sleep", "seconds": 600, "hold": HOLD, "pids": PIDS}) for n in range(9)]
list(LocalExecutor(2).run(SETUP, tasks))
"""


@pytest.mark.parametrize(
    ("signal_number", "state"),
    [
        (signal.SIGKILL, "sleeping"),
        (signal.SIGKILL, "holding the interpreter"),
        (signal.SIGKILL, "stopped"),
        (signal.SIGTERM, "holding the interpreter"),
        (signal.SIGINT, "stopped"),
    ],
)
def test_workers_die_with_their_parent(tmp_path: Path, signal_number: int, state: str) -> None:
    hold = state == "holding the interpreter"
    program = start_program(tmp_path, f"HOLD = {hold}\n" + SLEEPERS)
    pids = worker_pids(tmp_path, 2)
    server = psutil.Process(pids[0]).ppid()
    for pid in pids if state == "stopped" else ():
        os.kill(pid, signal.SIGSTOP)
    program.send_signal(signal_number)
    output, _ = program.communicate(timeout=20)
    assert wait_until(lambda: all(map(is_gone, [*pids, server])), 5), output
    assert program.returncode != 0


def test_workers_die_with_a_parent_whose_forked_child_lives_on(tmp_path: Path) -> None:
    body = """
def fork_later():
    while len(os.listdir(PIDS)) < 2:
        time.sleep(0.05)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    open(PIDS + "/../child", "w").write(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=fork_later).start()
HOLD = False
"""
    program = start_program(tmp_path, body + SLEEPERS)
    pids = worker_pids(tmp_path, 2)
    program.wait(timeout=20)
    gone = wait_until(lambda: all(map(is_gone, pids)), 5)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    program.communicate()
    assert gone


def test_interrupt_of_the_whole_terminal_group_is_the_parents_alone(tmp_path: Path) -> None:
    body = "sys.excepthook = lambda kind, *_: print(kind.__name__)\nHOLD = False\n"
    program = start_program(tmp_path, body + SLEEPERS)
    pids = worker_pids(tmp_path, 2)
    for pid in pids:  # what a terminal would do if they were in its group
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert not any(map(is_gone, pids))
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate(timeout=20)
    assert output == "KeyboardInterrupt\n"
    assert all(map(is_gone, pids))


SUM = """
tasks = [Task(n, {"do": "square", "value": n}) for n in range(8)]
print(sum(d.result["value"] for d in LocalExecutor(2).run(SETUP, tasks)))
"""


def test_users_script_runs_once_and_its_directory_is_no_danger(tmp_path: Path) -> None:
    # A module of the working directory that has a standard library's name.
    (tmp_path / "sub").mkdir()
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json was imported')")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('startup was hijacked')")
    program = start_program(tmp_path, SUM, name="sub/program.py")
    output, _ = program.communicate(timeout=60)
    assert output == "140\n"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_package_of_the_working_directory_is_found_by_workers_of_a_session() -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    session = (
        "import sys; assert sys.path[0] == ''\n"
        "from tokenmill.build.executors import LocalExecutor\n"
        "from tokenmill.build.tasks import Setup, Task\n"
        f"sys.path.append({str(ROOT)!r}); SETUP = Setup({ENTRY!r}, {{}})\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", session + SUM],
        cwd=ROOT / "src",
        env=kept,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout, ended.stderr) == ("140\n", "")


def test_works_after_threads_with_engine_parallelism_and_a_reset_sigpipe(tmp_path: Path) -> None:
    body = """
import tokenizers
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
words.encode_batch(["a b a"] * 1000)  # starts the engine's threads in the parent
lock = threading.Lock()
threading.Thread(target=lambda: (lock.acquire(), time.sleep(600)), daemon=True).start()
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO, signal.SIGTERM, signal.SIGUSR1})
tasks = [Task(n, {"do": "import_engine", "text": "a b a"}) for n in range(4)]
print([d.result["ids"] for d in LocalExecutor(2).run(SETUP, tasks)])
def deadly():
    yield Task(0, {"do": "sleep", "seconds": 0, "pids": PIDS})
    os.kill(int(os.listdir(PIDS)[0]), signal.SIGKILL)
    time.sleep(0.3)
    yield Task(1, {"do": "square", "value": 1})  # which is sent to a dead worker
print([d.attempts for d in LocalExecutor(1).run(SETUP, deadly())])
"""
    program = start_program(tmp_path, body + SUM, TOKENIZERS_PARALLELISM="true")
    output, _ = program.communicate(timeout=60)
    assert output == f"{[[0, 1, 0]] * 4}\n[1, 2]\n140\n"
