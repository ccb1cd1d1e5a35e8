"""The account of a run, and the proof that a store keeps of it.

An `Account` adds up what workers report: slices built, engines and renderers used, rows audited
against the reference and how many differed, seconds per stage. A room whose fast engine was seen to
differ is *caught*: whatever that engine made in this run is made anew, so the reports on those
slices no longer count. `proof_document` makes of it what ``proof.json`` says: advisory, part of no
key and no digest, with paths and versions, so that a person can later see how these tokens came to
be.

`COUNTERS` names every counter that a room may report. An undeclared one is refused here, and a
notice that waits for one does not import: a notice cannot wait for what nobody counts.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.optional import installed_version

LIBRARIES = ("tokenmill", "tokenizers", "fastokens", "jinja2", "transformers", "pillow",
             "pyarrow", "msgspec", "numpy")  # fmt: skip

COUNTERS: dict[str, frozenset[str]] = {
    "render": frozenset({
        "audited", "mismatches", "rows_traced", "rows_reference",
        "rows_without_closer", "generation_drops", "trailing_user", "trimmed_trailing",
        "trimmed_tool_turns", "null_as_empty", "arguments_as_text", "prompts_differ",
        "texts_as_parts",
    }),
    "expand": frozenset({"audited", "mismatches", "pictures"}),
    "encode": frozenset({"audited", "mismatches", "engine_failures", "reference_rows"}),
}  # fmt: skip
"""Room → the counters of its reports, apart from those that `UNTRACED` opens."""

UNTRACED = "untraced:"
"""Opens the counters of rows that stayed on the reference renderer, one for each cause."""


@dataclass(frozen=True)
class EngineKind:
    """One of the three places where a fast engine may stand in for a reference.

    Attributes:
        name: What people call it.
        used: The note that names the engine used.
        reference: The engine that is right by definition.
        fast: The one that may stand in for it.
    """

    name: str
    used: str
    reference: str
    fast: str


ROOMS = {
    "render": EngineKind("renderer", "renderer", "jinja2", "traced"),
    "encode": EngineKind("encoder", "engine", "hf", "fastokens"),
    "expand": EngineKind("expansion", "expansion", "processor", "learned"),
}
"""The rooms that report notes, and the engine of each."""


def require_counter(room: str, name: str) -> None:
    """Refuse a counter that is not declared."""
    if name not in COUNTERS[room] and not (room == "render" and name.startswith(UNTRACED)):
        raise AssertionError(f"counter {name!r} of {room!r} is not declared in COUNTERS")


def fast_rooms(result: Mapping[str, Any]) -> frozenset[str]:
    """The rooms whose fast engine had a part in a slice, by a worker's report on it."""
    return frozenset(
        room
        for room, notes in result["notes"].items()
        if notes.get(ROOMS[room].used, ROOMS[room].reference) != ROOMS[room].reference
    )


@dataclass
class _SliceReports:
    """What was reported on slices that the same engines made."""

    slices: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {r: Counter() for r in ROOMS})
    names: dict[str, Counter[str]] = field(default_factory=lambda: {r: Counter() for r in ROOMS})


@dataclass
class Account:
    """What the workers of one run did."""

    slices: int = 0
    slices_derived: int = 0
    slices_redone: int = 0
    slices_replaced: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    audited: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    _tallies: dict[frozenset[str], _SliceReports] = field(default_factory=dict)

    def add(self, result: dict[str, Any], *, again: bool = False) -> None:
        """Add one worker's report on one slice; again: on one that is made anew."""
        self.slices_derived += bool(result.get("derived"))
        if not result["built"]:
            return
        self.slices_redone += again
        self.slices_replaced += bool(result.get("replaced"))
        for stage, seconds in result["seconds"].items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        tally = self._tallies.setdefault(fast_rooms(result), _SliceReports())
        tally.slices += 1
        for room, notes in result["notes"].items():
            for name, value in notes.items():
                if name == ROOMS[room].used:
                    tally.names[room][value] += 1
                elif isinstance(value, int):
                    require_counter(room, name)
                    tally.counts[room][name] += value
            self.audited[room] += notes.get("audited", 0)
            self.mismatches[room] += notes.get("mismatches", 0)

    @property
    def caught(self) -> frozenset[str]:
        """The rooms whose fast engine was seen to differ from the reference."""
        return frozenset(room for room, rows in self.mismatches.items() if rows)

    def _valid(self) -> list[_SliceReports]:
        """Reports on slices that are not to be made anew."""
        return [tally for makers, tally in self._tallies.items() if not makers & self.caught]

    @property
    def slices_built(self) -> int:
        """Slices built, those made anew once."""
        return sum(tally.slices for tally in self._valid())

    def used(self, room: str) -> Counter[str]:
        """How many slices each engine of a room made."""
        return sum((tally.names[room] for tally in self._valid()), Counter[str]())

    def name(self, room: str) -> str | None:
        """The engines of one room, most often used first."""
        return "+".join(name for name, _ in self.used(room).most_common()) or None

    def counts(self, room: str) -> dict[str, int]:
        """The counters of one room."""
        return dict(sum((tally.counts[room] for tally in self._valid()), Counter[str]()))

    def notices(self) -> list[str]:
        """What a person must know of engines that were caught, one sentence each."""
        return [
            f"the fast {ROOMS[room].name} ({ROOMS[room].fast}) differed from the reference in "
            f"{self.mismatches[room]:,} of {self.audited[room]:,} rows compared; it was used no "
            f"more, {self.slices_redone:,} slices were made anew and {self.slices_replaced:,} of "
            "them replaced"
            for room in sorted(self.caught)
        ]


def proof_document(
    paths: list[str], account: Account, media_root: str | None = None
) -> dict[str, Any]:
    """What ``proof.json`` says."""
    counts = {room: account.counts(room) for room in ROOMS}
    return {
        "paths": paths,
        **({} if media_root is None else {"media_root": media_root}),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": account.name("encode"),
        "renderer": account.name("render"),
        "audited_rows": {kind.name: account.audited[room] for room, kind in ROOMS.items()},
        "audit_mismatches": {kind.name: account.mismatches[room] for room, kind in ROOMS.items()},
        "notices": account.notices(),
        "untraced": {
            name.removeprefix(UNTRACED): rows
            for name, rows in sorted(counts["render"].items())
            if name.startswith(UNTRACED)
        },
        "slices": account.slices,
        "slices_built": account.slices_built,
        "slices_redone": account.slices_redone,
        "slices_replaced": account.slices_replaced,
        "stage_seconds": {name: round(spent, 3) for name, spent in account.seconds.items()},
        "notes": counts,
        "used": {f"{room}.{kind.used}": dict(account.used(room)) for room, kind in ROOMS.items()},
        "versions": {"python": platform.python_version(), **installed_versions(LIBRARIES)},
    }


def audit_total(stated: Any) -> int | None:
    """Rows of all engines, from what a proof states; an older one states a single number."""
    if isinstance(stated, Mapping):
        return sum(rows for rows in stated.values() if isinstance(rows, int))
    return stated if isinstance(stated, int) else None


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Versions of those libraries that are installed."""
    found = {name: installed_version(name) for name in libraries}
    return {name: version for name, version in found.items() if version is not None}
