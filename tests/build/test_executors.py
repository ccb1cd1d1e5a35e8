"""The contract of every executor, tried on each by one harness."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizers
import tokenmill as tm
from tests.build import entries
from tests.build.making import TOKENIZER, conversations, files_of, small_cuts, write_rows
from tokenmill.build import executors, wire
from tokenmill.build.blocks import BlockJob
from tokenmill.build.executors import LocalExecutor, resolve_executor
from tokenmill.build.process import WorkerProcess
from tokenmill.build.run import BUILD
from tokenmill.build.tasks import Executor, InlineExecutor, Setup, Task
from tokenmill.errors import RowError, TokenmillError, UsageError, WorkerError

ENTRY = f"{entries.__name__}:open_worker"
SETUP = Setup(ENTRY, {})


@pytest.fixture(params=["inline", "local"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return InlineExecutor() if request.param == "inline" else LocalExecutor(2)


def squares(count: int, **more: object) -> Iterator[Task]:
    return (Task(n, {"do": "square", "value": n, **more}) for n in range(count))


in_rest_or_not = pytest.mark.parametrize("in_rest", [False, True], ids=["at once", "in a rest"])


@in_rest_or_not
def test_results_of_every_executor_are_equal(executor: Executor, in_rest: bool) -> None:
    done = sorted(executor.run(SETUP, squares(40, in_rest=in_rest)), key=lambda d: d.number)
    assert [d.number for d in done] == list(range(40))
    # Tuples come back as lists, in this process as from another.
    assert [d.result for d in done] == [
        {"value": n * n, "pair": [n * n, [str(n * n)]]} for n in range(40)
    ]
    assert all(d.attempts == 1 and d.seconds >= 0 for d in done)


def test_no_tasks_load_and_start_nothing(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "WorkerProcess", None)
    assert list(executor.run(Setup("no.such.module:x"), [])) == []


@in_rest_or_not
def test_tasks_are_pulled_lazily_and_a_bounded_number_ahead(
    executor: Executor, in_rest: bool
) -> None:
    pulled = 0

    def endless() -> Iterator[Task]:
        nonlocal pulled
        for task in squares(10**9, in_rest=in_rest):
            pulled += 1
            yield task

    run = executor.run(SETUP, endless())
    assert pulled == 0
    with contextlib.closing(run):
        for taken, _ in enumerate(itertools.islice(run, 200), start=1):
            # Up to three workers: at most two tasks each and a few results not yet taken. A message
            # to Ray has up to eight tasks.
            assert pulled - taken <= (80 if type(executor).__name__ == "RayExecutor" else 10)
            if taken < 20:
                time.sleep(0.01)  # workers are faster than this consumer


def test_error_of_the_task_iterable_passes(executor: Executor) -> None:
    def failing() -> Iterator[Task]:
        yield from squares(3)
        raise LookupError("the plan broke")

    with pytest.raises(LookupError, match="the plan broke"):
        list(executor.run(SETUP, failing()))


@in_rest_or_not
def test_typed_error_travels_with_type_attributes_and_notes(
    executor: Executor, in_rest: bool
) -> None:
    with pytest.raises(RowError, match="bad row") as caught:
        list(executor.run(SETUP, [Task(5, {"do": "raise_row_error", "in_rest": in_rest})]))
    error = caught.value
    assert type(error) is RowError
    found = error.reason, error.path, error.row, error.line, error.offset
    assert found == ("bad_json", "a.jsonl", 3, 4, 99)
    assert "a note" in error.__notes__


def test_result_that_comes_with_an_error_is_delivered_before_it(tmp_path: Path) -> None:
    tasks = [Task(n, {"do": "sleep", "seconds": 0, "pids": str(tmp_path)}) for n in range(2)]
    run = LocalExecutor(2).run(SETUP, [*tasks, Task(2, {"do": "raise_row_error"})])
    numbers = [next(run).number]
    # One worker has the failing task by now; wait, without listening, until both are through.
    while len(os.listdir(tmp_path)) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    numbers.append(next(run).number)
    assert sorted(numbers) == [0, 1]
    with pytest.raises(RowError):
        next(run)


FOREIGN = r"task 7 \(a\.jsonl\) failed: ZeroDivisionError: for the test's sake"


@pytest.mark.parametrize(
    ("do", "in_rest", "message"),
    [
        ("raise_foreign", False, FOREIGN),
        ("raise_foreign", True, FOREIGN),
        ("unencodable", False, "JSON-serializable"),
        ("no_dict", True, "JSON-serializable"),
    ],
)
def test_foreign_error_names_the_task_and_is_not_retried(
    executor: Executor, do: str, in_rest: bool, message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        list(executor.run(SETUP, [Task(7, {"do": do, "in_rest": in_rest}, "a.jsonl")]))
    if isinstance(executor, LocalExecutor) and do == "raise_foreign":
        assert "in raise_foreign" in "\n".join(caught.value.__notes__), "the worker's traceback"


@pytest.mark.parametrize(
    ("setup", "kind", "message"),
    [
        (Setup(f"{entries.__name__}:missing"), WorkerError, "missing"),
        (Setup(ENTRY, {"broken": True}), WorkerError, "KeyError"),
        (Setup(ENTRY, {"bad": True}), UsageError, "options are bad"),
        (Setup(ENTRY, {"value": object()}), WorkerError, "JSON-serializable"),
    ],
)
def test_setup_that_fails_is_a_typed_error(
    executor: Executor, setup: Setup, kind: type[TokenmillError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        list(executor.run(setup, squares(1000)))


def test_payload_that_cannot_travel_is_a_typed_error(executor: Executor) -> None:
    with pytest.raises(WorkerError, match="JSON-serializable"):
        list(executor.run(SETUP, [Task(0, {"do": object()})]))


def test_next_task_is_begun_while_the_rest_of_one_waits_and_one_rest_at_a_time(
    tmp_path: Path,
) -> None:
    tasks = [
        Task(n, {"do": "meet", "value": n, "place": str(tmp_path), "next": n < 4}) for n in range(5)
    ]
    done = list(LocalExecutor(1).run(SETUP, tasks))
    assert [(d.number, d.result["at_once"]) for d in done] == [(n, 1) for n in range(5)]


def test_work_is_closed_after_the_last_task(executor: Executor, tmp_path: Path) -> None:
    list(executor.run(Setup(ENTRY, {"closed": str(tmp_path)}), squares(20)))
    assert 1 <= len(list(tmp_path.iterdir())) <= 3


def test_large_payload_and_result_travel_whole(executor: Executor) -> None:
    tasks = [Task(n, {"do": "square", "value": n, "ballast": "y" * 3_000_000}) for n in range(4)]
    results = {d.number: d.result["value"] for d in executor.run(SETUP, tasks)}
    assert results == {0: 0, 1: 1, 2: 4, 3: 9}


def test_many_runs_leave_no_descriptor(executor: Executor) -> None:
    def run_some() -> None:
        list(executor.run(SETUP, squares(3)))
        with contextlib.closing(executor.run(SETUP, squares(30))) as run:
            next(run)
        with pytest.raises(RowError):
            list(executor.run(SETUP, [Task(0, {"do": "raise_row_error"})]))

    run_some()
    gc.collect()  # what earlier tests left open is closed now, not between the two counts
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        run_some()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_workers_see_the_parents_package_and_are_pinned_to_one_core_each() -> None:
    tasks = [Task(n, {"do": "describe"}) for n in range(30)]
    done = list(LocalExecutor(2).run(SETUP, tasks))
    allowed = os.sched_getaffinity(0)
    cores = {d.worker: d.result["cores"] for d in done}
    assert all(len(c) == 1 and set(c) <= allowed for c in cores.values())
    assert len({c[0] for c in cores.values()}) == min(len(cores), len(allowed))
    assert all(d.result["tokenmill"] == wire.errors.__file__ for d in done)
    assert all("" not in d.result["path"] for d in done)
    # Nothing of ours in their environment, which their own children would inherit.
    steering = ("PYTHON", "TOKEN", "OMP", "RAYON")
    for d in done:
        theirs = {k: v for k, v in d.result["env"].items() if k.startswith(steering)}
        assert theirs == {k: v for k, v in os.environ.items() if k.startswith(steering)}


def both_ways(entry: str, **options: object) -> list[Setup]:
    """Setups with forked workers, and with a server per worker because a thread is left."""
    exec_entry = f"{entries.__name__}:open_with_thread"
    return [Setup(entry, options), Setup(exec_entry, {**options, "wrapped": entry})]


def test_forked_workers_and_separate_ones_encode_alike_also_with_threads() -> None:
    texts = [f"Hello number {n}, how are you? Größe 中文 🙂 {n * n}" for n in range(2000)]
    payload = {"texts": texts, "cores": sorted(os.sched_getaffinity(0))}
    tasks = [Task(n, payload) for n in range(4)]
    answers = []
    for setup in both_ways(f"{entries.__name__}:open_engines", tokenizer=str(TOKENIZER)):
        results = [done.result for done in LocalExecutor(2).run(setup, tasks)]
        assert {result["loaded"] - ("wrapped" in setup.options) for result in results} == {2}
        assert max(result["threads"] for result in results) > 3, "nothing was parallel"
        servers = {result["server"] for result in results}
        assert (servers == {os.getpid()}) == ("wrapped" in setup.options)
        answers += [(result["ids"], result["fast"]) for result in results]
    reference = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    assert all(ids == expected for ids, _ in answers)
    flat = np.fromiter(itertools.chain.from_iterable(expected), "<i4").tobytes().hex()
    assert all(fast == flat for _, fast in answers)


def test_forked_workers_and_separate_ones_publish_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    for module in ("tokenmill.build.blocks", "tokenmill.tokenizers.cache"):
        monkeypatch.setattr(f"{module}.SMALL_JOB_BYTES", 100)  # so that fastokens is used
    rows = write_rows(tmp_path / "rows.jsonl", conversations(300))
    published, setup = [], BlockJob.setup
    for entry in (BUILD, f"{entries.__name__}:open_with_thread"):

        def with_entry(self: Any, _: str, size: int, entry: str = entry, **options: Any) -> Setup:
            return setup(self, entry, size, **options, wrapped=BUILD)

        monkeypatch.setattr(BlockJob, "setup", with_entry)
        cache = tmp_path / entry
        store = tm.prepare(rows, tokenizer=TOKENIZER, tokenizer_backend="file", num_workers=2,
                           cache_dir=cache)  # fmt: skip
        assert store.proof["engine"] == "fastokens"
        assert store.proof["notes"]["encode"]["engine_failures"] == 0
        published.append(files_of(cache, "slices"))
    assert published[0] == published[1]
    assert len(published[0]) > 6


def test_worker_that_dies_is_forked_again_by_the_same_server(tmp_path: Path) -> None:
    setups = tmp_path / "setups"
    setups.mkdir()
    tasks = [Task(n, {"do": "describe"}) for n in range(6)]
    tasks[3] = Task(3, {"do": "square", "value": 3, "fault": "SIGKILL", "when": "start",
                        "mark": str(tmp_path / "mark")})  # fmt: skip
    done = list(LocalExecutor(2).run(Setup(ENTRY, {"opened": str(setups)}), tasks))
    assert sorted(d.number for d in done) == list(range(6))
    assert len(os.listdir(setups)) == 1


def test_fewer_tasks_than_workers_start_only_as_many_workers() -> None:
    with mock.patch.object(executors, "WorkerProcess", wraps=WorkerProcess) as started:
        assert len(list(LocalExecutor(8).run(SETUP, squares(2)))) == 2
    assert 1 <= started.call_count <= 2  # the first may be free before the second starts


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}, 0.5),
        ("0::/hidden/path\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        (
            "4:cpu,cpuacct:/job\n2:cpuset:/\n",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/\n", {}, None),
    ],
)
def test_cpu_quota_is_the_smallest_above_the_process(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    assert executors.cpu_quota(tmp_path / "membership", tmp_path) == quota


def test_ranks_of_one_machine_get_different_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [0, 1, 2, 3, 8, 9, 10, 11]
    taken = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        taken += [executors.core_of_worker(worker, 2, cores) for worker in range(2)]
    assert sorted(taken) == cores


@settings(max_examples=50)
@given(
    results=st.lists(st.dictionaries(st.text(), st.integers(-(2**63), 2**64 - 1) | st.text())),
    cut=st.integers(1, 50),
)
def test_frames_come_out_whole_however_they_are_cut(results: list[dict], cut: int) -> None:
    sent = [wire.Finished(n, result, 0.5) for n, result in enumerate(results)]
    stream = b"".join(wire.frame(message) for message in sent)
    frames = wire.Frames()
    received = []
    for start in range(0, len(stream), cut):
        frames.feed(stream[start : start + cut])
        received += frames.ups()
    assert received == sent


def test_stream_without_frames_is_a_typed_error() -> None:
    frames = wire.Frames()
    frames.feed(b"Traceback (most recent call last)")
    with pytest.raises(WorkerError, match="damaged message"):
        list(frames.ups())


def test_executor_that_is_none_of_ours_is_refused_and_nothing_is_local() -> None:
    assert isinstance(resolve_executor(None, None), LocalExecutor)
    for wrong in (4, object(), "here"):
        with pytest.raises(UsageError, match="executor must be"):
            resolve_executor(wrong, None)  # type: ignore[arg-type]
    for workers in (-1, True, 1.5, "2"):
        with pytest.raises(UsageError, match="num_workers"):
            resolve_executor("local", workers)  # type: ignore[arg-type]
