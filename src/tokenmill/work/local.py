"""Worker processes on this machine, and what is done when one dies or stops.

A `LocalExecutor` is a number of workers and how to pin them. Each call of `run` has a *run* of its
own: workers are started when there is a task for them, get one task at a time (the next already
when only the rest of one is left), and are gone when the run ends, however it ends. One thread does
it all, in a select loop that turns when results are asked for. Where the caller left the number of
workers open and the setup says that there is little to do, no worker is started: the tasks run in
this process, as `InlineExecutor` would run them.

A worker is *stuck* when it sent nothing for `HEARTBEAT_SILENCE_S` and used no CPU time either: a
stopped process does neither, a slow row keeps the heartbeat, and an engine that holds the
interpreter lock for minutes silences the heartbeat but burns CPU. A worker that could run and gets
no processor is not stuck: the machine is busy. A stuck worker is killed. Silence counts only while
this loop listens, so that a consumer that takes its time, or a suspended machine, kills nobody.
docs/build-workers.md says what else was considered.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tokenmill.errors import UsageError, WorkerError, check_positive
from tokenmill.work import wire
from tokenmill.work.cores import allowed_cores, core_of_worker, default_workers
from tokenmill.work.process import END_S, WorkerProcess, describe_exit
from tokenmill.work.tasks import MAX_RETRIES, Done, InlineExecutor, Setup, Task

HEARTBEAT_SILENCE_S = 20.0  # promise P11: stuck after this, so that 30 s suffice for the error
BEAT_S = 1.0  # seconds between heartbeats; shorter only where the allowed silence is
RUNNABLE = "R"  # the state of a process that runs, or waits for nothing but a processor
FINISH_S = 2.0  # seconds an idle worker gets to leave by itself after the last task


@dataclass(slots=True)
class _Assignment:
    """A task on its way, and how the workers ended that had it before."""

    task: Task
    deaths: list[str] = field(default_factory=list)
    finishing: bool = False  # only its rest is left


class LocalExecutor:
    """Runs tasks in worker processes of this machine.

    Args:
        num_workers: How many; None: the usable cores of this rank, and none for a small job.
        pin: Pin each worker to one core before it loads anything.
        heartbeat_silence_s: Seconds without any sign of life after which a worker is stuck.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        pin: bool = True,
        heartbeat_silence_s: float = HEARTBEAT_SILENCE_S,
    ) -> None:
        if num_workers is not None:
            check_positive("num_workers", num_workers)
        if not heartbeat_silence_s > 0:
            raise UsageError(f"heartbeat_silence_s must be positive, not {heartbeat_silence_s!r}")
        self._was_told = num_workers is not None
        self.num_workers = default_workers() if num_workers is None else num_workers
        self.pin = pin and hasattr(os, "sched_setaffinity")
        self.heartbeat_silence_s = heartbeat_silence_s

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        if setup.little and not self._was_told:
            yield from InlineExecutor().run(setup, tasks)
            return
        run = _Run(self, setup, iter(tasks))
        try:
            yield from run.results()
            run.finish()
        finally:
            run.end()


