"""Run lint: choose rows, send blocks to the executor, merge the results.

Per accepted row the parent keeps 16 bytes (position and digest of the rendered text) to find exact
duplicates, and a sketch of 64 bytes for near-duplicates, at most `minhash.MAX_ROWS` of them.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill._core.origin import Origin
from tokenmill.build.blocks import BlockJob, BlockTask, cache_of, open_sources, size_of
from tokenmill.build.calls import resolve_call
from tokenmill.build.executors import executor_for
from tokenmill.build.identity import identify_tokenizer
from tokenmill.build.processor import processor_info, tokenizer_choice
from tokenmill.build.progress import open_progress
from tokenmill.build.recipe import serialize
from tokenmill.build.run import media_options
from tokenmill.build.tasks import Done, Executor, Setup, Task, run_tasks
from tokenmill.data.order import Permutation, derive_key
from tokenmill.errors import SourceError, UsageError, check_positive
from tokenmill.inspect.lint import linter, minhash
from tokenmill.inspect.lint.checks import first_equal, image_copies, one_sided
from tokenmill.inspect.lint.rules import (
    MAX_PLACES,
    RULES,
    SAMPLE_ROWS,
    SEVERITIES,
    Finding,
    LintReport,
    chosen_rules,
    excerpt,
)
from tokenmill.sources.rows import Rows

COLUMNAR = ("parquet", "arrow")
SHOWN_CHARS = 400  # of a row's JSON before it is cut to an excerpt

Positions = npt.NDArray[np.int64]


def lint(
    sources: Any,
    tokenizer: Any = None,
    *,
    sample: int | None = SAMPLE_ROWS,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: Any = None,
    **given: Any,
) -> LintReport:
    """Find problems in rows before they are prepared.

    Args:
        sources: As for `prepare`.
        tokenizer: As for `prepare`.
        sample: Check this many rows, the same ones every time; None: all rows.
        only: Names of the rules that run; empty: all.
        ignore: Names of rules that do not run.
        progress: As for `prepare`.
        given: Any other argument of `prepare` that shapes rows, ``num_workers``, ``cache_dir``,
            ``executor``, ``force_recache``, ``reference``.
    """
    start = time.perf_counter()
    recipe, options = resolve_call(sources, tokenizer, given)
    rules = chosen_rules(only, ignore)
    if recipe.format.startswith(("tokens", "rollouts")):
        raise UsageError(
            "lint does not support rows with ",
            ("format", recipe.format),
            "; prepare checks them",
        )
    with (
        executor_for(options.executor, options.num_workers) as executor,
        open_progress(progress) as shown,
    ):
        cache = cache_of(options.cache_dir)
        shown.phase("loading the tokenizer")
        processor = processor_info(recipe, cache, executor)
        choice = tokenizer_choice(recipe, processor)
        card = identify_tokenizer(choice, cache.root, executor)
        shown.phase("indexing the files")
        rows = open_sources(recipe.sources, cache, reread=options.force_recache)
        if not len(rows):
            raise SourceError("no rows: every source is empty", path=recipe.sources[0])
        places = RowOrigins(rows)
        chosen = choose(places.counts, sample)
        ranks = ranks_of(chosen, places.counts)
        job = BlockJob(executor, cache.root, card, reference=options.reference)
        setup = job.setup(
            linter.LINT,
            size_of(_tasks(rows, chosen)),
            recipe=serialize(recipe),
            rules=sorted(rules),
            media=media_options(recipe, options, processor),
            sources=[one if "://" in one else os.path.abspath(one) for one in recipe.sources],
        )
        shown.phase("checking", total_rows=ranks[-1])
        results = _Results(rules, places, ranks)

        def take(task: BlockTask, result: dict[str, Any]) -> None:
            results.add(task.number, result)
            shown.add(rows=result["rows"])

        job.run(setup, _tasks(rows, chosen), take)
        shown.phase("finding duplicates")
        results.find_duplicates()
        results.find_image_copies()
        if "near_duplicate" in rules:
            results.find_near_duplicates(executor, replace(setup, entry=linter.COMPARE))
    near = {**minhash.method(), "rows_compared": results.compared}
    described = {"rows": ranks[-1], "blocks": len(chosen), "of_blocks": len(ranks) - 1, "seed": 0}
    return LintReport(
        findings=tuple(results.findings()),
        rows=len(rows),
        rows_checked=ranks[-1],
        rules=tuple(name for name in RULES if name in rules),
        sample=described if ranks[-1] < len(rows) else None,
        near_duplicates=near if "near_duplicate" in rules else None,
        seconds=time.perf_counter() - start,
    )


def _tasks(rows: Rows, chosen: Choice) -> Iterator[BlockTask]:
    for number, block in enumerate(rows.blocks()):
        if number in chosen:
            yield BlockTask(number, block, params={"rows": chosen[number]})


class RowOrigins:
    """The origins of rows, by position among all rows; rows of columnar files have length 0."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.counts = [block.rows for block in rows.blocks()]
        self._starts = [0, *accumulate(self.counts)]

    def start(self, block: int) -> int:
        return self._starts[block]

    def origin(self, position: int) -> Origin:
        origin = self._rows.origin(position, {})  # does not read a row of a columnar file
        is_columnar = self._rows.file_of(position).entry.kind in COLUMNAR
        return origin._replace(length=0) if is_columnar else origin

    def shown(self, position: int) -> str:
        value = self._rows.batch([position])[0]
        return excerpt(json.dumps(value, ensure_ascii=False)[:SHOWN_CHARS])


