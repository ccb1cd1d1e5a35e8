"""A bound on open files: readers past it are closed, oldest first.

A source may have thousands of files; descriptors must not grow with them. Readers register when
they open; the pool tells the one that opened longest ago to close. A thread that is just reading
from it keeps what it holds until it is done: descriptors close when their last user lets go.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Protocol
from weakref import ref

from tokenmill.source.limits import OPEN_FILES


class Closable(Protocol):
    """A reader that can let go of its descriptors."""

    def close(self) -> None:
        """Let go."""
        ...


_order: deque[ref[Closable]] = deque()
_lock = threading.Lock()


def opened(reader: Closable) -> None:
    """A reader was opened; close the oldest beyond the bound."""
    with _lock:
        _order.append(ref(reader))
        while len(_order) > OPEN_FILES:
            oldest = _order.popleft()()
            if oldest is not None and oldest is not reader:
                oldest.close()


def _forget_lock() -> None:
    # Another thread of the parent may have held it at the fork; nobody here will release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
