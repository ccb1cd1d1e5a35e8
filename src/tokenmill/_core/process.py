"""Locks, caches and temporary directories that are safe across fork."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any


def at_end(owner: object, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function when ``owner`` is collected or this process ends; not in forked children."""
    weakref.finalize(owner, _call_in_process, os.getpid(), function, *arguments)


def _call_in_process(process: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == process:
        function(*arguments)


class PrivateDirectory:
    """A temporary directory, removed when this object is collected.

    Used as a context manager, it is also removed on an error, whose traceback would otherwise
    keep this object alive.
    """

    def __init__(self, prefix: str = "tokenmill-") -> None:
        self.process = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        at_end(self, _remove_directory, self.path)

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            _remove_directory(self.path)


def _remove_directory(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def in_children(owner: Any) -> None:
    """Call ``owner.after_fork()`` in every forked child while ``owner`` is alive."""
    _watched.add(owner)


def _after_fork() -> None:
    for owner in list(_watched):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def count_threads() -> int:
    """Return the number of threads of this process, those of libraries included; 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


_threads_at_fork: list[int] = []
os.register_at_fork(before=lambda: _threads_at_fork.append(count_threads()))


def parent_had_threads() -> bool:
    """Return whether locks may be held, or thread pools lost, since the fork of this process."""
    return _threads_at_fork[-1] != 1


class ProcessLock:
    """A lock between the threads of one process; in a forked child it is free."""

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_shared: list[PrivateDirectory] = []  # the last one may belong to this process
_sharing = ProcessLock()


def process_directory() -> Path:
    with _sharing:
        if not has_process_directory():
            _shared.append(PrivateDirectory())
        return _shared[-1].path


def has_process_directory() -> bool:
    return bool(_shared) and _shared[-1].process == os.getpid()


class RecentValues:
    """An LRU cache bounded in bytes, safe for threads and forks; it always holds one value."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.bytes = 0
        self._lock = threading.Lock()
        in_children(self)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.bytes = 0

    def after_fork(self) -> None:
        # Another thread of the parent may have held the lock in the middle of a change.
        self._lock = threading.Lock()
        self.bytes = sum(size for _, size in self._values.values())

    def get(self, key: Hashable) -> Any:
        with self._lock:
            entry = self._values.get(key)
            if entry is None:
                return None
            self._values.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: Any, size: int | None = None) -> None:
        """Add a value; ``size`` in bytes defaults to its length."""
        size = len(value) if size is None else size
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = value, size
            self.bytes += size - before
            while self.bytes > self._bound and len(self._values) > 1:
                _, (_, removed) = self._values.popitem(last=False)
                self.bytes -= removed
