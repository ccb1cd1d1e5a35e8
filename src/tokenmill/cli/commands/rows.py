"""``tokenmill rows``: indexes a source, counts its rows, shows one.

Without ``--row`` it prints totals; with it, the row's own bytes and where they stand. Bad rows are
counted by ``--scan``, which reads and parses everything.
"""

from __future__ import annotations

import time
from collections import Counter

import typer

from tokenmill.cli.app import app
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError


@app.command()
def rows(
    sources: list[str] = typer.Argument(..., metavar="SRC"),
    row: int | None = typer.Option(None, help="Show this row."),
    scan: bool = typer.Option(False, help="Parse every row and count the bad ones."),
    cache_dir: str | None = typer.Option(None),
    rehash: bool = typer.Option(False, help="Read the files again even if unchanged."),
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    """Index rows, count them, show one."""
    from tokenmill.api import open_rows

    output = Output.current()
    start = time.perf_counter()
    opened = open_rows(list(sources), cache_dir=cache_dir, rehash=rehash)
    document = {
        "rows": len(opened),
        "bytes": sum(file.bytes for file in opened.files),
        "files": len(opened.files),
    }
    if scan:
        from tokenmill.errors import RowError

        bad: Counter[str] = Counter()
        for _, value in opened.scan():
            if isinstance(value, RowError):
                bad[value.reason] += 1
        document["bad"] = dict(bad)  # type: ignore[assignment]
    document["seconds"] = round(time.perf_counter() - start, 3)  # type: ignore[assignment]
    if row is not None:
        if not -len(opened) <= row < len(opened):
            raise UsageError(f"--row {row}: there are {len(opened):,} rows")
        origin = opened.origin(row)
        document["row"] = opened[row]  # type: ignore[assignment]
        document["origin"] = origin._asdict()  # type: ignore[assignment]

    def show() -> None:
        if row is not None:
            output.say(f"{origin} (row {origin.row}, byte {origin.offset}, {origin.length} bytes)")
            typer.echo(opened.raw(row))
            return
        output.say(
            f"{document['rows']:,} rows in {document['files']:,} files, "
            f"{document['bytes']:,} bytes, {document['seconds']} s"
        )
        if scan:
            for reason, count in document["bad"].items():  # type: ignore[attr-defined]
                output.say(f"  {count:,} {reason}")

    output.result(document, show)
