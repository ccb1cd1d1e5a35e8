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
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

LIBRARIES = ("tokenmill", "tokenizers", "fastokens", "jinja2", "minijinja", "transformers",
             "pyarrow", "msgspec", "numpy")  # fmt: skip


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
        """What most slices used, for example ``encode.engine``."""
        used = self.names.get(what)
        return used.most_common(1)[0][0] if used else None

    def count(self, name: str) -> int:
        """A counter over all rooms, for example ``audited``."""
        return int(sum(counter[name] for counter in self.counts.values()))


def proof_document(paths: list[str], account: Account) -> dict[str, Any]:
    """What ``proof.json`` says."""
    return {
        "paths": paths,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": account.name("encode.engine"),
        "renderer": account.name("render.renderer"),
        "audited_rows": account.count("audited"),
        "audit_mismatches": account.count("mismatches"),
        "slices": account.slices,
        "slices_built": account.slices_built,
        "notes": {room: dict(counter) for room, counter in sorted(account.counts.items())},
        "used": {name: dict(counter) for name, counter in sorted(account.names.items())},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
