"""Plan an export, write its files and publish them together.

A run of rows, groups or packs is cut into *shards* (one file each, where the target is a directory)
and shards into *blocks* (what is in memory at a time). An existing target is compared byte by byte
with the files of the plan, and is either the same export or refused.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill._core import fingerprint
from tokenmill._core.publish import Staging, publish_directory, writing_errors
from tokenmill.data.group_batches import group_kind
from tokenmill.data.mixture import Mixture
from tokenmill.data.packs import Pack, Packs, Slots
from tokenmill.data.stream import WholeRun
from tokenmill.data.view import View, as_view, unweighted
from tokenmill.errors import UsageError, check_one_of
from tokenmill.exports.columns import TRAINERS, Table, stored_slots, table_of
from tokenmill.store import Store
from tokenmill.store.commit import datasets_state

FORMATS = (
    "parquet", "arrow", "jsonl", "hf", "axolotl", "llama-factory", "megatron", "packed-parquet",
)  # fmt: skip
MASKS = ("loss_mask", "labels")
LAYOUTS = ("tokenmill", "megatron-bridge")
# Formats whose readers know masks only; the others have a column of weights.
UNWEIGHTED = ("axolotl", "llama-factory", "megatron", "packed-parquet")
# Formats with everything about a row: loss mask or labels, origin, images, carried columns.
ROW_FORMATS = ("parquet", "arrow", "jsonl")
# A target that ends so is one file; any other is a directory, of shards where needed.
SUFFIXES = {
    "parquet": ".parquet", "arrow": ".arrow", "jsonl": ".jsonl", "packed-parquet": ".parquet",
}  # fmt: skip

SHARD_TOKENS = 1 << 27  # tokens per file of a directory: about 640 MB of ids and mask
BLOCK_TOKENS = 1 << 20  # tokens in memory at a time, and per row group: a few tens of MB
BLOCK_ROWS = 1000  # records in memory at a time, where they are short


@dataclass(frozen=True)
class ExportPlan:
    """What is exported; arguments are those of `tokenmill.export`."""

    run: WholeRun  # rows, groups or packs by number
    format: str
    target: Path
    mask: str = "loss_mask"
    layout: str = "tokenmill"
    also: tuple[str, ...] = ()  # more columns for a trainer
    embed_media: bool = False

    def __post_init__(self) -> None:
        for name, known in (("format", FORMATS), ("mask", MASKS), ("layout", LAYOUTS)):
            check_one_of(name, getattr(self, name), known)
        packed = self.run.spec.packing is not None
        if packed != (self.format == "packed-parquet"):
            raise UsageError(
                f"format {self.format} holds rows: it takes no pack"
                if packed
                else "format packed-parquet holds packs: say how long they are (pack, --length)"
            )
        if self.layout != "tokenmill" and not packed:
            raise UsageError(f"layout {self.layout} is for packed-parquet")
        if self.run.slots is not None and self.layout != "megatron-bridge":
            raise UsageError(
                ("pad_multiple",), " is for packed-parquet in the layout megatron-bridge"
            )
        if self.also and self.format not in TRAINERS:
            raise UsageError(("also",), f" is for {', '.join(TRAINERS)}; {self.format} has it all")
        if self.run.unit == "groups":
            self._check_groups()
        if self.format in UNWEIGHTED or self.run.unit == "groups":
            groups = " of groups" * (self.run.unit == "groups")
            unweighted(self.run.view, f"format {self.format}{groups}")
        if self.format not in ROW_FORMATS and self.run.view.has_media:
            raise UsageError(
                f"rows of this data have pictures, and format {self.format} has no place for them: "
                f"its reader would train on them as if there were none; {', '.join(ROW_FORMATS)} "
                "hold them"
            )
        if self.embed_media and not self.run.view.has_media:
            raise UsageError(("embed_media",), " is for rows with pictures, and these have none")
        if self.embed_media and self.format == "jsonl":
            raise UsageError(("embed_media",), " is for parquet and arrow: JSON holds no bytes")
        suffix = self.target.suffix
        if suffix in SUFFIXES.values() and not self.one_file:
            raise UsageError(f"{self.target.name} does not name a target of format {self.format}")
        if self.mask == "labels" and self.format not in ROW_FORMATS:
            raise UsageError(f"format {self.format} has columns of its own: it takes no mask")

    def _check_groups(self) -> None:
        if self.format == "axolotl":
            raise UsageError(
                "axolotl takes tokens of rows only: its DPO and KTO take texts and tokenize them "
                "by themselves; hf.for_trl feeds the trainers of TRL beneath them"
            )
        kind = group_kind(self.run.view)
        if kind not in ("preference", "kto"):
            raise UsageError(
                f"format {self.format} holds pairs or KTO data, and this has "
                f"{kind or 'several kinds of'} groups: parquet, arrow and jsonl hold their rows"
            )

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


@dataclass(frozen=True)
class SplitPlan:
    """One plan per split, each into a directory of the target."""

    target: Path
    splits: Mapping[str, ExportPlan]

    def __post_init__(self) -> None:
        if not self.splits:
            raise UsageError("no splits: name at least one")
        for name, plan in self.splits.items():
            if not name.isidentifier():
                raise UsageError(f"split {name!r}: a split's name is letters, digits and _")
            if plan.format not in TRAINERS or self.target.suffix in SUFFIXES.values():
                raise UsageError("splits are for a directory of format hf or llama-factory")

    one_file = False


def _tokens_of(packs: Packs) -> list[int]:
    counts: list[int] = packs.per_pack(packs.lengths).tolist()
    return counts


def _cut(tokens: Iterable[int], most: int) -> Iterator[range]:
    """Yield ranges of consecutive samples with at most ``most`` tokens, or of a single sample."""
    first = held = number = 0
    for number, count in enumerate(tokens, 1):
        if held and held + count > most:
            yield range(first, number - 1)
            first, held = number - 1, 0
        held += count
    yield range(first, number)


def unit_of(data: Store | View | Mixture, format_name: str) -> str:
    """Return what a record of a format holds when nothing is packed: ``rows`` or ``groups``."""
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
    found: bool  # it existed already


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
        return write_plan(
            SplitPlan(target, {n: plan(part, target / n) for n, part in data.items()})
        )
    return write_plan(plan(data, target))


def write_plan(plan: ExportPlan | SplitPlan) -> Exported:
    """Write the files of a plan, or find them at the target."""
    target = plan.target.absolute()
    if _is_there(target):
        return _same(plan, target)
    with writing_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with Staging(target.parent, beside=target) as staging:
        size = count = 0
        for name, stream in files_of(plan):
            staged = staging.write(name, stream)
            size += staged.stat().st_size
            count += 1
        with writing_errors(target):
            if plan.one_file:
                ours = staging.publish(staged, target)
            else:
                ours = publish_directory(staging.path, target)
    if not ours:
        return _same(plan, target)
    return Exported(target, _records(plan), size, count, found=False)


def _records(plan: ExportPlan | SplitPlan) -> int:
    parts = plan.splits.values() if isinstance(plan, SplitPlan) else [plan]
    return sum(len(part.run) for part in parts)


def files_of(plan: ExportPlan | SplitPlan) -> Iterator[tuple[str, Buffers]]:
    if isinstance(plan, SplitPlan):
        for split, part in plan.splits.items():
            for name, stream in files_of(part):
                yield f"{split}/{name}", stream
        # What makes `datasets.load_from_disk` see splits.
        yield "dataset_dict.json", [json.dumps({"splits": list(plan.splits)}).encode() + b"\n"]
        return
    if plan.format == "megatron":
        for name in ("tokens", "loss_mask"):
            yield f"{name}.bin", _megatron_items(plan, name)
            yield f"{name}.idx", _megatron_index(plan, name)
        return
    count = len(plan.shards)
    names = [f"data-{number:05d}-of-{count:05d}{plan.suffix}" for number in range(count)]
    if plan.one_file:
        names = [plan.target.name]
    table = table_of(plan)
    for name, samples in zip(names, plan.shards, strict=True):
        yield name, _stream(plan, table, samples)
    if plan.layout == "megatron-bridge" and not plan.one_file:
        yield "_metadata.json", _bridge_metadata(plan)
    if plan.suffix == ".arrow" and not plan.one_file:
        # For `datasets.load_from_disk`, which takes the types from the Arrow schema.
        yield "state.json", _state(plan, names)
        yield "dataset_info.json", [b"{}\n"]


def _stream(plan: ExportPlan, table: Table, samples: range) -> Iterator[bytes]:
    """Yield one file of tables or JSON lines, block by block; `datasets` maps those of Arrow."""
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
            made = table.table(block)
            writer.write_table(made, max(made.num_rows, 1))  # rows of a row group, or of a batch
            yield buffer.take()
    yield buffer.take()


class _Buffer(io.BytesIO):
    """A file that keeps what is written until it is taken."""

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
    made_of = [spec.dataset, spec.order, spec.seed, plan.format, plan.mask]
    made_of += ["embed_media"] * plan.embed_media
    key = fingerprint.key([*made_of, list(plan.also)] if plan.also else made_of)
    files = [{"filename": name} for name in names]
    state = {"_data_files": files, **datasets_state(key)}
    return [json.dumps(state).encode() + b"\n"]


def _is_there(target: Path) -> bool:
    # An empty directory is nothing.
    if target.is_dir():
        return any(target.iterdir())
    return target.exists() or target.is_symlink()


def _same(plan: ExportPlan | SplitPlan, target: Path) -> Exported:
    """Return the existing export, or raise if it is another one."""
    paths, same = set(), True
    for name, stream in files_of(plan):
        path = target if plan.one_file else target / name
        same = same and _are_bytes_of(path, stream)
        paths.add(path)
    if not plan.one_file:
        same = same and paths == {path for path in target.rglob("*") if not path.is_dir()}
    if not same:
        raise UsageError(
            "exists and is not this export; nothing is replaced: name another --out or remove it",
            path=target,
        )
    size = sum(path.stat().st_size for path in paths)
    return Exported(target, _records(plan), size, len(paths), found=True)


def _are_bytes_of(path: Path, stream: Buffers) -> bool:
    try:
        with open(path, "rb") as file:
            same = all(file.read(len(data)) == data for data in map(bytes, stream))
            return same and not file.read(1)
    except OSError:
        return False


def _megatron_items(plan: ExportPlan, name: str) -> Iterator[memoryview]:
    """Yield the ``.bin`` of Megatron-LM's indexed dataset: rows one after another."""
    for block in plan.blocks(range(len(plan.run))):
        for row in plan.run.view.rows(block.rows):
            array = row.input_ids if name == "tokens" else row.loss_mask
            yield np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data


