"""Check recorded rollouts against template and tokenizer. Nothing is published."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

from tokenmill._core.collector import without_collector
from tokenmill._core.origin import Origin
from tokenmill.build.blocks import BlockJob, BlockTask, block_of, cache_of, open_sources, size_of
from tokenmill.build.calls import Sources, resolve_call
from tokenmill.build.executors import executor_for
from tokenmill.build.identity import identity_card
from tokenmill.build.progress import open_progress
from tokenmill.build.recipe import Recipe, to_travel
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.inspect.lint.run import RowOrigins
from tokenmill.rl.formats import FORMATS, read_rollouts, reread
from tokenmill.rl.trajectory import Trajectory
from tokenmill.rl.verdict import CLASSES, Judge
from tokenmill.sources.block import BlockRows, read_block
from tokenmill.tokenizers.cache import load_copy

ENTRY = "tokenmill.inspect.drift:open_checker"
MAX_FINDINGS = 10_000
BATCH = 64  # trajectories checked at once
MAX_DETAIL = 300  # characters


class RolloutFinding(dict[str, Any]):
    """One finding; its values are items and attributes of the same names (``class_`` for class).

    Keys: ``class``, ``kind``, ``row`` (among all rows), ``trajectory`` (within the row), ``turn``,
    ``token``, ``expected``, ``found``, ``detail``, ``origin``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name.removesuffix("_")]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class RolloutReport:
    """The outcome of a check. Trajectories of which nothing could be compared are in no class."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))  # by class
    findings: list[RolloutFinding] = field(default_factory=list)  # in the order of the rows
    findings_left_off: int = 0  # beyond `MAX_FINDINGS`
    rows: int = 0
    trajectories: int = 0  # without those of rejected rows
    truncated: int = 0  # trajectories that end inside a turn, which is no finding
    unchecked: dict[str, int] = field(default_factory=dict)  # by what could not be compared
    rejected: dict[str, int] = field(default_factory=dict)  # rows or trajectories, by reason
    rejected_rows: list[tuple[Origin, str, str]] = field(default_factory=list)  # the first of them
    seconds: float = 0.0

    def fails(self, fail_on: str | None) -> bool:
        failing = CLASSES[CLASSES.index(fail_on) :] if fail_on is not None else ()
        return any(self.counts[name] for name in failing)

    def document(self) -> dict[str, Any]:
        findings = [{**one, "origin": one["origin"]._asdict()} for one in self.findings]
        rejected = [
            {"origin": origin._asdict(), "reason": reason, "detail": detail}
            for origin, reason, detail in self.rejected_rows
        ]
        return {**vars(self), "findings": findings, "rejected_rows": rejected}


def check_rollouts(
    sources: Sources,
    tokenizer: Any = None,
    format: str = "auto",  # noqa: A002 - a name of the contract
    *,
    progress: Any = None,
    **given: Any,
) -> RolloutReport:
    """Compare recorded rollouts with what template and tokenizer make of their messages.

    Args:
        sources: Files of rollouts, in any of the formats that docs/rollouts.md lists.
        tokenizer: As for `prepare`.
        format: ``auto`` looks at each row's columns; a name reads every row so.
        progress: As for `prepare`.
        given: Of the other arguments of `prepare` those that concern rendering (``chat_template``,
            ``template_kwargs``, ``date``, ``thinking_opener``) and running (``num_workers``,
            ``cache_dir``, ``executor``, ``engine``, ``renderer``, ``rehash``).
    """
    from tokenmill.build.recorded import readable_sources

    start = time.perf_counter()
    if format != "auto" and format not in FORMATS:
        raise UsageError(f"format={format!r}: choose one of auto, {', '.join(FORMATS)}")
    # `names` are the files that were converted to readable ones, for origins.
    readable, names = readable_sources(sources, given.get("cache_dir"))
    recipe, options = resolve_call(readable, tokenizer, given)
    results: dict[int, dict[str, Any]] = {}
    held = 0
    with executor_for(options.executor, options.num_workers) as executor:
        cache = cache_of(options.cache_dir)
        card = identity_card(recipe, cache.root, executor)
        rows = open_sources(recipe.sources, cache, rehash=options.rehash)
        if not len(rows):
            raise SourceError("no rows: every source is empty", path=recipe.sources[0])
        places = RowOrigins(rows)
        job = BlockJob(executor, cache.root, card, options.engine)
        size = size_of(starmap(BlockTask, enumerate(rows.blocks())))
        setup = job.setup(
            ENTRY, size, recipe=to_travel(recipe), renderer=options.renderer, format=format
        )
        with open_progress(progress, total_rows=len(rows)) as shown:

            def take(task: BlockTask, result: dict[str, Any]) -> None:
                nonlocal held
                # By number, so that the findings do not depend on the order of arrival.
                results[task.number] = result
                held += len(result["findings"])
                if held > 4 * MAX_FINDINGS:
                    held = _drop_last(results)
                shown.add(rows=result["rows"], size=0)

            job.run(setup, starmap(BlockTask, enumerate(rows.blocks())), take)
    report = RolloutReport(rows=len(rows))
    unchecked: Counter[str] = Counter()
    rejected: Counter[str] = Counter()

    def origin_of(position: int) -> Origin:
        origin = places.origin(position)
        return origin._replace(path=names.get(origin.path or "", origin.path))

    for number in sorted(results):
        result = results[number]
        first = places.start(number)
        for name, count in result["counts"].items():
            report.counts[name] += count
        report.trajectories += result["trajectories"]
        report.truncated += result["truncated"]
        unchecked.update(result["unchecked"])
        rejected.update(result["rejected"])
        report.findings_left_off += result["left_off"]
        for row, trajectory, note in result["findings"]:
            if len(report.findings) >= MAX_FINDINGS:
                report.findings_left_off += 1
                continue
            position = first + row
            report.findings.append(
                RolloutFinding(
                    {"class": note["drift"], "kind": note["kind"], "row": position,
                     "trajectory": trajectory, "turn": note["turn"], "token": note["token"],
                     "expected": note["expected"], "found": note["found"],
                     "detail": note["detail"], "origin": origin_of(position)}
                )
            )  # fmt: skip
        for row, reason, detail in result["rejected_rows"]:
            if len(report.rejected_rows) < MAX_FINDINGS:
                report.rejected_rows.append((origin_of(first + row), reason, detail))
    report.unchecked, report.rejected = dict(unchecked), dict(rejected)
    report.seconds = time.perf_counter() - start
    return report


def _drop_last(results: dict[int, dict[str, Any]]) -> int:
    """Keep only the findings of the first blocks, and return how many are left."""
    held = 0
    for number in sorted(results):
        found = results[number]["findings"]
        keep = max(0, MAX_FINDINGS - held)
        results[number]["left_off"] += max(0, len(found) - keep)
        del found[keep:]
        held += len(found)
    return held


def open_checker(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    recipe = Recipe(**options["recipe"])
    tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
    judge = Judge(tokenizer, recipe.chat_spec(), options["engine"], options["renderer"])

    @without_collector()
    def check(payload: dict[str, Any]) -> dict[str, Any]:
        return check_rows(judge, read_block(block_of(payload)), options["format"])

    return check


def check_rows(judge: Judge, rows: BlockRows, format: str) -> dict[str, Any]:  # noqa: A002
    members: list[tuple[int, int, Trajectory]] = []
    findings: list[tuple[int, int, dict[str, Any]]] = []
    rejected: list[tuple[int, str, str]] = []
    counts: Counter[str] = Counter()
    unchecked: Counter[str] = Counter()
    truncated = 0
    for row, (value, raw) in enumerate(zip(rows.values, rows.raw, strict=True)):
        try:
            recording = read_rollouts(reread(value, raw), format)
        except RowError as error:
            rejected.append((row, error.reason, error.message[:MAX_DETAIL]))
            continue
        members += [(row, number, one) for number, one in enumerate(recording.trajectories)]
    for first in range(0, len(members), BATCH):
        batch = members[first : first + BATCH]
        verdicts = judge.judge([trajectory for _, _, trajectory in batch])
        for (row, number, _), verdict in zip(batch, verdicts, strict=True):
            if isinstance(verdict, RowError):
                rejected.append((row, verdict.reason, verdict.message[:MAX_DETAIL]))
                continue
            if verdict.drift is not None:
                counts[verdict.drift] += 1
            if verdict.unchecked:
                unchecked[verdict.unchecked] += 1
            truncated += verdict.truncated
            findings += [(row, number, note._asdict()) for note in verdict.notes]
    return {
        "rows": len(rows.raw),
        "counts": dict(counts),
        "findings": findings[:MAX_FINDINGS],
        "left_off": max(0, len(findings) - MAX_FINDINGS),
        "trajectories": len(members),
        "truncated": truncated,
        "unchecked": dict(unchecked),
        "rejected": dict(Counter(reason for _, reason, _ in rejected)),
        "rejected_rows": sorted(rejected, key=lambda one: one[0])[:MAX_FINDINGS],
    }
