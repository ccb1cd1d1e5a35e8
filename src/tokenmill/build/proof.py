"""The account of a run, and the proof that a store keeps of it.

An `Account` adds up what workers report: slices built, engines and renderers used, rows audited
against the reference and how many differed, seconds per stage. `proof_document` makes of it what
``proof.json`` says: advisory, part of no key and no digest, with paths and versions, so that a
person can later see how these tokens came to be.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

LIBRARIES = ("tokenmill", "tokenizers", "fastokens", "jinja2", "transformers",
             "pyarrow", "msgspec", "numpy")  # fmt: skip

ROOMS = ("render", "encode")  # the rooms that report notes


@dataclass
class Account:
    """What the workers of one run did."""

    slices: int = 0
    slices_built: int = 0
    slices_derived: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    names: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, result: dict[str, Any]) -> None:
        """Add one worker's report on one slice."""
        self.slices_derived += bool(result.get("derived"))
        if not result["built"]:
            return
        self.slices_built += 1
        for stage, seconds in result["seconds"].items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        for room, notes in result["notes"].items():
            for name, value in notes.items():
                if isinstance(value, str):
                    self.names.setdefault(f"{room}.{name}", Counter())[value] += 1
                elif isinstance(value, int):
                    self.counts.setdefault(room, Counter())[name] += value

    def name(self, what: str) -> str | None:
        """What slices used, most often first, for example ``encode.engine``."""
        used = self.names.get(what)
        return "+".join(name for name, _ in used.most_common()) if used else None

    def count(self, room: str, name: str) -> int:
        """A counter of one room, for example ``render``, ``audited``."""
        return self.counts.get(room, Counter())[name]


def proof_document(paths: list[str], account: Account) -> dict[str, Any]:
    """What ``proof.json`` says."""
    return {
        "paths": paths,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": account.name("encode.engine"),
        "renderer": account.name("render.renderer"),
        # Texts and ids are audited on samples of their own; the larger is what surely was.
        "audited_rows": max(account.count(room, "audited") for room in ROOMS),
        "audit_mismatches": sum(account.count(room, "mismatches") for room in ROOMS),
        "slices": account.slices,
        "slices_built": account.slices_built,
        "stage_seconds": {name: round(spent, 3) for name, spent in account.seconds.items()},
        "notes": {room: dict(counter) for room, counter in sorted(account.counts.items())},
        "used": {name: dict(counter) for name, counter in sorted(account.names.items())},
        "versions": {"python": platform.python_version(), **installed_versions(LIBRARIES)},
    }


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Versions of those libraries that are installed."""
    versions = {}
    for name in libraries:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