class _Run:
    """One call of `run`: its workers and where its tasks are."""

    def __init__(self, executor: LocalExecutor, setup: Setup, tasks: Iterator[Task]) -> None:
        self._executor = executor
        self._begin = wire.Begin(setup.entry, setup.options)
        self._tasks: Iterator[Task] | None = tasks
        self._retries: deque[_Assignment] = deque()
        self._workers: dict[WorkerProcess, dict[int, _Assignment]] = {}  # by their tasks' numbers
        self._finished: deque[Done] = deque()
        self._failure: Exception | None = None
        self._cores = allowed_cores()
        self._beat_s = min(BEAT_S, executor.heartbeat_silence_s / 5)
        self._selector = selectors.DefaultSelector()
        self._listened = time.monotonic()
        self._owner = os.getpid()

    def results(self) -> Iterator[Done]:
        """Yield every task's result; raise the first failure after the results before it."""
        while True:
            # A consumer slower than the workers holds them back here, not in a growing queue.
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
        """Let idle workers leave by themselves, all at the same time."""
        for worker in self._workers:
            worker.finish()
        deadline = time.monotonic() + FINISH_S
        for worker in self._workers:
            code = worker.wait(max(0.0, deadline - time.monotonic()))
            worker.drain_output()
            if code is not None and code > 0:
                raise WorkerError(f"worker {worker.number} failed at its end{worker.last_output()}")

    def end(self) -> None:
        """Kill and reap whoever is left, free everything."""
        self._selector.close()
        if os.getpid() == self._owner:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.wait(END_S)
        # else: a process that the parent forked; the workers are its parent's, not its own.
        for worker in self._workers:
            worker.release()
        self._workers.clear()

    def _assign(self) -> None:
        """Give tasks to idle workers, and start workers for tasks while there may be more."""
        while True:
            idle = next(filter(self._is_idle, self._workers), None)
            if idle is None and len(self._workers) >= self._executor.num_workers:
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

        One that lost a worker before is done alone, so that the next death is no other's.
        """
        under_way = self._workers[worker].values()
        if self._retries:
            return not under_way
        return all(task.finishing and not task.deaths for task in under_way)

    def _next(self) -> _Assignment | None:
        if self._retries:
            return self._retries.popleft()
        if self._tasks is not None:
            for task in self._tasks:
                return _Assignment(task)
            self._tasks = None
        return None

    def _start(self) -> WorkerProcess:
        taken = {worker.number for worker in self._workers}
        number = next(n for n in range(self._executor.num_workers) if n not in taken)
        core = None
        if self._executor.pin:
            core = core_of_worker(number, self._executor.num_workers, self._cores)
        worker = WorkerProcess(number, core, self._beat_s)
        self._workers[worker] = {}
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        worker.send(self._begin)
        return worker

    def _watch(self, worker: WorkerProcess) -> None:
        """Wake up for what can be read, and for room to write while something is unsent."""
        events = selectors.EVENT_READ
        if worker.has_outgoing:
            events |= selectors.EVENT_WRITE
        self._selector.modify(worker.channel, events, worker)

    def _listen(self, timeout_s: float) -> None:
        """Handle what the workers sent; then look at those that sent nothing."""
        heard = set()
        for key, events in self._selector.select(timeout_s):
            worker: WorkerProcess = key.data
            if worker not in self._workers:
                continue  # replaced a moment ago, in this same round
            if key.fileobj is not worker.channel:
                if not worker.drain_output():
                    self._selector.unregister(worker.output)
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush()
                self._watch(worker)
            if events & selectors.EVENT_READ:
                heard.add(worker)
                if not self._hear(worker):
                    self._replace(worker)
        now = time.monotonic()
        # A round longer than this was not spent waiting for workers but suspended or elsewhere.
        elapsed_s = min(now - self._listened, 2 * self._beat_s)
        self._listened = now
        for worker in [worker for worker in self._workers if worker not in heard]:
            self._judge(worker, elapsed_s)

    def _hear(self, worker: WorkerProcess) -> bool:
        """Take in a worker's messages; False when there will be no more."""
        is_open, messages = worker.receive()
        worker.silent_s = 0.0
        under_way = self._workers[worker]
        for message in messages:
            if isinstance(message, wire.Ready):
                worker.is_ready = True
            elif isinstance(message, wire.OutOfMemory):
                worker.ending = "ran out of memory (hint: fewer num_workers)"
            elif isinstance(message, wire.Finishing) and message.number in under_way:
                under_way[message.number].finishing = True
            elif isinstance(message, wire.Finished) and message.number in under_way:
                assignment = under_way.pop(message.number)
                done = Done(
                    message.number,
                    message.result,
                    message.seconds,
                    worker.number,
                    attempts=len(assignment.deaths) + 1,
                    private_bytes=message.private_bytes,
                )
                self._finished.append(done)
            elif isinstance(message, wire.Failed) and under_way:
                # Without a number it could not get ready, and has but one task.
                number = next(iter(under_way)) if message.number is None else message.number
                assignment = under_way.pop(number)
                if self._failure is None:
                    self._failure = wire.unpack_error(message.failure)
                    self._failure.add_note(f"in worker {worker.number}, at {assignment.task}")
        return is_open

    def _judge(self, worker: WorkerProcess, elapsed_s: float) -> None:
        """End a worker that shows no sign of life."""
        worker.silent_s += elapsed_s
        if worker.silent_s <= 2 * self._beat_s:
            worker.cpu_ticks = None
            return
        if not worker.is_alive:  # yet its channel is open: a child of a task holds it
            self._replace(worker)
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
        """Let a dead worker go; its tasks are tried again by others, or fail."""
        code = worker.wait(END_S)
        self._hear(worker)  # a result that it sent before it died is a result
        worker.drain_output()
        self._selector.unregister(worker.channel)
        with contextlib.suppress(KeyError):  # its end may have been seen before
            self._selector.unregister(worker.output)
        worker.release()
        ending = worker.ending or describe_exit(code)
        if not worker.is_ready:
            ending += " (while it started)"
        for assignment in self._workers.pop(worker).values():
            assignment.finishing = False
            assignment.deaths.append(ending)
            if len(assignment.deaths) <= MAX_RETRIES:
                self._retries.append(assignment)
            elif self._failure is None:
                endings = "; then ".join(assignment.deaths)
                self._failure = WorkerError(
                    f"{assignment.task}: gave up after {len(assignment.deaths)} workers were lost: "
                    f"{endings}{worker.last_output()}"
                )
