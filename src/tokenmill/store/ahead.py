"""Map a function over a stream with several calls in flight, results in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH = 64  # items per task: handing over costs as much as a few looks at a local disk
THREADS = 8  # looks in flight: they wait for disks and servers, not for a core
WINDOW = THREADS + 2  # batches in existence, finished ones that nobody took included


def ahead(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    batch: int = BATCH,
    threads: int = THREADS,
) -> Generator[Result, None, None]:
    """``map(work, items)`` with several calls in flight; an error is raised in its turn."""
    stream = iter(items)
    some, following = (list(itertools.islice(stream, batch)) for _ in range(2))
    if not following:  # not worth a thread
        yield from map(work, some)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenmill-ahead")
    window = min(WINDOW, threads + 2)
    waiting: deque[Future[list[Result]]] = deque()

    def all_of(some: list[Item]) -> list[Result]:
        return [work(item) for item in some]

    try:
        while some or waiting:
            if some:
                waiting.append(pool.submit(all_of, some))
                some, following = following, list(itertools.islice(stream, batch))
            if len(waiting) >= window or not some:
                yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
