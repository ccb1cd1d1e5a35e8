"""What a build reports: counts of the run, the store's ``proof.json``, the caller's summary."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill._core.optional import installed_version
from tokenmill._core.origin import Origin, nothing_left
from tokenmill.build.plan import Share
from tokenmill.build.recipe import RunOptions
from tokenmill.errors import RowError, SourceError
from tokenmill.store import Store
from tokenmill.store.manifest import units_out

LIBRARIES = ("tokenmill", "tokenizers", "fastokens", "jinja2", "transformers", "pillow",
             "pyarrow", "msgspec", "numpy")  # fmt: skip

UNTRACED = "untraced:"  # begins counters of rows that stayed on the reference, by cause


class Stage(NamedTuple):
    """A stage of the pipeline in which a fast engine may replace a reference."""

    name: str  # in messages
    used: str  # the note that names the engine
    reference: str
    fast: str


STAGES = {
    "render": Stage("renderer", "renderer", "jinja2", "traced"),
    "encode": Stage("encoder", "engine", "hf", "fastokens"),
    "expand": Stage("expansion", "expansion", "processor", "learned"),
}


def _per_stage() -> dict[str, Counter[str]]:
    return {stage: Counter() for stage in STAGES}


@dataclass
class Account:
    """What the workers did: audits and mismatches in all, the rest since the last `restart`."""

    slices: int = 0
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
        for stage, notes in result["notes"].items():
            for name, value in notes.items():
                if name == STAGES[stage].used:
                    self.used[stage][value] += 1
                elif isinstance(value, int):
                    self.counts[stage][name] += value
            self.audited[stage] += notes.get("audited", 0)
            self.mismatches[stage] += notes.get("mismatches", 0)

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


def proof_document(
    paths: list[str], account: Account, media_root: str | None = None
) -> dict[str, Any]:
    """Return the content of ``proof.json``, which is part of no key and no digest."""
    stages = STAGES.items()
    return {
        "paths": paths,
        **({} if media_root is None else {"media_root": media_root}),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": account.name("encode"),
        "renderer": account.name("render"),
        "audited_rows": {kind.name: account.audited[stage] for stage, kind in stages},
        "audit_mismatches": {kind.name: account.mismatches[stage] for stage, kind in stages},
        "notices": account.notices(),
        "untraced": {
            name.removeprefix(UNTRACED): rows
            for name, rows in sorted(account.counts["render"].items())
            if name.startswith(UNTRACED)
        },
        "slices": account.slices,
        "slices_built": account.slices_built,
        "slices_replaced": account.slices_replaced,
        "stage_seconds": {name: round(spent, 3) for name, spent in account.seconds.items()},
        "notes": {stage: dict(counts) for stage, counts in account.counts.items()},
        "used": {f"{stage}.{kind.used}": dict(account.used[stage]) for stage, kind in stages},
        "versions": {"python": platform.python_version(), **installed_versions(LIBRARIES)},
    }


def audit_total(stated: Any) -> int | None:
    if isinstance(stated, Mapping):
        return sum(rows for rows in stated.values() if isinstance(rows, int))
    return None


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    found = {name: installed_version(name) for name in libraries}
    return {name: version for name, version in found.items() if version is not None}


@dataclass
class Prepared:
    store: Store
    hit: bool  # it was there already
    account: Account
    seconds: float
    options: RunOptions

    @property
    def path(self) -> Path:
        return self.store.path

    def copied_to(self, target: Path, *, embed_media: bool = False) -> Prepared:
        """Return this with a self-contained copy of the store in place of the cache's."""
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
            "source_rows": totals["source_rows"],
            "rows_in": totals["rows_in"],
            "rows_out": units_out(totals),
            "rejected": totals["rejected"],
            "tokens": totals["tokens"],
            "trained_tokens": totals["trained_tokens"],
            "slices": totals["slices"],
            "slices_built": self.account.slices_built,
            "slices_derived": self.account.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": proof.get("engine"),
            "renderer": proof.get("renderer"),
            "audited_rows": audit_total(proof.get("audited_rows")),
            "audit_mismatches": audit_total(proof.get("audit_mismatches")),
        }

    def judge(self) -> None:
        """Apply the options about rejected rows, to hits and builds alike.

        Raises:
            RowError: The first rejected row, with ``on_bad_row="raise"``.
            SourceError: No row is left, or more were rejected than ``max_rejected`` allows.
        """
        totals, limit = self.store.manifest["totals"], self.options.max_rejected
        count, source = totals["rows_in"] - units_out(totals), self.store.sources[0]
        reasons = ", ".join(f"{number:,} {why}" for why, number in totals["rejected"].items())
        if count and self.options.on_bad_row == "raise":
            origin, reason, detail = next(iter(self.store.rejected_rows()))
            raise RowError(
                f"{detail} ({reason}; {count:,} rows in all)",
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
                f"{count:,} of {totals['rows_in']:,} rows rejected ({reasons}), more than "
                f"max_rejected={f'{limit:.4g}' if share else limit} allows",
                path=source,
            )

    def examples(self, most: int) -> dict[str, list[tuple[Origin, str]]]:
        """Return the first rejected rows of each reason, with its detail."""
        found: dict[str, list[tuple[Origin, str]]] = {why: [] for why in self.store.rejected}
        missing = sum(min(most, number) for number in self.store.rejected.values())
        for origin, why, detail in self.store.rejected_rows():
            if not missing:
                break
            if len(found[why]) < most:
                found[why].append((origin, detail))
                missing -= 1
        return found

    def remarks(self) -> Iterator[str]:
        proof = self.store.proof
        if self.hit:  # whoever builds is told by the build itself
            yield from proof.get("notices", ())
        rendered = proof.get("notes", {}).get("render", {})
        for counter, text in REMARKS.items():
            if rendered.get(counter):
                yield f"{rendered[counter]:,} {text}"


@dataclass(frozen=True)
class Unfinished:
    """A share that is done while others are not."""

    share: Share
    key: str  # of the store to be
    source_rows: int  # of all sources
    missing: int  # slices that nobody has published
    account: Account
    seconds: float

    def summary(self) -> dict[str, Any]:
        return {
            "path": None,
            "key": self.key,
            "hit": False,
            "source_rows": self.source_rows,
            "slices": self.account.slices,
            "slices_built": self.account.slices_built,
            "slices_derived": self.account.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": self.account.name("encode"),
            "renderer": self.account.name("render"),
        }


REMARKS = {  # counter of the render stage: what it says to a person
    "trimmed_trailing": "conversations ended with a user turn, which was cut (trailing='trim')",
    "trimmed_tool_turns": "conversations lost tool results after their last assistant turn",
    "null_as_empty": "conversations have null contents on which the template fails; they were"
    " rendered as empty text",
    "arguments_as_text": "conversations have calls whose arguments the template takes as JSON text"
    " and not as objects",
    "prompts_differ": "groups whose prompt the template writes differently for different answers;"
    " their prompt_tokens is None",
    "generation_clipped": "rows whose template has the turn header in a generation block; the"
    " generation prompt gives the header, so it is not trained",
    "rows_without_closer": "rows whose template closes no turn: nothing tells the model to stop",
}
