"""Finding a length index, or having it made.

`find_index` computes the key of what the caller asks for (source by content, tokenizer by what it
does, every row-shaping argument) and opens ``rows/<key>`` if it is there: a *hit*, which writes
nothing and loads neither a tokenizer nor a template engine. Otherwise the blocks of the source
whose parts are missing are measured wherever the executor likes, and the index is assembled from
the parts and published by one rename. Builders that run at the same time share the blocks by
claims; claims are a courtesy, and the worst without them is a block measured twice.

A cache that cannot be written is no reason to refuse: the index is then made in a temporary
directory that lives as long as the dataset.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill import fingerprint
from tokenmill.build.claims import Claims
from tokenmill.build.executors import Executor, Setup, Task
from tokenmill.build.identify import Comparison, identity_card
from tokenmill.build.keys import source_documents
from tokenmill.build.missing import WAIT_S
from tokenmill.build.recipe import Recipe
from tokenmill.build.slices import from_block, load_copy
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.files import Staging
from tokenmill.prompts import media
from tokenmill.prompts.lengths import Int32Array, LengthIndex, Rejection, publish_index
from tokenmill.prompts.measuring import (
    ENTRY,
    Measurer,
    measure_block,
    part_key,
    read_part,
    write_part,
)
from tokenmill.prompts.spec import PromptSpec
from tokenmill.source import Block, Rows
from tokenmill.tokenizer import IdentityCard

INDEX_VERSION = 1


@dataclass(frozen=True)
class Wanted:
    """What is asked for: arguments that lead to one index.

    Attributes:
        rows: The opened source.
        spec: The row-shaping arguments.
        tokenizer: As for `tokenmill.prepare`.
        tokenizer_backend: See there.
        chat_template: See there.
        trust_remote_code: See there.
        processor: Measures prompts with media, where there is one.
        engine: Which engine may encode; never changes the result.
    """

    rows: Rows
    spec: PromptSpec
    tokenizer: Any
    tokenizer_backend: str = "auto"
    chat_template: Any = None
    trust_remote_code: bool = False
    processor: Any = None
    engine: str = "auto"

    def card(self, root: Path, executor: Executor) -> tuple[IdentityCard, Comparison | None]:
        """The tokenizer's identity card; its copy is then in the cache."""
        recipe = Recipe(
            sources=("-",),
            tokenizer=self.tokenizer,
            tokenizer_backend=self.tokenizer_backend,
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
        )
        return identity_card(recipe, root, executor)

    def shape(self, card: IdentityCard) -> dict[str, Any]:
        """Everything but the source that can change a length."""
        identity = dict(card.identity)
        if not self.spec.apply_chat_template:
            # Plain text meets no template, so another template must not make another key.
            identity |= {"template": {}, "special_tokens": {}}
        shape = {"prompts": INDEX_VERSION, "spec": self.spec.document(), "tokenizer": identity}
        if self.processor is not None:
            shape["processor"] = media.identity(self.processor)
        return shape


@dataclass
class Found:
    """An index and how it came to be.

    Attributes:
        index: The index, open.
        hit: Whether it was there already.
        measured: Rows whose prompts were rendered and encoded in this call.
        home: A temporary directory that must outlive the index, if there is one.
    """

    index: LengthIndex
    hit: bool
    measured: int = 0
    home: PrivateHome | None = None


class PrivateHome:
    """A temporary directory, removed when nobody holds this object any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tokenmill-prompts-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's files
        shutil.rmtree(path, ignore_errors=True)


def find_index(wanted: Wanted, root: Path, executor: Executor) -> Found:
    """Open the index of what is wanted, having it made where it is not there."""
    nameless = wanted.processor is not None and media.identity(wanted.processor) is None
    try:
        if not nameless:  # lengths by a processor that cannot say what it is are nobody else's
            return _find_or_make(wanted, root, executor)
    except CacheError:
        if _writable(root):
            raise
    home = PrivateHome()
    found = _find_or_make(wanted, home.path, executor)
    found.home = home
    return found


def _writable(root: Path) -> bool:
    try:
        with Staging(root):
            return True
    except CacheError:
        return False


def _find_or_make(wanted: Wanted, root: Path, executor: Executor) -> Found:
    card, comparison = wanted.card(root, executor)
    shape = wanted.shape(card)
    sources = [
        {name: value for name, value in source.items() if name != "file"}
        for source in source_documents(wanted.rows.blocks())
    ]
    document = {**shape, "sources": sources}
    place = root / "rows" / fingerprint.key(document)
    if place.is_dir():
        if comparison is not None:
            comparison.agree(card, root)
        return Found(LengthIndex(place, document), hit=True)
    work = _Work(wanted, root, executor, card, fingerprint.key(shape))
    if wanted.processor is None:
        work.measure_all()
    if comparison is not None:
        comparison.agree(card, root)
    serving: dict[str, Any] = {"template": None, "special_tokens": {}}
    if wanted.spec.apply_chat_template:
        serving = {"template": card.template, "special_tokens": card.special_tokens}
    publish_index(root, place, document, serving, work.parts())
    return Found(LengthIndex(place, document), hit=False, measured=work.measured)


class _Work:
    """Measuring the blocks of one source that nobody has measured."""

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
        setup = Setup(
            ENTRY,
            {
                "spec": self._wanted.spec.travelling(),
                "tokenizer": str(self._root / "tokenizers" / self._card.key),
                "card": self._card.as_dict(),
                "engine": self._wanted.engine,
                "cache": str(self._root),
            },
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
