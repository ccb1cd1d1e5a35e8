"""Write the files of a plan and publish them together.

Files are staged in a hidden sibling of the target and published in one step: one file by a link, a
directory by a rename. Where the target exists, nothing is written: it is compared with the files
of the plan byte by byte, and is either the same export or refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill import fingerprint
from tokenmill.errors import UsageError
from tokenmill.files import Staging, publish_directory, writing_errors
from tokenmill.formats import megatron
from tokenmill.formats.columns import Table, table_of
from tokenmill.formats.plan import ExportPlan, SplitPlan
from tokenmill.store.commit import datasets_state

Buffers = Iterable[bytes | memoryview]


@dataclass(frozen=True)
class Exported:
    """The outcome of an export."""

    path: Path
    rows: int  # records: rows, groups or packs
    bytes: int  # of all files
    files: int
    found: bool  # it existed already


def export(plan: ExportPlan | SplitPlan) -> Exported:
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
            yield f"{name}.bin", megatron.items(plan, name)
            yield f"{name}.idx", megatron.index(plan, name)
        return
    count = len(plan.shards)
    names = [f"data-{number:05d}-of-{count:05d}{plan.suffix}" for number in range(count)]
    if plan.one_file:
        names = [plan.target.name]
    table = table_of(plan)
    for name, samples in zip(names, plan.shards, strict=True):
        yield name, _stream(plan, table, samples)
    if plan.layout == "megatron-bridge" and not plan.one_file:
        yield "_metadata.json", megatron.bridge_metadata(plan)
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
