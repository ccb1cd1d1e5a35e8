"""Batches ahead of the trainer, filled in a thread.

A `Prefetcher` runs an iterator in a thread of its own and hands its items on in order. Items
carry the cursor behind them, so what counts as consumed is what was handed out, never what lies
ready here. The thread holds no reference to the prefetcher: when nobody wants items any more it
ends by itself, within a tenth of a second, and it is a daemon, so a trainer that dies is not kept
alive by it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

from tokenmill.files import at_end

T = TypeVar("T")

_LOOK_SECONDS = 0.1  # how often a full queue looks whether anybody still wants its items


class _End:
    """The last thing in the queue: the iterator's end, or what it raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Iterator[T]):
    """Runs an iterator ahead in a thread.

    Args:
        items: The iterator; it is used by the thread alone.
        depth: How many items may lie ready.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: queue.Queue[T | _End] = queue.Queue(depth)
        self._unwanted = threading.Event()
        self._ended: _End | None = None
        thread = threading.Thread(
            target=_run,
            args=(items, self._ready, self._unwanted),
            name="tokenmill-prefetch",
            daemon=True,
        )
        self.thread = thread
        at_end(self, self._unwanted.set)
        thread.start()

    def __next__(self) -> T:
        item: T | _End = self._ended if self._ended is not None else self._ready.get()
        if not isinstance(item, _End):
            return item
        self._ended = item
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        self._unwanted.set()


def _run(items: Iterator[T], ready: queue.Queue[T | _End], unwanted: threading.Event) -> None:
    def put(item: T | _End) -> bool:
        while not unwanted.is_set():
            try:
                ready.put(item, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    try:
        for item in items:
            if not put(item):
                return
    except BaseException as error:
        put(_End(error))
    else:
        put(_End(None))
