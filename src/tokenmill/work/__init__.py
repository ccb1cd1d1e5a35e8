"""Run work on the rows of sources, here, in worker processes or on a cluster.

A `Setup` says how a worker gets ready: a dotted callable that is imported and called once, where
the work happens, and returns the function that does one task. A `Task` is a number and a small
JSON-able payload (a file and a byte range, never rows). A `Done` is the small JSON-able result. An
`Executor` turns a setup and an iterable of tasks into `Done`s in the order of completion.
"""

from __future__ import annotations

from tokenmill.work.executors import (
    HEARTBEAT_SILENCE_S,
    LocalExecutor,
    executor_for,
    resolve_executor,
    usable_cores,
)
from tokenmill.work.tasks import (
    MAX_RETRIES,
    Done,
    Executor,
    InlineExecutor,
    Setup,
    Task,
    run_tasks,
)

__all__ = [
    "HEARTBEAT_SILENCE_S",
    "MAX_RETRIES",
    "Done",
    "Executor",
    "InlineExecutor",
    "LocalExecutor",
    "Setup",
    "Task",
    "executor_for",
    "resolve_executor",
    "run_tasks",
    "usable_cores",
]
