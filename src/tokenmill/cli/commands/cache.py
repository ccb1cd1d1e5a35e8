"""``tokenmill cache list`` and ``tokenmill cache gc``: what is there, what nobody needs.

``gc`` marks at the first call and removes at a later one, after the grace period; it is the only
command that removes anything.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import typer

from tokenmill.cli.app import app, require_command
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError

cache_app = typer.Typer(help="What the cache holds, and what nobody needs.")
app.add_typer(cache_app, name="cache")
cache_app.callback(invoke_without_command=True)(require_command)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@cache_app.command("list")
def list_cache(
    cache_dir: str | None = typer.Option(None),
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    """List the stores of the cache and the bytes of its parts."""
    from tokenmill.files import default_cache_dir
    from tokenmill.store.collect import survey

    root = Path(cache_dir or default_cache_dir())
    output = Output.current()
    found = survey(root)

    def show() -> None:
        for entry in found["entries"]:
            made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.get("made", 0)))
            rows = entry.get("rows", entry.get("error"))
            typer.echo(f"{entry['key'][:12]}  {made}  {rows:>12,} rows  {entry['path']}")
        parts = ", ".join(f"{name} {size:,}" for name, size in found["parts"].items() if size)
        output.say(f"{root}: {found['bytes']:,} bytes ({parts})")

    output.result(found, show)


@cache_app.command("gc")
def gc(
    cache_dir: str | None = typer.Option(None),
    grace: str = typer.Option("24h", help="Time between marking and removing: 30m, 24h, 7d."),
    older_than: str | None = typer.Option(None, help="Also give up stores made longer ago."),
    store: list[str] = typer.Option([], help="Also give up this store (its key); repeatable."),
    dry_run: bool = typer.Option(False, help="Only say what would be done."),
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    """Mark what nobody needs; remove what was marked before the grace period."""
    from tokenmill.files import default_cache_dir
    from tokenmill.store.collect import collect

    root = Path(cache_dir or default_cache_dir())
    output = Output.current()
    done = collect(
        root,
        grace_s=_seconds(grace, "--grace"),
        older_than_s=None if older_than is None else _seconds(older_than, "--older-than"),
        stores=store,
        dry_run=dry_run,
    )
    document = {"entries": done.removed, "bytes": done.freed_bytes, "marked": done.marked}

    def show() -> None:
        would = "would be " if dry_run else ""
        output.say(f"{len(done.removed):,} {would}removed, {done.freed_bytes:,} bytes")
        output.say(f"{len(done.marked):,} {would}marked; a gc after {grace} removes them")

    output.result(document, show)


def _seconds(text: str, flag: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise UsageError(f"{flag} is {text!r}; write it as 90s, 30m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2]]
