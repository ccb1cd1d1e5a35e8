"""From a plan to visible files: all of them in one step, or none.

In goes an `ExportPlan`, out comes what was made (`Exported`); `tokenmill.export` and ``tokenmill
export`` call `export`. `files_of` names the files of a plan, each with a stream of its bytes.
`export` stages them as a hidden sibling of the target and publishes: one file by a link, a
directory by a rename. Where the target is there already, nothing is written: the streams are
compared with it, byte by byte, and it is either the same export (fine) or something else (refused).
Nothing is ever replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill import fingerprint
from tokenmill.errors import UsageError
from tokenmill.files import Staging, publish_directory, writing_errors
from tokenmill.formats import megatron
from tokenmill.formats.megatron_bridge import METADATA, metadata_of
from tokenmill.formats.plan import ExportPlan, SplitPlan
from tokenmill.formats.streams import arrow_stream, json_lines, parquet_stream
from tokenmill.formats.tables import TableMaker, maker_of
from tokenmill.store.commit import datasets_state

Buffers = Iterable[bytes | memoryview]


@dataclass(frozen=True)
class Exported:
    """What an export made, or found.

    Attributes:
        path: The file or directory.
        rows: Records in it: rows, or packs.
        bytes: Size of all files together.
        files: How many there are.
        found: Whether it was there already.
    """

    path: Path
    rows: int
    bytes: int
    files: int
    found: bool


def export(plan: ExportPlan | SplitPlan) -> Exported:
    """Make the files of a plan.

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
    """Names and streams, one after the other."""
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
    maker = None if plan.format == "jsonl" else maker_of(plan)
    for name, samples in zip(names, plan.shards, strict=True):
        yield name, _stream(plan, maker, samples)
    if plan.layout == "megatron-bridge" and not plan.one_file:
        yield METADATA, metadata_of(plan)
    if plan.suffix == ".arrow" and not plan.one_file:
        # What `datasets.load_from_disk` asks for. Types are taken from the Arrow schema.
        yield "state.json", _state(plan, names)
        yield "dataset_info.json", [b"{}\n"]


def _stream(plan: ExportPlan, maker: TableMaker | None, samples: range) -> Buffers:
    blocks = plan.blocks(samples)
    if maker is None:
        return json_lines(plan, blocks)
    write = parquet_stream if plan.suffix == ".parquet" else arrow_stream
    return write(maker.schema, (maker.table(block) for block in blocks))


def _state(plan: ExportPlan, names: list[str]) -> Buffers:
    spec = plan.run.spec
    made_of = [spec.dataset, spec.order, spec.seed, plan.format, plan.mask]
    made_of += ["embed_media"] * plan.embed_media
    key = fingerprint.key([*made_of, list(plan.also)] if plan.also else made_of)
    files = [{"filename": name} for name in names]
    state = {"_data_files": files, **datasets_state(key)}
    return [json.dumps(state).encode() + b"\n"]


def _is_there(target: Path) -> bool:
    """Whether something is at the target; an empty directory is nothing."""
    if target.is_dir():
        return any(target.iterdir())
    return target.exists() or target.is_symlink()


def _same(plan: ExportPlan | SplitPlan, target: Path) -> Exported:
    """What is there, when it is this export; else a refusal."""
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
