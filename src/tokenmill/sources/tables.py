"""Read Parquet and Arrow files: record batches, and rows as the dicts of equivalent JSON.

Null members of structs are dropped at every level, because Arrow adds them to ragged records. Nulls
inside lists stay. Maps with string keys become objects, binary becomes base64, dates and times
ISO 8601, durations seconds, decimals strings. A row with a value without JSON form (NaN,
infinities, other keys, invalid UTF-8) is bad.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill._core.paths import is_network
from tokenmill._core.process import RecentValues
from tokenmill._core.ranged import RangedStream, RemoteFile
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.sources.block import Value
from tokenmill.sources.bytefile import Span
from tokenmill.sources.limits import (
    COLUMNAR_BLOCK,
    DECODED_BYTES,
    FREE_EXPANSION,
    MAX_BATCH,
    MAX_EXPANSION,
    MAX_NESTING,
    MAX_ROW,
)
from tokenmill.sources.parse import over_limit

BATCH_ROWS = 1024  # rows decoded at once
READ_BYTES = 256 << 10  # bytes of a column of a local Parquet file read at once
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
ARROW_FILE = b"ARROW1"
Convert = Callable[[Any], Any]
MAX_ROW_BYTES = 4 * MAX_ROW  # decoded; an integer has 8 bytes decoded and 2 in JSON
_CANDIDATE = MAX_ROW // 6  # decoded bytes; JSON escapes turn one byte into at most six


class RowGroup(NamedTuple):
    """A row group of Parquet, or a record batch of Arrow."""

    rows: int
    bytes: int  # decoded


def plan_ranges(
    groups: Sequence[RowGroup], target: int = COLUMNAR_BLOCK
) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, end row, decoded bytes) of ranges of about the target size.

    A range is part of one group or consists of complete small groups. Ranges depend on the sizes of
    groups alone.
    """
    first = row = size = 0
    for group in groups:
        if row > first and size + group.bytes > target:
            yield first, row, size
            first, size = row, 0
        pieces = min(-(-group.bytes // target), group.rows)
        if pieces > 1:
            for piece in range(pieces):
                start = row + group.rows * piece // pieces
                stop = row + group.rows * (piece + 1) // pieces
                yield start, stop, group.bytes * (stop - start) // group.rows
            first, size = row + group.rows, 0
        else:
            size += group.bytes
        row += group.rows
    if row > first:
        yield first, row, size


@contextlib.contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        text = str(error).strip().splitlines()
        raise SourceError(
            f"cannot be read; it may be truncated or damaged: {text[0] if text else error!r}",
            path=path,
        ) from error


class Table:
    schema: Any

    def __init__(self, path: str) -> None:
        self.path = path
        self.groups: list[RowGroup] = []

    @functools.cached_property
    def starts(self) -> list[int]:
        return list(accumulate((group.rows for group in self.groups), initial=0))

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def group_batches(self, group: int) -> Iterator[Any]:
        raise NotImplementedError


class ParquetTable(Table):
    def __init__(self, location: str | RemoteFile, path: str) -> None:
        super().__init__(path)
        self.location = location
        with arrow_errors(path):
            file = self._file(None)
            footer = self._footer = file.metadata
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                self.groups.append(RowGroup(group.num_rows, group.total_byte_size))
            self.schema = file.schema_arrow

    def _file(self, footer: Any) -> Any:
        if isinstance(self.location, str):
            # Read page by page: a row group may be the whole file, and only its start be needed.
            return pq.ParquetFile(
                self.location, metadata=footer, buffer_size=READ_BYTES, pre_buffer=False
            )
        return pq.ParquetFile(RangedStream(self.location), metadata=footer)

    def group_batches(self, group: int) -> Iterator[Any]:
        with arrow_errors(self.path):
            rows = self._rows_at_once(group)
            # Threads must not share a reader, and opening one is cheap.
            yield from self._file(self._footer).iter_batches(
                batch_size=rows, row_groups=[group], use_threads=False
            )

    def _rows_at_once(self, group: int) -> int:
        """Return how many rows to decode at once: a dictionary can repeat a long value."""
        part, bytes_per_row = self._footer.row_group(group), 1
        rows = max(part.num_rows, 1)
        for number in range(part.num_columns):
            column = part.column(number)
            size, compressed = column.total_uncompressed_size, column.total_compressed_size
            if size > FREE_EXPANSION and size > MAX_EXPANSION * compressed:
                raise SourceError(
                    f"column {column.path_in_schema!r} expands more than {MAX_EXPANSION} times;"
                    " this may be a zip bomb",
                    path=self.path,
                )
            value = 8
            if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY":
                value = self._dictionary_bytes(column)
            bytes_per_row += max(size // rows, -(-column.num_values // rows) * value)
        return min(max(MAX_BATCH // bytes_per_row, 1), BATCH_ROWS)

    def _dictionary_bytes(self, column: Any) -> int:
        """Return the size of a dictionary page, the limit of the size of its values."""
        length = 16  # of the type and the size in the header of a page
        if isinstance(self.location, str):
            with open(self.location, "rb") as file:
                header = os.pread(file.fileno(), length, column.dictionary_page_offset)
        else:
            header = self.location.pread(length, column.dictionary_page_offset)
        size = 0
        if header[:3] == b"\x15\x04\x15":  # Thrift's compact protocol: a dictionary page, its size
            for place, byte in enumerate(header[3:8]):
                size |= (byte & 0x7F) << 7 * place
                if byte < 0x80:
                    return size >> 1
        return int(column.total_uncompressed_size)


class ArrowTable(Table):
    """A local Arrow IPC file or stream."""

    def __init__(self, location: str, path: str) -> None:
        super().__init__(path)
        self.location = location
        with arrow_errors(path):
            with open(location, "rb") as file:
                self._is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
                if not self._is_file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - len(STREAM_END)))
                    if file.read() != STREAM_END:
                        raise SourceError(
                            "the stream has no end marker; the file is truncated", path=path
                        )
            with self._reader() as reader:
                self.schema = reader.schema
                for batch in self._all(reader):
                    self.groups.append(RowGroup(batch.num_rows, batch.nbytes))
        self._spare: list[tuple[int, int, Any]] = []  # (process, next batch, reader)

    def _reader(self) -> Any:
        # Mapped, so that skipping costs nothing, except where a map can crash the process.
        if is_network(self.location):
            source = pa.OSFile(self.location)
        else:
            source = pa.memory_map(self.location)
        return pa.ipc.open_file(source) if self._is_file else pa.ipc.open_stream(source)

    def _all(self, reader: Any) -> Iterator[Any]:
        if self._is_file:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        else:
            yield from reader

    def group_batches(self, group: int) -> Iterator[Any]:
        with arrow_errors(self.path):
            batch = self._batch(group)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)

    def _batch(self, group: int) -> Any:
        if self._is_file:
            with self._reader() as reader:
                return reader.get_batch(group)
        try:
            process, position, reader = self._spare.pop()  # another thread opens its own
        except IndexError:
            process, position, reader = 0, 0, None
        # A reader opened before a fork may share its file position with the parent.
        if process != os.getpid() or position > group:
            position, reader = 0, self._reader()
        try:
            while position < group:
                reader.read_next_batch()
                position += 1
            batch = reader.read_next_batch()
        except StopIteration:
            raise SourceError(f"the file ends before batch {group}", path=self.path) from None
        self._spare[:] = [(os.getpid(), group + 1, reader)]
        return batch


def walk_spans(file: RemoteFile) -> tuple[Span, ...]:
    """Find the schema and the batches of an Arrow file or stream by reading it once.

    Workers then fetch only the bytes of their batches.
    """
    stream = RangedStream(file)
    with arrow_errors(file.path):
        is_file = file.pread(len(ARROW_FILE), 0) == ARROW_FILE
        mark = ARROW_FILE if is_file else STREAM_END
        if file.pread(len(mark), max(0, file.size - len(mark))) != mark:
            raise SourceError("the stream has no end marker; the file is truncated", path=file.path)
        start = stream.seek(8 if is_file else 0)
        source = pa.PythonFile(stream, mode="r")
        schema = pa.ipc.read_schema(pa.ipc.read_message(source))
        _refuse_dictionaries(schema, file.path)
        spans = [Span(0, 0, start, stream.tell())]
        while True:
            start = stream.tell()
            try:
                message = pa.ipc.read_message(source)
            except EOFError:
                return tuple(spans)
            batch = pa.ipc.read_record_batch(message, schema)
            spans.append(Span(batch.num_rows, batch.nbytes, start, stream.tell()))


def _refuse_dictionaries(schema: Any, path: str) -> None:
    # The dictionaries of a batch may be anywhere before it in the file.
    for field in schema:
        if pa.types.is_dictionary(field.type):
            raise SourceError(
                f"column {field.name!r} is dictionary-encoded, which is not supported in remote "
                "Arrow files; download the file, or save it as Parquet",
                path=path,
            )


class SpannedTable(Table):
    """Record batches of a remote Arrow file, read by span; the first starts at ``first_row``."""

    def __init__(
        self, file: RemoteFile, path: str, spans: Sequence[Span], first_row: int = 0
    ) -> None:
        super().__init__(path)
        self._file = file
        head, *self._spans = spans
        with arrow_errors(path):
            data = file.pread(head.stop - head.start, head.start)
            self.schema = pa.ipc.read_schema(pa.py_buffer(data))
        self.groups = [RowGroup(span.rows, span.bytes) for span in self._spans]
        self.starts = list(accumulate((group.rows for group in self.groups), initial=first_row))

    def group_batches(self, group: int) -> Iterator[Any]:
        span = self._spans[group]
        with arrow_errors(self.path):
            data = self._file.pread(span.stop - span.start, span.start)
            message = pa.ipc.read_message(pa.py_buffer(data))
            batch = pa.ipc.read_record_batch(message, self.schema)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                # Copied, because a slice would keep the whole batch in memory.
                part = batch.slice(start, BATCH_ROWS).serialize()
                yield pa.ipc.read_record_batch(part, self.schema)


# --- rows as dicts ----------------------------------------------------------------------------

encode = msgspec.json.Encoder().encode  # the raw form of a row: compact, in the order of the schema


class _NoFormError(Exception):
    """A value has no JSON form."""


_PROBLEMS = (_NoFormError, ValueError, pa.ArrowException)  # exceptions of a conversion


class CheckedBatch(NamedTuple):
    """A record batch after validation, which costs as much for one row as for all."""

    batch: Any  # if valid, cast to types that have Python values
    is_valid: bool  # if not, each row is validated separately
    is_large: bool  # a row may be over the limit

    def slice(self, first: int, count: int) -> CheckedBatch:
        return self._replace(batch=self.batch.slice(first, count))


class RowForm:
    def __init__(self, schema: Any, path: str) -> None:
        self._path = path
        try:
            self._convert = _members([(field.name, _converter(field.type, 2)) for field in schema])
        except UsageError as error:
            raise UsageError(error.message, path=path) from None
        names = list(schema.names)
        if len(set(names)) != len(names):
            raise UsageError("two columns have the same name", path=path)
        self._target = pa.schema([pa.field(f.name, _in_microseconds(f.type)) for f in schema])
        self._casts = self._target.types != schema.types

    def checked(self, batch: Any) -> CheckedBatch:
        is_large = batch.nbytes > _CANDIDATE
        try:
            return CheckedBatch(self._validated(batch), True, is_large)
        except _PROBLEMS:
            return CheckedBatch(batch, False, is_large)

    def rows(self, checked: CheckedBatch, first_row: int) -> list[Value]:
        """Return the rows of a batch, with a `RowError` for a row without JSON form."""
        batch, is_valid, is_large = checked
        if batch.num_rows > 1 and is_valid and not is_large:
            with contextlib.suppress(*_PROBLEMS):
                return list(map(self._convert, batch.to_pylist()))
        if batch.num_rows != 1:
            rows = range(batch.num_rows)
            return [self.rows(checked.slice(n, 1), first_row + n)[0] for n in rows]
        if batch.nbytes > MAX_ROW_BYTES:
            message = over_limit(batch.nbytes)
            return [RowError(message, reason="limit", path=self._path, row=first_row)]
        try:
            plain = batch if is_valid else self._validated(batch)
            value: dict[str, Any] = self._convert(plain.to_pylist()[0])
        except _PROBLEMS as error:
            message = f"no JSON form: {error}"
            if isinstance(error, UnicodeDecodeError):
                message = f"not UTF-8: {error.reason}"
            bad = RowError(message, reason="bad_json", path=self._path, row=first_row)
            bad.__cause__ = error
            return [bad]
        if is_large and batch.nbytes > _CANDIDATE and (length := len(encode(value))) > MAX_ROW:
            return [RowError(over_limit(length), reason="limit", path=self._path, row=first_row)]
        return [value]

    def _validated(self, batch: Any) -> Any:
        # The bytes are untrusted: an invalid offset must be an error, not a crash.
        batch.validate(full=True)
        if not self._casts:
            return batch
        # Column by column, because casting a batch needs pyarrow 16.
        columns = zip(batch.columns, self._target.types, strict=True)
        cast = [column.cast(kind, safe=True) for column, kind in columns]
        return pa.RecordBatch.from_arrays(cast, schema=self._target)


def _members(fields: list[tuple[str, Convert | None]]) -> Convert:
    """Return the converter of a struct, which drops null members."""
    if all(convert is None for _, convert in fields):
        return _without_nulls
    converters = dict(fields)

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for name, member in value.items():
            if member is not None:
                change = converters[name]
                result[name] = member if change is None else change(member)
        return result

    return convert


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not None}


def _converter(kind: Any, depth: int) -> Convert | None:
    """Return the converter of non-null values of an Arrow type; None for the identity."""
    if depth > MAX_NESTING:
        raise UsageError(f"the schema is nested more than {MAX_NESTING} levels deep")
    types = pa.types
    if types.is_struct(kind):
        return _members([(field.name, _converter(field.type, depth + 1)) for field in kind])
    if types.is_map(kind):
        return _object(_converter(kind.item_type, depth + 1))
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _converter(kind.value_type, depth)
    if hasattr(kind, "value_type"):  # every kind of list
        return _each(_converter(kind.value_type, depth + 1))
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type, depth)
    if types.is_floating(kind):
        return _finite
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _base64
    if types.is_duration(kind):
        return lambda value: value.total_seconds()
    if types.is_temporal(kind):
        return lambda value: value.isoformat()
    if types.is_decimal(kind):
        return str
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind):
        return None
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return None
    if str(kind) == "binary_view":
        return _base64
    raise UsageError(f"a column of type {kind} has no JSON form")


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda values: [None if value is None else convert(value) for value in values]


