"""Reports of a build: statistics, the store's ``proof.json``, and the summary for the caller."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tokenmill._core.optional import installed_version
from tokenmill._core.origin import nothing_left
from tokenmill._core.publish import Staging, writing_errors
from tokenmill.build.plan import Partition
from tokenmill.build.recipe import RunOptions
from tokenmill.chat.agent_traces import NOTES
from tokenmill.errors import RowError, SourceError
from tokenmill.store import CacheLayout, Store
from tokenmill.store.manifest import units_out
from tokenmill.store.prefetch import prefetch_map
from tokenmill.store.record import UNREADABLE

LIBRARIES = ("tokenmill", "tokenizers", "fastokens", "jinja2", "transformers", "pillow",
             "pyarrow", "msgspec", "numpy")  # fmt: skip

UNTRACED = "untraced:"  # prefix of counters of rows that only the reference rendered, by cause


class Stage(NamedTuple):
    """A stage of the pipeline in which a fast engine may replace a reference."""

    name: str  # in messages
    used: str  # key of the engine's name in the notes
    reference: str
    fast: str


STAGES = {
    "render": Stage("renderer", "renderer", "jinja2", "traced"),
    "encode": Stage("encoder", "engine", "hf", "fastokens"),
    "expand": Stage("expansion", "expansion", "processor", "computed"),
}


Notes = dict[str, dict[str, Any]]  # of a slice: counters and engines by stage
_notes: msgspec.json.Decoder[Notes] = msgspec.json.Decoder(
    dict[Literal[tuple(STAGES)], dict[str, int | str]]  # type: ignore[misc]
)


def _per_stage() -> dict[str, Counter[str]]:
    return {stage: Counter() for stage in STAGES}


@dataclass
class BuildStats:
    """Statistics of the workers; all but audits and mismatches count from the last `restart`."""

    slices: int = 0
    slices_with_notes: int = 0
    slices_built: int = 0
    slices_derived: int = 0  # limited copies of slices that were published before
    slices_replaced: int = 0
    restarted: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    audited: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    used: dict[str, Counter[str]] = field(default_factory=_per_stage)  # slices by engine
    counts: dict[str, Counter[str]] = field(default_factory=_per_stage)

    def add(self, result: dict[str, Any]) -> None:
        if not result["built"]:
            return
        self.slices_built += 1
        self.slices_replaced += result["replaced"]
        for stage, seconds in result["seconds"].items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.add_notes(result["notes"])

    def add_notes(self, notes_of: Notes) -> None:
        for stage, notes in notes_of.items():
            for name, value in notes.items():
                if name == STAGES[stage].used:
                    self.used[stage][value] += 1
                elif isinstance(value, int):
                    self.counts[stage][name] += value
        self.audited.update({stage: notes.get("audited", 0) for stage, notes in notes_of.items()})
        self.mismatches.update(
            {stage: notes.get("mismatches", 0) for stage, notes in notes_of.items()}
        )

    @property
    def mismatched(self) -> list[str]:
        return sorted(stage for stage, rows in self.mismatches.items() if rows)

    def restart(self) -> None:
        self.restarted, self.slices_built, self.slices_derived = True, 0, 0
        self.seconds, self.used, self.counts = {}, _per_stage(), _per_stage()

    def name(self, stage: str) -> str | None:
        """Return the engines of a stage, most often used first."""
        return "+".join(name for name, _ in self.used[stage].most_common()) or None

    def notices(self) -> list[str]:
        """Return one sentence for each fast engine that differed from its reference."""
        return [
            f"the fast {STAGES[stage].name} ({STAGES[stage].fast}) differed from the reference in "
            f"{self.mismatches[stage]:,} of {self.audited[stage]:,} rows compared; all "
            f"{self.slices_built:,} slices were built again by the references and "
            f"{self.slices_replaced:,} of them replaced"
            for stage in self.mismatched
        ]


def write_notes(cache: CacheLayout, key: str, notes: Notes) -> None:
    """Write the notes of a slice; they replace those of an earlier build."""
    target = cache.notes(key)
    with Staging(cache.root) as staging, writing_errors(target):
        staged = staging.path / "notes"
        staged.write_bytes(msgspec.json.encode(notes))  # not synced: lost notes are not an error
        target.unlink(missing_ok=True)
        staging.publish(staged, target, durable=False)


def store_stats(cache: CacheLayout, keys: Iterable[str]) -> BuildStats:
    """Add up the notes of a store's slices, also of those that earlier runs built."""

    def read(key: str) -> Notes | None:
        try:
            return _notes.decode(cache.notes(key).read_bytes())
        except (OSError, *UNREADABLE):
            return None

    stats = BuildStats()
    for notes in prefetch_map(read, keys):
        stats.slices += 1
        if notes is not None:
            stats.slices_with_notes += 1
            stats.add_notes(notes)
    return stats


