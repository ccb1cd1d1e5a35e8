"""Building what is missing: rounds of tasks until every slice of the plan is published.

A `Builder` walks the plan from a place of its own (so that builders that run at the same time meet
late), passes over slices that are published or that a live builder has claimed, and hands the rest
to the executor: first those that can be *derived* from another limit's slice, which needs no
tokenizer, then those to be *built*. What others had claimed is looked at again in the next round:
by then it is published, or its claimer is dead and it is ours to take.

A fast engine that one worker sees differ from its reference is *caught*. Every task that is handed
out from then on says so, and whatever that engine made or may have made in this run is built anew
by the reference, which replaces what turns out to be wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tokenmill.build import entries, limits
from tokenmill.build.keys import slice_key
from tokenmill.build.plan import Plan
from tokenmill.build.proof import ROOMS, Account, fast_rooms
from tokenmill.build.recipe import RunOptions, to_travel
from tokenmill.build.share import WHOLE, Share
from tokenmill.source import Block
from tokenmill.store import CacheLayout
from tokenmill.tokenizer import LITTLE_WORK, engine_for
from tokenmill.work import Executor, Setup, Task
from tokenmill.work.claims import Claims
from tokenmill.work.identity import Comparison
from tokenmill.work.progress import Progress

WAIT_S = 0.2  # seconds between looks at slices that other builders are at ...
WAIT_PER_SLICE_S = 3e-6  # ... and for each slice of the plan: about what walking past it takes


class _Handed(NamedTuple):
    """A task that was handed out: its slice, and the rooms that it leaves to their reference."""

    key: str
    block: Block
    distrusted: int = 0
    again: bool = False


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
    """One process's share in building a plan.

    Args:
        plan: What is needed.
        cache: Where it goes.
        executor: Where the work runs.
        options: How.
        account: Receives what workers report.
        progress: Receives what was done.
        comparison: Must agree before anything is committed.
        share: Which of the slices; may be widened later.
    """

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
        self._executor = executor
        self._options = options
        self._account = account
        self._progress = progress
        self._comparison = comparison
        self.share = share
        self._under_way: dict[int, _Handed] = {}  # the few tasks handed out
        self._passed_over = 0
        self._published = bytearray()  # one byte per slice: 1 when it was seen to be there
        self._counted = bytearray(plan.slices)  # 1 when progress was told of it
        self._makers = bytearray(plan.slices)  # bits of the rooms whose fast engine made it here
        # Where a builder starts decides only who makes which slice, so it may be random.
        self._first = random.SystemRandom().randrange(max(plan.slices, 1))

    def build_all(self) -> None:
        """Return when every slice of the share is published and the tokenizer is agreed on."""
        self._build_all()
        if self._comparison is not None:
            self._comparison.agree(self._plan.card, self._cache.root)

    def _build_all(self) -> None:
        plan = self._plan
        limits.remember_limit(self._cache.root, plan.base, plan.recipe.max_length)
        self._published = bytearray(plan.slices)
        with Claims(self._cache.root) as claims:
            while True:
                size = self._missing_size()
                if not self._options.force_recache:
                    self._run(self._derive_setup(size), self._derive_tasks(claims), claims)
                self._passed_over = 0
                self._run(self._build_setup(size), self._build_tasks(claims), claims)
                self._build_anew(claims, size)
                if not self._passed_over:
                    return
                time.sleep(WAIT_S + WAIT_PER_SLICE_S * plan.slices)

    def _build_anew(self, claims: Claims, size: int) -> None:
        """Build again what engines made that were caught since."""
        while self._has_suspects():
            self._run(self._build_setup(size), self._anew_tasks(claims), claims)

    def _has_suspects(self) -> bool:
        caught = _bits(self._account.caught)
        return any(maker & caught for maker in set(self._makers))

    def _run(self, setup: Setup, tasks: Iterator[Task], claims: Claims) -> None:
        with contextlib.closing(self._executor.run(setup, tasks)) as finished:  # type: ignore[type-var]
            for done in finished:
                handed = self._under_way.pop(done.number)
                claims.release(handed.key)
                self._account.add(done.result, again=handed.again)
                self._makers[done.number] = _makers(done.result) & ~handed.distrusted
                if self._comparison is not None:
                    self._comparison.check()
                if done.result.get("derived", True):  # else it is built in a moment
                    self._count(done.number, handed.block, found=not done.result["built"])

    def _count(self, number: int, block: Block, *, found: bool = False) -> None:
        """Tell progress of a slice, once."""
        if not self._counted[number]:
            self._counted[number] = 1
            self._progress.add(rows=block.rows, size=block.length, found=found)

    def _missing(self) -> Iterator[tuple[int, str, Block]]:
        """Slices that are not published, from this builder's own place on."""
        plan, published = self._plan, self._published
        numbered = itertools.chain(
            itertools.islice(enumerate(plan.blocks()), self._first, None),
            itertools.islice(enumerate(plan.blocks()), 0, self._first),
        )
        for number, block in numbered:
            if published[number] or not self.share.has(number):
                continue  # what is published stays; asking a server again for each would add up
            key = plan.key_of(block)
            if self._options.force_recache or not self._cache.slice(key).record.exists():
                yield number, key, block
            else:
                published[number] = 1
                self._count(number, block, found=True)

    def _missing_size(self) -> int:
        """Bytes of rows of the slices to be made; counted only until it is more than a little."""
        size = 0
        for _, _, block in self._missing():
            size += block.length
            if size > LITTLE_WORK:
                break
        return size

    def _build_setup(self, size: int) -> Setup:
        return Setup(
            entries.BUILD,
            {
                "recipe": to_travel(self._plan.recipe),
                "tokenizer": str(self._cache.tokenizer(self._plan.card.key)),
                "card": self._plan.card.as_dict(),
                "engine": engine_for(self._options.engine, size),
                "renderer": self._options.renderer,
                "cache": str(self._cache.root),
                "rebuild": self._options.force_recache,
            },
            shared=(str(self._cache.root),),
            little=size <= LITTLE_WORK,
        )

    def _build_tasks(self, claims: Claims) -> Iterator[Task]:
        for number, key, block in self._missing():
            if not self._options.force_recache and not claims.take(key):
                self._passed_over += 1
                continue
            yield self._task(number, key, block, again=False)

    def _anew_tasks(self, claims: Claims) -> Iterator[Task]:
        """Slices that an engine had a part in which was caught since."""
        for number, block in enumerate(self._plan.blocks()):
            if self._makers[number] & _bits(self._account.caught):
                key = self._plan.key_of(block)
                claims.take(key)  # a courtesy to others, who would find it missing for a moment
                yield self._task(number, key, block, again=True)

    def _task(self, number: int, key: str, block: Block, *, again: bool) -> Task:
        caught = self._account.caught
        self._under_way[number] = _Handed(key, block, _bits(caught), again)
        last = block.first_row + block.rows - 1
        payload = {
            "key": key,
            "block": entries.from_block(block),
            "distrusted": sorted(caught),
            "again": again,
        }
        return Task(number, payload, f"{block.path}, rows {block.first_row} to {last}")

    def _derive_setup(self, size: int) -> Setup:
        root, limit = str(self._cache.root), self._plan.recipe.max_length
        options = {"cache": root, "max_length": limit}
        return Setup(entries.DERIVE, options, shared=(root,), little=size <= LITTLE_WORK)

    def _derive_tasks(self, claims: Claims) -> Iterator[Task]:
        recipe = self._plan.recipe
        if recipe.overlong != "drop" and recipe.max_length is not None:
            return
        known = limits.known_limits(self._cache.root, self._plan.base)
        shapes = {
            limit: self._plan.shape_with_limit(limit)
            for limit in known
            if limit != recipe.max_length
        }
        if not shapes:
            return
        for number, key, block in self._missing():
            for limit, shape in shapes.items():
                other = slice_key(shape, block)
                if not limits.can_serve(self._cache, other, limit, recipe.max_length):
                    continue
                if claims.take(key):
                    self._under_way[number] = _Handed(key, block)
                    yield Task(number, {"key": key, "from": other}, f"{block.path}, derived")
                break
