"""Run a recipe: find the store, or build the missing slices and commit it.

A corrupt slice goes to quarantine and is built again. If a worker sees a fast engine differ from
its reference, the build starts again with the references alone: it builds every slice of the plan,
whoever published it, and replaces those that differ.

This process loads no engine, except for a small job without a stated number of workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from tokenmill._core.process import PrivateDirectory
from tokenmill._core.publish import Staging
from tokenmill.build.blocks import (
    BlockJob,
    BlockTask,
    MissingBlocks,
    cache_of,
    open_sources,
    size_of,
)
from tokenmill.build.executors import executor_for
from tokenmill.build.identity import identity_card
from tokenmill.build.outcome import STAGES, Account, Prepared, Unfinished, proof_document
from tokenmill.build.plan import WHOLE, PicturesOfBlocks, Plan, Share
from tokenmill.build.processor import ProcessorCard, processor_card, tokenizer_choice
from tokenmill.build.progress import Progress, open_progress
from tokenmill.build.recipe import Recipe, RunOptions, to_travel
from tokenmill.build.tasks import Executor, InlineExecutor
from tokenmill.chat import ChatSpec
from tokenmill.errors import CacheError, CorruptionError, SourceError, UsageError
from tokenmill.sources.rows import Rows
from tokenmill.store import CacheLayout, Store
from tokenmill.store.ahead import ahead
from tokenmill.store.commit import commit_store
from tokenmill.store.slices import quarantine_of, quarantine_slice, read_record

# Entries of workers, by name: this process does not import template engines, Arrow and Pillow.
BUILD = "tokenmill.build.slices:open_builder"
LIMIT = "tokenmill.build.limit:open_limiter"
HASH = "tokenmill.build.externals:open_hasher"

MAX_STATS = 4096  # slices whose files a hit looks for one by one: about 30 ms
MAX_REBUILDS = 8  # corrupt slices rebuilt in one run; more is a broken disk, not an accident
log = logging.getLogger("tokenmill.build")  # by default it prints on stderr


def run(recipe: Recipe, options: RunOptions, *, progress: Any = None) -> Prepared:
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
    """Build a share of a recipe's slices, and commit the store if none is missing then."""
    start = time.perf_counter()
    if options.disable_cache and not share.is_whole:
        raise UsageError("a part needs the cache: that is where the other parts leave theirs")
    private = PrivateDirectory() if options.disable_cache else None
    cache = cache_of(private.path if private else options.cache_dir)
    with (
        private or contextlib.nullcontext(),
        executor_for(options.executor, options.num_workers) as executor,
    ):
        planned = plan(recipe, options, executor, cache)
        account = Account(slices=planned.slices)
        media = {"media_root": options.media_root, "media_urls": options.media_urls}

        def open_store() -> Store:
            return Store(cache.store(planned.key).directory, paths=planned.paths, **media)  # type: ignore[arg-type]

        store = None
        if cache.store(planned.key).manifest.exists() and not options.force_recache:
            store = open_store()
            if any(lost_slices(cache, store)):
                store = None
        hit = store is not None
        if store is None:
            _require_reachable(planned, executor)
            with Staging(cache.root):
                pass  # raises a CacheError before anything is loaded if it cannot be written
            rows, size = planned.size_of(share)
            with open_progress(progress, total_rows=rows, total_size=size) as shown:
                builder = Builder(planned, cache, executor, options, account, shown, share)
                missing = builder.build_and_commit()
            for notice in account.notices():
                log.warning("%s", notice)
            if missing:
                seconds = time.perf_counter() - start
                return Unfinished(share, planned.key, planned.rows, missing, account, seconds)
            store = open_store()
    store.private_directory = private  # removed when nobody holds the store any more
    return Prepared(store, hit, account, time.perf_counter() - start, options)


def plan(recipe: Recipe, options: RunOptions, executor: Executor, cache: CacheLayout) -> Plan:
    processor = processor_card(recipe, cache, executor)
    card = identity_card(tokenizer_choice(recipe, processor), cache.root, executor)
    rows = open_sources(recipe.sources, cache, rehash=options.rehash)
    if not len(rows):
        raise SourceError("no rows: every source is empty", path=recipe.sources[0])
    pictures = None
    if processor is not None:
        pictures = _hash_pictures(recipe, options, processor, rows, cache, executor)
    return Plan(recipe, card, rows, processor, pictures)


