"""Which executor a name means: the one place where that is decided.

A caller names an executor (``local``, ``inline``, ``ray``) or gives one. `executor_for` turns
either into an executor for the time of a call, and lets go afterwards of what it made. ``local``
and ``inline`` are of this room. An executor of other machines needs a library that this room does
not know: the layer that does registers it with `register_executor`, as `tokenmill.integrations`
does with ``ray``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenmill.errors import UsageError, check_one_of
from tokenmill.work.local import LocalExecutor
from tokenmill.work.tasks import Executor, InlineExecutor

Maker = Callable[[int | None], Executor]
"""Makes an executor for a number of workers; None leaves the number to it."""

_makers: dict[str, Maker] = {
    "local": lambda workers: InlineExecutor() if workers == 0 else LocalExecutor(workers),
    "inline": lambda _: InlineExecutor(),
}


def register_executor(name: str, make: Maker) -> None:
    """Let a name mean an executor, from now on and in this process."""
    _makers[name] = make


def resolve_executor(executor: str | Executor | None, num_workers: int | None) -> Executor:
    """An executor by name, or the object that was given; None is ``local``."""
    executor = "local" if executor is None else executor
    if not isinstance(executor, str):
        if not callable(getattr(executor, "run", None)):
            raise UsageError(f"executor is {executor!r}; it is a name or an executor object")
        return executor
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0
    ):
        raise UsageError(f"num_workers is {num_workers!r}; it is 0 (inline), a count, or None")
    check_one_of("executor", executor, _makers)
    return _makers[executor](num_workers)


@contextmanager
def executor_for(executor: str | Executor | None, num_workers: int | None) -> Iterator[Executor]:
    """`resolve_executor` for a while: what was made here is closed, what was given is not."""
    resolved = resolve_executor(executor, num_workers)
    try:
        yield resolved
    finally:
        close = getattr(resolved, "close", None)
        if resolved is not executor and close is not None:
            close()
