"""Files of Megatron-LM's indexed dataset, and the metadata of Megatron-Bridge's packed dataset.

The index of an indexed dataset, all numbers little-endian::

    9 bytes    MMIDIDX and two zero bytes
    uint64     version, 1
    uint8      code of the items' type: 1 is uint8, 4 is int32
    uint64     sequences
    uint64     documents + 1
    int32[]    items of every sequence
    int64[]    byte at which every sequence starts in the .bin
    int64[]    number of the first sequence of every document, and one past the last

A row is one sequence and one document. The loss mask is a second pair of files: item i of sequence
r of ``loss_mask`` belongs to item i of sequence r of ``tokens``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np

from tokenmill.formats.columns import stored_slots
from tokenmill.formats.plan import ExportPlan

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_CODES = {"tokens": (4, 4), "loss_mask": (1, 1)}  # code and bytes of an item
_CHUNK = 1 << 18  # rows at a time in the index: 2 MiB


def items(plan: ExportPlan, name: str) -> Iterator[memoryview]:
    """Yield the ``.bin``: rows one after another."""
    for block in plan.blocks(range(len(plan.run))):
        for row in plan.run.view.rows(block.rows):
            array = row.input_ids if name == "tokens" else row.loss_mask
            yield np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data


def index(plan: ExportPlan, name: str) -> Iterator[bytes]:
    """Yield the ``.idx``."""
    code, size = _CODES[name]
    rows = len(plan.run)
    yield _MAGIC + struct.pack("<QBQQ", _VERSION, code, rows, rows + 1)
    for lengths in _lengths(plan):
        yield lengths.astype("<i4").tobytes()
    begin = 0
    for lengths in _lengths(plan):
        ends = begin + np.cumsum(lengths, dtype=np.int64) * size
        yield (ends - lengths * size).astype("<i8").tobytes()
        begin = int(ends[-1])
    for first in range(0, rows + 1, _CHUNK):
        yield np.arange(first, min(first + _CHUNK, rows + 1), dtype="<i8").tobytes()


def _lengths(plan: ExportPlan) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    for first in range(0, len(plan.run), _CHUNK):
        yield plan.run.packs(range(first, min(first + _CHUNK, len(plan.run)))).lengths


def bridge_metadata(plan: ExportPlan) -> list[bytes]:
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
