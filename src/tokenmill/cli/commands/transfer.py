"""``tokenmill push`` and ``tokenmill pull``: copy stores to a URL and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import CACHE, EmbedMedia, Given, OutDirectory, StorePath, command
from tokenmill.cli.output import Output


@command(app)
def push(
    output: Output,
    store: StorePath,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="URL of the directory that becomes the store.")
    ],
    embed_media: EmbedMedia = False,
) -> None:
    """Copy a store to S3 or another place that fsspec can write."""
    from tokenmill.api import push as push_store
    from tokenmill.files import is_remote
    from tokenmill.store import open_store

    opened = open_store(store)
    done = push_store(opened, target, embed_media=embed_media)
    new = done.files - done.skipped
    output.say(f"{new:,} of {done.files:,} files sent, {done.rows:,} rows, {done.bytes:,} bytes")
    staying = [sidecar.name for sidecar in opened.sidecars] if is_remote(target) else []
    if staying:
        output.say(f"not sent: {', '.join(staying)}; attach them again where the store is read")
    output.result(asdict(done))


@command(app, *CACHE)
def pull(
    output: Output,
    given: Given,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="URL that `tokenmill push` printed.")
    ],
    out: OutDirectory = None,
    embed_media: EmbedMedia = False,
) -> None:
    """Bring a store from S3 or another place into the cache."""
    from tokenmill.store import transfer

    done = transfer.pull(source, out=out, embed_media=embed_media, **given)
    output.say(f"{done.rows:,} rows, {done.bytes:,} bytes, every block checked")
    output.result(asdict(done))