def _megatron_index(plan: ExportPlan, name: str) -> Iterator[bytes]:
    """Yield the ``.idx`` of Megatron-LM's indexed dataset.

    A row is one sequence and one document. All numbers are little-endian::

        9 bytes    MMIDIDX and two zero bytes
        uint64     version, 1
        uint8      code of the items' type: 1 is uint8, 4 is int32
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
    """Return the JSON that Megatron-Bridge's collator pads by, counted in predictions.

    Its option ``packed_metadata_path`` names the file.
    """
    packing = plan.run.spec.packing
    assert packing is not None
    length = shortest = packing["length"]
    longest = most = packs = rows = total = 0
    for samples in plan.shards:
        for block in plan.blocks(samples):
            predictions = stored_slots(plan, block) - 1
            filled = block.per_pack(predictions)
            shortest = min(shortest, int(filled.min()))
            most = max(most, int(np.diff(block.bounds).max()))
            longest = max(longest, int(predictions.max(initial=0)))
            packs += len(block)
            rows += predictions.size
            total += int(filled.sum())
    document = {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": most,
        "packing_factor": round(rows / packs, 2),
        "packing_efficiency": round(total / packs / length * 100, 2),
        "pack_size": length,
        "min_packed_seqlen": shortest,
    }
    return [json.dumps([document]).encode() + b"\n"]
