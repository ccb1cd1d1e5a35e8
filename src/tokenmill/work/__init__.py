"""Work on the rows of sources, wherever it runs: what builds, prompt lengths and lint share.

Four nouns. A `Setup` says how a worker gets ready: a dotted callable that is imported and called
once, where the work happens, and returns the function that does one task. A `Task` is a number and
a small JSON-able payload (a file and a byte range, never rows). A `Done` is the small JSON-able
result with the seconds it took. An `Executor` turns a setup and an iterable of tasks into `Done`s
in the order of completion.

`InlineExecutor` works in this process. `LocalExecutor` starts worker processes that end with their
parent, can be killed one by one, never re-run the user's script, and cost a task at most a retry
when they die or stop. Both give the same results; what travels is encoded the same way. `executors`
says which one a name means.

On top of them stand `inputs` (the cache and the rows of a call), `identity` (which tokenizer this
is, found out once), `claims` (processes that share work), `progress`, and `blocks`: the engine that
takes the blocks of a source through an executor.
"""

from __future__ import annotations

from tokenmill.work.cores import usable_cores
from tokenmill.work.executors import executor_for, register_executor, resolve_executor
from tokenmill.work.local import HEARTBEAT_SILENCE_S, LocalExecutor
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
    "register_executor",
    "resolve_executor",
    "run_tasks",
    "usable_cores",
]
