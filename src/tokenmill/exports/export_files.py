"""Plan an export, write its files and publish them together.

Rows, groups or packs are cut into *shards* (one file each, if the target is a directory) and shards
into *blocks* (in memory at a time). An existing target is compared byte by byte with the planned
files: it is either the same export or an error.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill._core import fingerprint
from tokenmill._core.paths import local_target
from tokenmill._core.publish import Staging, publish_directory, writing_errors
from tokenmill.data.group_batches import group_kind
from tokenmill.data.mixture import Mixture
from tokenmill.data.packs import Pack, Packs, Slots
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import View, as_view, unweighted
from tokenmill.errors import UsageError, check_one_of, check_strings
from tokenmill.exports.columns import TRAINERS, Table, make_table, stored_slots
from tokenmill.store import Store
from tokenmill.store.commit import datasets_state

PACKED = ("format", "packed-parquet")
FORMATS = (
    "parquet", "arrow", "jsonl", "hf", "axolotl", "llama-factory", "megatron", "packed-parquet",
)  # fmt: skip
MASKS = ("loss_mask", "labels")
LAYOUTS = ("tokenmill", "megatron-bridge")
# Formats whose readers support masks only; the others have a column of weights.
UNWEIGHTED = ("axolotl", "llama-factory", "megatron", "packed-parquet")
# Formats with all data of a row: loss mask or labels, origin, images, kept columns.
ROW_FORMATS = ("parquet", "arrow", "jsonl")
# A target with this suffix is one file; any other is a directory of shards.
SUFFIXES = {
    "parquet": ".parquet", "arrow": ".arrow", "jsonl": ".jsonl", "packed-parquet": ".parquet",
}  # fmt: skip

SHARD_TOKENS = 1 << 27  # per file of a directory: about 640 MB of ids and mask
BLOCK_TOKENS = 1 << 20  # in memory at a time, and per row group: a few tens of MB
BLOCK_ROWS = 1000  # in memory at a time, where rows are short


@dataclass(frozen=True)
class ExportPlan:
    """A checked export; the fields are arguments of `tokenmill.export`."""

    run: RunIndex  # rows, groups or packs by number
    format: str
    target: Path
    mask: str = "loss_mask"
    layout: str = "tokenmill"
    also: tuple[str, ...] = ()
    embed_media: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("format", FORMATS), ("mask", MASKS), ("layout", LAYOUTS)):
            check_one_of(name, getattr(self, name), choices)
        packed = self.run.spec.packing is not None
        if packed and self.format != "packed-parquet":
            raise UsageError(("format", self.format), " cannot contain packs. Use ", PACKED)
        if not packed and self.format == "packed-parquet":
            raise UsageError(PACKED, " needs the length of packs in ", ("pack",))
        if self.layout != "tokenmill" and not packed:
            raise UsageError(("layout", self.layout), " needs ", PACKED)
        if self.run.slots is not None and self.layout != "megatron-bridge":
            raise UsageError(("pad_multiple",), " needs ", ("layout", "megatron-bridge"))
        if self.also and self.format not in TRAINERS:
            raise UsageError(
                ("also",), " needs ", ("format", *TRAINERS), f"; {self.format} has all columns"
            )
        if self.run.unit == "groups":
            self._check_groups()
        if self.format in UNWEIGHTED or self.run.unit == "groups":
            groups = " of groups" * (self.run.unit == "groups")
            unweighted(self.run.view, f"format {self.format}{groups}")
        if self.format not in ROW_FORMATS and self.run.view.has_media:
            raise UsageError(
                ("format", self.format), " cannot contain the images of these rows. Use ",
                ("format", *ROW_FORMATS),
            )  # fmt: skip
        if self.embed_media and not self.run.view.has_media:
            raise UsageError(("embed_media",), " needs rows with images; these rows have none")
        if self.embed_media and self.format == "jsonl":
            raise UsageError(("embed_media",), " needs ", ("format", "parquet", "arrow"))
        suffix = self.target.suffix
        if suffix in SUFFIXES.values() and not self.one_file:
            raise UsageError(
                ("out", self.target.name), " has the wrong suffix for ", ("format", self.format)
            )
        if self.mask == "labels" and self.format not in ROW_FORMATS:
            raise UsageError(("mask", "labels"), " needs ", ("format", *ROW_FORMATS))

    def _check_groups(self) -> None:
        if self.format == "axolotl":
            raise UsageError(
                ("format", "axolotl"),
                " cannot contain groups: its DPO and KTO trainers tokenize"
                " texts themselves. Use integrations.hf.for_trl with the trainers of TRL",
            )
        kind = group_kind(self.run.view)
        if kind not in ("preference", "kto"):
            raise UsageError(
                ("format", self.format), " needs preference pairs or KTO data, got "
                f"{kind or 'several kinds of'} groups. Use ", ("format", *ROW_FORMATS),
            )  # fmt: skip

    @property
    def one_file(self) -> bool:
        suffix = ".parquet" if self.format == "hf" else SUFFIXES.get(self.format)
        return suffix is not None and self.target.suffix == suffix

    @property
    def suffix(self) -> str:
        return SUFFIXES.get(self.format, ".parquet" if self.one_file else ".arrow")

    @cached_property
    def shards(self) -> list[range]:
        if self.one_file:
            return [range(len(self.run))]
        tokens = (count for packs in _index(self) for count in _tokens_of(packs))
        return list(_cut(tokens, SHARD_TOKENS))

    def blocks(self, samples: range) -> Iterator[Packs]:
        """Yield the samples of a shard, a bounded number of tokens at a time."""
        for start in range(samples.start, samples.stop, BLOCK_ROWS):
            packs = self.run.packs(range(start, min(start + BLOCK_ROWS, samples.stop)))
            for part in _cut(_tokens_of(packs), BLOCK_TOKENS):
                yield packs.take(np.arange(part.start, part.stop))


Plans = Mapping[str, ExportPlan]
"""The plan of each split, in its own directory; ``""`` is an export without splits."""


def _check_splits(target: Path, plans: Plans) -> None:
    if not plans:
        raise UsageError("No splits: name at least one")
    for name, plan in plans.items():
        if not name.isidentifier():
            raise UsageError(f"Split names consist of letters, digits and _, got {name!r}")
        if plan.format not in TRAINERS or target.suffix in SUFFIXES.values():
            raise UsageError(
                "Splits need a directory as ", ("out",), " and ", ("format", *TRAINERS)
            )


def _tokens_of(packs: Packs) -> list[int]:
    counts: list[int] = packs.per_pack(packs.lengths).tolist()
    return counts


def _cut(tokens: Iterable[int], max_tokens: int) -> Iterator[range]:
    """Yield ranges of consecutive samples with at most ``max_tokens`` or one sample."""
    first = size = number = 0
    for number, count in enumerate(tokens, 1):
        if size and size + count > max_tokens:
            yield range(first, number - 1)
            first, size = number - 1, 0
        size += count
    yield range(first, number)


def unit_of(data: Store | View | Mixture, format_name: str) -> str:
    """Return what a record of a format is without packing: ``rows`` or ``groups``."""
    view = data.view if isinstance(data, Mixture) else as_view(data)
    return "groups" if view.has_groups and format_name in TRAINERS else "rows"


def default_name(key: str, format_name: str) -> str:
    packed = ".packed" if format_name == "packed-parquet" else ""
    return key[:12] + packed + SUFFIXES.get(format_name, f"-{format_name}")


Buffers = Iterable[bytes | memoryview]

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_VERSION = 1
MEGATRON_CODES = {"tokens": (4, 4), "loss_mask": (1, 1)}  # code and bytes of an item
INDEX_CHUNK = 1 << 18  # rows at a time in the index: 2 MiB


@dataclass(frozen=True)
class Exported:
    path: Path
    rows: int  # records: rows, groups or packs
    bytes: int  # of all files
    files: int
    found: bool  # existed already


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
    """Write rows in another library's format. The files appear all at once.

    Args:
        data: A store, a view or a mixture; for hf also a mapping of split names to them.
        format: ``parquet``, ``arrow``, ``jsonl``, ``hf``, ``axolotl``, ``llama-factory``,
            ``megatron``, ``packed-parquet``. For grouped data, hf and llama-factory write a record
            per group, the others a record per row.
        out: A file if it ends in ``.parquet``, ``.arrow`` or ``.jsonl``, else a directory with a
            file per 128 Mi tokens.
        mask: ``loss_mask`` or ``labels``, for parquet, arrow and jsonl.
        also: Additional columns for hf: ``origin``, ``length``, ``lengths`` (rows), ``margin``
            (groups), or kept columns.
        pack: How to pack rows, for packed-parquet.
        pad_multiple: Pad each row of a pack to a multiple of this many tokens, for Megatron-Bridge.
        layout: Columns of packs: ``tokenmill``, or ``megatron-bridge`` for its packed dataset.
        order: As in the loader. None writes rows and groups in the order of the data, and packs in
            the loader's default order.
        seed: Seed of the order.
        epochs: Number of epochs to write, one after the other.
        embed_media: Include the bytes of images, for parquet and arrow.

    Raises:
        UsageError: An argument is wrong, or ``out`` contains something else.
        CacheError: The disk is full or not writable; nothing was published.
    """
    columns = tuple(check_strings("also", also))
    order = order or ("sequential" if pack is None else "feistel")
    slots = None if pad_multiple == 1 else Slots(pad_multiple, label_shift=1)

    def plan(part: Store | View | Mixture, target: Path) -> ExportPlan:
        run = RunIndex(
            part, epochs=epochs, seed=seed, order=order, pack=pack, slots=slots,
            unit=unit_of(part, format),
        )  # fmt: skip
        return ExportPlan(run, format, target, mask, layout, columns, embed_media)

    target = local_target("out", out)
    if isinstance(data, Mapping):
        check_strings("data", data)
        plans = {name: plan(part, target / name) for name, part in data.items()}
        _check_splits(target, plans)
        return _write(target, plans)
    return _write(target, {"": plan(data, target)})


def _write(target: Path, plans: Plans) -> Exported:
    """Write the files of the plans, unless the target has them already."""
    target = target.absolute()
    if _exists(target):
        return _compare(plans, target)
    with writing_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with Staging(target.parent, beside=target) as staging:
        paths = [staging.write(name, stream) for name, stream in _files(plans)]
        exported = _exported(plans, target, paths, found=False)
        with writing_errors(target):
            if _is_one_file(plans):
                published = staging.publish(paths[0], target)
            else:
                published = publish_directory(staging.path, target)
    # If it is not published, another process was faster.
    return exported if published else _compare(plans, target)


def _exported(plans: Plans, target: Path, paths: Collection[Path], *, found: bool) -> Exported:
    records = sum(len(plan.run) for plan in plans.values())
    return Exported(target, records, sum(p.stat().st_size for p in paths), len(paths), found)


def _is_one_file(plans: Plans) -> bool:
    return "" in plans and plans[""].one_file


def _files(plans: Plans) -> Iterator[tuple[str, Buffers]]:
    for split, plan in plans.items():
        for name, stream in _files_of(plan):
            yield f"{split}/{name}" if split else name, stream
    if "" not in plans:  # `datasets.load_from_disk` reads the names of splits from this file
        yield "dataset_dict.json", [json.dumps({"splits": list(plans)}).encode() + b"\n"]


def _files_of(plan: ExportPlan) -> Iterator[tuple[str, Buffers]]:
    if plan.format == "megatron":
        for name in ("tokens", "loss_mask"):
            yield f"{name}.bin", _megatron_items(plan, name)
            yield f"{name}.idx", _megatron_index(plan, name)
        return
    count = len(plan.shards)
    names = [f"data-{number:05d}-of-{count:05d}{plan.suffix}" for number in range(count)]
    if plan.one_file:
        names = [plan.target.name]
    table = make_table(plan)
    for name, samples in zip(names, plan.shards, strict=True):
        yield name, _stream(plan, table, samples)
    if plan.layout == "megatron-bridge" and not plan.one_file:
        yield "_metadata.json", _bridge_metadata(plan)
    if plan.suffix == ".arrow" and not plan.one_file:
        # `datasets.load_from_disk` needs these files; it takes the types from the Arrow schema.
        yield "state.json", _state(plan, names)
        yield "dataset_info.json", [b"{}\n"]


def _stream(plan: ExportPlan, table: Table, samples: range) -> Iterator[bytes]:
    """Yield the bytes of one file of tables or JSON lines, block by block."""
    blocks = plan.blocks(samples)
    if plan.suffix == ".jsonl":
        yield from map(table.lines, blocks)
        return
    buffer = _Buffer()
    file = pa.PythonFile(buffer, mode="w")
    if plan.suffix == ".parquet":
        writer = pq.ParquetWriter(file, table.schema, compression="zstd")
    else:
        writer = pa.ipc.new_stream(file, table.schema)
    with writer:
        for block in blocks:
            rows = table.table(block)
            writer.write_table(rows, max(rows.num_rows, 1))  # one row group or record batch
            yield buffer.take()
    yield buffer.take()


class _Buffer(io.BytesIO):
    """A file that returns and discards the bytes written so far."""

    _taken = 0

    def tell(self) -> int:
        return self._taken + super().tell()

    def take(self) -> bytes:
        data = self.getvalue()
        self._taken += len(data)
        self.seek(0)
        self.truncate()
        return data


def _state(plan: ExportPlan, names: list[str]) -> Buffers:
    spec = plan.run.spec
    inputs = [spec.dataset, spec.order, spec.seed, plan.format, plan.mask]
    inputs += ["embed_media"] * plan.embed_media
    key = fingerprint.key([*inputs, list(plan.also)] if plan.also else inputs)
    files = [{"filename": name} for name in names]
    state = {"_data_files": files, **datasets_state(key)}
    return [json.dumps(state).encode() + b"\n"]


def _exists(target: Path) -> bool:
    if target.is_dir():  # An empty directory may be used.
        return any(target.iterdir())
    return target.exists() or target.is_symlink()


def _compare(plans: Plans, target: Path) -> Exported:
    """Return the existing export, or raise if it differs from the plans."""
    paths, same = set(), True
    for name, stream in _files(plans):
        path = target if _is_one_file(plans) else target / name
        same = same and _has_bytes(path, stream)
        paths.add(path)
    if not _is_one_file(plans):
        same = same and paths == {path for path in target.rglob("*") if not path.is_dir()}
    if not same:
        raise UsageError(
            "exists and is not this export. Remove it, or choose another ", ("out",), path=target
        )
    return _exported(plans, target, paths, found=True)


def _has_bytes(path: Path, stream: Buffers) -> bool:
    try:
        with open(path, "rb") as file:
            same = all(file.read(len(data)) == data for data in map(bytes, stream))
            return same and not file.read(1)
    except OSError:
        return False


def _megatron_items(plan: ExportPlan, name: str) -> Iterator[memoryview]:
    """Yield the ``.bin`` of Megatron-LM's indexed dataset: the rows without separators."""
    for block in plan.blocks(range(len(plan.run))):
        for row in plan.run.view.rows(block.rows):
            array = row.input_ids if name == "tokens" else row.loss_mask
            yield np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data


