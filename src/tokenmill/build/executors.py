"""Run tasks in worker processes of this machine, and replace workers that die or are stuck.

docs/internals/build-workers.md defines *stuck*.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.build import wire
from tokenmill.build.process import END_S, WorkerProcess, WorkerServer, describe_exit
from tokenmill.build.tasks import MAX_RETRIES, Done, Executor, InlineExecutor, Setup, Task
from tokenmill.errors import UsageError, WorkerError, check_one_of, check_positive

HEARTBEAT_SILENCE_S = 20.0  # a hanging worker is reported within 30 s (docs/guarantees.md)
BEAT_S = 1.0  # seconds between heartbeats; shorter only where the allowed silence is
RUNNABLE = "R"  # state of a process that runs or waits for a processor
STALLED_S = 20.0  # without a new result of the first rank, after which other ranks take part
FINISH_S = 2.0  # seconds in which an idle worker must exit after the last task


@dataclass(slots=True)
class _Assignment:
    task: Task
    deaths: list[str] = field(default_factory=list)  # how earlier workers with this task ended
    finishing: bool = False  # only its completion is left


class LocalExecutor:
    """Runs tasks in worker processes; each call of `run` starts and ends them.

    With ``num_workers=None`` there is one per usable core of this rank, and none for a small job.
    Each is pinned to one core before it loads an engine, because fastokens starts a thread per
    visible core.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        heartbeat_silence_s: float = HEARTBEAT_SILENCE_S,
    ) -> None:
        if num_workers is not None:
            check_positive("num_workers", num_workers)
        self.has_fixed_size = num_workers is not None
        self.num_workers = default_workers() if num_workers is None else num_workers
        self.heartbeat_silence_s = heartbeat_silence_s

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        if setup.small_job and not self.has_fixed_size:
            yield from InlineExecutor().run(setup, tasks)
            return
        run = _Run(self, setup, iter(tasks))
        try:
            yield from run.results()
            run.finish()
        finally:
            run.end()


