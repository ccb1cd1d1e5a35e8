"""Run a recipe: find the store, or build the missing slices and commit it.

A corrupt slice goes to quarantine and is built again. If a fast engine differs from its reference,
the build starts again with the references alone: it builds every slice of the plan, also those of
other processes, and replaces slices that differ.

This process loads no engine, except for a small job with the default number of workers.
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
from tokenmill.build.executors import executor_for, wait_for_first_rank_s
from tokenmill.build.identity import identify_tokenizer
from tokenmill.build.outcome import BuildStats, Prepared, Unfinished, proof_document, store_stats
from tokenmill.build.plan import ALL, ImagesOfBlocks, Partition, Plan
from tokenmill.build.processor import ProcessorInfo, processor_info, tokenizer_choice
from tokenmill.build.progress import Progress, open_progress
from tokenmill.build.recipe import Recipe, RunOptions, serialize
from tokenmill.build.tasks import Executor, InlineExecutor
from tokenmill.chat import ChatSpec
from tokenmill.errors import CacheError, CorruptionError, MissingFileError, SourceError, UsageError
from tokenmill.sources.rows import Rows
from tokenmill.store import CacheLayout, Store
from tokenmill.store.commit import commit_store
from tokenmill.store.named import write_name
from tokenmill.store.prefetch import prefetch_map
from tokenmill.store.slices import quarantine_of, quarantine_slice, read_record

# Functions for workers, by name: this process imports no template engine, Arrow or Pillow.
BUILD = "tokenmill.build.slices:open_builder"
LIMIT = "tokenmill.build.limit:open_limiter"
HASH = "tokenmill.build.referenced:open_hasher"

MAX_STATS = 4096  # slices for which a cache hit stats every file: about 30 ms
MAX_REBUILDS = 8  # corrupt slices rebuilt in one run; more suggest a broken disk
log = logging.getLogger("tokenmill.build")  # by default it prints on stderr


def run(
    recipe: Recipe,
    options: RunOptions,
    partition: Partition = ALL,
    *,
    progress: Any = None,
) -> Prepared | Unfinished:
    """Build a partition of a recipe's slices; commit the store if no slice is missing then."""
    start = time.perf_counter()
    if options.disable_cache and not partition.is_whole:
        raise UsageError(("disable_cache",), " cannot be used with a part: parts share the cache")
    private = PrivateDirectory() if options.disable_cache else None
    cache = cache_of(private.path if private else options.cache_dir)
    with (
        private or contextlib.nullcontext(),
        executor_for(options.executor, options.num_workers) as executor,
        open_progress(progress) as shown,
    ):
        planned = plan(recipe, options, executor, cache, shown)
        shown.phase("checking the cache")
        build_stats = BuildStats(slices=planned.slices)
        store = find_store(planned, cache, options)
        hit = store is not None
        if store is None:
            _require_reachable(planned, executor)
            planned.check_columns()
            with Staging(cache.root):
                pass  # raises a CacheError before anything is loaded if it cannot be written
            rows, size = planned.size_of(partition)
            shown.phase("building", total_rows=rows, total_size=size)
            builder = Builder(planned, cache, executor, options, build_stats, shown, partition)
            missing = builder.build_and_commit()
            for notice in build_stats.notices():
                log.warning("%s", notice)
            if missing:
                seconds = time.perf_counter() - start
                return Unfinished(
                    partition, planned.key, planned.rows, missing, build_stats, seconds
                )
            store = _open_store(planned, cache, options)
    if options.name is not None:
        write_name(cache.root, options.name, planned.key)
    store.private_directory = private  # removed together with the store object
    return Prepared(store, hit, build_stats, time.perf_counter() - start, options)


def find_store(planned: Plan, cache: CacheLayout, options: RunOptions) -> Store | None:
    """Return the store of a plan if the cache has it, with all slices."""
    if options.force_recache or not cache.store(planned.key).manifest.exists():
        return None
    store = _open_store(planned, cache, options)
    return None if any(missing_slices(cache, store)) else store


def _open_store(planned: Plan, cache: CacheLayout, options: RunOptions) -> Store:
    return Store(
        cache.store(planned.key).directory,
        paths=planned.paths,
        media_root=options.media_root,
        media_urls=options.media_urls,
    )


def plan(
    recipe: Recipe,
    options: RunOptions,
    executor: Executor,
    cache: CacheLayout,
    progress: Progress | None = None,
    *,
    hash_images: bool = True,
) -> Plan:
    """Plan a build. Without the hashes of images, keys of stores and slices are not valid."""
    progress = progress or Progress()
    progress.phase("loading the tokenizer")
    processor = processor_info(recipe, cache, executor)
    card = identify_tokenizer(tokenizer_choice(recipe, processor), cache.root, executor)
    progress.phase("indexing the files")
    rows = open_sources(recipe.sources, cache, reread=options.force_recache)
    if not len(rows):
        raise SourceError("no rows: every source is empty", path=recipe.sources[0])
    images = None
    if processor is not None and hash_images:
        progress.phase("hashing the images")
        images = _hash_images(recipe, options, processor, rows, cache, executor)
    return Plan(recipe, card, rows, processor, images)


