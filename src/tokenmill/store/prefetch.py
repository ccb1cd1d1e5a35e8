"""Map a function over a stream in threads, with results in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH = 64  # items per task, because starting one costs as much as a few local reads
THREADS = 8  # more than cores, because they wait for disks and servers
WINDOW = THREADS + 2  # unfinished batches, and finished ones that were not consumed yet


def prefetch_map(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    batch: int = BATCH,
    threads: int = THREADS,
) -> Generator[Result, None, None]:
    """Yield ``map(work, items)``, computed in threads; errors are raised in order."""
    stream = iter(items)
    some, following = (list(itertools.islice(stream, batch)) for _ in range(2))
    if not following:  # too little work for a thread
        yield from map(work, some)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenmill-prefetch")
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
