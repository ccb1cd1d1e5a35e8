"""Blocks of a source through an executor: the engine of a build, a length index and lint.

In come the blocks of opened rows, the name of what a worker runs, and the tokenizer's card; out
come the workers' results, one for each block, in the order of completion. A `BlockTask` is a block
on its way. A `BlockJob` hands tasks to the executor and results to its caller, and sees that the
tokenizer was agreed on. Lint needs no more than that: its results stay with the caller.

A build and a length index publish what a block becomes, under a key, and share the work with
other processes that make the same. `MissingBlocks` walks the blocks whose result is not there yet,
from a place of its own, so that processes that run at the same time meet late. `BlockJob.in_rounds`
takes claims: a round passes over what a live process has claimed, and the next one looks again. By
then it is published, or its claimer is dead and it is ours to take.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.source import Block
from tokenmill.tokenizer import LITTLE_WORK, IdentityCard, engine_for
from tokenmill.work.claims import Claims
from tokenmill.work.identity import Comparison
from tokenmill.work.tasks import Done, Executor, Setup, Task, run_tasks

WAIT_S = 0.2  # seconds between looks at blocks that other processes are at ...
WAIT_PER_BLOCK_S = 3e-6  # ... and for each block: about what walking past it takes

_NOTHING: Mapping[str, Any] = {}


class BlockTask(NamedTuple):
    """A block that is to be worked on.

    Attributes:
        number: The block's number among those of the rows.
        block: The block.
        key: What its result is published under; empty where nothing is.
        more: What the worker is told beside.
    """

    number: int
    block: Block
    key: str = ""
    more: Mapping[str, Any] = _NOTHING

    def task(self) -> Task:
        """The task as it travels: the block as plain values, read back by `block_of`."""
        block = self.block
        payload = {"key": self.key, "block": msgspec.to_builtins(block), **self.more}
        last = block.first_row + block.rows - 1
        return Task(self.number, payload, f"{block.path}, rows {block.first_row} to {last}")


def block_of(payload: dict[str, Any]) -> Block:
    """The block of a task, where the work happens."""
    return msgspec.convert(payload["block"], Block)


def size_of(tasks: Iterable[BlockTask]) -> int:
    """Bytes of rows to be worked on; counted only until it is more than a little."""
    size = 0
    for task in tasks:
        size += task.block.length
        if size > LITTLE_WORK:
            break
    return size


class BlockJob:
    """One process's part in working through blocks.

    Args:
        executor: Where the work runs.
        root: The cache directory.
        card: The tokenizer's identity card, whose copy workers load; None where nobody needs one.
        comparison: Must agree to the card before the results count.
        engine: Which engine may encode; never changes the result.
    """

    def __init__(
        self,
        executor: Executor,
        root: Path,
        card: IdentityCard | None,
        comparison: Comparison | None = None,
        engine: str = "auto",
    ) -> None:
        self._executor = executor
        self._root = root
        self._card = card
        self._comparison = comparison
        self._engine = engine
        self._claims: Claims | None = None
        self._passed_over = 0

    def setup(self, entry: str, size: int, **options: Any) -> Setup:
        """How workers get ready for this many bytes; the options are for the entry."""
        card = self._card
        stated = {
            "cache": str(self._root),
            "tokenizer": None if card is None else str(self._root / "tokenizers" / card.key),
            "card": None if card is None else card.as_dict(),
            "engine": engine_for(self._engine, size),
            **options,
        }
        return Setup(entry, stated, shared=(str(self._root),), little=size <= LITTLE_WORK)

    def run(
        self,
        setup: Setup,
        tasks: Iterable[BlockTask],
        take: Callable[[BlockTask, dict[str, Any]], None],
    ) -> None:
        """Do every task and hand each result to `take`."""
        under_way: dict[int, BlockTask] = {}  # the few that were handed out

        def handed_out() -> Iterator[Task]:
            for task in tasks:
                under_way[task.number] = task
                yield task.task()

        def finished(done: Done) -> None:
            task = under_way.pop(done.number)
            if self._claims is not None:
                self._claims.release(task.key)
            take(task, done.result)
            if self._comparison is not None:
                self._comparison.check()

        run_tasks(self._executor, setup, handed_out(), finished)

    def in_rounds(self, one_round: Callable[[], None], blocks: int) -> None:
        """Call `one_round` until it passed over nothing that another process has claimed."""
        with Claims(self._root) as self._claims:
            while True:
                self._passed_over = 0
                one_round()
                if not self._passed_over:
                    return
                time.sleep(WAIT_S + WAIT_PER_BLOCK_S * blocks)

    def claimed(self, tasks: Iterable[BlockTask], *, insist: bool = False) -> Iterator[BlockTask]:
        """Tasks that no other process is at; insist: all of them, claimed where they can be."""
        assert self._claims is not None, "claims are taken in rounds"
        for task in tasks:
            if self._claims.take(task.key) or insist:
                yield task
            else:
                self._passed_over += 1

    def agree(self) -> None:
        """Wait until the tokenizer is agreed on; raise where it is not."""
        if self._comparison is not None and self._card is not None:
            self._comparison.agree(self._card)


class MissingBlocks:
    """The blocks whose result is not published yet; iterating walks them anew, as tasks.

    Args:
        blocks: Walks all blocks in order.
        count: How many there are.
        key_of: What a block's result is published under.
        is_published: Asked until it says yes: asking a server again for each would add up.
        is_ours: Which numbers concern this process.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterator[Block]],
        count: int,
        key_of: Callable[[Block], str],
        is_published: Callable[[BlockTask], bool],
        is_ours: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.count = count
        self._blocks = blocks
        self._key_of = key_of
        self._is_published = is_published
        self._is_ours = is_ours
        self._published = bytearray(count)  # one byte per block: 1 when it was seen to be there
        # Where a process starts decides only who makes what, so it may be random.
        self._first = random.SystemRandom().randrange(max(count, 1))

    def __iter__(self) -> Iterator[BlockTask]:
        numbered = itertools.chain(
            itertools.islice(enumerate(self._blocks()), self._first, None),
            itertools.islice(enumerate(self._blocks()), 0, self._first),
        )
        for number, block in numbered:
            if self._published[number] or not self._is_ours(number):
                continue
            task = BlockTask(number, block, self._key_of(block))
            if self._is_published(task):
                self._published[number] = 1
            else:
                yield task