def _object(convert: Convert | None) -> Convert:
    def change(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        result = {}
        for name, value in pairs:
            if not isinstance(name, str):
                raise _NoFormError(f"a map has the key {name!r}, which is not a string")
            if value is not None:
                result[name] = value if convert is None else convert(value)
        return result

    return change


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise _NoFormError(f"{number} is not a JSON number")
    return number


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _in_microseconds(kind: Any) -> Any:
    """Return the type with nanoseconds replaced by microseconds, the precision of Python."""
    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, _in_microseconds(f.type)) for f in kind])
    if types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_in_microseconds(kind.value_type))
    return kind


# --- decoded rows ----------------------------------------------------------------------------

_MAX_DECODERS = 8  # suspended in the middle of a group, per process; each has buffers
# Serial number of a `DecodedRows` → process, group, next row, the batches from there.
_decoders: OrderedDict[int, tuple[int, int, int, Iterator[Any]]] = OrderedDict()
_serials = itertools.count()
_decoded = RecentValues(DECODED_BYTES)  # of all readers of this process


class DecodedRows:
    """The rows of a table; a group is decoded once while its batches are kept.

    A row group can only be decoded from its start. Reading a row decodes up to it, caches the
    batches, and continues from there for a later row. ``kept`` is a bounded LRU cache of batches;
    by default all readers of the process share one.

    Threads share batches but not decoders: a decoder is removed while in use, so that after an
    exception, including Ctrl-C, the next reader starts from the beginning.
    """

    def __init__(self, table: Table, form: RowForm, kept: RecentValues | None = None) -> None:
        self.table = table
        self.form = form
        self._kept = _decoded if kept is None else kept
        self._serial = next(_serials)
        self._bounds: dict[int, tuple[int, ...]] = {}  # group → rows at which its batches begin

    def value(self, row: int) -> Value:
        first, checked = self._batch_of(row)
        return self.form.rows(checked.slice(row - first, 1), row)[0]

    def batches(self, first: int, last: int) -> Iterator[tuple[int, list[Value]]]:
        """Yield the first row and the values of each part of the rows ``first:last``."""
        while first < last:
            start, checked = self._batch_of(first)
            stop = min(last, start + checked.batch.num_rows)
            yield first, self.form.rows(checked.slice(first - start, stop - first), first)
            first = stop

    def _batch_of(self, row: int) -> tuple[int, CheckedBatch]:
        """Return the batch that contains a row, and its first row."""
        starts = self.table.starts
        group = bisect_right(starts, row) - 1
        bounds = self._bounds.get(group, (starts[group],))
        if row < bounds[-1]:
            first = bounds[bisect_right(bounds, row) - 1]
            kept = self._kept.get((self._serial, first))
            if kept is not None:
                return first, kept
        return self._decode(group, row)

    def _decode(self, group: int, row: int) -> tuple[int, CheckedBatch]:
        process, of_group, at, coming = _decoders.pop(self._serial, (0, 0, 0, iter(())))
        if process != os.getpid() or of_group != group or row < at:
            at, coming = self.table.starts[group], self.table.group_batches(group)
        while True:
            batch = next(coming, None)
            if batch is None:
                raise SourceError(
                    f"the file ends at row {at}, before row {row}", path=self.table.path
                )
            checked = self.form.checked(batch)
            self._kept.put((self._serial, at), checked, batch.nbytes)
            first, at = at, at + batch.num_rows
            # Replaced, not mutated: another thread may be decoding the same group.
            bounds = self._bounds.get(group, (first,))
            if first == bounds[-1]:
                self._bounds[group] = (*bounds, at)
            if row < at:
                _decoders[self._serial] = (os.getpid(), group, at, coming)
                while len(_decoders) > _MAX_DECODERS:
                    with contextlib.suppress(KeyError):  # another thread removed it first
                        _decoders.popitem(last=False)
                return first, checked


def open_table(
    kind: str,
    location: str | RemoteFile,
    path: str,
    spans: Sequence[Span] = (),
    first_row: int = 0,
) -> Table:
    """Open a "parquet" or "arrow" file; of a remote Arrow file only the ``spans``."""
    if kind == "parquet":
        return ParquetTable(location, path)
    if isinstance(location, str):
        return ArrowTable(location, path)
    return SpannedTable(location, path, spans, first_row)
