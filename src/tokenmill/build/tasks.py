"""Tasks, their results, and the contract of executors, which one test harness checks.

Tasks are pulled lazily, a bounded number ahead of the results that were taken. Each gives exactly
one `Done`, in the order of completion. docs/internals/build-workers.md lists what happens after a
failure.
"""

from __future__ import annotations

import contextlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.build.wire import deserialize
from tokenmill.errors import TokenmillError, WorkerError

MAX_RETRIES = 2  # a task that kills more workers has a bad row or needs more memory

Completion = Callable[[], dict[str, Any]]
"""The last part of a task, which only waits (for a disk); returns the result.

It may run in another thread beside the next task. Completions run one after another.
"""
Work = Callable[
    [dict[str, Any]], dict[str, Any] | Completion
]  # payload → result, or completion of the task


@dataclass(frozen=True, slots=True)
class Setup:
    """How a worker sets up.

    ``entry``, as in ``"package.module:callable"``, is imported by the worker and called once with
    the options. It returns the function that does one task. If that function has a ``close``
    attribute, it is called when there is no more work (not when the worker is killed).
    """

    entry: str
    options: dict[str, Any] = field(default_factory=dict)  # JSON-able
    shared: tuple[str, ...] = ()  # directories that caller and workers must both see
    prefer_local: bool = False  # prefer the caller's machine, which alone may have the files
    small_job: bool = False  # it may run in the calling process if no number of workers is set


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    payload: dict[str, Any]  # small and JSON-able
    label: str = ""  # for error messages: "chat.jsonl, rows 0 to 812"

    def __str__(self) -> str:
        return f"task {self.number} ({self.label})" if self.label else f"task {self.number}"


@dataclass(frozen=True, slots=True)
class Done:
    number: int
    result: dict[str, Any]  # as decoded: tuples are lists
    seconds: float
    worker: int  # from 0; a replacement inherits the number
    attempts: int = 1  # more than 1 if workers died


class Executor(Protocol):
    """Decides where tasks run; the module's docstring states the contract."""

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]: ...


def open_work(entry: str, options: dict[str, Any]) -> Work:
    """Import and call a setup's entry; errors of other libraries become a `WorkerError`."""
    try:
        work: Work = pkgutil.resolve_name(entry)(options)
    except (TokenmillError, MemoryError):
        raise
    except Exception as error:
        raise WorkerError(
            f"a worker failed to set up: {entry}: {type(error).__name__}: {error}"
        ) from error
    return work


def run_tasks(
    executor: Executor, setup: Setup, tasks: Iterable[Task], take: Callable[[Done], None]
) -> None:
    """Run all tasks and pass each result to `take`; if `take` raises, the workers end."""
    with contextlib.closing(executor.run(setup, tasks)) as finished:  # type: ignore[type-var]
        for done in finished:
            take(done)


def finish(outcome: dict[str, Any] | Completion) -> dict[str, Any]:
    return outcome() if callable(outcome) else outcome


def close_work(work: Work) -> None:
    close = getattr(work, "close", None)
    if close is not None:
        close()


def foreign_error(task: Task, error: Exception) -> WorkerError:
    if isinstance(error, MemoryError):
        return WorkerError(f"{task}: out of memory; {error}".removesuffix("; "))
    return WorkerError(f"{task} failed: {type(error).__name__}: {error}")


class InlineExecutor:
    """Runs each task in the calling thread, with payloads and results encoded as for a worker."""

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        work = None
        try:
            for task in tasks:
                if work is None:  # load nothing if there is no task
                    work = open_work(setup.entry, deserialize(setup.options))
                started = time.perf_counter()
                try:
                    result = deserialize(finish(work(deserialize(task.payload))))
                except TokenmillError:
                    raise
                except Exception as error:
                    raise foreign_error(task, error) from error
                seconds = time.perf_counter() - started
                yield Done(task.number, result, seconds, 0)
        finally:
            if work is not None:
                close_work(work)
