"""The executor without processes: tasks run here, one after another.

For debugging, for tiny inputs, and for hosts that forbid child processes. Payloads and results make
the same trip through the encoding as they would to a worker, so that nothing works here that
would fail there. There is nobody to retry for: what kills this process kills the build.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tokenmill.errors import TokenmillError
from tokenmill.work.tasks import (
    Done,
    Setup,
    Task,
    close_work,
    finish,
    foreign_error,
    open_work,
    private_bytes,
)
from tokenmill.work.wire import as_travelled


class InlineExecutor:
    """Runs every task in the calling thread, when its result is asked for."""

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        """Do every task in order; see `Executor.run`."""
        work = None
        try:
            for task in tasks:
                if work is None:  # without a task nothing is loaded, as with workers
                    work = open_work(Setup(setup.entry, as_travelled(setup.options)))
                started = time.perf_counter()
                try:
                    result = as_travelled(finish(work(as_travelled(task.payload))))
                except TokenmillError:
                    raise
                except Exception as error:
                    raise foreign_error(task, error) from error
                seconds = time.perf_counter() - started
                yield Done(task.number, result, seconds, 0, private_bytes=private_bytes())
        finally:
            if work is not None:
                close_work(work)
