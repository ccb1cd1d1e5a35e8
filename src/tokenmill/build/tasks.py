"""What an executor is given and gives back.

`Setup`, `Task` and `Done` are plain values, so that the same build runs here, in a worker process
or on another machine. The contract that every executor keeps, and that one test harness tries:

- tasks are pulled lazily, a bounded number ahead of the results that were taken;
- each task gives exactly one `Done`, in the order of completion;
- a `TokenmillError` of the callable is raised to the consumer as the same type with the same
  attributes and is not retried; any other exception becomes a `WorkerError` with its traceback;
- a worker that dies or stops costs its task, and one whose rest it was at, a retry, `MAX_RETRIES`
  times, then a `WorkerError`;
- whoever stops iterating (close, exception, Ctrl-C) leaves no worker behind.

`InlineExecutor` keeps it without processes.
"""

from __future__ import annotations

import contextlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.build.wire import as_travelled
from tokenmill.errors import TokenmillError, WorkerError

MAX_RETRIES = 2  # more deaths on one task are no accident: a bad row, or too little memory

Rest = Callable[[], dict[str, Any]]
"""What is left of a task that needs a core no more but waits, say for a disk; gives the result."""

Work = Callable[[dict[str, Any]], dict[str, Any] | Rest]
"""What a setup's callable returns: one task's payload to its result, or to the rest of the task.

A rest may run in another thread while the next task is done; the one before it has ended by then.
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a worker gets ready.

    Args:
        entry: ``"package.module:callable"``, imported where the work happens and called once with
            `options`; returns the function that does one task. If that function has a ``close``
            attribute, it is called when there is no more work (not when the worker is killed).
        options: JSON-able argument of the callable.
        shared: Directories that caller and workers must both see.
        near_caller: Prefer the caller's machine: the work reads what may be on it alone.
        little: Less work than getting a worker ready. Without a stated number of workers, an
            executor may do it in the calling process.
    """

    entry: str
    options: dict[str, Any] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    near_caller: bool = False
    little: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work: a number of the caller's and a small JSON-able payload."""

    number: int
    payload: dict[str, Any]
    label: str = ""  # for error messages: "chat.jsonl, rows 0 to 812"

    def __str__(self) -> str:
        return f"task {self.number} ({self.label})" if self.label else f"task {self.number}"


@dataclass(frozen=True, slots=True)
class Done:
    """One finished piece of work."""

    number: int
    result: dict[str, Any]  # after a trip through the encoding: tuples are lists
    seconds: float
    worker: int  # from 0; a replacement inherits the number
    attempts: int = 1  # more where workers died on the way


class Executor(Protocol):
    """Decides where tasks run; the module's docstring states the contract."""

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]: ...


def open_work(entry: str, options: dict[str, Any]) -> Work:
    """Import and call a setup's entry; its own errors pass, others become a `WorkerError`."""
    try:
        work: Work = pkgutil.resolve_name(entry)(options)
    except (TokenmillError, MemoryError):
        raise
    except Exception as error:
        raise WorkerError(
            f"a worker could not get ready: {entry}: {type(error).__name__}: {error}"
        ) from error
    return work


def run_tasks(
    executor: Executor, setup: Setup, tasks: Iterable[Task], take: Callable[[Done], None]
) -> None:
    """Do every task and hand each result to `take`; an exception of its ends the workers at once.

    Left to the garbage collector, they would go on for as long as somebody holds the traceback.
    """
    with contextlib.closing(executor.run(setup, tasks)) as finished:  # type: ignore[type-var]
        for done in finished:
            take(done)


def finish(outcome: dict[str, Any] | Rest) -> dict[str, Any]:
    """A task's result, after the rest of it where there is one."""
    return outcome() if callable(outcome) else outcome


def close_work(work: Work) -> None:
    """Tell the function, if it wants to know, that no more work is coming."""
    close = getattr(work, "close", None)
    if close is not None:
        close()


def foreign_error(task: Task, error: Exception) -> WorkerError:
    """An exception that is not of our tree: a defect, so not retried, and named with its task."""
    if isinstance(error, MemoryError):
        return WorkerError(f"{task}: out of memory; {error}".removesuffix("; "))
    return WorkerError(f"{task} failed: {type(error).__name__}: {error}")


class InlineExecutor:
    """Runs every task in the calling thread, when its result is asked for.

    For debugging, for tiny inputs, and for hosts that forbid child processes. Payloads and results
    make the same trip through the encoding as they would to a worker, so that nothing works here
    that would fail there. There is nobody to retry for: what kills this process kills the build.
    """

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        work = None
        try:
            for task in tasks:
                if work is None:  # without a task nothing is loaded, as with workers
                    work = open_work(setup.entry, as_travelled(setup.options))
                started = time.perf_counter()
                try:
                    result = as_travelled(finish(work(as_travelled(task.payload))))
                except TokenmillError:
                    raise
                except Exception as error:
                    raise foreign_error(task, error) from error
                seconds = time.perf_counter() - started
                yield Done(task.number, result, seconds, 0)
        finally:
            if work is not None:
                close_work(work)
