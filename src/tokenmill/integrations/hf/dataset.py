"""Samples of a run as a lazy `datasets.Dataset`.

`datasets` reads a dataset's rows through three methods of a `datasets.table.Table` (``fast_slice``,
``fast_gather``, ``to_reader``) and derives other tables from it. `LazyTable` implements these with
a `Reader`, so select, shard, shuffle, set_format, map and pickling work as on any dataset.
Operations that need a whole column (adding a column, concatenation with another dataset) create an
ordinary table in memory, as `datasets` itself would.

The fingerprint of a dataset is computed from the content (store, order, packing), so `datasets`
hashes nothing and finds its own cached maps in another process. The columns have a *shape*:

    loss_mask        input_ids int32, loss_mask int8: the stored columns, without a copy
    labels           input_ids int32, labels int64 (-100 where a token is not trained)
    assistant_masks  input_ids int32, assistant_masks int8: TRL computes labels from these
    packs            input_ids, labels, seq_lengths int64: the rows of a pack without padding
    rows             row int64: row numbers, for a collator that reads the rows itself

Labels are those of the loader: unshifted, and -100 at the first token of every row, which no token
predicts; ``assistant_masks`` is 0 there, too. ``loss_mask`` is the stored mask, first token
included: trainers that take a mask shift it themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets.table import InMemoryTable, TableBlock, table_cast

from tokenmill import fingerprint
from tokenmill.dataset import Mixture, View, tokens_alone
from tokenmill.errors import check_one_of
from tokenmill.formats.columns import listed, weights_of
from tokenmill.integrations.trainers import FIELDS
from tokenmill.loader import WholeRun
from tokenmill.store import Store

READ_ROWS = 1000  # rows per batch of a full scan, as in `datasets`
MASKS = ("labels", "loss_mask", "assistant_masks")
SHAPES: dict[str, dict[str, tuple[str, Any]]] = {
    "loss_mask": {"input_ids": ("ids", np.int32), "loss_mask": ("", np.int8)},
    "labels": {"input_ids": ("ids", np.int32), "labels": ("labels", np.int64)},
    "assistant_masks": {"input_ids": ("ids", np.int32), "assistant_masks": ("mask", np.int8)},
    "packs": {
        "input_ids": ("ids", np.int32),
        "labels": ("labels", np.int64),
        "seq_lengths": ("length", np.int64),
    },
}
"""Columns of each shape: a field of `FIELDS` and the type of its elements."""
ROW_NUMBERS = pa.schema({"row": pa.int64()})
WEIGHTS = pa.field("loss_weights", pa.list_(pa.float32()))
"""An additional column of data with weights."""


@dataclass(frozen=True)
class Reader:
    """What a `LazyTable` is computed from; its functions must be picklable."""

    rows: int
    schema: pa.Schema
    nbytes: Callable[[], int]  # an estimate for all columns
    read: Callable[[Sequence[int]], pa.Table]


def to_hf(data: Store | View | Mixture, mask: str = "labels") -> datasets.Dataset:
    """Return rows as a lazy `datasets.Dataset`.

    Rows are in the order of the store or view. A mixture's rows are in the order in which one epoch
    interleaves them by the weights, each source in its own order.

    Args:
        data: A store, a view or a mixture.
        mask: ``labels``: columns input_ids and labels, -100 where a token is not trained and at
            the first token of every row, as in the loader. ``loss_mask``: the stored columns
            input_ids and loss_mask, without a copy. ``assistant_masks``: columns input_ids and
            assistant_masks, from which TRL computes those labels when it truncates or packs.
    """
    check_one_of("mask", mask, MASKS)
    samples = WholeRun(data, order="sequential")
    if samples.view.has_media or mask == "assistant_masks":
        tokens_alone(samples.view, f"a dataset with {mask}")
    return lazy_dataset(samples, mask)


def run_identity(samples: WholeRun) -> dict[str, Any]:
    """What determines the samples of a run, as JSON values."""
    spec = samples.spec
    return {
        "epochs": samples.epochs,
        "dataset": spec.dataset,
        "seed": spec.seed,
        "order": spec.order,
        "packing": spec.packing,
    }


def lazy_dataset(samples: WholeRun, shape: str) -> datasets.Dataset:
    """Return a dataset over samples of a run, in a shape of `SHAPES` or as ``rows``."""
    if shape == "rows":
        nbytes = partial(operator.mul, 8, len(samples))
        reader = Reader(len(samples), ROW_NUMBERS, nbytes, partial(_numbers, samples))
    else:
        columns = SHAPES[shape]
        schema = pa.schema(
            {name: pa.list_(pa.from_numpy_dtype(dtype)) for name, (_, dtype) in columns.items()}
        )
        if samples.view.has_weights:
            schema = schema.append(WEIGHTS)
        nbytes = partial(token_bytes, samples, 12 if "labels" in columns else 5)
        reader = Reader(len(samples), schema, nbytes, partial(_columns, samples, shape))
    return as_dataset(reader, {"shape": shape, **run_identity(samples)})


def token_bytes(samples: WholeRun, size: int) -> int:
    """Estimate the size of columns with this many bytes per token."""
    return samples.tokens * size


def as_dataset(reader: Reader, identity: Any) -> datasets.Dataset:
    """Return a dataset over a reader, with a fingerprint of the identity's JSON values."""
    return datasets.Dataset(LazyTable.of(reader), fingerprint=fingerprint.key(identity)[:16])


