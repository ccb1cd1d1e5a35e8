"""Building what is missing: rounds of tasks until every slice of the plan is published.

A `Builder` takes the blocks of a plan whose slices are not published through the engine of
`tokenmill.work.blocks`: first those that can be *derived* from another limit's slice, which needs
no tokenizer, then those to be *built*. Which limits were built before for the same *base*
(everything that shapes a row except the limit) is remembered as empty directories
``<cache>/limits/<base>/<limit>``: a hint, whose absence costs only time.

A fast engine that one worker sees differ from its reference is *caught*. Every task that is handed
out from then on says so, and whatever that engine made or may have made in this run is built anew
by the reference, which replaces what turns out to be wrong.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.build.plan import WHOLE, Plan, Share
from tokenmill.build.proof import ROOMS, Account, fast_rooms
from tokenmill.build.recipe import Recipe, RunOptions, to_travel
from tokenmill.chat import ChatSpec
from tokenmill.errors import CorruptionError
from tokenmill.files import make_directory
from tokenmill.source import Block
from tokenmill.store import CacheLayout
from tokenmill.store.slices import read_record
from tokenmill.work import Executor, Setup
from tokenmill.work.blocks import BlockJob, BlockTask, MissingBlocks, size_of
from tokenmill.work.identity import Comparison
from tokenmill.work.processor import ProcessorCard
from tokenmill.work.progress import Progress

# What workers run, by name: what it imports (template engines, Arrow) is not for this process.
BUILD = "tokenmill.build.slices:open_builder"
DERIVE = "tokenmill.build.derive:open_deriver"

_NO_LIMIT = "none"
_BITS = {room: 1 << place for place, room in enumerate(ROOMS)}


def _bits(rooms: Iterable[str]) -> int:
    return sum(_BITS[room] for room in rooms)


def _makers(result: dict[str, Any]) -> int:
    """Bits of the rooms whose fast engine made a slice, or may have."""
    if result.get("derived"):
        return 0
    # Not built because it was there: a worker of ours may have made it and died before it could
    # say so.
    return _bits(fast_rooms(result) if result["built"] else ROOMS)


class Builder:
    """One process's share in building a plan."""

    def __init__(
        self,
        plan: Plan,
        cache: CacheLayout,
        executor: Executor,
        options: RunOptions,
        account: Account,
        progress: Progress,
        comparison: Comparison | None = None,
        share: Share = WHOLE,
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._options = options
        self._account = account
        self._progress = progress
        self.share = share
        self._job = BlockJob(executor, cache.root, plan.card, comparison, options.engine)
        self._counted = bytearray(plan.slices)  # 1 when progress was told of it
        self._makers = bytearray(plan.slices)  # bits of the rooms whose fast engine made it here

    @property
    def media_root(self) -> str | None:
        """Where pictures were looked for, if not beside the sources."""
        root = self._options.media_root
        return None if root is None else os.path.abspath(root)

    def build_all(self) -> None:
        """Return when every slice of the share is published and the tokenizer is agreed on."""
        plan = self._plan
        remember_limit(self._cache.root, plan.base, plan.recipe.max_length)
        missing = self.missing()

        def one_round() -> None:
            size = size_of(missing)
            build = self._build_setup(size)
            if self._options.force_recache:
                self._job.run(build, self._told(missing), self._take)
            else:
                self._job.run(self._derive_setup(size), self._derivable(missing), self._take)
                self._job.run(build, self._told(self._job.claimed(missing)), self._take)
            while self._has_suspects():
                # Claimed, so that others do not build what is missing for a moment.
                anew = self._job.claimed(self._suspects(), insist=True)
                self._job.run(build, self._told(anew, again=True), self._take)

        self._job.in_rounds(one_round, plan.slices)
        self._job.agree()

    def missing(self) -> MissingBlocks:
        """The slices of the share that are not published."""
        plan = self._plan
        return MissingBlocks(
            plan.blocks,
            plan.slices,
            plan.key_of,
            self._is_published,
            lambda number: self.share.has(number),
        )

    def _is_published(self, task: BlockTask) -> bool:
        if self._options.force_recache or not self._cache.slice(task.key).record.exists():
            return False
        self._count(task, found=True)
        return True

    def _take(self, task: BlockTask, result: dict[str, Any]) -> None:
        """Take a worker's report on a slice."""
        self._account.add(result, again=task.more.get("again", False))
        self._makers[task.number] = _makers(result) & ~_bits(task.more.get("distrusted", ()))
        if result.get("derived", True):  # else it is built in a moment
            self._count(task, found=not result["built"])

    def _count(self, task: BlockTask, *, found: bool) -> None:
        """Tell progress of a slice, once."""
        if not self._counted[task.number]:
            self._counted[task.number] = 1
            self._progress.add(rows=task.block.rows, size=task.block.length, found=found)

    # Building

    def _build_setup(self, size: int) -> Setup:
        return self._job.setup(
            BUILD,
            size,
            recipe=to_travel(self._plan.recipe),
            renderer=self._options.renderer,
            rebuild=self._options.force_recache,
            media=media_options(self._plan.recipe, self._options, self._plan.processor),
        )

    def _told(self, tasks: Iterable[BlockTask], *, again: bool = False) -> Iterator[BlockTask]:
        """Tasks that say which engines were caught when they were handed out."""
        for task in tasks:
            more: dict[str, Any] = {"distrusted": sorted(self._account.caught), "again": again}
            if self._plan.processor is not None:
                more["pictures"] = self._plan.pictures.of(task.block)
            yield BlockTask(task.number, task.block, task.key, more)

    def _has_suspects(self) -> bool:
        caught = _bits(self._account.caught)
        return any(maker & caught for maker in set(self._makers))

    def _suspects(self) -> Iterator[BlockTask]:
        """Slices that an engine had a part in which was caught since."""
        for number, block in enumerate(self._plan.blocks()):
            if self._makers[number] & _bits(self._account.caught):
                yield BlockTask(number, block, self._plan.key_of(block))

    # Deriving

    def _derive_setup(self, size: int) -> Setup:
        return self._job.setup(DERIVE, size, max_length=self._plan.recipe.max_length)

    def _derivable(self, missing: MissingBlocks) -> Iterator[BlockTask]:
        """Slices that another limit's slice can serve, claimed."""
        recipe = self._plan.recipe
        if recipe.overlong != "drop" and recipe.max_length is not None:
            return
        shapes = {
            limit: self._plan.shape_with_limit(limit)
            for limit in known_limits(self._cache.root, self._plan.base)
            if limit != recipe.max_length
        }
        if not shapes:
            return
        served = (
            BlockTask(task.number, task.block, task.key, {"from": source})
            for task in missing
            if (source := self._source_of(task.block, shapes)) is not None
        )
        yield from self._job.claimed(served)

    def _source_of(self, block: Block, shapes: dict[int | None, str]) -> str | None:
        """The slice of another limit that holds every row that this plan would keep."""
        for limit, shape in shapes.items():
            key = self._plan.key_of(block, shape)
            if can_serve(self._cache, key, limit, self._plan.recipe.max_length):
                return key
        return None


def media_options(
    recipe: Recipe, options: RunOptions, processor: ProcessorCard | None
) -> dict[str, Any] | None:
    """What workers are told about pictures; None where rows may have none."""
    if processor is None:
        return None
    root = options.media_root
    return {
        "processor": msgspec.to_builtins(processor),
        "tokens": [processor.image_token, processor.video_token],
        "spec": {name: getattr(recipe, name) for name in ChatSpec.__struct_fields__},
        "root": None if root is None else os.path.abspath(root),
        "urls": options.media_urls,
        "trust_remote_code": recipe.trust_remote_code,
        "rehash": options.rehash,
    }


def known_limits(root: Path, base: str) -> list[int | None]:
    """Limits built before for a base: none first, then the largest, whose slices hold the most."""
    try:
        names = [path.name for path in (root / "limits" / base).iterdir()]
    except OSError:
        return []
    numbers = sorted((int(name) for name in names if name.isdigit()), reverse=True)
    return [None, *numbers] if _NO_LIMIT in names else list(numbers)


def remember_limit(root: Path, base: str, limit: int | None) -> None:
    """Note that slices of this limit are being built."""
    directory = root / "limits" / base
    with contextlib.suppress(OSError):  # a hint only
        make_directory(directory / (_NO_LIMIT if limit is None else str(limit)), root)


def can_serve(layout: CacheLayout, key: str, limit: int | None, wanted: int | None) -> bool:
    """Whether the slice of one limit holds every row that another would keep.

    One of a larger limit (or none) does; one of a smaller limit does when it dropped nothing as
    overlong.
    """
    files = layout.slice(key)
    if not files.record.exists():
        return False
    if limit is None or (wanted is not None and limit >= wanted):
        return True
    try:
        record, _ = read_record(files)
    except CorruptionError:
        return False
    return all(row.reason != "overlong" for row in record.rejected)
