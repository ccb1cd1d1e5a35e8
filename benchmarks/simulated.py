"""A simulated cache of a million slices, without terabytes of data.

The *sources* are sparse files of the real size (1,000 blocks of 8 MiB each) with published row
indexes, so that the real plan reads real tables of blocks. The *slices* are stand-ins: every slice
has its own commit record and key, and its two data files are hard links to one real slice of a few
rows. Nothing is synced. A preparation finds every slice built and runs the rest: plan, search for
missing slices, commit, open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

import tokenmill
from tokenmill.build.blocks import cache_of
from tokenmill.build.calls import resolve_call
from tokenmill.build.executors import resolve_executor
from tokenmill.build.plan import Plan
from tokenmill.build.run import plan
from tokenmill.sources.bytefile import FileEntry, LocalFile
from tokenmill.sources.discover import Found
from tokenmill.sources.index import Assembler, BlockEntry, IndexCache, index_key, write_index
from tokenmill.sources.rows import write_note
from tokenmill.store.columns import SliceColumns
from tokenmill.store.slice_writer import EncodedSlice, encode_slice

BLOCK = 8 << 20  # bytes of raw rows in a slice
BLOCKS_PER_FILE = 1000  # 8 GB files
ROWS = 4  # rows of a stand-in slice
TOKENS = 12  # tokens of each of its rows
MAX_LINKS = 30_000  # hard links to one file; ext4 allows 65,000
TOKENIZER = Path(tokenmill.__file__).parent / "examples" / "tokenizer"


class _Scan:
    """A scan for `write_index` with computed instead of read blocks."""

    def __init__(self, name: str, blocks: int) -> None:
        self.bytes = blocks * BLOCK
        self.assembler = Assembler()
        self.assembler.rows = blocks * ROWS
        for number in range(blocks):
            digest = xxhash.xxh3_128_hexdigest(f"{name} {number}".encode())
            first = number * ROWS
            self.assembler.blocks.append(
                BlockEntry(number * BLOCK, BLOCK, first, ROWS, first + 1, ROWS, digest)
            )

    def starts(self) -> Iterator[np.ndarray[Any, Any]]:
        yield np.append(np.arange(self.assembler.rows) * (BLOCK // ROWS), self.bytes)


def make_sources(directory: Path, cache: Path, slices: int) -> Path:
    """Create sparse files with published row indexes, ``slices`` blocks in total."""
    directory.mkdir(parents=True)
    index_cache = IndexCache(cache.absolute())
    for number, first in enumerate(range(0, slices, BLOCKS_PER_FILE)):
        path = directory / f"part-{number:05}.jsonl"
        blocks = min(BLOCKS_PER_FILE, slices - first)
        with open(path, "wb") as file:
            file.truncate(blocks * BLOCK)
        scan = _Scan(path.name, blocks)
        document = write_index(index_cache, scan)
        opened = LocalFile(str(path))
        entry = FileEntry(
            path=str(path), location=str(path), kind="lines", signature=opened.signature,
            is_stable=True, rows=document.rows, bytes=document.bytes, digest=document.digest,
            index=index_key(document.digest),
        )  # fmt: skip
        write_note(Found(str(path), "jsonl", ""), opened, index_cache, entry)
    return directory


def arguments_of(sources: Path, cache: Path) -> dict[str, Any]:
    """Return the arguments that prepare the simulated sources."""
    return {
        "sources": str(sources), "tokenizer": str(TOKENIZER), "tokenizer_backend": "file",
        "executor": "inline", "cache_dir": str(cache),
    }  # fmt: skip


def planned(sources: Path, cache: Path) -> Plan:
    """Return the plan of this preparation."""
    arguments = arguments_of(sources, cache)
    recipe, options = resolve_call(arguments.pop("sources"), arguments.pop("tokenizer"), arguments)
    workers = resolve_executor(options.executor, options.num_workers)
    return plan(recipe, options, workers, cache_of(cache))


def make_slices(plan: Plan, cache: Path) -> None:
    """Publish a stand-in for every slice of a plan, without syncing anything."""
    layout = cache_of(cache)
    for prefix in range(256):
        (layout.slices / f"{prefix:02x}").mkdir(parents=True, exist_ok=True)
    model = _model("0" * 40)
    slices = str(layout.slices)
    shared = Path()
    for number, (key, _) in enumerate(plan.walk()):
        if number % MAX_LINKS == 0:
            shared = layout.root / f"model-{number}"
            shared.mkdir()
            (shared / "tokens").write_bytes(model.tokens)
            (shared / "meta").write_bytes(model.meta)
        stem = f"{slices}/{key[:2]}/{key}"
        os.link(shared / "tokens", f"{stem}.arrow")
        os.link(shared / "meta", f"{stem}.meta.arrow")
        with open(f"{stem}.json", "wb") as file:
            file.write(msgspec.structs.replace(model.record, slice=key).encode())


def _model(key: str) -> EncodedSlice:
    starts = np.arange(ROWS + 1, dtype=np.int64) * TOKENS
    mask = np.ones(ROWS * TOKENS, np.uint8)
    mask[starts[:-1]] = 0
    rows = np.arange(ROWS)
    columns = SliceColumns(
        ids=np.arange(ROWS * TOKENS, dtype=np.int32), mask=mask, starts=starts,
        row=rows.astype(np.int32), part=np.zeros(ROWS, np.int32), line=rows.astype(np.int64),
        offset=rows.astype(np.int64) * (BLOCK // ROWS),
        raw_length=np.full(ROWS, BLOCK // ROWS - 1, np.int64),
        digest=np.arange(ROWS, dtype=np.uint64), turn_ends=np.full(ROWS, TOKENS, np.int32),
        turn_roles=np.zeros(ROWS, np.int8), turn_starts=np.arange(ROWS + 1, dtype=np.int64),
        roles=("assistant",), source_rows=ROWS, rows_in=ROWS,
    )  # fmt: skip
    return encode_slice(key, columns)
