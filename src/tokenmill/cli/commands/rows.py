"""``tokenmill rows``: indexes a source, counts its rows, shows one.

Without ``--row`` it prints totals; with it, the row's own bytes (on a terminal without what could
steer it) and where they stand, also of a row that is no JSON (exit code 1 then says so). ``--scan``
reads and parses everything and counts the bad rows.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import CACHE, RUN_OPTIONS, Given, Sources, command
from tokenmill.cli.output import Output
from tokenmill.errors import RowError, UsageError
from tokenmill.report.terminal_text import harmless

if TYPE_CHECKING:
    from tokenmill.source import Rows


@command(app, *CACHE, RUN_OPTIONS["rehash"])
def rows(
    output: Output,
    given: Given,
    sources: Sources,
    row: Annotated[
        int | None, typer.Option(help="Show this row; negative counts from the end.")
    ] = None,
    scan: Annotated[bool, typer.Option(help="Parse every row and count the bad ones.")] = False,
) -> None:
    """Index rows, count them, show one."""
    from tokenmill.api import open_rows

    start = time.perf_counter()
    opened = open_rows(sources, **given)
    document: dict[str, Any] = {
        "rows": len(opened),
        "bytes": sum(file.bytes for file in opened.files),
        "files": len(opened.files),
    }
    if scan:
        parsed = (value for _, value in opened.scan())
        document["bad"] = Counter(bad.reason for bad in parsed if isinstance(bad, RowError))
    document["seconds"] = round(time.perf_counter() - start, 3)
    output.known.update(document)
    if row is None:
        output.result(document, lambda: show_totals(output, document))
    else:
        show_row(output, opened, row)


def show_totals(output: Output, document: dict[str, Any]) -> None:
    """How much there is, and how much of it is bad."""
    output.say(
        f"{document['rows']:,} rows in {document['files']:,} files, "
        f"{document['bytes']:,} bytes, {document['seconds']} s"
    )
    for reason, count in document.get("bad", {}).items():
        output.say(f"  {count:,} {reason}")


def show_row(output: Output, opened: Rows, row: int) -> None:
    """The row's own bytes on stdout, where they stand on stderr."""
    if not -len(opened) <= row < len(opened):
        raise UsageError(f"--row {row}: there are {len(opened):,} rows")
    origin = opened.origin(row)
    if not output.as_json:
        byte = "" if origin.offset is None else f"byte {origin.offset:,}, "
        output.say(f"{origin} (row {origin.row:,}, {byte}{origin.length:,} bytes)")
        raw = opened.raw(row)
        if sys.stdout.isatty():  # a program gets the bytes, a terminal what cannot steer it
            typer.echo(harmless(raw.decode("utf-8", "backslashreplace")))
        else:
            typer.echo(raw)
    output.known["origin"] = origin._asdict()
    value = opened[row]  # a bad row is refused here
    output.result({**output.known, "row": value}, lambda: None)
