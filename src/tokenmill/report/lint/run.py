"""Running lint: choose rows, hand blocks to the executor, add up what comes back.

`run_lint` walks the way of a build up to the tokens and stops there: rows are opened, the
tokenizer's identity is learned, blocks go to workers; nothing is published but what opening rows
and tokenizers leaves in the cache anyway. What is kept here per accepted row is 16 bytes (position
and digest of the rendered text, for exact duplicates) and a sketch of 64 bytes (near-duplicates)
for at most `minhash.MOST_ROWS` rows: rows beyond are compared for equality only, and the report
says how many were compared.

A *sample* of n rows is spread by the same keyed permutation that orders training data, seed 0:
among all rows where the source has few blocks, else among the rows of `SAMPLE_BLOCKS` blocks that
are themselves chosen so, because a block is read whole. It is a function of how many rows the
blocks have, so it does not change with workers or machines. A `Choice` names, per block, its rows.

Two rows of the same digest are the same text but for one chance in 2⁶⁴ per pair.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.build.recipe import Recipe, RunOptions, to_travel
from tokenmill.build.run import media_options
from tokenmill.errors import SourceError, UsageError
from tokenmill.report.lint import linter, minhash
from tokenmill.report.lint.findings import PLACES, Finding, LintReport, Merged, in_order
from tokenmill.report.lint.groups import one_sided
from tokenmill.report.lint.pictures import copies, first_equal
from tokenmill.report.lint.row_origins import RowOrigins
from tokenmill.report.lint.rules import RULES, SAMPLE_ROWS, chosen_rules
from tokenmill.sampling import Permutation, derive_key
from tokenmill.source import Rows
from tokenmill.work import Done, Executor, Setup, Task, run_tasks
from tokenmill.work.blocks import BlockJob, BlockTask, cache_of, open_sources, size_of
from tokenmill.work.identity import identity_card
from tokenmill.work.processor import processor_card, tokenizer_choice
from tokenmill.work.progress import open_progress

Positions = npt.NDArray[np.int64]


def run_lint(
    recipe: Recipe,
    options: RunOptions,
    executor: Executor,
    *,
    sample: int | None = SAMPLE_ROWS,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: Any = None,
) -> LintReport:
    """Look for what is wrong with the rows of a recipe.

    Args:
        recipe: Sources, tokenizer and everything that shapes rows.
        options: Cache, engines; what concerns stores is not looked at.
        executor: Where rows are looked at.
        sample: Rows to look at; None: all.
        only: Rules that run; empty: all.
        ignore: Rules that do not.
        progress: As for `tokenmill.prepare`.
    """
    start = time.perf_counter()
    if recipe.format in ("tokens", "rollouts"):
        raise UsageError(
            f"lint reads texts; rows of format={recipe.format!r} are checked by prepare itself"
        )
    rules = chosen_rules(only, ignore)
    cache = cache_of(options.cache_dir)
    processor = processor_card(recipe, cache, executor)
    choice = tokenizer_choice(recipe, processor)
    card = identity_card(choice, cache.root, executor)
    rows = open_sources(recipe.sources, cache, rehash=options.rehash)
    if not len(rows):
        raise SourceError("no rows: every source is empty", path=recipe.sources[0])
    places = RowOrigins(rows)
    chosen = choose(places.counts, sample)
    ranks = ranks_of(chosen, places.counts)
    size = size_of(_tasks(rows, chosen))
    job = BlockJob(executor, cache.root, card, options.engine)
    setup = job.setup(
        linter.LINT,
        size,
        recipe=to_travel(recipe),
        renderer=options.renderer,
        rules=sorted(rules),
        media=media_options(recipe, options, processor),
        sources=[_absolute(source) for source in recipe.sources],
    )
    with open_progress(progress, total_rows=ranks[-1]) as shown:
        results = _Results(rules, places, ranks)

        def take(task: BlockTask, result: dict[str, Any]) -> None:
            results.add(task.number, result)
            shown.add(rows=result["rows"], size=0)

        job.run(setup, _tasks(rows, chosen), take)
    results.find_duplicates()
    if "duplicate_picture" in rules:
        results.find_copied_pictures()
    if "near_duplicate" in rules:
        results.find_near_duplicates(executor, replace(setup, entry=linter.COMPARE))
    return LintReport(
        findings=tuple(results.findings()),
        rows=len(rows),
        rows_checked=ranks[-1],
        rules=tuple(name for name in RULES if name in rules),
        sample=described(chosen, places.counts),
        near_duplicates=results.near_method(),
        seconds=time.perf_counter() - start,
    )


def _absolute(source: str) -> str:
    """A source as any process of this machine finds it; addresses of elsewhere stay."""
    return source if "://" in source else os.path.abspath(source)


def _tasks(rows: Rows, chosen: Choice) -> Iterator[BlockTask]:
    for number, block in enumerate(rows.blocks()):
        if number in chosen:
            yield BlockTask(number, block, more={"rows": chosen[number]})


class _Results:
    """What came back so far, by number of the block, so that the order of arrival is nothing."""

    def __init__(self, rules: frozenset[str], places: RowOrigins, ranks: Sequence[int]) -> None:
        self._rules = rules
        self._places = places
        self._ranks = ranks
        self._merged = Merged()
        self._about_tokenizer: dict[str, str] = {}
        self._balance: Counter[str] = Counter()
        self._digests: dict[int, tuple[Positions, npt.NDArray[np.uint64]]] = {}
        self._sketches: dict[int, tuple[Positions, minhash.Sketches]] = {}
        self._copies: Positions = np.zeros(0, np.int64)
        self._pictures: dict[int, npt.NDArray[np.uint64]] = {}
        self._compared = 0

    def add(self, number: int, result: dict[str, Any]) -> None:
        start = self._places.start(number)
        self._merged.add(result["findings"], start)
        self._about_tokenizer.update(result["tokenizer"])
        self._balance.update(result["balance"])
        positions = linter.unpacked(result["numbers"], np.int32).astype(np.int64) + start
        self._digests[number] = positions, linter.unpacked(result["digests"], np.uint64)
        sketched = linter.unpacked(result["sketched"], np.int32).astype(np.int64) + start
        bands = linter.unpacked(result["sketches"], np.uint32).reshape(-1, minhash.BANDS)
        pictures = linter.unpacked(result["pictures"], np.uint64).reshape(-1, 3).copy()
        pictures[:, 0] += np.uint64(start)
        self._pictures[number] = pictures
        # By rank and not by arrival, so that the same rows are compared whoever is quicker.
        most = max(0, minhash.MOST_ROWS - self._ranks[number])
        self._sketches[number] = sketched[:most], bands[:most]

    def find_duplicates(self) -> None:
        """Rows whose rendered text an earlier row has already."""
        blocks = [self._digests[number] for number in sorted(self._digests)]
        if not blocks:
            return
        positions = np.concatenate([block[0] for block in blocks])
        digests = np.concatenate([block[1] for block in blocks])
        first = first_equal(digests)  # the earliest row, because positions rise
        again = np.flatnonzero(first != np.arange(len(digests)))
        self._copies = positions[again]
        if len(again) and "duplicate" in self._rules:
            original = int(positions[first[again[0]]])
            detail = f"the same text as {self._places.origin(original)}"
            self._found("duplicate", self._copies, detail)

    def find_copied_pictures(self) -> None:
        """Rows with a picture that an earlier row has under another name."""
        blocks = [self._pictures[number] for number in sorted(self._pictures)]
        if not blocks:
            return
        pictures = np.concatenate(blocks)
        found = copies(pictures[:, 0].astype(np.int64), pictures[:, 1:])
        if found:
            detail = f"a picture of {self._places.origin(found[0][1])}, under another name"
            rows = np.array(list(dict.fromkeys(row for row, _ in found)), np.int64)
            self._found("duplicate_picture", rows, detail)

    def find_near_duplicates(self, executor: Executor, setup: Setup) -> None:
        """Rows that nearly repeat an earlier one; exact copies are not looked at again."""
        blocks = [self._sketches[number] for number in sorted(self._sketches)]
        if not blocks:
            return
        positions = np.concatenate([block[0] for block in blocks])
        bands = np.concatenate([block[1] for block in blocks])
        once = ~np.isin(positions, self._copies)
        positions, bands = positions[once], bands[once]
        self._compared = len(positions)
        self._sketches.clear()
        maybe = minhash.candidates(bands)
        found: list[tuple[int, int, float]] = []

        def take(done: Done) -> None:
            found.extend(tuple(entry) for entry in done.result["near"])

        run_tasks(executor, setup, _comparisons(maybe, positions), take)
        if found:
            found.sort()
            _, other, index = found[0]
            detail = f"{index:.0%} of its shingles are those of {self._places.origin(other)}"
            self._found("near_duplicate", np.array([entry[0] for entry in found]), detail)

    def _found(self, rule: str, positions: Positions, detail: str) -> None:
        first = positions[:PLACES].tolist()
        shown = self._places.shown(first[0])
        document = {"count": len(positions), "rows": first, "detail": detail, "excerpt": shown}
        self._merged.add({rule: document})

    def near_method(self) -> dict[str, Any] | None:
        """How near-duplicates were looked for, and among how many rows."""
        if "near_duplicate" not in self._rules:
            return None
        return {**minhash.method(), "rows_compared": self._compared}

    def findings(self) -> list[Finding]:
        told = [*self._about_tokenizer.items(), *one_sided(self._balance)]
        about = [Finding(rule, 1, (), detail) for rule, detail in told if rule in self._rules]
        return in_order([*self._merged.findings(self._places.origin), *about])


def _comparisons(maybe: dict[int, list[int]], positions: Positions) -> Iterator[Task]:
    """Tasks of some candidates each, in the order of the rows."""
    numbers = sorted(maybe)
    for number, first in enumerate(range(0, len(numbers), linter.ROWS_PER_TASK)):
        some = [
            [int(positions[row]), [int(positions[other]) for other in maybe[row]]]
            for row in numbers[first : first + linter.ROWS_PER_TASK]
        ]
        yield Task(number, {"pairs": some}, f"near-duplicates, part {number}")


# Which rows


SAMPLE_BLOCKS = 32  # blocks of about 8 MiB that are read for a sample

_ROWS, _BLOCKS = 1, 2  # streams of the seed: rows within, and blocks

Choice = dict[int, list[int] | None]
"""Number of the block → numbers of its rows, None for all of them."""


def choose(rows: Sequence[int], wanted: int | None) -> Choice:
    """The rows to look at."""
    if wanted is not None and (isinstance(wanted, bool) or wanted < 1):
        raise UsageError(f"sample is {wanted!r}; it is a positive number of rows")
    filled = [number for number, count in enumerate(rows) if count]
    if wanted is None or wanted >= sum(rows):
        return dict.fromkeys(filled)
    if len(filled) > SAMPLE_BLOCKS:
        order = Permutation(len(filled), derive_key(0, _BLOCKS)).indices(np.arange(SAMPLE_BLOCKS))
        filled = sorted(filled[place] for place in order.tolist())
    starts = np.concatenate(([0], np.cumsum([rows[number] for number in filled], dtype=np.int64)))
    total = int(starts[-1])
    if wanted >= total:
        return dict.fromkeys(filled)
    places = np.sort(Permutation(total, derive_key(0, _ROWS)).indices(np.arange(wanted)))
    owners = np.searchsorted(starts, places, side="right") - 1
    return {
        filled[owner]: (places[owners == owner] - starts[owner]).tolist()
        for owner in np.unique(owners).tolist()
    }


def ranks_of(choice: Choice, rows: Sequence[int]) -> list[int]:
    """Per block, how many rows before it are looked at; one more than blocks, the last is all."""
    looked = [0] * len(rows)
    for number, some in choice.items():
        looked[number] = rows[number] if some is None else len(some)
    return [0, *accumulate(looked)]


def described(choice: Choice, rows: Sequence[int]) -> dict[str, Any] | None:
    """What the report says of a sample; None where everything is looked at."""
    looked = ranks_of(choice, rows)[-1]
    if looked == sum(rows):
        return None
    return {"rows": looked, "blocks": len(choice), "of_blocks": len(rows), "seed": 0}
