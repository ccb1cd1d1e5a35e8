"""The commands `verify`, `attach`, `export`, `push`, `pull` and `cache`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tokenmill._core.paths import cache_root
from tokenmill.cli.app import app, require_command
from tokenmill.cli.help import Group
from tokenmill.cli.options import (
    CACHE,
    EmbedMedia,
    Flags,
    OutDirectory,
    PackMethod,
    PackOversize,
    PackWindow,
    StorePath,
    command,
)
from tokenmill.cli.output import Output
from tokenmill.errors import MissingFileError, SourceMissing, UsageError
from tokenmill.inspect.terminal_text import harmless

if TYPE_CHECKING:
    from tokenmill.store import Store


@command(app)
def verify(output: Output, store: StorePath) -> None:
    """Check every checksum of a store."""
    from tokenmill.store import open_store

    checked_bytes, errors = open_store(store).check_everything()
    documents = [error.as_dict() for error in errors]
    document = {"ok": not errors, "checked_bytes": checked_bytes, "errors": documents}

    def show() -> None:
        for error in errors:
            output.message(str(error))
        missing = all(isinstance(error, MissingFileError) for error in errors)
        verdict = ("INCOMPLETE" if missing else "CORRUPT") if errors else "intact"
        output.message(f"{verdict}: {checked_bytes:,} bytes checked")

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
    producer: str,
    per: Literal["row", "token"] = "row",
) -> None:
    """Attach numbers to the rows or tokens of a store.

    Args:
        name: Name of the values in batches and filters.
        file: A .npy or .jsonl file.
        producer: Where the values come from, for example a digest of the model.
        per: What each value belongs to.
    """
    from tokenmill.store import open_store

    opened = open_store(store)
    path = Path(file)
    if not path.is_file():
        raise SourceMissing("no such file", path=path)
    values = _load_npy(path) if path.suffix == ".npy" else _read_lines(path, opened, per)
    sidecar = opened.attach(name, values, producer=producer, per=per)
    members = {key: getattr(sidecar, key) for key in ("name", "producer", "per")}
    document = {"path": str(sidecar.path), **members, "rows": len(sidecar), "bytes": sidecar.bytes}
    output.message(f"{sidecar.name}: {sidecar.record.values:,} values, one per {sidecar.per}")
    output.result(document)


def _load_npy(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"not a .npy array of numbers: {error}", path=path) from error


def _read_lines(path: Path, store: Store, per: str) -> Iterator[Any]:
    """Yield a number per row, or a list with a number per token."""
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
                expected = "a number" if per == "row" else "a list of numbers"
                message = f"expected {expected}: {error}"
                raise UsageError(message, path=path, line=line) from error
            if per == "token" and row < len(store) and len(values) != store.lengths[row]:
                message = f"row {row} has {store.lengths[row]} tokens, got {len(values)} values"
                raise UsageError(message, path=path, line=line)
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
    """Write a store in another library's file format.

    Args:
        format: Format of the files.
        out: A file if it ends in .parquet, .arrow or .jsonl, else a directory.
        mask: Column that marks trained tokens, in parquet, arrow and jsonl.
        also: Column to add to hf: origin, length, lengths, margin (groups), or a kept column.
            Repeatable.
        split: A split and its share of the rows, for hf. Repeatable.
        split_seed: Seed of --split.
        length: Tokens per pack, for packed-parquet.
        pad_multiple: Pad each row of a pack to a multiple, for --layout megatron-bridge.
        layout: Columns of packed-parquet.
        order: Order of rows or packs. Default: sequential for rows, feistel for packs.
        seed: Seed of the order.
        epochs: Number of epochs to write.
    """
    from tokenmill.data.packs import Pack
    from tokenmill.exports.export_files import PACKED, default_name, unit_of
    from tokenmill.exports.export_files import export as write
    from tokenmill.store import open_store

    opened = open_store(store)
    if length is None and ("format", format) == PACKED:
        raise UsageError(PACKED, " needs ", ("length",))
    exported = write(
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
    document = {"path": str(exported.path), "rows": exported.rows, "bytes": exported.bytes,
                "format": format, "files": exported.files, "found": exported.found}  # fmt: skip
    if not output.as_json:
        unit = "packs" if length is not None else unit_of(opened, format)
        size = f"{exported.bytes:,} bytes in {exported.files} files"
        how = "exist already" if exported.found else "written"
        output.message(f"{exported.rows:,} {unit}, {size}, {how}")
    output.result(document)


def _split_by(store: Store, splits: list[str], seed: int) -> dict[str, Any]:
    """Split the store by ``--split NAME=SHARE``; a single split may leave out its share."""
    shares: dict[str, float] = {}
    for text in splits:
        name, equals, share = text.partition("=")
        if name in shares:
            raise UsageError(f"--split {name} is given twice")
        try:
            shares[name] = float(share) if equals or len(splits) > 1 else 1.0
        except ValueError:
            raise UsageError(
                f"--split must be NAME=SHARE, for example train=0.98, got {text!r}"
            ) from None
    return dict(store.split(shares, seed=seed))


@command(app)
def push(output: Output, store: StorePath, target: str, *, embed_media: EmbedMedia = False) -> None:
    """Copy a store to S3 or another remote location.

    Args:
        target: URL of the new store's directory; any protocol of fsspec.
    """
    from tokenmill._core.remote import is_remote
    from tokenmill.store import open_store
    from tokenmill.store.transfer import push as push_store

    opened = open_store(store)
    done = push_store(opened, target, embed_media=embed_media)
    new = done.files - done.skipped
    output.message(
        f"{new:,} of {done.files:,} files sent, {done.rows:,} rows, {done.bytes:,} bytes"
    )
    sidecars = [sidecar.name for sidecar in opened.sidecars] if is_remote(target) else []
    if sidecars:
        output.message(f"sidecars not sent: {', '.join(sidecars)}; attach them to the copy again")
    output.result(asdict(done))


@command(app, *CACHE)
def pull(
    output: Output,
    flags: Flags,
    source: str,
    *,
    out: OutDirectory = None,
    embed_media: EmbedMedia = False,
) -> None:
    """Copy a remote store into the cache.

    Args:
        source: URL that `tokenmill push` printed.
    """
    from tokenmill.store.transfer import copy_from

    done = copy_from(source, out=out, embed_media=embed_media, **flags)
    output.message(f"{done.rows:,} rows, {done.bytes:,} bytes, every block checked")
    output.result(asdict(done))


cache_app = typer.Typer(cls=Group, help="List the cache, or remove files that no store needs.")
app.add_typer(cache_app, name="cache")
cache_app.callback(invoke_without_command=True)(require_command)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@command(cache_app, *CACHE, name="list")
def list_cache(output: Output, flags: Flags) -> None:
    """List the stores in the cache and its size."""
    from tokenmill.store.collect import survey

    root = cache_root(flags.get("cache_dir"))
    document = survey(root)
    output.result(document, lambda: _show_cache(output, root, document))


def _show_cache(output: Output, root: Path, document: dict[str, Any]) -> None:
    from rich.text import Text

    from tokenmill.build.progress import duration
    from tokenmill.cli.commands.stats import new_table, show_tables

    texts = ("name", "tokenizer", "sources")
    table = new_table("key", "rows", "tokens", "size", "age", texts=texts)
    for entry in document["entries"]:
        key = entry["key"][:12]
        if "error" in entry:
            # The error may quote bytes of the damaged file.
            typer.echo(f"{key}  DAMAGED  {harmless(entry['error'])}")
            continue
        numbers = f"{entry['rows']:,}", f"{entry['tokens']:,}", _short_size(entry["bytes"])
        age = duration(time.time() - entry["made"])
        first, *others = entry["sources"] or ["?"]
        sources = f"{first} and {len(others)} more" if others else first
        shown = ", ".join(entry["names"]), entry["tokenizer"] or "?", sources
        table.add_row(key, *numbers, age, *(Text(harmless(text)) for text in shown))
        for sidecar in entry["sidecars"]:
            detail = f"{sidecar['name']} per {sidecar['per']}, producer {sidecar['producer']}"
            size = _short_size(sidecar["bytes"])
            table.add_row("", "", "", size, "", Text(f"+ {harmless(detail)}"), "", "")
    if table.row_count:
        show_tables(output.stdout, table)
    parts = ", ".join(
        f"{name} {_short_size(size)}" for name, size in document["parts"].items() if size
    )
    output.message(f"{root}: {_short_size(document['bytes'])}{f' ({parts})' if parts else ''}")


def _short_size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


@command(cache_app, *CACHE)
def gc(
    output: Output,
    flags: Flags,
    *,
    grace: str = "24h",
    older_than: str | None = None,
    store: list[str] | None = None,
    dry_run: bool = False,
) -> None:
    """Remove files that no store needs.

    Files are marked first, and removed by a run after the grace period.

    Args:
        grace: Time between marking and removing, for example 30m, 24h or 7d.
        older_than: Also remove stores older than this, for example 30d.
        store: Also remove this store. Repeatable.
        dry_run: Only report what would happen.
    """
    from tokenmill.store.collect import collect
    from tokenmill.store.layout import is_key
    from tokenmill.store.named import find_store

    root = cache_root(flags.get("cache_dir"))
    collected = collect(
        root,
        grace_s=_seconds("grace", grace),
        older_than_s=None if older_than is None else _seconds("older_than", older_than),
        stores=[one if is_key(one) else Path(find_store(one, root)).name for one in store or ()],
        dry_run=dry_run,
    )
    removed, marked, freed = collected.removed, collected.marked, collected.freed_bytes
    document = {"entries": removed, "bytes": freed, "marked": marked}

    def show() -> None:
        would = "would be " if dry_run else ""
        output.message(f"{len(removed):,} {would}removed, {freed:,} bytes")
        output.message(f"{len(marked):,} {would}marked; run gc again after {grace} to remove them")

    output.result(document, show)


def _seconds(name: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"{flag} must be a duration like 90s, 30m, 24h or 7d, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]