def proof_document(
    paths: list[str], run: BuildStats, whole: BuildStats, media_root: str | None = None
) -> dict[str, Any]:
    """Return the content of ``proof.json``, which is part of no key and no digest.

    ``run`` counts the slices of this run, ``whole`` those of the store.
    """
    stages = STAGES.items()
    # A slice with a mismatch is not published, so only this run has counted its rows.
    audited = run.audited if run.restarted else whole.audited
    return {
        "paths": paths,
        **({} if media_root is None else {"media_root": media_root}),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": whole.name("encode"),
        "renderer": whole.name("render"),
        "audited_rows": {kind.name: audited[stage] for stage, kind in stages},
        "audit_mismatches": {kind.name: run.mismatches[stage] for stage, kind in stages},
        "notices": run.notices(),
        "untraced": {
            name.removeprefix(UNTRACED): rows
            for name, rows in sorted(whole.counts["render"].items())
            if name.startswith(UNTRACED)
        },
        "slices": whole.slices,
        "slices_with_notes": whole.slices_with_notes,
        "slices_built": run.slices_built,
        "slices_replaced": run.slices_replaced,
        "stage_seconds": {name: round(spent, 3) for name, spent in run.seconds.items()},
        "notes": {stage: dict(counts) for stage, counts in whole.counts.items()},
        "used": {f"{stage}.{kind.used}": dict(whole.used[stage]) for stage, kind in stages},
        "versions": {"python": platform.python_version(), **installed_versions(LIBRARIES)},
    }


def audit_total(counts: Any) -> int | None:
    if isinstance(counts, Mapping):
        return sum(rows for rows in counts.values() if isinstance(rows, int))
    return None


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    versions = {name: installed_version(name) for name in libraries}
    return {name: version for name, version in versions.items() if version is not None}


TOTALS = ("source_rows", "rows_in", "rejected", "tokens", "trained_tokens", "slices")


@dataclass
class Prepared:
    store: Store
    hit: bool  # the store existed already
    build_stats: BuildStats
    seconds: float
    options: RunOptions

    @property
    def path(self) -> Path:
        return self.store.path

    def copied_to(self, target: Path, *, embed_media: bool = False) -> Prepared:
        """Copy the store to a self-contained directory, and return this with the copy."""
        from tokenmill.store.transfer import copy_store

        paths = [str(path) for path in self.store.sources]
        copied = copy_store(self.store, target, embed_media=embed_media)
        return replace(self, store=Store(copied, paths=paths))

    def summary(self) -> dict[str, Any]:
        """Return the object that ``tokenmill prepare --json`` prints."""
        totals, proof = self.store.manifest["totals"], self.store.proof
        return {
            "path": str(self.path),
            "key": self.store.key,
            "hit": self.hit,
            "rows_out": units_out(totals),
            **{name: totals[name] for name in TOTALS},
            "slices_built": self.build_stats.slices_built,
            "slices_derived": self.build_stats.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": proof.get("engine"),
            "renderer": proof.get("renderer"),
            "audited_rows": audit_total(proof.get("audited_rows")),
            "audit_mismatches": audit_total(proof.get("audit_mismatches")),
        }

    def raise_for_rejections(self) -> None:
        """Apply `max_rejected`, for cache hits as well.

        Raises:
            RowError: The first rejected row, with ``max_rejected=0``.
            SourceError: No row is left, or more were rejected than ``max_rejected`` allows.
        """
        totals, limit = self.store.manifest["totals"], self.options.max_rejected
        count, source = totals["rows_in"] - units_out(totals), self.store.sources[0]
        reasons = ", ".join(f"{number:,} {why}" for why, number in totals["rejected"].items())
        if count and limit == 0:
            origin, reason, detail = next(iter(self.store.rejected_rows()))
            raise RowError(
                f"{detail} ({reason}; {count:,} rows rejected in total)",
                reason=reason,
                **origin.location,
            )
        if not totals["rows"]:
            raise nothing_left("row", totals["rejected"], self.store.rejected_rows(), source)
        if limit is None:
            return
        share = isinstance(limit, float)
        if count > (limit * totals["rows_in"] if share else limit):
            raise SourceError(
                f"{count:,} of {totals['rows_in']:,} rows were rejected ({reasons}), more than ",
                ("max_rejected", float(f"{limit:.4g}") if share else limit),
                path=source,
            )

    def remarks(self) -> Iterator[str]:
        proof = self.store.proof
        if self.hit:  # a build has logged its notices
            yield from proof.get("notices", ())
        rendered = proof.get("notes", {}).get("render", {})
        for counter, text in REMARKS.items():
            if rendered.get(counter):
                yield f"{rendered[counter]:,} {text}"


@dataclass(frozen=True)
class Unfinished:
    """A part that is finished while slices of others are missing."""

    partition: Partition
    key: str  # of the future store
    source_rows: int  # of all sources
    missing: int  # slices that are not published
    build_stats: BuildStats
    seconds: float

    def summary(self) -> dict[str, Any]:
        return {
            "path": None,
            "key": self.key,
            "hit": False,
            "source_rows": self.source_rows,
            "slices": self.build_stats.slices,
            "slices_built": self.build_stats.slices_built,
            "slices_derived": self.build_stats.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": self.build_stats.name("encode"),
            "renderer": self.build_stats.name("render"),
        }


REMARKS = {  # by counter of the render stage
    "misspelt_roles": "conversations have a role that is nearly system, user, assistant or tool;"
    " `tokenmill lint` names it",
    "plain_strings": "rows are plain strings: the chat template is not applied; pass --as-chat"
    " to make them user and assistant messages",
    "trimmed_trailing": "conversations ended with a user turn, which was removed",
    "trimmed_tool_turns": "conversations lost tool results after their last assistant turn",
    "null_as_empty": "conversations have null content that the template cannot render; it was"
    " rendered as empty text",
    "arguments_as_text": "conversations have tool-call arguments that the template expects as"
    " JSON text instead of objects",
    "prompts_differ": "groups have a prompt that the template renders differently for each answer;"
    " their prompt_tokens is None",
    "generation_clipped": "rows have a template with the turn header in a generation block; the"
    " header is in the generation prompt, so it is not trained",
    **NOTES,
    "rows_without_closer": "rows have a template without an end-of-turn token, so the model does"
    " not learn to stop",
}
