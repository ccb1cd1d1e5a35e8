"""Workers that die, stop, print much or lose their parent."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import psutil
import pytest

from tests.build import entries
from tests.build.watching import nothing_left  # noqa: F401 - autouse
from tests.sampling import sampled
from tokenmill.build.executors import LocalExecutor
from tokenmill.build.process import END_S, TAIL_BYTES, WorkerProcess
from tokenmill.build.tasks import MAX_RETRIES, Done, Setup, Task
from tokenmill.errors import WorkerError

ENTRY = f"{entries.__name__}:open_worker"
SETUP = Setup(ENTRY, {})
SILENCE_S = 0.5  # instead of 20, so that the tests of stopped workers are short


def squares(count: int, **fault: object) -> list[Task]:
    """Tasks of which number 3 carries the fault."""
    return [
        Task(n, {"do": "square", "value": n, **(fault if n == 3 else {})}) for n in range(count)
    ]


EXPECTED = {n: n * n for n in range(8)}


@pytest.mark.parametrize(
    ("fault", "in_rest"), sampled(product(sorted(entries.FAULTS), (False, True)), 2)
)
def test_worker_that_is_lost_once_costs_its_task_a_retry(
    fault: str, in_rest: bool, tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    tasks = squares(8, fault=fault, when="middle", mark=mark, in_rest=in_rest)
    executor = LocalExecutor(2, heartbeat_silence_s=SILENCE_S)
    done = {d.number: d for d in executor.run(SETUP, tasks)}
    assert {n: d.result["value"] for n, d in done.items()} == EXPECTED
    again = {n: d.attempts for n, d in done.items() if d.attempts > 1}
    # Whatever was begun while the rest waited is lost with it.
    assert again.pop(3) == 2
    assert not again or (in_rest and list(again.values()) == [2])


def test_task_that_loses_every_worker_is_not_taken_for_one_that_was_nearly_done() -> None:
    tasks = [
        Task(n, {"do": "linger", **({"fault": "SIGKILL"} if n == 3 else {})}) for n in range(8)
    ]
    done: list[Done] = []
    with pytest.raises(WorkerError, match=r"^task 3: gave up after 3 workers"):
        done.extend(LocalExecutor(1).run(SETUP, tasks))
    assert [(d.number, d.attempts) for d in done] == [(0, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_result_sent_before_the_worker_is_lost_is_a_result(signal_number: int) -> None:
    executor = LocalExecutor(1, heartbeat_silence_s=SILENCE_S)
    run = executor.run(SETUP, [Task(n, {"do": "describe"}) for n in range(3)])
    first = next(run)
    time.sleep(0.3)  # the worker has sent the result of task 1, which is not read yet
    os.kill(first.result["pid"], signal_number)
    time.sleep(0.2)  # result and death are found at the same time
    second, third = run
    assert second.result["pid"] == first.result["pid"] != third.result["pid"]
    assert second.attempts == 1


def test_server_that_dies_is_replaced_and_its_tasks_are_retried() -> None:
    tasks = [
        Task(n, {"do": "sleep", "seconds": 0.5} if n else {"do": "describe"}) for n in range(6)
    ]
    run = LocalExecutor(2).run(SETUP, tasks)
    first = next(run)
    os.kill(first.result["server"], signal.SIGKILL)
    rest = list(run)
    assert sorted(d.number for d in rest) == list(range(1, 6))
    assert {d.attempts for d in rest} == {1, 2}


@pytest.mark.slow
def test_server_that_is_stopped_is_replaced_when_a_worker_has_ended() -> None:
    """It reports no exit, neither of a killed worker nor of those that have finished."""
    tasks = [
        Task(n, {"do": "sleep", "seconds": 0.2} if n else {"do": "describe"}) for n in range(6)
    ]
    started = time.monotonic()
    run = LocalExecutor(2, heartbeat_silence_s=SILENCE_S).run(SETUP, tasks)
    first = next(run)
    os.kill(first.result["server"], signal.SIGSTOP)
    os.kill(first.result["pid"], signal.SIGKILL)
    rest = list(run)
    assert sorted(d.number for d in rest) == list(range(1, 6))
    assert max(d.attempts for d in rest) == 2
    assert time.monotonic() - started < 3 * END_S
    tasks = [Task(n, {"do": "describe"}) for n in range(8)]
    run = LocalExecutor(4, heartbeat_silence_s=SILENCE_S).run(SETUP, tasks)
    os.kill(next(run).result["server"], signal.SIGSTOP)
    started = time.monotonic()
    assert len(list(run)) == 7
    assert time.monotonic() - started < 3 * END_S


def test_server_of_a_parent_that_ignores_its_children_survives_a_worker() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        tasks = [Task(n, {"do": "describe"}) for n in range(3)]
        run = LocalExecutor(1).run(SETUP, tasks)
        first = next(run)
        os.kill(first.result["pid"], signal.SIGKILL)
        assert {d.result["server"] for d in run} == {first.result["server"]}
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_too_few_descriptors_are_a_typed_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in (1, 5, 9):  # a worker needs 6, a server 4
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
        try:
            with pytest.raises(WorkerError, match=r"cannot be started: .*Too many open files"):
                list(LocalExecutor(1).run(SETUP, squares(1)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("SIGKILL", "killed by SIGKILL, which tokenmill did not send: probably out of memory"),
        ("SIGSEGV", "killed by SIGSEGV"),
        ("exit", "exited with code 7"),
        ("SIGSTOP", "stuck (process state T): no heartbeat and no CPU time"),
        ("MemoryError", "ran out of memory (hint: use fewer num_workers)"),
    ],
)
def test_task_that_loses_every_worker_is_named_in_a_typed_error(fault: str, says: str) -> None:
    payload = {"do": "square", "value": 41, "fault": fault, "when": "start"}
    tasks = [Task(41, payload, "a.jsonl, rows 0-9")]
    with pytest.raises(WorkerError) as caught:
        list(LocalExecutor(2, heartbeat_silence_s=SILENCE_S).run(SETUP, tasks))
    message = str(caught.value)
    assert "task 41 (a.jsonl, rows 0-9)" in message
    assert message.count(says) == MAX_RETRIES + 1
    assert "while it started" not in message
    if fault == "SIGSEGV":  # the Python frames of the crash
        assert re.search(r"(?s)its last output:.*in square", message)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_worker_that_dies_starting_is_retried_then_given_up(fault: str, tmp_path: Path) -> None:
    executor = LocalExecutor(2, heartbeat_silence_s=SILENCE_S)
    once = Setup(ENTRY, {"die_starting": fault, "mark": str(tmp_path / "mark")})
    assert {d.number: d.result["value"] for d in executor.run(once, squares(8))} == EXPECTED
    with pytest.raises(WorkerError, match=r"task \d+: gave up after 3 .*while it started"):
        list(executor.run(Setup(ENTRY, {"die_starting": fault}), squares(1)))


def test_worker_whose_child_keeps_the_channel_open_is_still_found_dead(tmp_path: Path) -> None:
    executor = LocalExecutor(1, heartbeat_silence_s=SILENCE_S)
    child = tmp_path / "child"
    task = Task(0, {"do": "leave_child", "mark": str(tmp_path / "mark"), "child": str(child)})
    (done,) = executor.run(SETUP, [task])
    assert done.attempts == 2
    # The child is the task's, not the executor's; other tests' workers look just like it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(child.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("hold", "silence_s"),
    [(False, SILENCE_S), (True, SILENCE_S / 2)],
    ids=["sleeping", "holding the interpreter"],
)
def test_slow_task_is_never_killed_for_time(hold: bool, silence_s: float) -> None:
    executor = LocalExecutor(1, heartbeat_silence_s=silence_s)
    work = {"do": "sleep", "seconds": 3 * silence_s, "hold": hold}
    assert [d.attempts for d in executor.run(SETUP, [Task(0, work)])] == [1]


def test_worker_that_gets_no_processor_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "read_cpu", lambda worker: ("R", 5))
    executor = LocalExecutor(1, heartbeat_silence_s=SILENCE_S / 4)
    work = {"do": "sleep", "seconds": SILENCE_S, "hold": True}
    assert [d.attempts for d in executor.run(SETUP, [Task(0, work)])] == [1]


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


def test_flood_on_the_standard_streams_breaks_nothing_and_its_end_is_in_the_error() -> None:
    tasks = [Task(n, {"do": "shout", "lines": 2000}) for n in range(4)]
    done = []
    with pytest.raises(WorkerError, match="the last words"):
        done += LocalExecutor(1).run(SETUP, [*tasks, Task(4, tasks[0].payload | {"fault": "exit"})])
    assert [d.result for d in done] == [{"lines": 2000}] * 4
    endless_line = Task(0, {"do": "shout", "lines": 0, "fault": "exit", "long": 10_000_000})
    with pytest.raises(WorkerError) as caught:
        list(LocalExecutor(1).run(SETUP, [endless_line]))
    assert len(str(caught.value)) < TAIL_BYTES + 1000


def test_failing_close_is_reported_after_all_results() -> None:
    results = []
    with pytest.raises(WorkerError, match=r"(?s)failed at exit.*for the test's sake"):
        results.extend(LocalExecutor(1).run(Setup(ENTRY, {"close_fails": True}), squares(3)))
    assert len(results) == 3


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("how", ["close", "drop", "raise", "interrupt", "exit", "task_iterable"])
def test_workers_are_gone_when_the_consumer_stops(how: str) -> None:
    before = children()
    raised = {"raise": LookupError, "interrupt": KeyboardInterrupt, "exit": SystemExit}

    def tasks() -> Iterator[Task]:
        yield Task(0, {"do": "describe"})
        for n in range(1, 100):
            if how == "task_iterable" and n > 2:
                raise KeyboardInterrupt
            yield Task(n, {"do": "sleep", "seconds": 600})

    def consume() -> None:
        for _ in LocalExecutor(2).run(SETUP, tasks()):
            assert children() - before
            raise raised.get(how, KeyboardInterrupt)

    if how in ("close", "drop"):
        run = LocalExecutor(2).run(SETUP, tasks())
        next(run)
        assert children() - before
        if how == "close":
            run.close()  # type: ignore[attr-defined]
        del run
    else:
        with pytest.raises(raised.get(how, KeyboardInterrupt)):
            consume()
    assert children() <= before


def test_works_in_a_thread_beside_others() -> None:
    def work(_: int) -> dict[int, int]:
        done = LocalExecutor(2).run(SETUP, squares(8))
        return {d.number: d.result["value"] for d in done}

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [EXPECTED] * 3


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
