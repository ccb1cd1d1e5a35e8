"""`RayExecutor`: the tasks of a build as plain Ray tasks.

A run keeps a bounded window of tasks submitted and yields results as they complete. Ray retries a
task `MAX_RETRIES` times if its worker or node died, or if it raised `worker.Transient`; every other
failure arrives as its own typed error. When the consumer stops iterating, waiting tasks do nothing,
and running ones get `FINISH_S` to finish before they are interrupted; published slices stay usable.

An executor joins a cluster for its first task, so a cache hit needs no Ray, and leaves it in
`close`. `Done.attempts` is always 1: Ray does not report it. A stopped (not killed) worker process
is not detected.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from tokenmill.errors import CacheError, TokenmillError, UsageError, WorkerError, check_positive
from tokenmill.files import at_end, write_file
from tokenmill.fingerprint import checksum
from tokenmill.integrations.ray import cluster, worker
from tokenmill.work import MAX_RETRIES, Done, Setup, Task, wire

FINISH_S = 2.0  # seconds that running tasks get to finish before they are interrupted
REFRESH_S = 10.0  # seconds between two reads of the cluster's number of CPUs

LOST = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""Ray's errors when a worker was lost more often than it retries."""


class RayExecutor:
    """Runs tasks on a Ray cluster.

    Args:
        num_workers: Maximum number of tasks at a time; None: the cluster's CPUs, also when nodes
            join or leave.
        address: As for ``ray.init``, if this process belongs to no cluster yet; None lets Ray find
            one or start a local one.
        num_cpus: CPUs that a task reserves; 0 if waiting actors reserve all of them.
        pin: Keep each task on one core, where the engine is fastest.
        wait_s: Seconds to wait for the first free CPU; None: no limit, but a minute inside an actor
            or a task, which may hold the CPUs itself.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        address: str | None = None,
        num_cpus: float = 1,
        pin: bool = True,
        wait_s: float | None = None,
    ) -> None:
        if num_workers is not None:
            check_positive("num_workers", num_workers)
        if isinstance(num_cpus, bool) or not isinstance(num_cpus, int | float) or num_cpus < 0:
            raise UsageError(f"num_cpus must be a number from 0, not {num_cpus!r}")
        self.num_workers = num_workers
        self.address = address
        self.num_cpus = num_cpus
        self.pin = pin
        self.wait_s = wait_s
        self._scheduling: cluster.Scheduling | None = None
        self._sentinels: dict[str, worker.Sentinel] = {}
        self._open = contextlib.ExitStack()
        at_end(self, self._open.close)

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        """Run every task; see `Executor.run`."""
        waiting = iter(tasks)
        first = next(waiting, None)
        if first is None:
            return
        scheduling, sentinels = self._get_ready(setup.shared)
        run = _RayRun(self, scheduling, setup, sentinels)
        try:
            yield from run.results(itertools.chain([first], waiting))
        finally:
            run.end()

    def close(self) -> None:
        """Leave the cluster, if this executor joined it; a later run joins again."""
        self._open.close()
        self._scheduling = None
        self._sentinels.clear()

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get_ready(self, shared: Iterable[str]) -> tuple[cluster.Scheduling, list[worker.Sentinel]]:
        """Join, find a CPU, and check that every node shares these directories: each once."""
        if self._scheduling is None:
            self._open.callback(cluster.join(self.address))
        new = [directory for directory in shared if directory not in self._sentinels]
        planted = {directory: cluster.plant(directory, self._open) for directory in new}
        if planted or self._scheduling is None:
            cluster.probe(list(planted.values()))
        self._sentinels.update(planted)
        if self._scheduling is None:
            self._scheduling = cluster.find_cpu(self.num_cpus, self.wait_s)
        return self._scheduling, [self._sentinels[directory] for directory in shared]


class _RayRun:
    """One call of `run`."""

    def __init__(
        self,
        executor: RayExecutor,
        scheduling: cluster.Scheduling,
        setup: Setup,
        sentinels: list[worker.Sentinel],
    ) -> None:
        self._num_workers = executor.num_workers
        self._scheduling = scheduling
        # A task that finds this file does nothing.
        self._stop = f"{sentinels[0][0]}-stop-{secrets.token_hex(8)}" if sentinels else ""
        setup = replace(setup, options=wire.as_travelled(setup.options))
        key = checksum(wire.frame(wire.Begin(setup.entry, setup.options)))
        job = worker.Job(setup, key, sentinels, self._stop, executor.pin)
        self._job = ray.put(job)  # once for all tasks
        node = ray.get_runtime_context().get_node_id() if setup.near_caller else None
        self._remote = ray.remote(worker.do_task).options(
            **scheduling.options(near=node),
            max_retries=MAX_RETRIES,
            retry_exceptions=[worker.Transient],
        )
        self._pending: dict[Any, Task] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # worker numbers by node and process id
        self._updated_at = float("-inf")
        self._window = 1

    def results(self, tasks: Iterator[Task]) -> Iterator[Done]:
        """Yield every task's result; raise the first failure after the results before it."""
        while True:
            self._fill(tasks)
            if not self._pending:
                return
            finished, failure = self._collect()
            if failure is None:
                self._fill(tasks)  # before the consumer takes its time
            yield from finished
            if failure is not None:
                raise failure

    def end(self) -> None:
        """Stop waiting tasks at once, and running ones after `FINISH_S`."""
        if not self._pending or not ray.is_initialized():
            return
        if self._stop:
            with contextlib.suppress(CacheError):
                write_file(Path(self._stop), b"")
        left = list(self._pending)
        self._pending.clear()
        # Most slices take less than this, and a finished one must not be cancelled (`cancel`).
        _, running = ray.wait(left, num_returns=len(left), timeout=FINISH_S)
        for ref in running:
            cluster.cancel(ref)
        if running:
            ray.wait(running, num_returns=len(running), timeout=FINISH_S)

    def _fill(self, waiting: Iterator[Task]) -> None:
        """Submit tasks up to the window."""
        self._update_window()
        while len(self._pending) < self._window:
            task = next(waiting, None)
            if task is None:
                return
            self._submit(task)

    def _update_window(self) -> None:
        now = time.monotonic()
        if now - self._updated_at < REFRESH_S:
            return
        self._updated_at = now
        window = self._num_workers
        if window is None:
            window = max(1, int(cluster.cpus() / (self._scheduling.num_cpus or 1)))
        self._window = min(window, self._scheduling.most or window)

    def _submit(self, task: Task) -> None:
        sent = replace(task, payload=wire.as_travelled(task.payload))
        self._pending[self._remote.remote(self._job, sent)] = task

    def _collect(self) -> tuple[list[Done], TokenmillError | None]:
        """Wait for a result, and take all that are ready by then."""
        refs = list(self._pending)
        ready, _ = ray.wait(refs, num_returns=1, timeout=REFRESH_S)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        finished, failure = [], None
        for ref in ready:
            task = self._pending.pop(ref)
            answer = _answer(ref, task)
            if isinstance(answer, TokenmillError):
                failure = failure or answer
            else:
                finished.append(self._done(*answer))
        return finished, failure

    def _done(self, node: str, pid: int, answer: wire.Finished) -> Done:
        number = self._numbers.setdefault((node, pid), len(self._numbers))
        return Done(
            answer.number,
            answer.result,
            answer.seconds,
            number,
        )


def _answer(ref: Any, task: Task) -> tuple[str, int, wire.Finished] | TokenmillError:
    """Return a task's result, or Ray's error as one of ours."""
    try:
        node, pid, answer = ray.get(ref)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, worker.Transient):
            return wire.unpack_error(cause.answer.failure)
        return _because(f"{task} could not be run: {cluster.last_line(error)}", error)
    except LOST as error:
        lost = f"gave up after {MAX_RETRIES + 1} workers or nodes were lost"
        return _because(f"{task}: {lost}: {type(error).__name__}: {_reason(error)}", error)
    except TaskCancelledError as error:
        return _because(f"{task} was cancelled by somebody else", error)
    except RayError as error:
        return _because(f"{task}: Ray failed: {type(error).__name__}: {_reason(error)}", error)
    if isinstance(answer, wire.Failed):
        return wire.unpack_error(answer.failure)
    return node, pid, answer


def _because(message: str, error: BaseException) -> WorkerError:
    translated = WorkerError(message)
    translated.__cause__ = error
    return translated


def _reason(error: BaseException) -> str:
    """The first sentence of Ray's explanation, which goes on about log files."""
    return " ".join(str(error).split()).partition(". ")[0]
