"""The values that a process used last, bounded by their bytes.

`RecentValues` is shared by threads, and a forked child goes on with what its parent kept. It holds
blocks of remote files (`ranged`), decoded row groups of columnar sources and decompressed frames of
seekable copies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from tokenmill.files.process import in_children


class RecentValues:
    """What was put or taken last: bounded in bytes, the newest value aside."""

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
        """Another thread of the parent may have held the lock, half way through a change."""
        self._lock = threading.Lock()
        self.bytes = sum(size for _, size in self._values.values())

    def get(self, key: Hashable) -> Any:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Any, size: int | None = None) -> None:
        """Keep a value of a size in bytes (its length by default); those unused for longest go."""
        size = len(value) if size is None else size
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = value, size
            self.bytes += size - before
            while self.bytes > self._bound and len(self._values) > 1:
                _, (_, gone) = self._values.popitem(last=False)
                self.bytes -= gone