def _hash_images(
    recipe: Recipe,
    options: RunOptions,
    processor: ProcessorInfo,
    rows: Rows,
    cache: CacheLayout,
    executor: Executor,
) -> ImagesOfBlocks:
    images = ImagesOfBlocks()
    job = BlockJob(executor, cache.root, None)

    def tasks() -> Iterator[BlockTask]:
        return (BlockTask(number, block) for number, block in enumerate(rows.blocks()))

    media = media_options(recipe, options, processor)
    setup = job.setup(HASH, size_of(tasks()), media=media)
    job.run(setup, tasks(), lambda task, result: images.add(task.block, result["digest"]))
    return images


def media_options(
    recipe: Recipe, options: RunOptions, processor: ProcessorInfo | None
) -> dict[str, Any] | None:
    """Return the workers' options for images; None without a processor."""
    if processor is None:
        return None
    return {
        "processor": msgspec.to_builtins(processor),
        "tokens": [processor.image_token, processor.video_token],
        "spec": {name: getattr(recipe, name) for name in ChatSpec.__struct_fields__},
        "root": _media_root(options),
        "urls": options.media_urls,
        "trust_remote_code": recipe.trust_remote_code,
        "reread": options.force_recache,
    }


def _media_root(options: RunOptions) -> str | None:
    return None if options.media_root is None else os.path.abspath(options.media_root)


def _name_of(source: Any) -> str | None:
    """Return the path or hub id of a tokenizer or template; for an object the name of its class."""
    if source is None:
        return None
    if not isinstance(source, str | os.PathLike):
        return type(source).__name__
    name = os.fspath(source)
    return "given as text" if "\n" in name or "{" in name else name


def _require_reachable(planned: Plan, executor: Executor) -> None:
    private = [path for path in planned.paths if path.startswith("memory://")]
    if private and not isinstance(executor, InlineExecutor):
        raise UsageError(
            "workers cannot read memory:// files of this process; set ",
            ("executor", "inline"),
            path=private[0],
        )


# Building


def require_tokenizer(plan: Plan, cache: CacheLayout, executor: Executor) -> None:
    """Copy the tokenizer to the cache again if the copy was removed."""
    copy = cache.tokenizer(plan.card.key)
    if not copy.is_dir():
        choice = tokenizer_choice(plan.recipe, plan.processor)
        identify_tokenizer(choice, cache.root, executor)
    if not copy.is_dir():
        raise CacheError(
            "the copy of the tokenizer could not be written; free disk space, or set another ",
            ("cache_dir",),
            ", and run it again",
            path=copy,
        )


class _FastPathMismatch(Exception):
    """A fast engine differed from its reference."""