class _Run:
    """The workers and tasks of one call of `run`, in one thread with a select loop."""

    def __init__(self, executor: LocalExecutor, setup: Setup, tasks: Iterator[Task]) -> None:
        self._executor = executor
        self._begin = wire.Begin(setup.entry, setup.options)
        self._tasks = tasks
        self._retries: deque[_Assignment] = deque()
        self._workers: dict[WorkerProcess, dict[int, _Assignment]] = {}  # by their tasks' numbers
        self._servers: list[WorkerServer] = []  # several only if they cannot fork
        self._finished: deque[Done] = deque()
        self._failure: Exception | None = None
        self._cores = allowed_cores()
        self._beat_s = min(BEAT_S, executor.heartbeat_silence_s / 5)
        self._selector = selectors.DefaultSelector()
        self._listened = time.monotonic()
        self._owner = os.getpid()

    def results(self) -> Iterator[Done]:
        """Yield every result; raise the first failure after the results that preceded it."""
        while True:
            # If the consumer is slower than the workers, assign nothing: the queue must not grow.
            if self._failure is None and len(self._finished) <= self._executor.num_workers:
                self._assign()
            if self._finished:
                yield self._finished.popleft()
                self._listen(0)
            elif self._failure is not None:
                raise self._failure
            elif any(self._workers.values()):
                self._listen(self._beat_s)
            else:
                return

    def finish(self) -> None:
        """Let all idle workers exit."""
        for worker in self._workers:
            worker.finish()
        deadline = time.monotonic() + FINISH_S
        for worker in self._workers:
            code = worker.server.wait(worker, max(0.0, deadline - time.monotonic()))
            worker.drain_output()
            if code is not None and code > 0:
                raise WorkerError(f"worker {worker.number} failed at exit{worker.last_output()}")

    def end(self) -> None:
        self._selector.close()
        if os.getpid() == self._owner:
            for worker in self._workers:
                worker.kill()
            for server in self._servers:
                server.stop()
        # A forked child of the owner must not kill the workers of its parent.
        for process in [*self._workers, *self._servers]:
            process.release()
        self._workers.clear()
        self._servers.clear()

    def _assign(self) -> None:
        while True:
            idle = next(filter(self._is_idle, self._workers), None)
            if idle is None and not self._can_start():
                return
            assignment = self._next()
            if assignment is None:
                return
            worker = idle if idle is not None else self._start()
            task = assignment.task
            self._workers[worker][task.number] = assignment
            worker.send(wire.Assign(task.number, task.payload, task.label))
            self._watch(worker)

    def _is_idle(self, worker: WorkerProcess) -> bool:
        """Whether a worker can begin the next task.

        A task that lost a worker before runs alone, so that another death is clearly its own.
        """
        under_way = self._workers[worker].values()
        if self._retries:
            return not under_way
        return all(task.finishing and not task.deaths for task in under_way)

    def _next(self) -> _Assignment | None:
        if self._retries:
            return self._retries.popleft()
        task = next(self._tasks, None)
        return None if task is None else _Assignment(task)

    def _can_start(self) -> bool:
        """Whether another worker can be started; a server that can fork starts one at a time."""
        if len(self._workers) >= self._executor.num_workers:
            return False
        return self._cannot_fork or all(server.starting is None for server in self._servers)

    @property
    def _cannot_fork(self) -> bool:
        return any(server.is_worker for server in self._servers)

    def _start(self) -> WorkerProcess:
        used_numbers = {worker.number for worker in self._workers}
        number = next(n for n in range(self._executor.num_workers) if n not in used_numbers)
        core = None
        if hasattr(os, "sched_setaffinity"):
            core = core_of_worker(number, self._executor.num_workers, self._cores)
        try:
            worker = WorkerProcess(number)
            if not self._servers or self._cannot_fork:
                server = WorkerServer(worker, core, self._beat_s)
                self._servers.append(server)
                self._selector.register(server.channel, selectors.EVENT_READ, server)
        except OSError as error:
            raise WorkerError(
                f"a worker process cannot be started: {error} (hint: use fewer num_workers)"
            ) from error
        self._servers[-1].start(worker, core)
        self._workers[worker] = {}
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        worker.send(self._begin)
        return worker

    def _watch(self, worker: WorkerProcess) -> None:
        events = selectors.EVENT_READ
        if worker.outgoing:
            events |= selectors.EVENT_WRITE
        self._selector.modify(worker.channel, events, worker)

    def _listen(self, timeout_s: float) -> None:
        """Handle the workers' messages; then check the workers that sent nothing."""
        received = set()
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, WorkerServer):
                key.data.listen()
                continue
            worker: WorkerProcess = key.data
            if worker not in self._workers:
                continue  # replaced earlier in this loop
            if key.fileobj is not worker.channel:
                if not worker.drain_output():
                    self._selector.unregister(worker.output)
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush()
                self._watch(worker)
            if events & selectors.EVENT_READ:
                received.add(worker)
                if not self._receive(worker):
                    self._replace(worker)
        now = time.monotonic()
        # A longer time was not spent waiting: the machine was suspended or the consumer slow.
        elapsed_s = min(now - self._listened, 2 * self._beat_s)
        self._listened = now
        for worker in list(self._workers):
            if worker.has_exited:  # a child of a task may keep its channel open
                self._replace(worker)
            elif worker not in received:
                self._check_worker(worker, elapsed_s)
        for server in [server for server in self._servers if server.has_exited]:
            self._selector.unregister(server.channel)
            server.release()
            self._servers.remove(server)

    def _receive(self, worker: WorkerProcess) -> bool:
        """Handle a worker's messages; return False if its channel is closed."""
        is_open, messages = worker.receive()
        worker.silent_s = 0.0
        under_way = self._workers[worker]
        for message in messages:
            if isinstance(message, wire.Finishing) and message.number in under_way:
                under_way[message.number].finishing = True
            elif isinstance(message, wire.Finished) and message.number in under_way:
                assignment = under_way.pop(message.number)
                done = Done(
                    message.number,
                    message.result,
                    message.seconds,
                    worker.number,
                    attempts=len(assignment.deaths) + 1,
                )
                self._finished.append(done)
            elif isinstance(message, wire.Failed) and under_way:
                # Without a number, the worker failed to start and has only one task.
                number = next(iter(under_way)) if message.number is None else message.number
                assignment = under_way.pop(number)
                if self._failure is None:
                    self._failure = wire.unpack_error(message.failure)
                    self._failure.add_note(f"in worker {worker.number}, at {assignment.task}")
        return is_open

    def _check_worker(self, worker: WorkerProcess, elapsed_s: float) -> None:
        worker.silent_s += elapsed_s
        if worker.silent_s <= 2 * self._beat_s:
            worker.cpu_ticks = None
            return
        state, ticks = worker.read_cpu()
        if ticks != worker.cpu_ticks or state == RUNNABLE:
            worker.cpu_ticks, worker.idle_s = ticks, 0.0
            return
        worker.idle_s += elapsed_s
        if worker.idle_s >= self._executor.heartbeat_silence_s:
            worker.ending = (
                f"stuck (process state {state}): no heartbeat and no CPU time "
                f"for {worker.idle_s:.0f} s, so it was killed"
            )
            worker.kill()
            self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        """Remove a dead worker; retry its tasks on other workers, or fail."""
        code = worker.server.wait(worker, END_S)
        self._receive(worker)  # results that it sent before it died count
        worker.drain_output()
        self._selector.unregister(worker.channel)
        with contextlib.suppress(KeyError):  # unregistered already if its end was read
            self._selector.unregister(worker.output)
        worker.release()
        ending = worker.ending or describe_exit(code)
        if worker.pid is None:
            ending += " (while it started)"
        for assignment in self._workers.pop(worker).values():
            assignment.finishing = False
            assignment.deaths.append(ending)
            if len(assignment.deaths) <= MAX_RETRIES:
                self._retries.append(assignment)
            elif self._failure is None:
                endings = "; then ".join(assignment.deaths)
                self._failure = WorkerError(
                    f"{assignment.task}: gave up after {len(assignment.deaths)} workers died: "
                    f"{endings}{worker.last_output()}"
                )