def _megatron_index(plan: ExportPlan, name: str) -> Iterator[bytes]:
    """Yield the ``.idx`` of Megatron-LM's indexed dataset.

    A row is one sequence and one document. All numbers are little-endian::

        9 bytes    MMIDIDX and two zero bytes
        uint64     version, 1
        uint8      type of the items: 1 is uint8, 4 is int32
        uint64     sequences
        uint64     documents + 1
        int32[]    items of every sequence
        int64[]    byte at which every sequence starts in the .bin
        int64[]    number of the first sequence of every document, and one past the last
    """
    code, size = MEGATRON_CODES[name]
    rows = len(plan.run)
    yield MEGATRON_MAGIC + struct.pack("<QBQQ", MEGATRON_VERSION, code, rows, rows + 1)
    for packs in _index(plan):
        yield packs.lengths.astype("<i4").tobytes()
    begin = 0
    for packs in _index(plan):
        lengths = packs.lengths
        ends = begin + np.cumsum(lengths, dtype=np.int64) * size
        yield (ends - lengths * size).astype("<i8").tobytes()
        begin = int(ends[-1])
    for first in range(0, rows + 1, INDEX_CHUNK):
        yield np.arange(first, min(first + INDEX_CHUNK, rows + 1), dtype="<i8").tobytes()


