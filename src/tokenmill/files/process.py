"""What belongs to one process, and what a forked child of it must leave alone.

A child made by ``os.fork`` inherits everything: also the clean-up that removes a temporary
directory when the program ends, and a lock that another thread of the parent held at that moment
and that nobody in the child will ever release. `at_end` runs a clean-up in the process that asked
for it and in no child; a `PrivateDirectory` is a temporary directory that goes with its owner that
way, and `process_directory` the one that everything in a process shares where no cache can be
written. A `ProcessLock` is free again in every child; what else must begin anew there is known to
`in_children`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self


def at_end(owner: object, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function when nobody holds ``owner`` any more, or when this process ends.

    A forked child that ends, or lets its copy of the owner go, calls nothing.
    """
    weakref.finalize(owner, _if_ours, os.getpid(), function, *arguments)


def _if_ours(process: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == process:
        function(*arguments)


class PrivateDirectory:
    """A temporary directory, removed silently when nobody holds this object any more.

    As a context it is removed at once by an error that passes: whoever holds the error also holds
    the frames in which this object is.
    """

    def __init__(self, prefix: str = "tokenmill-") -> None:
        self.process = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        at_end(self, _remove_directory, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            _remove_directory(self.path)


def _remove_directory(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def in_children(owner: Any) -> None:
    """Call ``owner.after_fork()`` in every forked child, as long as somebody holds ``owner``."""
    _watched.add(owner)


def _after_fork() -> None:
    for owner in list(_watched):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class ProcessLock:
    """A lock between the threads of one process; a forked child finds it free."""

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """Begin anew: whoever held it lives in the parent."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_shared: list[PrivateDirectory] = []  # the last one is this process's, if it has one
_sharing = ProcessLock()


def process_directory() -> Path:
    """This process's own temporary directory, made when first asked for, removed at its end."""
    with _sharing:
        if not has_process_directory():
            _shared.append(PrivateDirectory())
        return _shared[-1].path


def has_process_directory() -> bool:
    """Whether this process, not a parent of it, asked for one before."""
    return bool(_shared) and _shared[-1].process == os.getpid()
