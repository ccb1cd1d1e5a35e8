"""Open sources and run a function over their blocks on an executor.

Processes that build the same store at the same time share the work without communication, because
`MissingBlocks` yields blocks in a random order and checks again just before it yields one.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.paths import cache_root
from tokenmill.build.tasks import Done, Executor, Setup, Task, run_tasks
from tokenmill.errors import CorruptionError
from tokenmill.sources.block import Block
from tokenmill.sources.rows import Rows, open_rows
from tokenmill.store import CacheLayout
from tokenmill.tokenizers.cache import SMALL_JOB_BYTES, engine_for
from tokenmill.tokenizers.identity import TokenizerFingerprint

POLL_S = 0.2  # between looks at the missing results
MAX_POLL_SHARE = 0.05  # of the time, if a look takes long
MAX_SHUFFLED = 4096  # missing blocks in memory at once; more are shuffled piece by piece
FIRST_ROWS = 100  # rows of each file in which a column that an argument names must appear
MAX_NAMED = 16  # columns in a message

_EMPTY: Mapping[str, Any] = {}

Source = str | os.PathLike[str]


def cache_of(directory: Source | None) -> CacheLayout:
    return CacheLayout(cache_root(directory))


def open_sources(
    sources: Source | Sequence[Source], cache: CacheLayout, *, reread: bool = False
) -> Rows:
    """Open rows; rebuild a damaged row index."""
    try:
        return open_rows(sources, cache_dir=cache.root, force_recache=reread)
    except CorruptionError as error:
        if reread or cache.rows not in Path(error.path or "").parents:
            raise
        return open_rows(sources, cache_dir=cache.root, force_recache=True)


def missing_columns(rows: Rows, names: Iterable[str]) -> tuple[set[str], str]:
    """Return the names that no first row of any file has, and a list of the columns there are."""
    missing, columns, start = set(names), set[str](), 0
    for _, blocks in itertools.groupby(rows.blocks(), key=lambda block: block.file):
        if not missing:
            break
        for _, row in rows[start : start + FIRST_ROWS].scan():
            columns.update(row if isinstance(row, dict) else ())
        missing -= columns
        start += sum(block.rows for block in blocks)
    # Rows that cannot be parsed are rejected later, with their own reason.
    return missing if columns else set(), ", ".join(sorted(columns)[:MAX_NAMED])


def source_documents(blocks: Iterable[Block]) -> list[tuple[int, dict[str, Any]]]:
    """Describe the sources by content, in order: (number of a file, document of its rows).

    The digests are those of the blocks in use, so ``path@[a:b]`` has its own content. A file that
    appears again after another file is another source.
    """
    documents = []
    for file, run in itertools.groupby(blocks, key=lambda block: block.file):
        hasher = hashlib.blake2b(digest_size=fingerprint.KEY_HEX // 2)
        rows = size = 0
        for block in run:
            hasher.update(f"{block.kind}:{block.digest}\n".encode())
            rows += block.rows
            size += block.length
        document = {"kind": block.kind, "rows": rows, "bytes": size, "digest": hasher.hexdigest()}
        documents.append((file, document))
    return documents


class BlockTask(NamedTuple):
    number: int  # among the blocks of the rows
    block: Block
    key: str = ""  # of the published result, if there is one
    params: Mapping[str, Any] = _EMPTY  # additional task parameters

    def task(self) -> Task:
        block = self.block
        payload = {"key": self.key, "block": msgspec.to_builtins(block), **self.params}
        last = block.first_row + block.rows - 1
        return Task(self.number, payload, f"{block.path}, rows {block.first_row} to {last}")


def block_of(payload: dict[str, Any]) -> Block:
    return msgspec.convert(payload["block"], Block)


def size_of(tasks: Iterable[BlockTask]) -> int:
    """Add up the bytes of tasks, up to the limit of a small job."""
    size = 0
    for task in tasks:
        size += task.block.length
        if size > SMALL_JOB_BYTES:
            break
    return size


class BlockJob:
    """Runs blocks on an executor with one cache and, if a card is given, one tokenizer."""

    def __init__(
        self,
        executor: Executor,
        root: Path,
        card: TokenizerFingerprint | None,
        *,
        reference: bool = False,
    ) -> None:
        self.executor = executor
        self._root = root
        self._card = card
        self._reference = reference

    def setup(self, entry: str, size: int, **options: Any) -> Setup:
        """Return the workers' setup for `size` bytes of rows; the options are for the entry."""
        card = self._card
        defaults = {
            "cache": str(self._root),
            "tokenizer": None if card is None else str(self._root / "tokenizers" / card.key),
            "card": None if card is None else card.as_dict(),
            "reference": self._reference,
            "engine": "hf" if self._reference else engine_for("auto", size),
            "renderer": "jinja2" if self._reference else "auto",
            **options,
        }
        return Setup(entry, defaults, shared=(str(self._root),), small_job=size <= SMALL_JOB_BYTES)

    def run(
        self,
        setup: Setup,
        tasks: Iterable[BlockTask],
        take: Callable[[BlockTask, dict[str, Any]], None],
    ) -> None:
        running: dict[int, BlockTask] = {}

        def started() -> Iterator[Task]:
            for task in tasks:
                running[task.number] = task
                yield task.task()

        def finished(done: Done) -> None:
            take(running.pop(done.number), done.result)

        run_tasks(self.executor, setup, started(), finished)


class MissingBlocks:
    """The blocks whose result is not published, as tasks, in another order on each iteration.

    ``blocks`` yields all blocks in order, ``key_of`` returns the key of a block's result,
    ``is_ours`` whether this process builds a block. The first iteration waits while another process
    publishes results, until there is no new one for ``wait_s`` seconds.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterator[Block]],
        count: int,
        key_of: Callable[[Block], str],
        is_published: Callable[[BlockTask], bool],
        is_ours: Callable[[int], bool] = lambda _: True,
        *,
        wait_s: float = 0.0,
    ) -> None:
        self._blocks = blocks
        self._count = count
        self._key_of = key_of
        self._is_published = is_published
        self._is_ours = is_ours
        self._wait_s = wait_s

    def __iter__(self) -> Iterator[BlockTask]:
        self._wait(self._wait_s)
        self._wait_s = 0.0
        chance = random.SystemRandom()  # the order affects only who builds what
        rank, ranks = _rank()
        missing = self._from(chance.randrange(max(self._count, 1)))
        while some := list(itertools.islice(missing, MAX_SHUFFLED)):
            chance.shuffle(some)
            some.sort(key=lambda task: task.number % ranks != rank)
            for task in some:
                if not self._is_published(task):
                    yield task

    def _wait(self, seconds: float) -> None:
        missing: list[BlockTask] = []
        deadline = time.monotonic() + seconds
        while (start := time.monotonic()) < deadline:
            remaining = [task for task in missing if not self._is_published(task)]
            if len(remaining) < len(missing):
                deadline = start + seconds
            missing = remaining or list(itertools.islice(self._from(0), MAX_SHUFFLED))
            if not missing:
                return
            time.sleep(max(POLL_S, (time.monotonic() - start) / MAX_POLL_SHARE))

    def _from(self, first: int) -> Iterator[BlockTask]:
        numbered = itertools.chain(
            itertools.islice(enumerate(self._blocks()), first, None),
            itertools.islice(enumerate(self._blocks()), 0, first),
        )
        for number, block in numbered:
            if self._is_ours(number):
                task = BlockTask(number, block, self._key_of(block))
                if not self._is_published(task):
                    yield task


def _rank() -> tuple[int, int]:
    """Return rank and world size as torchrun and others state them; else (0, 1)."""
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)
