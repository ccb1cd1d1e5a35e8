"""``tokenmill push``: copies a store to a place elsewhere.

The target is any URL that fsspec can write (``s3://bucket/store``); it becomes the store's own URL,
for ``open_store`` and ``tokenmill pull``. What is there and equal is passed over, so a push that
was interrupted is run again; the manifest goes last, so nobody sees half a store.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import AsJson, StorePath
from tokenmill.cli.output import Output


@app.command()
def push(
    store: StorePath,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="URL of the directory that becomes the store.")
    ],
    as_json: AsJson = False,
) -> None:
    """Copy a store to S3 or any other place."""
    from tokenmill.api import push as push_store

    output = Output.current()
    done = push_store(store, target)
    new = done.files - done.skipped
    output.say(f"{new:,} of {done.files:,} files sent, {done.rows:,} rows, {done.bytes:,} bytes")
    output.result(done.document(), lambda: typer.echo(done.path))