class Builder:
    def __init__(
        self,
        plan: Plan,
        cache: CacheLayout,
        executor: Executor,
        options: RunOptions,
        build_stats: BuildStats,
        progress: Progress,
        partition: Partition = ALL,
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._executor = executor
        self._options = options
        self._build_stats = build_stats
        self._progress = progress
        self._partition = partition
        self._counted = bytearray(plan.slices)  # 1 when progress has counted the slice

    def build_and_commit(self) -> int:
        """Build the partition and commit; return the number of slices that are still missing."""
        plan, cache = self._plan, self._cache
        removed = False
        for _ in range(MAX_REBUILDS):
            try:
                require_tokenizer(plan, cache, self._executor)
                self._build()
                missing = 0 if self._partition.is_whole else self._count_missing()
                if missing:
                    return missing
                self._partition = ALL  # rebuild corrupt slices of others, too
                whole = store_stats(cache, (key for key, _ in plan.walk()))
                root = _media_root(self._options)
                proof = proof_document(plan.paths, self._build_stats, whole, root)
                proof["tokenizer"] = _name_of(plan.recipe.tokenizer or plan.recipe.processor)
                proof["chat_template"] = _name_of(plan.recipe.chat_template)
                placements = (
                    plan.placement(block, self._key_in_store(key)) for key, block in plan.walk()
                )
                layout = commit_store(cache, plan.document, placements, plan.tokenizer, proof)
                lost_keys = list(missing_slices(cache, Store(layout.directory, "off")))
                for key in lost_keys:
                    quarantine_slice(cache, key)
                if not lost_keys:
                    return 0
                removed = True
            except CorruptionError as error:
                if not quarantine_of(cache, error.path):
                    raise
                removed = isinstance(error, MissingFileError)
                if removed:
                    self._quarantine_incomplete()
        if removed:
            raise CacheError(
                f"another process removed slices of this cache {MAX_REBUILDS} times while this "
                "build ran; stop it and prepare again",
                path=cache.root,
            )
        raise CorruptionError(
            f"more than {MAX_REBUILDS} slices of this cache are corrupt; check the disk",
            path=cache.root,
        )

    def _quarantine_incomplete(self) -> None:
        """Quarantine all slices with a record but without a file, not one per attempt."""
        limit = self._plan.limit
        for key, _ in self._plan.walk():
            for own in (key,) if limit is None else (key, limit.key_of(key)):
                files = self._cache.slice(own)
                if not (files.tokens.exists() and files.meta.exists()):
                    quarantine_slice(self._cache, own)

    def _build(self) -> None:
        try:
            self._build_slices()
        except _FastPathMismatch:
            self._build_stats.restart()
            self._build_slices()

    def _build_slices(self) -> None:
        plan, options, restarted = self._plan, self._options, self._build_stats.restarted
        reference = options.reference or restarted
        job = BlockJob(self._executor, self._cache.root, plan.card, reference=reference)
        missing = self._missing(self._is_built)
        setup = job.setup(
            BUILD,
            size_of(missing),
            recipe=serialize(plan.recipe),
            rebuild=options.force_recache or restarted,
            replace=restarted,
            limit=plan.limit,
            media=media_options(plan.recipe, options, plan.processor),
        )
        job.run(setup, self._with_images(missing), self._take)
        if plan.limit is not None:
            missing = self._missing(lambda t: self._cache.has_slice(self._key_in_store(t.key)))
            setup = job.setup(LIMIT, size_of(missing), limit=plan.limit)
            job.run(setup, missing, self._take_limited)

    def _missing(self, is_published: Any) -> MissingBlocks:
        plan, replaces = self._plan, self._options.force_recache or self._build_stats.restarted
        return MissingBlocks(
            plan.blocks, plan.slices, plan.key_of, is_published, self._partition.has,
            wait_s=0.0 if replaces else wait_for_first_rank_s(self._executor),
        )  # fmt: skip

    def _with_images(self, tasks: MissingBlocks) -> Iterator[BlockTask]:
        for task in tasks:
            images = self._plan.images.of(task.block)
            yield task._replace(params={"images": images}) if images else task

    def _is_built(self, task: BlockTask) -> bool:
        if self._options.force_recache or self._build_stats.restarted:
            return False
        if not self._cache.has_slice(task.key):
            return False
        self._count(task, is_hit=True)
        return True

    def _key_in_store(self, key: str) -> str:
        """Return the key of the slice that the store uses: the slice itself or a limited copy."""
        limit = self._plan.limit
        if limit is None:
            return key
        record, _ = read_record(self._cache.slice(key))
        return limit.key_of(key) if record.longest > limit.max_length else key

    def _take(self, task: BlockTask, result: dict[str, Any]) -> None:
        self._build_stats.add(result)
        self._count(task, is_hit=not result["built"])
        if self._build_stats.mismatched and not self._build_stats.restarted:
            raise _FastPathMismatch

    def _take_limited(self, task: BlockTask, result: dict[str, Any]) -> None:
        self._build_stats.slices_derived += 1

    def _count(self, task: BlockTask, *, is_hit: bool) -> None:
        if not self._counted[task.number]:
            self._counted[task.number] = 1
            self._progress.add(rows=task.block.rows, size=task.block.length, is_hit=is_hit)

    def _count_missing(self) -> int:
        """Count the slices that no process has published yet.

        Opening a directory refreshes the cache of a network file system. Without it, two processes
        that finish at the same time might each miss the other's slice.
        """

        def is_missing(key: str) -> bool:
            if not self._cache.has_slice(key):
                with contextlib.suppress(FileNotFoundError):
                    os.scandir(self._cache.slice(key).directory).close()
            return not self._cache.has_slice(key)

        # The record of the slice determines whether there is a limited copy.
        return sum(
            is_missing(key) or (key != (own := self._key_in_store(key)) and is_missing(own))
            for key, _ in self._plan.walk()
        )


def missing_slices(cache: CacheLayout, store: Store) -> Iterator[str]:
    """Yield the keys of a store's slices that lack a file.

    `cache gc` may have removed a slice while the store was committed. For many slices, listing the
    directories is faster than a stat per file: about a microsecond for each file of the cache.
    """
    keys = store.table["key"]
    if len(keys) <= MAX_STATS:

        def key_if_lost(key: str) -> str:
            files = cache.slice(key)
            is_whole = all(path.exists() for path in (files.record, files.tokens, files.meta))
            return "" if is_whole else key

        with contextlib.closing(prefetch_map(key_if_lost, store.slice_keys())) as missing:
            yield from filter(None, missing)
        return
    for first in np.unique(keys[:, 0]).tolist():
        expected = {key.tobytes().hex() for key in keys[keys[:, 0] == first]}
        directory = cache.slices / f"{first:02x}"
        names = os.listdir(directory) if directory.is_dir() else []
        for ending in (".json", ".arrow", ".meta.arrow"):
            for name in {f"{key}{ending}" for key in expected}.difference(names):
                yield name.partition(".")[0]
