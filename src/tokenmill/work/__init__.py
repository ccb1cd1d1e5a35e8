"""Where the steps of a build run: in this process, or in worker processes of our own.

Four nouns. A `Setup` says how a worker gets ready: a dotted callable that is imported and called
once, where the work happens, and returns the function that does one task. A `Task` is a number and
a small JSON-able payload (a file and a byte range, never rows). A `Done` is the small JSON-able
result with the seconds it took. An `Executor` turns a setup and an iterable of tasks into `Done`s
in the order of completion.

`InlineExecutor` works in this process. `LocalExecutor` starts worker processes that end with their
parent, can be killed one by one, never re-run the user's script, and cost a task at most a retry
when they die or stop. Both give the same results; what travels is encoded the same way.
Executors know nothing of tokenmill's rooms: they import the setup's callable by name.
"""

from __future__ import annotations

from tokenmill.work.cores import usable_cores
from tokenmill.work.inline import InlineExecutor
from tokenmill.work.local import HEARTBEAT_SILENCE_S, LocalExecutor
from tokenmill.work.tasks import (
    MAX_RETRIES,
    Done,
    Executor,
    Setup,
    Task,
    closed_unless,
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
    "closed_unless",
    "executor_here",
    "usable_cores",
]


def executor_here(name: str, num_workers: int | None) -> Executor | None:
    """The executor of this machine that a name means; None where it means none."""
    if name == "inline" or (name == "local" and num_workers == 0):
        return InlineExecutor()
    return LocalExecutor(num_workers) if name == "local" else None
