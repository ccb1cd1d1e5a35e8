"""``tokenmill pack``: the loader's packing plan for one epoch, and how full its packs are.

Packs what `tokenmill.Loader` would pack, window by window in its order, and counts. Only stored
lengths are read, so any length and method can be tried in a moment; nothing is written.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import (
    Order,
    PackMethod,
    PackOversize,
    PackWindow,
    Seed,
    StorePath,
    command,
)
from tokenmill.cli.output import Output


@command(app)
def pack(
    output: Output,
    store: StorePath,
    length: Annotated[int, typer.Option(help="Tokens per pack.")],
    method: PackMethod = "best_fit",
    window: PackWindow = 65536,
    oversize: PackOversize = "error",
    order: Annotated[Order, typer.Option(help="Order of the rows.")] = "feistel",
    seed: Seed = 42,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch that is packed.")] = 0,
    world_size: Annotated[
        int, typer.Option(help="Ranks; only --method balanced depends on them.")
    ] = 1,
) -> None:
    """Plan the packs of an epoch and say how full they are."""
    from tokenmill.loader.stream import packing_plan
    from tokenmill.packing import Pack
    from tokenmill.store import open_store

    packing = Pack(length, method, window, oversize)
    start = time.perf_counter()
    opened = open_store(store)
    packs, tokens = packing_plan(
        opened, packing, order=order, seed=seed, epoch=epoch, world_size=world_size
    )
    stored = opened.manifest["totals"]["tokens"]
    document = {
        "packs": packs,
        "fill": round(tokens / (packs * length), 6) if packs else 0.0,
        "seconds": round(time.perf_counter() - start, 3),
        "rows": len(opened),
        "tokens": tokens,
        "tokens_left_out": stored - tokens,
    }

    def show() -> None:
        left = f", {stored - tokens:,} tokens left out" if stored != tokens else ""
        output.say(
            f"{packs:,} packs of {length:,} tokens from {len(opened):,} rows, "
            f"{document['fill']:.2%} full{left}; {document['seconds']} s"
        )

    output.result(document, show)