def _numbers(samples: WholeRun, indices: Sequence[int]) -> pa.Table:
    return pa.table([pa.array(samples.packs(indices).rows)], schema=ROW_NUMBERS)


def _columns(samples: WholeRun, shape: str, indices: Sequence[int]) -> pa.Table:
    found = samples.pieces(indices)
    if shape == "packs":  # an empty pack, which ``balanced`` creates, holds one untrained token
        pad = np.full(1, samples.pad_id or 0, np.int32), np.zeros(1, np.uint8)
        found = [pieces or [pad] for pieces in found]
    if shape == "loss_mask":
        table = pa.Table.from_batches(_stored(ids, mask) for ((ids, mask),) in found)
    else:
        table = pa.table(
            {
                name: listed(
                    [np.concatenate([FIELDS[field](*p) for p in ps]) for ps in found], dtype
                )
                for name, (field, dtype) in SHAPES[shape].items()
            }
        )
    if samples.view.has_weights:
        rows = samples.view.rows(samples.packs(indices).rows)
        weights = listed([weights_of(row, shape) for row in rows], np.float32)
        table = table.append_column(WEIGHTS, weights)
    return table


def _stored(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> pa.RecordBatch:
    """One row over the mapped bytes of the store, without a copy."""
    arrays = []
    for values, kind in ((ids, pa.int32()), (mask, pa.int8())):
        flat = pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(values)])
        arrays.append(pa.ListArray.from_arrays(pa.array([0, values.size], pa.int32()), flat))
    return pa.RecordBatch.from_arrays(arrays, names=list(SHAPES["loss_mask"]))


def _in_memory(name: str) -> Callable[..., Any]:
    """A method of `datasets` tables, implemented on the rows in memory."""

    def method(self: LazyTable, *arguments: Any, **named: Any) -> Any:
        return getattr(InMemoryTable(self.table), name)(*arguments, **named)

    method.__name__ = name
    return method


