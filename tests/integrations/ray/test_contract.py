"""The executors' contract on Ray, by the harness that the others pass; and workers that die."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.build import test_executors
from tests.build.test_executors import (  # noqa: F401 - collected here, with the fixture below
    test_error_of_the_task_iterable_passes,
    test_foreign_error_names_the_task_and_is_not_retried,
    test_large_payload_and_result_travel_whole,
    test_no_tasks_load_and_start_nothing,
    test_payload_that_cannot_travel_is_a_typed_error,
    test_results_of_every_executor_are_equal,
    test_setup_that_fails_is_a_typed_error,
    test_tasks_are_pulled_lazily_and_a_bounded_number_ahead,
    test_typed_error_travels_with_type_attributes_and_notes,
)
from tokenmill.build.tasks import Setup, Task
from tokenmill.errors import SourceMissing, UsageError, WorkerError
from tokenmill.integrations.ray import RayExecutor

SETUP = test_executors.SETUP


@pytest.fixture
def executor(joined: str) -> RayExecutor:
    return RayExecutor(3)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSEGV", "MemoryError"])
def test_worker_that_dies_costs_its_task_a_retry(
    executor: RayExecutor, tmp_path: Path, fault: str
) -> None:
    once = {"fault": fault, "when": "start", "mark": str(tmp_path / "mark")}
    tasks = [Task(n, {"do": "square", "value": n, **(once if n else {})}) for n in range(2)]
    assert {d.number: d.result["value"] for d in executor.run(SETUP, tasks)} == {0: 0, 1: 1}
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("SIGKILL", r"task 4 \(chat\.jsonl\): gave up after 3 workers or nodes were lost"),
        ("MemoryError", r"task 4 \(chat\.jsonl\): out of memory on node .*fewer num_workers"),
    ],
)
def test_worker_that_always_dies_is_a_typed_error(
    executor: RayExecutor, fault: str, message: str
) -> None:
    task = Task(4, {"do": "square", "value": 3, "fault": fault, "when": "start"}, "chat.jsonl")
    with pytest.raises(WorkerError, match=message):
        list(executor.run(SETUP, [task]))


def test_unreachable_file_system_is_retried(executor: RayExecutor, tmp_path: Path) -> None:
    setup = Setup("tests.integrations.ray.entries:open_flaky", {"mark": str(tmp_path / "mark")})
    (done,) = executor.run(setup, [Task(0, {"times": 2})])
    assert done.result == {"attempts": 3}
    with pytest.raises(SourceMissing, match=r"gone \(attempt 6\) on node .*every node must see"):
        list(executor.run(setup, [Task(0, {"times": 9})]))


def test_worker_is_opened_once_per_process_and_leaves_the_core_alone(
    executor: RayExecutor,
) -> None:
    setup = Setup("tests.integrations.ray.entries:open_counting", {})
    done = list(executor.run(setup, [Task(n, {}) for n in range(30)]))
    # How many processes Ray starts is its own choice, but a task of each is not the only one.
    processes = {(d.worker, d.result["pid"]) for d in done}
    assert len(dict(processes)) == len({pid for _, pid in processes}) == len(processes) < 30
    assert {d.result["opened"] for d in done} == {1}
    assert {len(d.result["cores"]) for d in done} == {1}
    # Afterwards the process is the job's own again, for whatever task comes next.
    assert all(os.sched_getaffinity(pid) == os.sched_getaffinity(0) for _, pid in processes)


def test_closing_in_the_middle_ends_the_tasks_under_way(
    executor: RayExecutor, tmp_path: Path
) -> None:
    setup = Setup("tests.integrations.ray.entries:open_sleeper", {"log": str(tmp_path)})
    with contextlib.closing(executor.run(setup, [Task(n, {"s": 60 * n}) for n in range(9)])) as run:
        assert next(run).number == 0
    assert len(list(tmp_path.glob("started-*"))) <= 4
    # Interrupted, so that a task's own clean-up ran.
    assert len(list(tmp_path.glob("cleaned-*"))) == len(list(tmp_path.glob("started-*")))


@pytest.mark.parametrize("given", [{"num_workers": 0}, {"num_workers": True}, {"num_cpus": -1}])
def test_wrong_argument_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        RayExecutor(**given)  # type: ignore[arg-type]
