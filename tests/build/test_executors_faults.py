"""Workers that die, stop, flood or are left alone: promises P11 and P12, T19 and T20."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.build import entries
from tokenmill.build.executors import MAX_RETRIES, LocalExecutor, Setup, Task
from tokenmill.build.executors.process import TAIL_BYTES, describe_exit
from tokenmill.errors import WorkerError

ENTRY = f"{entries.__name__}:open_worker"
SETUP = Setup(ENTRY, {})
SILENCE_S = 1.0  # instead of 20, so that the tests of stopped workers are short
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a child."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def squares(count: int, **fault: object) -> list[Task]:
    """Tasks of which number 3 carries the fault."""
    return [
        Task(n, {"do": "square", "value": n, **(fault if n == 3 else {})}) for n in range(count)
    ]


EXPECTED = {n: n * n for n in range(8)}


@pytest.mark.parametrize("when", ["start", "middle"])
@pytest.mark.parametrize("fault", sorted(entries.FAULTS))
def test_worker_that_is_lost_once_costs_its_task_a_retry(
    fault: str, when: str, tmp_path: Path
) -> None:
    tasks = squares(8, fault=fault, when=when, mark=str(tmp_path / "mark"))
    executor = LocalExecutor(2, heartbeat_silence_s=SILENCE_S)
    done = {d.number: d for d in executor.run(SETUP, tasks)}
    assert {n: d.result["value"] for n, d in done.items()} == EXPECTED
    assert {n: d.attempts for n, d in done.items() if d.attempts > 1} == {3: 2}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_result_sent_before_the_worker_is_lost_is_a_result(signal_number: int) -> None:
    executor = LocalExecutor(1, heartbeat_silence_s=SILENCE_S)
    run = executor.run(SETUP, [Task(n, {"do": "describe"}) for n in range(3)])
    first = next(run)
    time.sleep(0.3)  # the worker has been given task 1 and has answered; nobody listens
    os.kill(first.result["pid"], signal_number)
    time.sleep(0.2)  # result and death are found in the same moment
    second, third = run
    assert second.result["pid"] == first.result["pid"] != third.result["pid"]
    assert second.attempts == 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("SIGKILL", "killed by SIGKILL, which tokenmill did not send: probably out of memory"),
        ("SIGSEGV", "killed by SIGSEGV"),
        ("exit", "exited with code 7"),
        ("SIGSTOP", "stuck (process state T): no heartbeat and no CPU time"),
        ("MemoryError", "ran out of memory (hint: fewer num_workers)"),
    ],
)
def test_task_that_loses_every_worker_is_named_in_a_typed_error(fault: str, says: str) -> None:
    tasks = [
        Task(n, {"do": "square", "value": n, "fault": fault, "when": "start"}, "a.jsonl, rows 0-9")
        for n in [41]
    ]
    with pytest.raises(WorkerError) as caught:
        list(LocalExecutor(2, heartbeat_silence_s=SILENCE_S).run(SETUP, tasks))
    message = str(caught.value)
    assert "task 41 (a.jsonl, rows 0-9)" in message
    assert message.count(says) == MAX_RETRIES + 1
    assert "while it started" not in message


def test_crash_shows_the_python_frames_it_happened_in() -> None:
    tasks = [Task(0, {"do": "square", "value": 1, "fault": "SIGSEGV", "when": "start"})]
    with pytest.raises(WorkerError, match=r"(?s)its last output:.*in square"):
        list(LocalExecutor(1).run(SETUP, tasks))


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "exit"])
def test_worker_that_dies_starting_is_retried_then_given_up(fault: str, tmp_path: Path) -> None:
    executor = LocalExecutor(2, heartbeat_silence_s=SILENCE_S)
    once = Setup(ENTRY, {"die_starting": fault, "mark": str(tmp_path / "mark")})
    assert {d.number: d.result["value"] for d in executor.run(once, squares(8))} == EXPECTED
    with pytest.raises(WorkerError, match=r"task \d+: gave up after 3 .*while it started"):
        list(executor.run(Setup(ENTRY, {"die_starting": fault}), squares(8)))


def test_worker_whose_child_keeps_the_channel_open_is_still_found_dead(tmp_path: Path) -> None:
    executor = LocalExecutor(1, heartbeat_silence_s=SILENCE_S)
    before = {c.pid for c in psutil.Process().children(recursive=True)}
    task = Task(0, {"do": "leave_child", "mark": str(tmp_path / "mark")})
    (done,) = executor.run(SETUP, [task])
    assert done.attempts == 2
    # The child is the task's, not the executor's; put it away.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in before and "worker_main" in " ".join(process.cmdline()):
                process.kill()


@pytest.mark.parametrize("hold", [False, True], ids=["sleeping", "holding the interpreter"])
def test_slow_task_is_never_killed_for_time(hold: bool) -> None:
    executor = LocalExecutor(2, heartbeat_silence_s=SILENCE_S)
    work = {"do": "sleep", "seconds": 3 * SILENCE_S, "hold": hold}
    done = executor.run(SETUP, [Task(n, work) for n in range(2)])
    assert [d.attempts for d in done] == [1, 1]


def test_nothing_is_kept_in_shared_memory() -> None:
    run = LocalExecutor(2).run(SETUP, [Task(n, {"do": "describe"}) for n in range(4)])
    first = next(run)
    # /dev/shm belongs to the whole machine, so look at what the processes hold, not at its files.
    assert first.result["shared_memory"] == entries.shared_memory_of("self") == []
    list(run)


def test_slow_consumer_does_not_make_workers_look_stuck() -> None:
    executor = LocalExecutor(2, heartbeat_silence_s=SILENCE_S)
    tasks = [Task(n, {"do": "sleep", "seconds": SILENCE_S}) for n in range(2)]
    attempts = []
    for done in executor.run(SETUP, tasks):
        attempts.append(done.attempts)
        time.sleep(2 * SILENCE_S)
    assert attempts == [1] * 2


def test_flood_on_the_standard_streams_breaks_nothing() -> None:
    tasks = [Task(n, {"do": "shout", "lines": 2000}) for n in range(4)]
    assert [d.result for d in LocalExecutor(2).run(SETUP, tasks)] == [{"lines": 2000}] * 4


def test_end_of_a_flood_is_in_the_error_and_no_more() -> None:
    task = Task(0, {"do": "shout", "lines": 3000, "fault": "exit"})
    with pytest.raises(WorkerError, match="the last words"):
        list(LocalExecutor(1).run(SETUP, [task]))
    endless_line = Task(0, {"do": "shout", "lines": 0, "fault": "exit", "long": 10_000_000})
    with pytest.raises(WorkerError) as caught:
        list(LocalExecutor(1).run(SETUP, [endless_line]))
    assert len(str(caught.value)) < TAIL_BYTES + 1000


def test_failing_close_is_reported_after_all_results() -> None:
    results = []
    with pytest.raises(WorkerError, match=r"(?s)failed at its end.*for the test's sake"):
        results.extend(LocalExecutor(1).run(Setup(ENTRY, {"close_fails": True}), squares(3)))
    assert len(results) == 3


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("how", ["close", "drop", "raise", "interrupt", "exit", "task_iterable"])
def test_workers_are_gone_when_the_consumer_stops(how: str) -> None:
    before = children()
    seen: set[int] = set()

    def tasks() -> Iterator[Task]:
        yield Task(0, {"do": "describe"})
        for n in range(1, 100):
            if how == "task_iterable" and n > 2:
                raise KeyboardInterrupt
            yield Task(n, {"do": "sleep", "seconds": 600})

    def consume() -> None:
        for _ in LocalExecutor(2).run(SETUP, tasks()):
            seen.update(children() - before)
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "exit":
                raise SystemExit(1)
            raise LookupError

    if how == "close":
        run = LocalExecutor(2).run(SETUP, tasks())
        next(run)
        seen |= children() - before
        run.close()  # type: ignore[attr-defined]
    elif how == "drop":
        run = LocalExecutor(2).run(SETUP, tasks())
        next(run)
        seen |= children() - before
        del run
    else:
        with pytest.raises((KeyboardInterrupt, SystemExit, LookupError)):
            consume()
    assert seen or how == "task_iterable"
    assert children() <= before


def test_works_in_a_thread_beside_others() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            done = LocalExecutor(2).run(SETUP, squares(8))
            assert {d.number: d.result["value"] for d in done} == EXPECTED
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_forked_copy_of_a_run_leaves_the_workers_alone() -> None:
    run = LocalExecutor(2).run(SETUP, iter(squares(8)))
    numbers = [next(run).number]
    pid = os.fork()
    if pid == 0:  # only os._exit below: this is a copy of pytest
        code = 1
        with contextlib.suppress(BaseException):
            run.close()  # type: ignore[attr-defined]
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    done = list(run)
    assert sorted(numbers + [d.number for d in done]) == list(range(8))
    assert all(d.attempts == 1 for d in done)


# Whole programs: what happens to the workers of another process.


def start_program(
    tmp_path: Path, body: str, *, name: str = "program.py", **environment: str
) -> subprocess.Popen[str]:
    """Run a user's script, which has no ``if __name__ == "__main__"``."""
    script = tmp_path / name
    script.write_text(
        "import os, sys, time, threading, signal\n"
        f"sys.path += {[str(ROOT / 'src'), str(ROOT)]!r}\n"  # what only this process knows
        f"open({str(tmp_path / 'runs')!r}, 'a').write('run\\n')\n"
        "from tokenmill.build.executors import LocalExecutor, Setup, Task\n"
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
    """Wait until so many workers are at work."""
    directory = tmp_path / "pids"
    assert wait_until(lambda: directory.is_dir() and len(os.listdir(directory)) >= count, 30)
    return [int(name) for name in os.listdir(directory)]


SLEEPERS = """
tasks = [Task(n, {"do": "sleep", "seconds": 600, "hold": HOLD, "pids": PIDS}) for n in range(9)]
list(LocalExecutor(2).run(SETUP, tasks))
"""


@pytest.mark.parametrize("hold", [False, True], ids=["sleeping", "holding the interpreter"])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_die_with_their_parent(tmp_path: Path, signal_number: int, hold: bool) -> None:
    program = start_program(tmp_path, f"HOLD = {hold}\n" + SLEEPERS)
    pids = worker_pids(tmp_path, 2)
    program.send_signal(signal_number)
    output, _ = program.communicate(timeout=20)
    assert wait_until(lambda: all(map(is_gone, pids)), 5), output
    assert program.returncode != 0


def test_stopped_workers_die_with_their_parent(tmp_path: Path) -> None:
    program = start_program(tmp_path, "HOLD = False\n" + SLEEPERS)
    pids = worker_pids(tmp_path, 2)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    program.kill()
    program.communicate()
    assert wait_until(lambda: all(map(is_gone, pids)), 5)


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
    body = """
try:
    HOLD = False
    exec(SLEEPERS)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    program = start_program(tmp_path, f"SLEEPERS = {SLEEPERS!r}\n" + body)
    pids = worker_pids(tmp_path, 2)
    for pid in pids:  # what a terminal would do if they were in its group
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert not any(map(is_gone, pids))
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate(timeout=20)
    assert output == "interrupted\n"
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
        "from tokenmill.build.executors import LocalExecutor, Setup, Task\n"
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


@pytest.mark.parametrize(
    ("code", "says"),
    [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-64, "signal 64|SIGRTMAX"), (3, "code 3"), (None, "end")],
)
def test_exit_codes_are_described(code: int | None, says: str) -> None:
    assert re.search(says, describe_exit(code))