class LazyTable(TableBlock):  # type: ignore[misc]
    """A `datasets` table whose rows are computed when they are read.

    It has some rows and columns of the reader; the schema has its own names for them.
    """

    def __init__(
        self, reader: Reader, span: range, columns: Sequence[str], schema: pa.Schema
    ) -> None:
        # The parent's constructor would need the rows.
        self._reader = reader
        self._span = span
        self._columns = list(columns)
        self._schema = schema

    @classmethod
    def of(cls, reader: Reader) -> LazyTable:
        return cls(reader, range(reader.rows), reader.schema.names, reader.schema)

    def __reduce__(self) -> Any:
        return LazyTable, (self._reader, self._span, self._columns, self._schema)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTable:
        return self  # immutable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyTable) and self.__reduce__()[1:] == other.__reduce__()[1:]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LazyTable({self.num_rows} rows, {', '.join(self.column_names)})"

    __str__ = __repr__

    # Rows

    def _read(self, numbers: Sequence[int]) -> pa.Table:
        if not len(numbers):
            return self._schema.empty_table()
        found = self._reader.read(numbers).select(self._columns)
        return table_cast(found.rename_columns(self._schema.names), self._schema)

    def fast_slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        if offset < 0:
            raise IndexError("offset must be non-negative")
        stop = len(self._span) if length is None else offset + max(length, 0)
        return self._read(self._span[offset:stop])

    def fast_gather(self, indices: Any) -> pa.Table:
        numbers = np.asarray(indices, dtype=np.int64)
        return self._read((numbers + self._span.start).tolist())

    def to_reader(self, max_chunksize: int | None = None) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches(max_chunksize))

    def _batches(self, size: int | None = None) -> Iterator[pa.RecordBatch]:
        size = min(size or READ_ROWS, READ_ROWS)
        for first in range(0, len(self._span), size):
            yield from self._read(self._span[first : first + size]).to_batches()

    @property
    def table(self) -> pa.Table:
        """All rows, in memory."""
        return pa.Table.from_batches(self._batches(), schema=self._schema)

    def column(self, i: int | str) -> pa.ChunkedArray:
        return self.select([i]).table.column(0)

    filter = _in_memory("filter")
    add_column = _in_memory("add_column")
    append_column = _in_memory("append_column")
    set_column = _in_memory("set_column")

    # Metadata

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def num_rows(self) -> int:
        return len(self._span)

    def __len__(self) -> int:
        return len(self._span)

    @property
    def num_columns(self) -> int:
        return len(self._columns)

    @property
    def column_names(self) -> list[str]:
        return list(self._schema.names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns

    @property
    def nbytes(self) -> int:
        """An estimate."""
        rows = self._reader.nbytes() * len(self._span) // max(self._reader.rows, 1)
        return rows * len(self._columns) // len(self._reader.schema)

    # Derived tables

    def slice(self, offset: int = 0, length: int | None = None) -> LazyTable:
        stop = len(self._span) if length is None else offset + length
        return LazyTable(self._reader, self._span[offset:stop], self._columns, self._schema)

    def select(self, columns: Sequence[str | int]) -> LazyTable:
        names = self._schema.names
        places = [names.index(name) if isinstance(name, str) else name for name in columns]
        schema = pa.schema([self._schema.field(place) for place in places], self._schema.metadata)
        kept = [self._columns[place] for place in places]
        return LazyTable(self._reader, self._span, kept, schema)

    def drop(self, columns: str | Sequence[str]) -> LazyTable:
        dropped = {columns} if isinstance(columns, str) else set(columns)
        missing = dropped - set(self._schema.names)
        if missing:
            raise KeyError(f"column {sorted(missing)[0]!r} does not exist")
        return self.select([name for name in self._schema.names if name not in dropped])

    def remove_column(self, i: int) -> LazyTable:
        return self.select([place for place in range(self.num_columns) if place != i])

    def rename_columns(self, names: Sequence[str]) -> LazyTable:
        fields = [f.with_name(name) for f, name in zip(self._schema, names, strict=True)]
        return self.cast(pa.schema(fields, self._schema.metadata))

    def replace_schema_metadata(self, metadata: Any = None) -> LazyTable:
        return self.cast(self._schema.with_metadata(metadata))

    def cast(self, target_schema: pa.Schema, *_: Any, **__: Any) -> LazyTable:
        return LazyTable(self._reader, self._span, self._columns, target_schema)

    def flatten(self, *_: Any, **__: Any) -> LazyTable:
        return self  # nothing is nested

    def combine_chunks(self, *_: Any, **__: Any) -> LazyTable:
        return self  # there are no chunks
