"""Running a recipe: find the store, or build the slices that are missing and commit it.

`run` walks the way of a preparation: open the rows, learn the tokenizer's identity, compute the
store's key; if that store is there, it is a *hit* and nothing is written. Otherwise the slices that
are missing are built wherever the executor likes, and when all are there the store is committed by
one rename. `run_share` builds only some of them and commits if no other is missing. A slice that
turns out to be corrupt on the way is moved to quarantine and built again.

The parent loads no engine: what it must know of the tokenizer it recalls from a memo, or has a
worker find out. The exception is a little work of a caller who left the number of workers open: it
is done here, by the reference.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.build.builder import Builder, media_options
from tokenmill.build.outcome import Prepared, Unfinished
from tokenmill.build.plan import WHOLE, PicturesOfBlocks, Plan, Share
from tokenmill.build.proof import Account, proof_document
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.errors import CacheError, CorruptionError, SourceError, UsageError
from tokenmill.files import PrivateDirectory, Staging
from tokenmill.fingerprint import KEY_HEX
from tokenmill.source import Block, Rows
from tokenmill.store import CacheLayout, Store
from tokenmill.store.ahead import ahead
from tokenmill.store.commit import commit_store
from tokenmill.store.slices import quarantine_of
from tokenmill.work import Executor, InlineExecutor, executor_for
from tokenmill.work.blocks import BlockJob, BlockTask, size_of
from tokenmill.work.identity import Comparison, identity_card
from tokenmill.work.inputs import cache_of, open_sources
from tokenmill.work.processor import ProcessorCard, processor_card, tokenizer_choice
from tokenmill.work.progress import open_progress

MOST_LOOKED_AT = 4096  # slices whose files a hit looks for one by one: about 30 ms
HASH = "tokenmill.build.externals:open_hasher"  # by name: this process opens no picture
STRETCH = 8192  # slices looked at together
log = logging.getLogger("tokenmill.build")  # unless the program says otherwise, it ends on stderr

REPAIRS = 8  # corrupt slices mended in one run; more is a broken disk, not an accident


def run(recipe: Recipe, options: RunOptions, *, progress: Any = None) -> Prepared:
    """Make or find the store of a recipe: the door for `tokenmill.api` and for hosts."""
    outcome = run_share(recipe, options, progress=progress)
    assert isinstance(outcome, Prepared)
    return outcome


def run_share(
    recipe: Recipe,
    options: RunOptions,
    share: Share = WHOLE,
    *,
    progress: Any = None,
) -> Prepared | Unfinished:
    """Build a share of a recipe's slices, and commit the store if none is missing then.

    Args:
        recipe: What is to be made.
        options: How and where.
        share: Which slices.
        progress: As for `tokenmill.prepare`.
    """
    start = time.perf_counter()
    if options.disable_cache and not share.is_whole:
        raise UsageError("a part needs the cache: that is where the other parts leave theirs")
    private = PrivateDirectory() if options.disable_cache else None
    cache = cache_of(private.path if private else options.cache_dir)
    with (
        private or contextlib.nullcontext(),
        executor_for(options.executor, options.num_workers) as executor,
    ):
        planned, comparison = plan(recipe, options, executor, cache)
        account = Account(slices=planned.slices)
        layout = cache.store(planned.key)
        hit = (
            layout.manifest.exists() and not options.force_recache and _slices_exist(planned, cache)
        )
        if not hit:
            _require_reachable(planned, executor)
            _require_writable(cache)
            rows, size = planned.size_of(share)
            with open_progress(progress, total_rows=rows, total_size=size) as shown:
                builder = Builder(
                    planned, cache, executor, options, account, shown, comparison, share
                )
                missing = _build_and_commit(planned, cache, builder, executor, account)
            for notice in account.notices():
                log.warning("%s", notice)
            if missing:
                seconds = time.perf_counter() - start
                return Unfinished(share, planned.key, planned.rows, missing, account, seconds)
        elif comparison is not None:
            comparison.agree(planned.card)
    media = {"media_root": options.media_root, "media_urls": options.media_urls}
    store = Store(layout.directory, paths=planned.paths, **media)  # type: ignore[arg-type]
    store.private_directory = private  # removed when nobody holds the store any more
    return Prepared(store, hit, account, time.perf_counter() - start, options)


def plan(
    recipe: Recipe, options: RunOptions, executor: Executor, cache: CacheLayout
) -> tuple[Plan, Comparison | None]:
    """What a recipe needs, and what must still agree to its tokenizer; builds nothing."""
    processor = processor_card(recipe, cache, executor)
    card, comparison = identity_card(tokenizer_choice(recipe, processor), cache.root, executor)
    rows = open_sources(recipe.sources, cache, rehash=options.rehash)
    if not len(rows):
        raise SourceError("no rows: every source is empty", path=recipe.sources[0])
    pictures = None
    if processor is not None:
        pictures = _hashed_pictures(recipe, options, processor, rows, cache, executor)
    return Plan(recipe, card, rows, processor, pictures), comparison


def _hashed_pictures(
    recipe: Recipe,
    options: RunOptions,
    processor: ProcessorCard,
    rows: Rows,
    cache: CacheLayout,
    executor: Executor,
) -> PicturesOfBlocks:
    """What the rows refer to outside of themselves, which is part of the keys."""
    found = PicturesOfBlocks()
    job = BlockJob(executor, cache.root, None)

    def tasks() -> Iterator[BlockTask]:
        return (BlockTask(number, block) for number, block in enumerate(rows.blocks()))

    media = media_options(recipe, options, processor)
    setup = job.setup(HASH, size_of(tasks()), media=media)
    job.run(setup, tasks(), lambda task, result: found.add(task.block, result["digest"]))
    return found


def _require_reachable(planned: Plan, executor: Executor) -> None:
    """Refuse sources that no worker could read, before anything is loaded for it."""
    private = [path for path in planned.paths if path.startswith("memory://")]
    if private and not isinstance(executor, InlineExecutor):
        raise UsageError(
            "memory:// is seen only by the process that wrote it, not by workers; prepare it with "
            "executor='inline'",
            path=private[0],
        )


def _require_writable(cache: CacheLayout) -> None:
    """Say that the cache cannot be written before anything is loaded for it."""
    with Staging(cache.root):
        pass


def _slices_exist(planned: Plan, cache: CacheLayout) -> bool:
    """Whether a store that is there still has its slices; else they are built again.

    Somebody may have cleaned up by hand. Many slices are looked for in their directories' lists,
    which costs a microsecond for each file of the cache.
    """
    if planned.slices <= MOST_LOOKED_AT:
        return all(
            path.exists()
            for key, _ in planned.walk()
            for files in (cache.slice(key),)
            for path in (files.record, files.tokens, files.meta)
        )
    wanted = np.fromiter((_head(key) for key, _ in planned.walk()), np.uint64, planned.slices)
    wanted.sort()  # in place: eight bytes for each slice are all that this takes
    distinct = 1 + sum(
        int(np.count_nonzero(np.diff(wanted[first : first + STRETCH + 1])))
        for first in range(0, len(wanted), STRETCH)
    )
    return distinct == sum(_found(wanted, directory) for directory in cache.slices.iterdir())


def _found(wanted: NDArray[np.uint64], directory: Path) -> int:
    """How many of the wanted slices have all their files in a directory."""
    names: dict[str, set[str]] = {".json": set(), ".arrow": set(), ".meta.arrow": set()}
    for name in os.listdir(directory):
        key, dot, ending = name.partition(".")
        if dot + ending in names and len(key) == KEY_HEX:
            names[dot + ending].add(key)
    whole = set.intersection(*names.values())
    there = np.array([_head(key) for key in whole], np.uint64)
    places = np.searchsorted(wanted, there)
    places[places == len(wanted)] = 0
    return int(np.count_nonzero(wanted[places] == there))


def _head(key: str) -> int:
    """The first eight bytes of a key: enough to tell the slices of one cache apart."""
    return int(key[:16], 16)


def _all_there(planned: Plan, cache: CacheLayout) -> bool:
    """Whether no slice went between its being found and the commit of the store that needs it.

    `cache gc` hides what it removes and then looks at stores; this looks after the store is there.
    """

    def is_there(block: Block) -> bool:
        files = cache.slice(planned.key_of(block))
        if not files.record.exists():
            return False
        for path in (files.tokens, files.meta):
            if not path.exists():
                raise CorruptionError("gone, though its commit record is there", path=path)
        return True

    with contextlib.closing(ahead(is_there, planned.blocks())) as found:
        return all(found)


def _build_and_commit(
    planned: Plan, cache: CacheLayout, builder: Builder, executor: Executor, account: Account
) -> int:
    """Build the builder's share and commit; how many slices are missing for that, else 0."""
    for _ in range(REPAIRS):
        try:
            _require_tokenizer(planned, cache, executor)
            builder.build_all()
            missing = 0 if builder.share.is_whole else planned.count_missing(cache)
            if missing:
                return missing
            builder.share = WHOLE  # whatever turns out to be corrupt is ours to mend
            proof = proof_document(planned.paths, account, builder.media_root)
            commit_store(cache, planned.document, planned.placements(), planned.tokenizer, proof)
            if _all_there(planned, cache):
                return 0
        except CorruptionError as error:
            if not quarantine_of(cache, error.path):
                raise
    raise CorruptionError(
        f"more than {REPAIRS} slices of this cache are corrupt; look at the disk", path=cache.root
    )


def _require_tokenizer(planned: Plan, cache: CacheLayout, executor: Executor) -> None:
    """See that the tokenizer's copy is there, which workers load; it may be in quarantine now."""
    copy = cache.tokenizer(planned.card.key)
    if not copy.is_dir():
        choice = tokenizer_choice(planned.recipe, planned.processor)
        card, comparison = identity_card(choice, cache.root, executor)
        if comparison is not None:
            comparison.agree(card)
    if not copy.is_dir():
        raise CacheError(
            "the tokenizer's copy could not be written; run the command again, or choose another "
            "cache_dir",
            path=copy,
        )
