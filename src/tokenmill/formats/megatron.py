"""Megatron-LM's indexed dataset: a ``.bin`` of tokens and an ``.idx`` that says where they are.

The index, all numbers little-endian::

    9 bytes    MMIDIDX and two zero bytes
    uint64     version, 1
    uint8      code of the items' type: 1 is uint8, 4 is int32
    uint64     sequences
    uint64     documents + 1
    int32[]    items of every sequence
    int64[]    byte at which every sequence starts in the .bin
    int64[]    number of the first sequence of every document, and one past the last

Here a row is one sequence and one document. The format knows tokens only, so the loss mask travels
as a second pair of the same shape: item i of sequence r of ``loss_mask`` belongs to item i of
sequence r of ``tokens``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from tokenmill.formats.plan import ExportPlan

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_CODES = {"tokens": (4, 4), "loss_mask": (1, 1)}  # code and bytes of an item
_CHUNK = 1 << 18  # rows at a time in the index: 2 MiB


def items(plan: ExportPlan, name: str) -> Iterator[memoryview]:
    """The ``.bin``: rows one after another."""
    for block in plan.blocks(range(len(plan.run))):
        for row in plan.run.view.rows(block.rows):
            array = row.input_ids if name == "tokens" else row.loss_mask
            yield np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data


def index(plan: ExportPlan, name: str) -> Iterator[bytes]:
    """The ``.idx``."""
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
