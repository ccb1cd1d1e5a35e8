"""Commands on stores and the cache: `verify`, `attach`, `export`, `push`, `pull`, `cache`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tokenmill.cli.app import app, require_command
from tokenmill.cli.options import (
    CACHE,
    EmbedMedia,
    Given,
    OutDirectory,
    PackMethod,
    PackOversize,
    PackWindow,
    StorePath,
    command,
)
from tokenmill.cli.output import Output
from tokenmill.errors import SourceMissing, UsageError
from tokenmill.inspect.terminal_text import harmless

if TYPE_CHECKING:
    from tokenmill.store import Store


@command(app)
def verify(output: Output, store: StorePath) -> None:
    """Check every checksum of a store."""
    from tokenmill.store import open_store

    checked, errors = open_store(store).check_everything()
    listed = [error.as_dict() for error in errors]
    document = {"ok": not errors, "checked_bytes": checked, "errors": listed}

    def show() -> None:
        for error in errors:
            output.say(str(error))
        output.say(f"{'intact' if not errors else 'CORRUPT'}: {checked:,} bytes checked")

    output.result(document, show)
    if errors:
        raise typer.Exit(1)


@command(app)
def attach(
    output: Output,
    store: StorePath,
    name: str,
    file: str,
    *,
    made_by: str,
    per: Literal["row", "token"] = "row",
) -> None:
    """Attach numbers to the rows of a store.

    Args:
        name: What batches and filters call them.
        file: A .npy or .jsonl file.
        made_by: What computed the values: a digest of the model, or a text.
        per: One value for each of these.
    """
    from tokenmill.store import open_store

    opened = open_store(store)
    path = Path(file)
    if not path.is_file():
        raise SourceMissing("no such file", path=path)
    values = _array(path) if path.suffix == ".npy" else _lines(path, opened, per)
    sidecar = opened.attach(name, values, made_by=made_by, per=per)
    members = {key: getattr(sidecar, key) for key in ("name", "made_by", "per")}
    document = {"path": str(sidecar.path), **members, "rows": len(sidecar), "bytes": sidecar.bytes}
    output.say(f"{sidecar.name}: {sidecar.record.values:,} values, one per {sidecar.per}")
    output.result(document)


def _array(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"not an array of numbers: {error}", path=path) from error


def _lines(path: Path, store: Store, per: str) -> Iterator[Any]:
    """Yield one line's values per row: a number, or as many as the row has tokens."""
    import msgspec

    kind: Any = float if per == "row" else list[float]
    decoder, row = msgspec.json.Decoder(kind), 0
    with open(path, "rb") as file:
        for line, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                values = decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                wanted = "a number" if per == "row" else "a list of numbers"
                raise UsageError(f"not {wanted}: {error}", path=path, line=line) from error
            if per == "token" and row < len(store) and len(values) != store.lengths[row]:
                raise UsageError(
                    f"{len(values)} values for row {row}, which has {store.lengths[row]} tokens",
                    path=path,
                    line=line,
                )
            yield values
            row += 1


ExportFormat = Literal["parquet", "arrow", "jsonl", "hf", "axolotl", "llama-factory", "megatron",
                       "packed-parquet"]  # fmt: skip


@command(app)
def export(
    output: Output,
    store: StorePath,
    *,
    format: ExportFormat,  # noqa: A002 - a name of the contract
    out: str | None = None,
    mask: Literal["loss_mask", "labels"] = "loss_mask",
    also: list[str] | None = None,
    split: list[str] | None = None,
    split_seed: int = 0,
    length: int | None = None,
    method: PackMethod = "best_fit",
    window: PackWindow = 65536,
    oversize: PackOversize = "error",
    pad_multiple: int = 1,
    layout: Literal["tokenmill", "megatron-bridge"] = "tokenmill",
    order: Literal["feistel", "sequential", "length_grouped"] | None = None,
    seed: int = 42,
    epochs: int = 1,
    embed_media: EmbedMedia = False,
) -> None:
    """Write a store's rows in another library's format.

    Args:
        format: Format of the files.
        out: One file when it ends in .parquet, .arrow or .jsonl, else a directory.
        mask: How trained tokens are marked; for parquet, arrow, jsonl.
        also: For hf: origin, length, lengths, of groups margin, or a carried one. Repeatable.
        split: For hf: a split and its share of the rows. Repeatable.
        split_seed: Seed of the splits, as for tm.split.
        length: Tokens per pack; for packed-parquet.
        pad_multiple: Pad rows in packs to a multiple; for --layout megatron-bridge.
        layout: Columns of packs.
        order: Order of rows or packs; when not given, sequential for rows, feistel for packs.
        seed: Seed of the order.
        epochs: Epochs written one after the other.
    """
    from tokenmill.data.packs import Pack
    from tokenmill.exports.export_files import default_name, unit_of
    from tokenmill.exports.export_files import export as write
    from tokenmill.store import open_store

    opened = open_store(store)
    made = write(
        _split_by(opened, split, split_seed) if split else opened,
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
    document = {"path": str(made.path), "rows": made.rows, "bytes": made.bytes, "format": format,
                "files": made.files, "found": made.found}  # fmt: skip
    if not output.as_json:
        what = "packs" if length is not None else unit_of(opened, format)
        how = "found" if made.found else "written"
        output.say(f"{made.rows:,} {what}, {made.bytes:,} bytes in {made.files} files, {how}")
    output.result(document)


def _split_by(store: Store, given: list[str], seed: int) -> dict[str, Any]:
    """Split the store by ``--split NAME=SHARE``; one alone may go without its share."""
    from tokenmill.data.choices import split

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


@command(app)
def push(output: Output, store: StorePath, target: str, *, embed_media: EmbedMedia = False) -> None:
    """Copy a store to S3 or another place that fsspec can write.

    Args:
        target: URL of the directory that becomes the store.
    """
    from tokenmill._core.remote import is_remote
    from tokenmill.store import open_store
    from tokenmill.store.transfer import push as push_store

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
    source: str,
    *,
    out: OutDirectory = None,
    embed_media: EmbedMedia = False,
) -> None:
    """Bring a store from S3 or another place into the cache.

    Args:
        source: URL that `tokenmill push` printed.
    """
    from tokenmill.store.transfer import copy_from

    done = copy_from(source, out=out, embed_media=embed_media, **given)
    output.say(f"{done.rows:,} rows, {done.bytes:,} bytes, every block checked")
    output.result(asdict(done))


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
    output.result(found, lambda: _show_cache(output, root, found))


def _show_cache(output: Output, root: Path, found: dict[str, Any]) -> None:
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
    *,
    grace: str = "24h",
    older_than: str | None = None,
    store: list[str] | None = None,
    dry_run: bool = False,
) -> None:
    """Mark files that no store needs; remove those marked longer ago than the grace period.

    Args:
        grace: Time between marking and removing: 30m, 24h, 7d.
        older_than: Also remove stores made longer ago: 30d.
        store: Also remove this store. Repeatable.
        dry_run: Only report what would be done.
    """
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
        marked = f"{len(done.marked):,} {would}marked"
        output.say(f"{marked}; running gc again after {grace} removes them")

    output.result(document, show)


def _root(given: Given) -> Path:
    from tokenmill._core.paths import default_cache_dir

    return Path(given.get("cache_dir") or default_cache_dir())


def _seconds(text: str, flag: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise UsageError(f"{flag} is {text!r}; write it as 90s, 30m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2]]
