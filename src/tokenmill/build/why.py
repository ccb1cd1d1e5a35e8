"""Why is it a miss: which field of the recipe, tokenizer or sources differs from a store that is there.

`explain` compares the key document of a plan with those of all stores in the cache and names the
nearest: the one with the fewest differing fields. A *difference* is the dotted name of a field with
both values. Nothing is built.
"""

from __future__ import annotations

from typing import Any

from tokenmill.build.plan import Plan
from tokenmill.errors import TokenmillError
from tokenmill.store import CacheLayout
from tokenmill.store.manifest import read_manifest


def explain(plan: Plan, cache: CacheLayout) -> dict[str, Any]:
    """The object that ``tokenmill why --json`` prints."""
    if cache.store(plan.key).manifest.exists():
        return {"hit": True, "key": plan.key, "nearest": plan.key, "differs": []}
    nearest, differs = None, []
    for path in sorted(cache.stores.glob("*/manifest.json")):
        try:
            manifest = read_manifest(cache.store(path.parent.name))
        except TokenmillError:
            continue
        found = differences(plan.document, manifest["document"])
        if nearest is None or len(found) < len(differs):
            nearest, differs = manifest["key"], found
    return {"hit": False, "key": plan.key, "nearest": nearest, "differs": differs}


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