def _index(plan: ExportPlan) -> Iterator[Packs]:
    for first in range(0, len(plan.run), INDEX_CHUNK):
        yield plan.run.packs(range(first, min(first + INDEX_CHUNK, len(plan.run))))


def _bridge_metadata(plan: ExportPlan) -> list[bytes]:
    """Return the metadata with which Megatron-Bridge's collator pads, counted in predictions.

    Its option ``packed_metadata_path`` takes the path of the file.
    """
    packing = plan.run.spec.packing
    assert packing is not None
    length = shortest = packing["length"]
    longest = most_rows = packs = rows = total = 0
    for samples in plan.shards:
        for block in plan.blocks(samples):
            predictions = stored_slots(plan, block) - 1
            filled = block.per_pack(predictions)
            shortest = min(shortest, int(filled.min()))
            most_rows = max(most_rows, int(np.diff(block.bounds).max()))
            longest = max(longest, int(predictions.max(initial=0)))
            packs += len(block)
            rows += predictions.size
            total += int(filled.sum())
    document = {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": most_rows,
        "packing_factor": round(rows / packs, 2),
        "packing_efficiency": round(total / packs / length * 100, 2),
        "pack_size": length,
        "min_packed_seqlen": shortest,
    }
    return [json.dumps([document]).encode() + b"\n"]
