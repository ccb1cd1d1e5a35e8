"""``tokenmill why``: hit or miss, and which field differs from the nearest store.

Takes the flags of ``prepare`` that say what is to be made, computes the store's key and compares
its document with those of all stores in the cache. Builds nothing and exits 0 either way; scripts
look at ``hit``.
"""

from __future__ import annotations

import json
from typing import Any

from tokenmill.cli.app import app
from tokenmill.cli.options import MEDIA, RECIPE, WHERE, Given, command, recipe_arguments
from tokenmill.cli.output import Output, one_line

SHOWN_CHARS = 60  # of a value; the whole one is in --json


@command(app, *RECIPE, *WHERE, *MEDIA)
def why(output: Output, given: Given) -> None:
    """Say whether `prepare` would find its store, and if not, why."""
    from tokenmill.api import explain_recipe

    found = explain_recipe(**recipe_arguments(given))
    output.result(found, lambda: show(output, found))


def show(output: Output, found: dict[str, Any]) -> None:
    """The verdict, then one line per differing field."""
    there, slices = found["slices_there"], found["slices"]
    if found["hit"]:
        output.say(f"hit: {found['nearest_path']}")
        return
    output.say(
        f"miss: {there:,} of {slices:,} slices are in the cache, but no store {found['key'][:12]}"
    )
    if found["nearest"] is None:
        output.say("the cache holds no store to compare with")
        return
    differs = found["differs"]
    output.say(f"nearest: {found['nearest_path']}")
    width = max(len(difference["field"]) for difference in differs)
    for difference in differs:
        ours, theirs = _short(difference["ours"]), _short(difference["theirs"])
        output.say(f"  {difference['field']:<{width}}  {ours}, in the nearest {theirs}")


def _short(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False), SHOWN_CHARS)