def _hash_pictures(
    recipe: Recipe,
    options: RunOptions,
    processor: ProcessorCard,
    rows: Rows,
    cache: CacheLayout,
    executor: Executor,
) -> PicturesOfBlocks:
    found = PicturesOfBlocks()
    job = BlockJob(executor, cache.root, None)

    def tasks() -> Iterator[BlockTask]:
        return (BlockTask(number, block) for number, block in enumerate(rows.blocks()))

    media = media_options(recipe, options, processor)
    setup = job.setup(HASH, size_of(tasks()), media=media)
    job.run(setup, tasks(), lambda task, result: found.add(task.block, result["digest"]))
    return found


def media_options(
    recipe: Recipe, options: RunOptions, processor: ProcessorCard | None
) -> dict[str, Any] | None:
    """Return the workers' options about images; None where rows have none."""
    if processor is None:
        return None
    return {
        "processor": msgspec.to_builtins(processor),
        "tokens": [processor.image_token, processor.video_token],
        "spec": {name: getattr(recipe, name) for name in ChatSpec.__struct_fields__},
        "root": _media_root(options),
        "urls": options.media_urls,
        "trust_remote_code": recipe.trust_remote_code,
        "rehash": options.rehash,
    }


def _media_root(options: RunOptions) -> str | None:
    return None if options.media_root is None else os.path.abspath(options.media_root)


def _require_reachable(planned: Plan, executor: Executor) -> None:
    private = [path for path in planned.paths if path.startswith("memory://")]
    if private and not isinstance(executor, InlineExecutor):
        raise UsageError(
            "memory:// is seen only by the process that wrote it, not by workers; prepare it with "
            "executor='inline'",
            path=private[0],
        )


# Building


class _FastPathMismatch(Exception):
    """A worker saw a fast engine differ from its reference."""


