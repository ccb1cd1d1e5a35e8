"""Measuring what nobody has measured: the blocks of a source, shared among builders.

A `Work` is one process's share in making one index. It walks the blocks from a place of its own (so
that builders that run at the same time meet late), passes over those whose part is published or
that a live builder has claimed, and hands the rest to the executor. What others had claimed is
looked at again in the next round: by then it is published, or its claimer is dead. Then the parts
are read in order, which is the index.

Where a processor measures, blocks are measured here: it is an object of this process.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.build.entries import from_block
from tokenmill.build.missing import WAIT_S
from tokenmill.build.slices import load_copy
from tokenmill.errors import CorruptionError
from tokenmill.files import Staging
from tokenmill.prompts.lengths import Int32Array, Rejection
from tokenmill.prompts.measuring import (
    ENTRY,
    Measurer,
    measure_block,
    part_key,
    read_part,
    write_part,
)
from tokenmill.source import Block
from tokenmill.tokenizer import LITTLE_WORK, IdentityCard, engine_for
from tokenmill.work import Executor, Setup, Task
from tokenmill.work.claims import Claims

if TYPE_CHECKING:
    from tokenmill.prompts.finding import Wanted


class Work:
    """One process's share in measuring a source.

    Args:
        wanted: What is asked for.
        root: The cache directory.
        executor: Where blocks are measured.
        card: The tokenizer's identity card.
        shape: Key of everything but the source that can change a length.

    Attributes:
        measured: Rows that were rendered and encoded.
    """

    def __init__(
        self, wanted: Wanted, root: Path, executor: Executor, card: IdentityCard, shape: str
    ) -> None:
        self._wanted = wanted
        self._root = root
        self._executor = executor
        self._card = card
        self._shape = shape
        self.measured = 0

    def _blocks(self) -> Iterator[tuple[str, Block]]:
        for block in self._wanted.rows.blocks():
            yield part_key(self._shape, block.kind, block.digest), block

    def _place(self, key: str) -> Path:
        return self._root / "rows" / key

    def measure_all(self) -> None:
        """Return when every block has a part."""
        with Staging(self._root):
            pass  # say that the cache cannot be written before anything is loaded for it
        size = self._missing_size()
        setup = Setup(
            ENTRY,
            {
                "spec": self._wanted.spec.travelling(),
                "tokenizer": str(self._root / "tokenizers" / self._card.key),
                "card": self._card.as_dict(),
                "engine": engine_for(self._wanted.engine, size),
                "cache": str(self._root),
            },
            shared=(str(self._root),),
            little=size <= LITTLE_WORK,
        )
        with Claims(self._root) as claims:
            while True:
                under_way: dict[int, str] = {}
                passed_over: list[str] = []
                tasks = self._tasks(claims, under_way, passed_over)
                with contextlib.closing(self._executor.run(setup, tasks)) as finished:  # type: ignore[type-var]
                    for done in finished:
                        claims.release(under_way.pop(done.number))
                        self.measured += done.result["measured"]
                if not passed_over:
                    return
                time.sleep(WAIT_S)

    def _missing_size(self) -> int:
        """Bytes of rows to be measured; counted only until it is more than a little."""
        size = 0
        for key, block in self._blocks():
            size += 0 if self._place(key).is_dir() else block.length
            if size > LITTLE_WORK:
                break
        return size

    def _tasks(
        self, claims: Claims, under_way: dict[int, str], passed_over: list[str]
    ) -> Iterator[Task]:
        # Where a builder starts decides only who measures which block, so it may be random.
        count = sum(1 for _ in self._wanted.rows.blocks())
        first = random.SystemRandom().randrange(max(count, 1))
        numbered = itertools.chain(
            itertools.islice(enumerate(self._blocks()), first, None),
            itertools.islice(enumerate(self._blocks()), 0, first),
        )
        for number, (key, block) in numbered:
            if self._place(key).is_dir():
                continue
            if not claims.take(key):
                passed_over.append(key)
                continue
            under_way[number] = key
            label = f"{block.path}, rows {block.first_row} to {block.first_row + block.rows - 1}"
            yield Task(number, {"key": key, "block": from_block(block)}, label)

    def parts(self) -> Iterator[tuple[Int32Array, list[Rejection]]]:
        """Every part in order; one that is not there or cannot be read is measured here.

        That is all of them where a processor measures: it is an object of this process.
        """
        before = 0
        measurer: Measurer | None = None
        for key, block in self._blocks():
            part = read_part(self._place(key), block.rows)
            if part is None:
                if measurer is None:
                    measurer = self._own_measurer()
                part = measure_block(measurer, block)
                self.measured += block.rows
                write_part(self._root, self._place(key), part)
            lengths, said = part
            if len(lengths) != block.rows:
                raise CorruptionError(
                    f"{len(lengths)} lengths for {block.rows} rows", path=self._place(key)
                )
            yield lengths, [one._replace(row=one.row + before) for one in said]
            before += block.rows

    def _own_measurer(self) -> Measurer:
        copy = self._root / "tokenizers" / self._card.key
        tokenizer = load_copy(copy, self._card.as_dict())
        wanted = self._wanted
        return Measurer(wanted.spec, tokenizer, wanted.engine, wanted.processor)
