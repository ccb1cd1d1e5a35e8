"""Export rows and copy stores: `to_hf`, `export`, `push`, `pull`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmill.store import Store, open_store

if TYPE_CHECKING:
    from tokenmill.dataset import Mixture, View
    from tokenmill.formats import Exported
    from tokenmill.packing import Pack
    from tokenmill.store.transfer import TransferResult


def to_hf(data: Store | View | Mixture, mask: str = "labels") -> Any:
    """Rows as a Hugging Face `datasets.Dataset` that reads through the store.

    Args:
        data: A store, a view or a mixture (one epoch, interleaved by its weights).
        mask: ``labels``: columns input_ids and labels, -100 where a token is not trained and at
            the first token of every row. ``loss_mask``: the stored columns input_ids and
            loss_mask, over the same bytes. ``assistant_masks``: the same for TRL's own truncation
            and packing, under its name and 0 at the first token.
    """
    return import_module("tokenmill.integrations.hf").to_hf(data, mask)


def export(
    data: Store | View | Mixture | Mapping[str, Store | View | Mixture],
    format: str,  # noqa: A002 - a name of the contract
    out: str | os.PathLike[str],
    *,
    mask: str = "loss_mask",
    also: Sequence[str] = (),
    pack: Pack | None = None,
    pad_multiple: int = 1,
    layout: str = "tokenmill",
    order: str | None = None,
    seed: int = 42,
    epochs: int = 1,
    embed_media: bool = False,
) -> Exported:
    """Write rows in another library's format; the files appear all at once.

    Args:
        data: A store, a view or a mixture; for hf also several by the names of their splits.
        format: ``parquet``, ``arrow``, ``jsonl``, ``hf``, ``axolotl``, ``llama-factory``,
            ``megatron``, ``packed-parquet``. Of data with groups, hf and llama-factory hold a
            record per group, the others a record per row.
        out: File or directory to make. One that ends in ``.parquet``, ``.arrow`` or ``.jsonl`` is
            one file; any other is a directory, with a file per 128 Mi tokens.
        mask: ``loss_mask`` or ``labels``, for parquet, arrow and jsonl.
        also: More columns for hf: ``origin``, ``length``, ``lengths``, or carried ones; of groups
            ``origin``, ``margin``, or carried ones.
        pack: How rows are packed, for packed-parquet.
        pad_multiple: Pad rows in packs to a multiple of this many tokens, for Megatron-Bridge.
        layout: Columns of packs: ``tokenmill``, or ``megatron-bridge`` for its packed dataset.
        order: As for the loader; None: rows and groups as they stand, packs in the loader's default
            order.
        seed: Of the order.
        epochs: How many epochs are written, one after the other.
        embed_media: For parquet and arrow: the bytes of pictures beside what is said of them.

    Raises:
        UsageError: An argument is wrong, or something else is at ``out``.
        CacheError: The disk is full or cannot be written; nothing was published.
    """
    from pathlib import Path

    from tokenmill.formats import ExportPlan, SplitPlan
    from tokenmill.formats import export as write
    from tokenmill.formats.export_files import unit_of
    from tokenmill.loader import WholeRun
    from tokenmill.packing import Slots

    order = order or ("sequential" if pack is None else "feistel")
    slots = None if pad_multiple == 1 else Slots(pad_multiple, unpredicted=1)

    def plan(part: Store | View | Mixture, target: Path) -> ExportPlan:
        run = WholeRun(
            part, epochs=epochs, seed=seed, order=order, pack=pack, slots=slots,
            unit=unit_of(part, format),
        )  # fmt: skip
        return ExportPlan(run, format, target, mask, layout, tuple(also), embed_media)

    target = Path(out)
    if isinstance(data, Mapping):
        return write(SplitPlan(target, {n: plan(part, target / n) for n, part in data.items()}))
    return write(plan(data, target))


def push(
    store: Store | str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    embed_media: bool = False,
) -> TransferResult:
    """Copy a store to any URL that fsspec can write, or to a directory.

    Args:
        store: A store of this machine, or its path.
        target: What will be the store's URL; `open_store` and `pull` take it.
        embed_media: Copy the images of its rows, each once.
    """
    from tokenmill.store import transfer

    opened = store if isinstance(store, Store) else open_store(store)
    return transfer.push(opened, os.fspath(target), embed_media=embed_media)


def pull(
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    embed_media: bool = False,
) -> Store:
    """Copy a store from a URL into the local cache, every block checked.

    Args:
        source: Its URL, or a directory.
        out: Also make a self-contained copy here, and open that.
        cache_dir: The cache; None: the user's own.
        embed_media: With ``out``: copy the images of its rows, each once.
    """
    from tokenmill.store import transfer

    return Store(transfer.pull(source, cache_dir, out, embed_media=embed_media).path)
