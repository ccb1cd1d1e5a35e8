"""``tokenmill cache list`` and ``tokenmill cache gc``."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.app import app, require_command
from tokenmill.cli.options import CACHE, Given, command
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError
from tokenmill.report.terminal_text import harmless

cache_app = typer.Typer(help="List the cache; remove what no store needs.")
app.add_typer(cache_app, name="cache")
cache_app.callback(invoke_without_command=True)(require_command)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@command(cache_app, *CACHE, name="list")
def list_cache(output: Output, given: Given) -> None:
    """List the stores in the cache and the space that its parts take."""
    from tokenmill.store.collect import survey

    root = _root(given)
    found = survey(root)
    output.result(found, lambda: show_cache(output, root, found))


def show_cache(output: Output, root: Path, found: dict[str, Any]) -> None:
    """One line per store, oldest first, then the size of each part."""
    for entry in found["entries"]:
        if "error" in entry:
            # It may quote what stands in the damaged file.
            typer.echo(f"{entry['key'][:12]}  DAMAGED  {harmless(entry['error'])}")
            continue
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["made"]))
        counts = f"{entry['rows']:>12,} rows  {entry['tokens']:>15,} tokens"
        typer.echo(f"{entry['key'][:12]}  {made}  {counts}  {entry['path']}")
        for one in entry["sidecars"]:
            told = f"{one['name']} per {one['per']}, made by {one['made_by']}"
            typer.echo(f"              + {harmless(told)}  {one['bytes']:,} bytes")
    parts = ", ".join(f"{name} {size:,}" for name, size in found["parts"].items() if size)
    output.say(f"{root}: {found['bytes']:,} bytes{f' ({parts})' if parts else ''}")


@command(cache_app, *CACHE)
def gc(
    output: Output,
    given: Given,
    grace: Annotated[
        str, typer.Option(help="Time between marking and removing: 30m, 24h, 7d.")
    ] = "24h",
    older_than: Annotated[
        str | None, typer.Option(help="Also remove stores made longer ago: 30d.")
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Also remove this store. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Only report what would be done.")] = False,
) -> None:
    """Mark files that no store needs; remove those marked longer ago than the grace period."""
    from tokenmill.store.collect import collect

    done = collect(
        _root(given),
        grace_s=_seconds(grace, "--grace"),
        older_than_s=None if older_than is None else _seconds(older_than, "--older-than"),
        stores=store or (),
        dry_run=dry_run,
    )
    document = {"entries": done.removed, "bytes": done.freed_bytes, "marked": done.marked}

    def show() -> None:
        would = "would be " if dry_run else ""
        output.say(f"{len(done.removed):,} {would}removed, {done.freed_bytes:,} bytes")
        output.say(
            f"{len(done.marked):,} {would}marked; running gc again after {grace} removes them"
        )

    output.result(document, show)


def _root(given: Given) -> Path:
    from tokenmill.files import default_cache_dir

    return Path(given.get("cache_dir") or default_cache_dir())


def _seconds(text: str, flag: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise UsageError(f"{flag} is {text!r}; write it as 90s, 30m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2]]
