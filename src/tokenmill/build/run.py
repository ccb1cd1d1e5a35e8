"""Running a recipe: find the store, or build the slices that are missing and commit it.

`run` walks the way of a preparation: open the rows, learn the tokenizer's identity, compute the
store's key; if that store is there, it is a *hit* and nothing is written. Otherwise every block
whose slice is not yet published becomes a task, an executor runs them wherever it likes, and when
all slices are there the store is committed by one rename. Nobody waits for a lock: any number of
processes may run the same recipe, start at different places and share what each has published.

The parent loads no engine: what it must know of the tokenizer it recalls from a memo, or has a
worker find out. `Prepared` is the store with the account of what was done.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenmill.build import proof as proofs
from tokenmill.build.executors import Executor, Setup, Task
from tokenmill.build.identify import identity_card
from tokenmill.build.keys import shape_key, slice_key, source_documents, store_document
from tokenmill.build.outcome import Prepared, check_rejected
from tokenmill.build.progress import Progress, resolve_progress
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.build.slices import ENTRY, from_block
from tokenmill.errors import SourceError
from tokenmill.files import default_cache_dir
from tokenmill.fingerprint import key as fingerprint_key
from tokenmill.source import Block, Rows, open_rows
from tokenmill.store import CacheLayout, Store
from tokenmill.store.commit import Placement, commit_store
from tokenmill.tokenizer import IdentityCard


def run(
    recipe: Recipe, options: RunOptions, executor: Executor, *, progress: Any = None
) -> Prepared:
    """Make or find the store of a recipe.

    Args:
        recipe: What is to be made.
        options: How.
        executor: Where slices are built.
        progress: As for `tokenmill.prepare`.
    """
    start = time.perf_counter()
    private = tempfile.TemporaryDirectory(prefix="tokenmill-") if options.disable_cache else None
    root = private.name if private else options.cache_dir or default_cache_dir()
    cache = CacheLayout(Path(root).absolute())
    rows = open_rows(list(recipe.sources), cache_dir=cache.root, rehash=options.rehash)
    if not len(rows):
        raise SourceError("no rows: every source is empty", path=recipe.sources[0])
    card = identity_card(recipe, cache.root, executor)
    plan = Plan(recipe, card, rows)
    layout = cache.store(plan.key)
    built = proofs.Account()
    hit = layout.manifest.exists() and not options.force_recache
    if not hit:
        with contextlib.closing(resolve_progress(progress, plan.rows, plan.bytes)) as shown:
            _build_missing(plan, cache, executor, options, built, shown)
        proof = proofs.proof_document(plan.paths, built)
        commit_store(cache, plan.document, plan.placements(), plan.tokenizer, proof)
    store = Store(layout.directory, paths=plan.paths)
    store.private_directory = private  # removed when nobody holds the store any more
    prepared = Prepared(store, hit, built, time.perf_counter() - start)
    check_rejected(prepared, options)
    return prepared


class Plan:
    """Which slices a recipe needs, in order: a function of recipe, identity and content.

    Nothing is kept per slice; blocks are walked again whenever they are needed.
    """

    def __init__(self, recipe: Recipe, card: IdentityCard, rows: Rows) -> None:
        self.recipe = recipe
        self.card = card
        self._rows = rows
        shaping = recipe.document()
        self.shape = shape_key(shaping, card.key)
        sources = source_documents(rows.blocks())
        self.document = store_document(shaping, card.identity, sources)
        self.key = fingerprint_key(self.document)
        self.rows = sum(source["rows"] for source in sources)
        self.bytes = sum(source["bytes"] for source in sources)
        self.paths = [str(rows.files[source["file"]].path) for source in sources]
        self._source_of_file = {source["file"]: n for n, source in enumerate(sources)}

    @property
    def tokenizer(self) -> dict[str, Any]:
        """What the manifest says of the tokenizer."""
        card = self.card
        return {
            "identity": card.key,
            "pad_id": card.pad_id,
            "eos_id": card.eos_id,
            "bos_id": card.bos_id,
        }

    def slices(self) -> Iterator[tuple[str, Block]]:
        """Every slice's key and the block it is made of, in order."""
        return ((slice_key(self.shape, block), block) for block in self._rows.blocks())

    def placements(self) -> Iterator[Placement]:
        """Every slice's place in the store, in order."""
        for key, block in self.slices():
            yield Placement(
                key=key,
                source=self._source_of_file[block.file],
                source_row=block.first_row,
                line=block.first_line,
                offset=block.offset,
            )


def _build_missing(
    plan: Plan,
    cache: CacheLayout,
    executor: Executor,
    options: RunOptions,
    account: proofs.Account,
    progress: Progress,
) -> None:
    setup = Setup(
        ENTRY,
        {
            "recipe": _recipe_to_travel(plan.recipe),
            "tokenizer": str(cache.tokenizer(plan.card.key)),
            "engine": options.engine,
            "cache": str(cache.root),
            "rebuild": options.force_recache,
        },
    )
    tasks = _tasks(plan, cache, options, account, progress)
    with contextlib.closing(executor.run(setup, tasks)) as finished:  # type: ignore[type-var]
        for done in finished:
            account.add(done.result)
            progress.advance(done.result.get("source_rows", 0), done.result.get("bytes", 0))


def _recipe_to_travel(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what a worker does not need and what cannot travel."""
    return {field.name: getattr(recipe, field.name) for field in fields(recipe)} | {
        "sources": ["-"],
        "tokenizer": "-",
        "chat_template": None,
    }


def _tasks(
    plan: Plan,
    cache: CacheLayout,
    options: RunOptions,
    account: proofs.Account,
    progress: Progress,
) -> Iterator[Task]:
    """The slices that are not published yet, from a place of this builder's own.

    Where it starts decides only which builder makes which slice, so it may be random.
    """
    count = sum(1 for _ in plan.slices())
    account.slices = count
    first = random.SystemRandom().randrange(count)
    numbered = itertools.chain(
        itertools.islice(enumerate(plan.slices()), first, None),
        itertools.islice(enumerate(plan.slices()), 0, first),
    )
    for number, (key, block) in numbered:
        if not options.force_recache and cache.slice(key).record.exists():
            progress.advance(block.rows, block.length)
            continue
        last = block.first_row + block.rows - 1
        label = f"{block.path}, rows {block.first_row} to {last}"
        yield Task(number, {"key": key, "block": from_block(block)}, label)