class _Results:
    def __init__(self, rules: frozenset[str], places: RowOrigins, ranks: Sequence[int]) -> None:
        self._rules = rules
        self._places = places
        self._ranks = ranks
        self._found: dict[str, dict[str, Any]] = {}  # as `Collector.document`, over all blocks
        self._about_tokenizer: dict[str, str] = {}
        self._balance: Counter[str] = Counter()
        self._arrays: dict[int, dict[str, npt.NDArray[Any]]] = {}  # by block
        self._copies: Positions = np.zeros(0, np.int64)
        self.compared = 0  # rows compared for near-duplicates

    def add(self, number: int, result: dict[str, Any]) -> None:
        start = self._places.start(number)
        for rule, found in result["findings"].items():
            self._merge(rule, {**found, "rows": [start + row for row in found["rows"]]})
        self._about_tokenizer.update(result["tokenizer"])
        self._balance.update(result["balance"])
        # Limit by rank, so that the result does not depend on the order in which blocks arrive.
        limit = max(0, minhash.MAX_ROWS - self._ranks[number])
        bands = np.array(result["sketches"][:limit], np.uint32)
        images = np.array(result["images"], np.uint64).reshape(-1, 3)
        self._arrays[number] = {
            "rows": np.array(result["numbers"], np.int64) + start,
            "digests": np.array(result["digests"], np.uint64),
            "sketched": np.array(result["sketched"][:limit], np.int64) + start,
            "bands": bands.reshape(-1, minhash.BANDS),
            "image_rows": images[:, 0].astype(np.int64) + start,
            "images": images[:, 1:],
        }

    def _all(self, name: str) -> npt.NDArray[Any]:
        """Join an array over all blocks in row order, and free its parts."""
        return np.concatenate([self._arrays[number].pop(name) for number in sorted(self._arrays)])

    def find_duplicates(self) -> None:
        rows, first = self._all("rows"), first_equal(self._all("digests"))
        again = np.flatnonzero(first != np.arange(len(first)))
        self._copies = rows[again]
        if len(again) and "duplicate" in self._rules:
            original = self._places.origin(int(rows[first[again[0]]]))
            self._add_rows("duplicate", self._copies, f"the same text as {original}")

    def find_image_copies(self) -> None:
        copies = image_copies(self._all("image_rows"), self._all("images"))
        if copies and "duplicate_image" in self._rules:
            detail = f"the same image as in {self._places.origin(copies[0][1])}, with another name"
            rows = np.array(list(dict.fromkeys(row for row, _ in copies)), np.int64)
            self._add_rows("duplicate_image", rows, detail)

    def find_near_duplicates(self, executor: Executor, setup: Setup) -> None:
        rows, bands = self._all("sketched"), self._all("bands")
        once = ~np.isin(rows, self._copies)
        rows, bands = rows[once], bands[once]
        self.compared = len(rows)
        pairs: list[tuple[int, int, float]] = []

        def take(done: Done) -> None:
            pairs.extend(tuple(entry) for entry in done.result["near"])

        run_tasks(executor, setup, _comparisons(minhash.candidates(bands), rows), take)
        if pairs:
            pairs.sort()
            _, other, index = pairs[0]
            detail = f"{index:.0%} similar to {self._places.origin(other)}"
            self._add_rows("near_duplicate", np.array([row for row, _, _ in pairs]), detail)

    def _add_rows(self, rule: str, positions: Positions, detail: str) -> None:
        first = positions[:MAX_PLACES].tolist()
        shown = self._places.shown(first[0])
        finding = {"count": len(positions), "rows": first, "detail": detail, "excerpt": shown}
        self._merge(rule, finding)

    def _merge(self, rule: str, finding: dict[str, Any]) -> None:
        known = self._found.setdefault(rule, finding)
        if known is finding:
            return
        first = min(known, finding, key=lambda one: one["rows"][0])
        self._found[rule] = {
            **first,
            "count": known["count"] + finding["count"],
            "rows": sorted([*known["rows"], *finding["rows"]])[:MAX_PLACES],
        }

    def findings(self) -> list[Finding]:
        findings = [
            Finding(rule, one["count"], tuple(map(self._places.origin, one["rows"])),
                    one["detail"], one["excerpt"])
            for rule, one in self._found.items()
        ]  # fmt: skip
        general = [*self._about_tokenizer.items(), *one_sided(self._balance)]
        findings += [
            Finding(rule, 1, (), detail) for rule, detail in general if rule in self._rules
        ]
        order = list(RULES)
        return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), order.index(f.rule)))


