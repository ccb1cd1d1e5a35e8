"""A table that is computed: what a lazy `datasets.Dataset` stands on.

`datasets` keeps every dataset's rows in a `datasets.table.Table`, asks it for rows through three
methods (``fast_slice``, ``fast_gather``, ``to_reader``), and derives other tables from it (fewer
columns, fewer rows, other metadata). `LazyTable` answers these from a `RowReader`, which reads rows
by number, without holding one, so select, shard, shuffle, set_format, map and pickling work as on
any dataset.

What needs the whole column at once (``dataset.data.column(0)``, adding a column, concatenation
with another dataset) makes an ordinary table in memory, as `datasets` itself would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from datasets.table import InMemoryTable, TableBlock, table_cast

READ_ROWS = 1000  # rows computed at a time where all are asked for, as `datasets` does itself


class RowReader(Protocol):
    """What a table is computed from."""

    def __len__(self) -> int: ...

    @property
    def schema(self) -> pa.Schema:
        """Columns and their types."""

    @property
    def nbytes(self) -> int:
        """About how many bytes all columns have together."""

    def read(self, indices: Sequence[int]) -> pa.Table:
        """Samples by number."""


def _in_memory(name: str) -> Callable[..., Any]:
    """A method that `datasets` may call on any table, done on the rows in memory."""

    def method(self: LazyTable, *arguments: Any, **named: Any) -> Any:
        return getattr(InMemoryTable(self.table), name)(*arguments, **named)

    method.__name__, method.__doc__ = name, f"``{name}`` of the rows in memory."
    return method


class LazyTable(TableBlock):  # type: ignore[misc]
    """Rows of a run, computed when asked for.

    Args:
        samples: Where rows come from.
        span: Which of them, without gaps.
        columns: Which of their columns.
        schema: What these are called here, with types and metadata.
    """

    def __init__(
        self, samples: RowReader, span: range, columns: Sequence[str], schema: pa.Schema
    ) -> None:
        # Not the parent's: it would want the rows.
        self._samples = samples
        self._span = span
        self._columns = list(columns)
        self._schema = schema

    @classmethod
    def of(cls, samples: RowReader) -> LazyTable:
        """All rows and columns."""
        schema = samples.schema
        return cls(samples, range(len(samples)), schema.names, schema)

    def __reduce__(self) -> Any:
        return LazyTable, (self._samples, self._span, self._columns, self._schema)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTable:
        return self  # nothing in it changes

    # Rows

    def _read(self, numbers: Sequence[int]) -> pa.Table:
        if not len(numbers):
            return self._schema.empty_table()
        found = self._samples.read(numbers).select(self._columns)
        found = found.rename_columns(self._schema.names)
        return table_cast(found, self._schema)

    def fast_slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        """Neighbouring rows."""
        if offset < 0:
            raise IndexError("offset must be non-negative")
        stop = len(self._span) if length is None else offset + max(length, 0)
        return self._read(self._span[offset:stop])

    def fast_gather(self, indices: Any) -> pa.Table:
        """Rows in the order asked for."""
        numbers = np.asarray(indices, dtype=np.int64)
        return self._read((numbers + self._span.start).tolist())

    def to_reader(self, max_chunksize: int | None = None) -> pa.RecordBatchReader:
        """All rows, some at a time."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches_of(max_chunksize))

    def _batches_of(self, size: int | None) -> Iterator[pa.RecordBatch]:
        size = min(size or READ_ROWS, READ_ROWS)
        for first in range(0, len(self._span), size):
            yield from self._read(self._span[first : first + size]).to_batches()

    @property
    def table(self) -> pa.Table:
        """All rows, in memory."""
        return pa.Table.from_batches(self._batches_of(None), schema=self._schema)

    # What is known without a row

    @property
    def schema(self) -> pa.Schema:
        """Names, types and metadata."""
        return self._schema

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return len(self._span)

    def __len__(self) -> int:
        return len(self._span)

    @property
    def num_columns(self) -> int:
        """How many columns."""
        return len(self._columns)

    @property
    def column_names(self) -> list[str]:
        """Their names."""
        return list(self._schema.names)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.num_rows, self.num_columns

    @property
    def nbytes(self) -> int:
        """About how many bytes all rows would take in memory."""
        whole = self._samples.nbytes * len(self._span) // max(len(self._samples), 1)
        return whole * len(self._columns) // len(self._samples.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyTable) and self.__reduce__()[1:] == other.__reduce__()[1:]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LazyTable({self.num_rows} rows, {', '.join(self.column_names)})"

    __str__ = __repr__

    # Tables derived from this one

    def slice(self, offset: int = 0, length: int | None = None) -> LazyTable:
        """Fewer rows."""
        stop = len(self._span) if length is None else offset + length
        return LazyTable(self._samples, self._span[offset:stop], self._columns, self._schema)

    def select(self, columns: Sequence[str | int]) -> LazyTable:
        """Fewer columns."""
        names = self._schema.names
        places = [names.index(name) if isinstance(name, str) else name for name in columns]
        schema = pa.schema([self._schema.field(place) for place in places], self._schema.metadata)
        kept = [self._columns[place] for place in places]
        return LazyTable(self._samples, self._span, kept, schema)

    def drop(self, columns: str | Sequence[str]) -> LazyTable:
        """Without some columns."""
        dropped = {columns} if isinstance(columns, str) else set(columns)
        missing = dropped - set(self._schema.names)
        if missing:
            raise KeyError(f"column {sorted(missing)[0]!r} does not exist")
        return self.select([name for name in self._schema.names if name not in dropped])

    def remove_column(self, i: int) -> LazyTable:
        """Without one column."""
        return self.select([place for place in range(self.num_columns) if place != i])

    def rename_columns(self, names: Sequence[str]) -> LazyTable:
        """Other names for the same columns."""
        fields = [f.with_name(name) for f, name in zip(self._schema, names, strict=True)]
        schema = pa.schema(fields, self._schema.metadata)
        return LazyTable(self._samples, self._span, self._columns, schema)

    def replace_schema_metadata(self, metadata: Any = None) -> LazyTable:
        """The same rows with other metadata."""
        schema = self._schema.with_metadata(metadata)
        return LazyTable(self._samples, self._span, self._columns, schema)

    def cast(self, target_schema: pa.Schema, *_: Any, **__: Any) -> LazyTable:
        """The same rows in other types."""
        return LazyTable(self._samples, self._span, self._columns, target_schema)

    def flatten(self, *_: Any, **__: Any) -> LazyTable:
        """Nothing is nested."""
        return self

    def combine_chunks(self, *_: Any, **__: Any) -> LazyTable:
        """There are no chunks."""
        return self

    def column(self, i: int | str) -> pa.ChunkedArray:
        """One column, in memory."""
        return self.select([i]).table.column(0)

    filter = _in_memory("filter")
    add_column = _in_memory("add_column")
    append_column = _in_memory("append_column")
    set_column = _in_memory("set_column")
