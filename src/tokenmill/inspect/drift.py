"""Check recorded rollouts against template and tokenizer, without writing a store."""

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
from tokenmill.build.identity import identify_tokenizer
from tokenmill.build.progress import open_progress
from tokenmill.build.recipe import Recipe, serialize
from tokenmill.errors import RowError, SourceError, check_one_of
from tokenmill.inspect.lint.run import RowOrigins
from tokenmill.rl.formats import FORMATS, read_rollouts, reread
from tokenmill.rl.trajectory import Trajectory
from tokenmill.rl.verdict import CLASSES, RolloutChecker
from tokenmill.sources.block import BlockRows, read_block
from tokenmill.tokenizers.cache import load_copy

ENTRY = "tokenmill.inspect.drift:open_checker"
MAX_FINDINGS = 10_000
BATCH = 64  # trajectories checked at once
MAX_DETAIL = 300  # characters


class RolloutFinding(dict[str, Any]):
    """One finding, as a dict whose keys are also attributes (``class_`` for class).

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
    """The result of a check. Trajectories without anything to compare are in no class."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))  # by class
    findings: list[RolloutFinding] = field(default_factory=list)  # in row order
    findings_left_off: int = 0  # beyond `MAX_FINDINGS`
    rows: int = 0
    trajectories: int = 0  # without those of rejected rows
    truncated: int = 0  # trajectories that end inside a turn; this is not a finding
    unchecked: Counter[str] = field(default_factory=Counter)  # by the part that was not compared
    warnings: Counter[str] = field(default_factory=Counter)  # trajectories, by warning
    rejected: Counter[str] = field(default_factory=Counter)  # rows or trajectories, by reason
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
    """Compare recorded rollouts with the tokens of their rendered messages.

    Args:
        sources: Files of rollouts, in any of the formats that docs/guides/rollouts.md lists.
        tokenizer: As for `prepare`.
        format: The format of all rows; ``auto`` detects it for each row.
        progress: As for `prepare`.
        given: Of the other arguments of `prepare` those that concern rendering (``chat_template``,
            ``chat_template_kwargs``, ``date``, ``thinking_opener``) and running (``num_workers``,
            ``cache_dir``, ``executor``, ``force_recache``, ``reference``).
    """
    from tokenmill.build.recorded import readable_sources

    start = time.perf_counter()
    check_one_of("format", format, ("auto", *FORMATS))
    # `names` maps converted files to the original ones, for origins.
    readable, names = readable_sources(sources, given.get("cache_dir"))
    recipe, options = resolve_call(readable, tokenizer, given)
    results: dict[int, dict[str, Any]] = {}
    finding_count = 0
    with (
        executor_for(options.executor, options.num_workers) as executor,
        open_progress(progress) as shown,
    ):
        cache = cache_of(options.cache_dir)
        shown.phase("loading the tokenizer")
        card = identify_tokenizer(recipe, cache.root, executor)
        shown.phase("indexing the files")
        rows = open_sources(recipe.sources, cache, reread=options.force_recache)
        if not len(rows):
            raise SourceError("no rows: every source is empty", path=recipe.sources[0])
        places = RowOrigins(rows)
        job = BlockJob(executor, cache.root, card, reference=options.reference)
        size = size_of(starmap(BlockTask, enumerate(rows.blocks())))
        setup = job.setup(ENTRY, size, recipe=serialize(recipe), format=format)
        shown.phase("checking", total_rows=len(rows))

        def take(task: BlockTask, result: dict[str, Any]) -> None:
            nonlocal finding_count
            # By number, so that the findings do not depend on the order in which blocks arrive.
            results[task.number] = result
            finding_count += len(result["findings"])
            if finding_count > 4 * MAX_FINDINGS:
                finding_count = _drop_last(results)
            shown.add(rows=result["rows"])

        job.run(setup, starmap(BlockTask, enumerate(rows.blocks())), take)
    report = RolloutReport(rows=len(rows))

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
        report.unchecked.update(result["unchecked"])
        report.warnings.update(result["warnings"])
        report.rejected.update(result["rejected"])
        report.findings_left_off += result["left_off"]
        for row, trajectory, note in result["findings"]:
            if len(report.findings) >= MAX_FINDINGS:
                report.findings_left_off += 1
                continue
            position = first + row
            where = {"row": position, "trajectory": trajectory, "origin": origin_of(position)}
            report.findings.append(RolloutFinding({"class": note.pop("drift"), **note, **where}))
        for row, reason, detail in result["rejected_rows"]:
            if len(report.rejected_rows) < MAX_FINDINGS:
                report.rejected_rows.append((origin_of(first + row), reason, detail))
    report.seconds = time.perf_counter() - start
    return report


def _drop_last(results: dict[int, dict[str, Any]]) -> int:
    """Drop findings after the first `MAX_FINDINGS`, and return the number of those left."""
    finding_count = 0
    for number in sorted(results):
        findings = results[number]["findings"]
        keep = max(0, MAX_FINDINGS - finding_count)
        results[number]["left_off"] += max(0, len(findings) - keep)
        del findings[keep:]
        finding_count += len(findings)
    return finding_count


def open_checker(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    recipe = Recipe(**options["recipe"])
    tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
    checker = RolloutChecker(tokenizer, recipe.chat_spec(), options["engine"], options["renderer"])

    @without_collector()
    def check(payload: dict[str, Any]) -> dict[str, Any]:
        return check_rows(checker, read_block(block_of(payload)), options["format"])

    return check


def check_rows(checker: RolloutChecker, rows: BlockRows, format: str) -> dict[str, Any]:  # noqa: A002
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
        verdicts = checker.check([trajectory for _, _, trajectory in batch])
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
        "warnings": dict(Counter(one.warning for _, _, one in members if one.warning)),
        "rejected": dict(Counter(reason for _, reason, _ in rejected)),
        "rejected_rows": sorted(rejected, key=lambda one: one[0])[:MAX_FINDINGS],
    }