def resolve_executor(executor: str | Executor | None, num_workers: int | None) -> Executor:
    """Return an executor by name, or the given object; None is ``local``."""
    executor = "local" if executor is None else executor
    if not isinstance(executor, str):
        if not callable(getattr(executor, "run", None)):
            raise UsageError(
                ("executor",), f" must be a name or an executor object, got {executor!r}"
            )
        return executor
    check_one_of("executor", executor, ("local", "inline", "ray"))
    if executor == "ray":
        from tokenmill.integrations.ray import RayExecutor

        return RayExecutor(num_workers)
    if executor == "inline" or num_workers == 0:
        return InlineExecutor()
    return LocalExecutor(num_workers)


@contextlib.contextmanager
def executor_for(executor: str | Executor | None, num_workers: int | None) -> Iterator[Executor]:
    """Yield the executor; close it afterwards unless the caller passed the object."""
    resolved = resolve_executor(executor, num_workers)
    try:
        yield resolved
    finally:
        close = getattr(resolved, "close", None)
        if resolved is not executor and close is not None:
            close()


# Cores


def allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the number of allowed cores, bounded by the CPU quota; at least 1."""
    quota = cpu_quota()
    cores = len(allowed_cores())
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def default_workers() -> int:
    """Return all usable cores; for ranks that wait for the first one of this machine, a share."""
    shared_by = _launcher_number("LOCAL_WORLD_SIZE") if _launcher_number("LOCAL_RANK") else 1
    return max(1, usable_cores() // max(1, shared_by))


def wait_for_first_rank_s(executor: Executor) -> float:
    """Return for how long this rank waits for new results of the first rank of its machine.

    The first rank loads the tokenizer once and uses all cores. Ranks with a stated number of
    workers do not wait.
    """
    is_default = isinstance(executor, LocalExecutor) and not executor.has_fixed_size
    return STALLED_S if is_default and _launcher_number("LOCAL_RANK") else 0.0


def _launcher_number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def core_of_worker(worker: int, workers: int, cores: list[int]) -> int:
    """Return the core of a worker: round robin over the allowed cores.

    Ranks of a launcher use consecutive cores; other processes start at their process id, so that
    they rarely share cores.
    """
    has_rank = "LOCAL_RANK" in os.environ
    start = _launcher_number("LOCAL_RANK") * workers if has_rank else os.getpid()
    return cores[(start + worker) % len(cores)]


def cpu_quota(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return the CPU quota of this process's control groups, in cores."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        for root in roots:
            # In some containers the group's own path is not visible; the root is the group then.
            group = Path(path.lstrip("/"))
            for directory in (group, *group.parents):
                quota = _quota_of(root / directory)
                if quota is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _quota_of(directory: Path) -> float | None:
    try:
        if (directory / "cpu.max").is_file():  # version 2: "max 100000" or "150000 100000"
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