def _comparisons(maybe: dict[int, list[int]], positions: Positions) -> Iterator[Task]:
    numbers = sorted(maybe)
    for number, first in enumerate(range(0, len(numbers), linter.ROWS_PER_TASK)):
        some = [
            [int(positions[row]), [int(positions[other]) for other in maybe[row]]]
            for row in numbers[first : first + linter.ROWS_PER_TASK]
        ]
        yield Task(number, {"pairs": some}, f"near-duplicates, part {number}")


# The permutation that orders training data, with seed 0, draws the sample: from all rows if there
# are few blocks, else from `SAMPLE_BLOCKS` blocks, because a block is always read completely.

SAMPLE_BLOCKS = 32  # blocks of about 8 MiB that are read for a sample

_ROWS, _BLOCKS = 1, 2  # streams of the seed: rows within, and blocks

Choice = dict[int, list[int] | None]  # number of the block → its rows, None for all of them


def choose(rows: Sequence[int], count: int | None) -> Choice:
    if count is not None:
        count = check_positive("sample", count)
    filled = [number for number, in_block in enumerate(rows) if in_block]
    if count is None or count >= sum(rows):
        return dict.fromkeys(filled)
    if len(filled) > SAMPLE_BLOCKS:
        order = Permutation(len(filled), derive_key(0, _BLOCKS)).indices(np.arange(SAMPLE_BLOCKS))
        filled = sorted(filled[place] for place in order.tolist())
    starts = np.concatenate(([0], np.cumsum([rows[number] for number in filled], dtype=np.int64)))
    total = int(starts[-1])
    if count >= total:
        return dict.fromkeys(filled)
    positions = np.sort(Permutation(total, derive_key(0, _ROWS)).indices(np.arange(count)))
    owners = np.searchsorted(starts, positions, side="right") - 1
    return {
        filled[owner]: (positions[owners == owner] - starts[owner]).tolist()
        for owner in np.unique(owners).tolist()
    }


def ranks_of(choice: Choice, rows: Sequence[int]) -> list[int]:
    """Return the number of checked rows before each block, and at the end their total."""
    checked = [0] * len(rows)
    for number, some in choice.items():
        checked[number] = rows[number] if some is None else len(some)
    return [0, *accumulate(checked)]
