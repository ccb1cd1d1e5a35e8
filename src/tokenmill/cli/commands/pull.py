"""``tokenmill pull``: brings a store from elsewhere into the local cache.

Slices that are in the cache already are not fetched again, so an interrupted pull is simply run
again; every block is checked before it is published. ``--out`` also makes a self-contained copy,
which is then what is printed.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import AsJson, CacheDir
from tokenmill.cli.output import Output


@app.command()
def pull(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="URL that `tokenmill push` printed.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Also make a self-contained copy here.")
    ] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring a store from S3 or any other place into the cache."""
    from tokenmill.api import pull_store

    output = Output.current()
    done = pull_store(source, out=out, cache_dir=cache_dir)
    output.say(f"{done.rows:,} rows, {done.bytes:,} bytes, every block checked")
    output.result(done.document(), lambda: typer.echo(done.path))
