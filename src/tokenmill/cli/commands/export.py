"""``tokenmill export``: a store's rows in another library's format.

Rows and groups are written as they stand, packs as `tokenmill.Loader` would pack the epoch. The
files appear all at once under ``--out``; what is there already is left alone: the same export is
found, anything else refused. Without ``--out`` the name is made from the store's key, in the
current directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import (
    EmbedMedia,
    Order,
    PackMethod,
    PackOversize,
    PackWindow,
    Seed,
    StorePath,
    command,
)
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from tokenmill.store import Store


@command(app)
def export(
    output: Output,
    store: StorePath,
    format: Annotated[  # noqa: A002 - a name of the contract
        Literal[
            "parquet",
            "arrow",
            "jsonl",
            "hf",
            "axolotl",
            "llama-factory",
            "megatron",
            "packed-parquet",
        ],
        typer.Option(help="Format of the files."),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="One file when it ends in .parquet, .arrow or .jsonl, else a directory.",
        ),
    ] = None,
    mask: Annotated[
        Literal["loss_mask", "labels"],
        typer.Option(help="How trained tokens are marked; for parquet, arrow, jsonl."),
    ] = "loss_mask",
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="For hf: origin, length, lengths, of groups margin, or a carried one. Repeatable.",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHARE", help="For hf: a split and its share of the rows. Repeatable."
        ),
    ] = None,
    split_seed: Annotated[int, typer.Option(help="Seed of the splits, as for tm.split.")] = 0,
    length: Annotated[int | None, typer.Option(help="Tokens per pack; for packed-parquet.")] = None,
    method: PackMethod = "best_fit",
    window: PackWindow = 65536,
    oversize: PackOversize = "error",
    pad_multiple: Annotated[
        int, typer.Option(help="Pad rows in packs to a multiple; for --layout megatron-bridge.")
    ] = 1,
    layout: Annotated[
        Literal["tokenmill", "megatron-bridge"], typer.Option(help="Columns of packs.")
    ] = "tokenmill",
    order: Annotated[
        Order | None,
        typer.Option(
            help="Order of rows or packs; when not given, sequential for rows, feistel for packs."
        ),
    ] = None,
    seed: Seed = 42,
    epochs: Annotated[int, typer.Option(help="Epochs written one after the other.")] = 1,
    embed_media: EmbedMedia = False,
) -> None:
    """Write a store's rows in another library's format."""
    from tokenmill.api import export as write
    from tokenmill.formats.export_files import default_name, unit_of
    from tokenmill.packing import Pack
    from tokenmill.store import open_store

    opened = open_store(store)
    made = write(
        split_by(opened, split, split_seed) if split else opened,
        format,
        out or default_name(opened.key, format),
        mask=mask,
        also=also or (),
        pad_multiple=pad_multiple,
        pack=None if length is None else Pack(length, method, window, oversize),
        layout=layout,
        order=order,
        seed=seed,
        epochs=epochs,
        embed_media=embed_media,
    )
    document = {
        "path": str(made.path),
        "rows": made.rows,
        "bytes": made.bytes,
        "format": format,
        "files": made.files,
        "found": made.found,
    }
    if not output.as_json:
        what = "packs" if length is not None else unit_of(opened, format)
        how = "found" if made.found else "written"
        output.say(f"{made.rows:,} {what}, {made.bytes:,} bytes in {made.files} files, {how}")
    output.result(document)


def split_by(store: Store, given: list[str], seed: int) -> dict[str, Any]:
    """The parts that ``--split NAME=SHARE`` names; one alone may go without its share."""
    from tokenmill.dataset import split

    shares: dict[str, float] = {}
    for one in given:
        name, equals, share = one.partition("=")
        try:
            number = float(share) if equals or len(given) > 1 else 1.0
        except ValueError:
            raise UsageError(f"--split {one}: write NAME=SHARE, for example train=0.98") from None
        if name in shares:
            raise UsageError(f"--split names {name} twice")
        shares[name] = number
    return dict(zip(shares, split(store, shares, seed=seed), strict=True))
