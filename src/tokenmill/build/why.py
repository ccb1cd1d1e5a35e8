"""Why is it a miss: which field of recipe, tokenizer or sources differs from the nearest store.

`explain` compares the key document of a plan with those of all stores in the cache and names the
nearest: the one with the fewest differing fields. A *difference* is the dotted name of a field with
both values. Nothing is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.build.plan import Plan
from tokenmill.errors import TokenmillError
from tokenmill.store import CacheLayout
from tokenmill.store.manifest import read_manifest


def explain(plan: Plan, cache: CacheLayout) -> dict[str, Any]:
    """The object that ``tokenmill why --json`` prints."""
    there = sum(1 for key, _ in plan.walk() if cache.slice(key).record.exists())
    nearest, differs = _nearest(plan, cache)
    return {
        "hit": nearest == plan.key,
        "key": plan.key,
        "nearest": nearest,
        "nearest_path": None if nearest is None else str(cache.store(nearest).directory),
        "differs": differs,
        "slices": plan.slices,
        "slices_there": there,
    }


def _nearest(plan: Plan, cache: CacheLayout) -> tuple[str | None, list[dict[str, Any]]]:
    """Key of the store with the fewest differing fields, and these; the newest of equals."""
    if cache.store(plan.key).manifest.exists():
        return plan.key, []
    nearest, differs = None, []
    manifests = sorted(cache.stores.glob("*/manifest.json"), key=_made, reverse=True)
    for path in manifests:
        try:
            manifest = read_manifest(cache.store(path.parent.name))
        except TokenmillError:
            continue
        found = differences(plan.document, manifest["document"])
        if nearest is None or len(found) < len(differs):
            nearest, differs = manifest["key"], found
    return nearest, differs


def _made(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # collected a moment ago


def differences(ours: Any, theirs: Any, name: str = "") -> list[dict[str, Any]]:
    """Every leaf in which two documents differ, by dotted name."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for member in sorted({*ours, *theirs}):
            dotted = f"{name}.{member}" if name else member
            found += differences(ours.get(member), theirs.get(member), dotted)
        return found
    if isinstance(ours, list) and isinstance(theirs, list) and name == "sources":
        if len(ours) != len(theirs):
            return [{"field": "sources", "ours": len(ours), "theirs": len(theirs)}]
        found = []
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            found += differences(one, other, f"sources[{number}]")
        return found
    if ours == theirs:
        return []
    return [{"field": name, "ours": ours, "theirs": theirs}]
