"""Write the files of a plan and publish them together.

Files are staged in a hidden sibling of the target and published in one step: one file by a link, a
directory by a rename. Where the target exists, nothing is written: it is compared with the files
of the plan byte by byte, and is either the same export or refused.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill import fingerprint
from tokenmill.dataset import Mixture, View
from tokenmill.errors import UsageError
from tokenmill.files import Staging, publish_directory, writing_errors
from tokenmill.formats.columns import Table, stored_slots, table_of
from tokenmill.formats.plan import ExportPlan, SplitPlan, unit_of
from tokenmill.loader import WholeRun
from tokenmill.packing import Pack, Slots
from tokenmill.store import Store
from tokenmill.store.commit import datasets_state

Buffers = Iterable[bytes | memoryview]

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_VERSION = 1
MEGATRON_CODES = {"tokens": (4, 4), "loss_mask": (1, 1)}  # code and bytes of an item
INDEX_CHUNK = 1 << 18  # rows at a time in the index: 2 MiB


@dataclass(frozen=True)
class Exported:
    """The outcome of an export."""

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
    """Write the files of a plan, or find them at the target.

    Raises:
        UsageError: Something else is where the files would go.
        CacheError: The disk is full or cannot be written; nothing was published.
    """
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
    return Exported(target, plan.rows, size, count, found=False)


def files_of(plan: ExportPlan | SplitPlan) -> Iterator[tuple[str, Buffers]]:
    """Yield the name and the bytes of every file."""
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
        # What `datasets.load_from_disk` asks for. Types are taken from the Arrow schema.
        yield "state.json", _state(plan, names)
        yield "dataset_info.json", [b"{}\n"]


def _stream(plan: ExportPlan, table: Table, samples: range) -> Iterator[bytes]:
    """Yield one file of tables or JSON lines, block by block.

    Parquet has a row group per block, compressed with zstd; Arrow is an uncompressed IPC stream,
    which `datasets` maps.
    """
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
            if plan.suffix == ".parquet":
                writer.write_table(made, row_group_size=max(made.num_rows, 1))
            else:
                writer.write_table(made)
            yield from buffer.take()
    yield from buffer.take()


class _Buffer(io.RawIOBase):
    """A file that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: object) -> int:
        held = bytes(memoryview(data))  # type: ignore[arg-type]  # whatever pyarrow hands over
        self._held.append(held)
        self._size += len(held)
        return len(held)

    def take(self) -> list[bytes]:
        held, self._held = self._held, []
        return held


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
    size, names = 0, set()
    for name, stream in files_of(plan):
        path = target if plan.one_file else target / name
        size += _compared(path, stream, target)
        names.add(name)
    if not plan.one_file:
        there = {path for path in target.rglob("*") if not path.is_dir()}
        if {path.relative_to(target).as_posix() for path in there} != names:
            raise _something_else(target)
    return Exported(target, plan.rows, size, len(names), found=True)


def _compared(path: Path, stream: Buffers, target: Path) -> int:
    size = 0
    try:
        with open(path, "rb") as file:
            for buffer in stream:
                expected = bytes(buffer)
                if file.read(len(expected)) != expected:
                    raise _something_else(target)
                size += len(expected)
            if file.read(1):
                raise _something_else(target)
    except OSError as error:
        raise _something_else(target) from error
    return size


def _something_else(target: Path) -> UsageError:
    return UsageError(
        "exists and is not this export; nothing is replaced: name another --out or remove it",
        path=target,
    )


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
    for lengths in _lengths(plan):
        yield lengths.astype("<i4").tobytes()
    begin = 0
    for lengths in _lengths(plan):
        ends = begin + np.cumsum(lengths, dtype=np.int64) * size
        yield (ends - lengths * size).astype("<i8").tobytes()
        begin = int(ends[-1])
    for first in range(0, rows + 1, INDEX_CHUNK):
        yield np.arange(first, min(first + INDEX_CHUNK, rows + 1), dtype="<i8").tobytes()


def _lengths(plan: ExportPlan) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    for first in range(0, len(plan.run), INDEX_CHUNK):
        yield plan.run.packs(range(first, min(first + INDEX_CHUNK, len(plan.run)))).lengths


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