class Builder:
    def __init__(
        self,
        plan: Plan,
        cache: CacheLayout,
        executor: Executor,
        options: RunOptions,
        account: Account,
        progress: Progress,
        share: Share = WHOLE,
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._executor = executor
        self._options = options
        self._account = account
        self._progress = progress
        self._share = share
        self._counted = bytearray(plan.slices)  # 1 when progress has counted the slice

    def build_and_commit(self) -> int:
        """Build the share and commit; return how many slices are missing for that, else 0."""
        plan, cache = self._plan, self._cache
        for _ in range(MAX_REBUILDS):
            try:
                self._require_tokenizer()
                self._build()
                missing = 0 if self._share.is_whole else self._count_missing()
                if missing:
                    return missing
                self._share = WHOLE  # a corrupt slice of another share is rebuilt here
                proof = proof_document(plan.paths, self._account, _media_root(self._options))
                placements = (
                    plan.placement(block, self._key_in_store(key)) for key, block in plan.walk()
                )
                layout = commit_store(cache, plan.document, placements, plan.tokenizer, proof)
                lost = list(lost_slices(cache, Store(layout.directory, "off")))
                for key in lost:
                    quarantine_slice(cache, key)
                if not lost:
                    return 0
            except CorruptionError as error:
                if not quarantine_of(cache, error.path):
                    raise
        raise CorruptionError(
            f"more than {MAX_REBUILDS} slices of this cache are corrupt; look at the disk",
            path=cache.root,
        )

    def _require_tokenizer(self) -> None:
        copy = self._cache.tokenizer(self._plan.card.key)
        if not copy.is_dir():
            choice = tokenizer_choice(self._plan.recipe, self._plan.processor)
            identity_card(choice, self._cache.root, self._executor)
        if not copy.is_dir():
            raise CacheError(
                "the tokenizer's copy could not be written; run the command again, or choose "
                "another cache_dir",
                path=copy,
            )

    def _build(self) -> None:
        try:
            self._build_slices()
        except _FastPathMismatch:
            self._account.restart()
            self._build_slices()

    def _build_slices(self) -> None:
        plan, options, by_reference = self._plan, self._options, self._account.restarted
        job = BlockJob(
            self._executor,
            self._cache.root,
            plan.card,
            STAGES["encode"].reference if by_reference else options.engine,
        )
        missing = self._missing(self._is_built)
        setup = job.setup(
            BUILD,
            size_of(missing),
            recipe=to_travel(plan.recipe),
            renderer=STAGES["render"].reference if by_reference else options.renderer,
            rebuild=options.force_recache or by_reference,
            replace=by_reference,
            limit=plan.limit,
            media=media_options(plan.recipe, options, plan.processor),
        )
        job.run(setup, self._with_pictures(missing), self._take)
        if plan.limit is not None:
            missing = self._missing(self._is_limited)
            setup = job.setup(LIMIT, size_of(missing), limit=plan.limit)
            job.run(setup, missing, self._take_limited)

    def _missing(self, is_published: Any) -> MissingBlocks:
        plan = self._plan
        return MissingBlocks(plan.blocks, plan.slices, plan.key_of, is_published, self._share.has)

    def _with_pictures(self, tasks: MissingBlocks) -> Iterator[BlockTask]:
        for task in tasks:
            pictures = self._plan.pictures.of(task.block)
            yield task._replace(more={"pictures": pictures}) if pictures else task

    def _is_built(self, task: BlockTask) -> bool:
        if self._options.force_recache or self._account.restarted:
            return False
        if not self._cache.slice(task.key).record.exists():
            return False
        self._count(task, found=True)
        return True

    def _is_limited(self, task: BlockTask) -> bool:
        return self._cache.slice(self._key_in_store(task.key)).record.exists()

    def _key_in_store(self, key: str) -> str:
        """Return the key of the slice that the store uses: the slice itself or a limited copy."""
        limit = self._plan.limit
        if limit is None:
            return key
        record, _ = read_record(self._cache.slice(key))
        return limit.key_of(key) if record.longest > limit.max_length else key

    def _take(self, task: BlockTask, result: dict[str, Any]) -> None:
        self._account.add(result)
        self._count(task, found=not result["built"])
        if self._account.mismatched and not self._account.restarted:
            raise _FastPathMismatch

    def _take_limited(self, task: BlockTask, result: dict[str, Any]) -> None:
        self._account.slices_derived += 1

    def _count(self, task: BlockTask, *, found: bool) -> None:
        if not self._counted[task.number]:
            self._counted[task.number] = 1
            self._progress.add(rows=task.block.rows, size=task.block.length, found=found)

    def _count_missing(self) -> int:
        """Count the slices that nobody has published yet.

        Opening a directory makes a network file system ask its server again. Otherwise two
        processes that finish at the same time might each see an old answer that the other's slice
        is missing.
        """

        def is_missing(key: str) -> bool:
            record = self._cache.slice(key).record
            if not record.exists():
                with contextlib.suppress(FileNotFoundError):
                    os.scandir(record.parent).close()
            return not record.exists()

        # The limited copy is looked for after the slice: its record says whether there is one.
        return sum(
            is_missing(key) or (key != (own := self._key_in_store(key)) and is_missing(own))
            for key, _ in self._plan.walk()
        )


def lost_slices(cache: CacheLayout, store: Store) -> Iterator[str]:
    """Yield the keys of a store's slices of which a file is missing.

    `cache gc` may have removed a slice while the store was committed. Many slices are looked for in
    the lists of their directories, which costs a microsecond for each file of the cache.
    """
    keys = store.table["key"]
    if len(keys) <= MAX_STATS:

        def found(key: str) -> str:
            files = cache.slice(key)
            there = all(path.exists() for path in (files.record, files.tokens, files.meta))
            return "" if there else key

        with contextlib.closing(ahead(found, store.slice_keys())) as missing:
            yield from filter(None, missing)
        return
    for first in np.unique(keys[:, 0]).tolist():
        wanted = {key.tobytes().hex() for key in keys[keys[:, 0] == first]}
        directory = cache.slices / f"{first:02x}"
        names = os.listdir(directory) if directory.is_dir() else []
        for ending in (".json", ".arrow", ".meta.arrow"):
            wanted_names = {f"{key}{ending}" for key in wanted}
            for name in wanted_names.difference(names):
                yield name.partition(".")[0]
