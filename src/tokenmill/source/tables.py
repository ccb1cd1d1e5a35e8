"""Parquet and Arrow files as runs of record batches.

A `Table` knows its *groups* (Parquet's row groups, Arrow's record batches) with their rows and
decoded bytes, and gives the record batches of any range of rows. Counting needs only footers and
metadata; only the record batches of a remote Arrow file must be walked once, and the *spans* found
are remembered with the file, so that a worker fetches the bytes of its batches and nothing else.
`plan_ranges` makes blocks of a table: a pure function of the groups' sizes, splitting large groups
evenly and joining small neighbours. `DecodedRows` gives its rows, decoded in place.

pyarrow's errors become `SourceError` here, with the file's name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.errors import RowError, SourceError
from tokenmill.files import is_network
from tokenmill.files.process import RecentValues
from tokenmill.files.ranged import RangedStream, RemoteFile
from tokenmill.source.bytefile import Span
from tokenmill.source.jsonform import CheckedBatch, RowForm
from tokenmill.source.limits import COLUMNAR_BLOCK, DECODED_BYTES

BATCH_ROWS = 1024  # rows decoded at once
READ_BYTES = 256 << 10  # bytes of a column of a local Parquet file read at once
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
ARROW_FILE = b"ARROW1"


class RowGroup(NamedTuple):
    """A row group or record batch."""

    rows: int
    bytes: int  # decoded


def plan_ranges(
    groups: Sequence[RowGroup], target: int = COLUMNAR_BLOCK
) -> Iterator[tuple[int, int, int]]:
    """Cut a file into ranges of rows of about the target size.

    A range lies within one group, or is made of whole small ones.

    Yields:
        (first row, behind the last row, decoded bytes).
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
    """Translate what pyarrow raises about a file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        text = str(error).strip().splitlines()
        raise SourceError(
            f"cannot be read, it may be truncated or damaged: {text[0] if text else error!r}",
            path=path,
        ) from error


class Table:
    """An opened Parquet or Arrow file: its groups and its schema."""

    def __init__(self, location: str | RemoteFile, path: str) -> None:
        self.path = path
        self.location = location
        self.groups: list[RowGroup] = []
        self.schema: Any = None

    def _ready(self) -> None:
        self.starts = [0, *accumulate(group.rows for group in self.groups)]

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def group_batches(self, group: int) -> Iterator[Any]:
        """The record batches of one group, in order."""
        raise NotImplementedError

    def batches(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        """Record batches of the rows ``first:last`` with the row each begins at."""
        group = bisect_right(self.starts, first) - 1
        while first < last and group < len(self.groups):
            row = self.starts[group]
            for batch in self.group_batches(group):
                begin, end = max(first, row), min(last, row + batch.num_rows)
                if begin < end:
                    yield begin, batch.slice(begin - row, end - begin)
                row += batch.num_rows
                if row >= last:
                    return
            group += 1


class ParquetTable(Table):
    """A Parquet file: groups from the footer."""

    def __init__(self, location: str | RemoteFile, path: str) -> None:
        super().__init__(location, path)
        with arrow_errors(path):
            file = self._file(None)
            footer = self._footer = file.metadata
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                self.groups.append(RowGroup(group.num_rows, group.total_byte_size))
            self.schema = file.schema_arrow
        self._ready()

    def _file(self, footer: Any) -> Any:
        if isinstance(self.location, str):
            # Page by page: a row group may be the whole file, and only its beginning be wanted.
            return pq.ParquetFile(
                self.location, metadata=footer, buffer_size=READ_BYTES, pre_buffer=False
            )
        return pq.ParquetFile(RangedStream(self.location), metadata=footer)

    def group_batches(self, group: int) -> Iterator[Any]:
        with arrow_errors(self.path):
            # A reader of its own, as cheap as opening a file: threads must not share one.
            yield from self._file(self._footer).iter_batches(
                batch_size=BATCH_ROWS, row_groups=[group], use_threads=False
            )


class ArrowTable(Table):
    """An Arrow IPC file or stream: groups from the batches' metadata."""

    location: str

    def __init__(self, location: str, path: str) -> None:
        super().__init__(location, path)
        with arrow_errors(path):
            with open(location, "rb") as file:
                self._is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
                if not self._is_file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - len(STREAM_END)))
                    if file.read() != STREAM_END:
                        raise SourceError(
                            "the stream has no end mark: the file is truncated", path=path
                        )
            with self._reader() as reader:
                self.schema = reader.schema
                for batch in self._all(reader):
                    self.groups.append(RowGroup(batch.num_rows, batch.nbytes))
        self._ready()
        self._spare: list[tuple[int, int, Any]] = []  # (process, next batch, reader)

    def _reader(self) -> Any:
        # Mapped, so that skipping costs nothing; but never where a map can end the process.
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
            process, position, reader = self._spare.pop()  # taken: another thread opens its own
        except IndexError:
            process, position, reader = 0, 0, None
        # A reader from before a fork may share its file position with the parent's.
        if process != os.getpid() or position > group:
            position, reader = 0, self._reader()
        try:
            while position < group:
                reader.read_next_batch()
                position += 1
            batch = reader.read_next_batch()
        except StopIteration:
            raise SourceError(f"ends before its batch {group}", path=self.path) from None
        self._spare[:] = [(os.getpid(), group + 1, reader)]
        return batch


def walk_spans(file: RemoteFile) -> tuple[Span, ...]:
    """Read an Arrow file or stream once, from end to end: where its schema and batches are."""
    stream = RangedStream(file)
    with arrow_errors(file.path):
        is_file = file.pread(len(ARROW_FILE), 0) == ARROW_FILE
        mark = ARROW_FILE if is_file else STREAM_END
        if file.pread(len(mark), max(0, file.size - len(mark))) != mark:
            raise SourceError("has no end mark: the file is truncated", path=file.path)
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
    # A batch alone would not be whole: its dictionaries stand anywhere before it.
    for field in schema:
        if pa.types.is_dictionary(field.type):
            raise SourceError(
                f"column {field.name!r} is dictionary-encoded, which is not read by ranges; copy "
                "the file here, or save it as Parquet",
                path=path,
            )


class SpannedTable(Table):
    """Record batches of a remote Arrow file, by their spans; the first one is the schema's.

    The first batch begins at ``first_row`` of the file.
    """

    def __init__(
        self, file: RemoteFile, path: str, spans: Sequence[Span], first_row: int = 0
    ) -> None:
        super().__init__(file, path)
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
                # A copy: one slice that is kept would keep the whole batch in memory.
                part = batch.slice(start, BATCH_ROWS).serialize()
                yield pa.ipc.read_record_batch(part, self.schema)


_MOST_DECODERS = 8  # suspended half-way through a group, in this process; each holds its buffers
_decoders: OrderedDict[int, tuple[int, int, int, Iterator[Any]]] = OrderedDict()
"""Of readers used last, by their number: process, group, next row, its batches."""
_serials = itertools.count()
_decoded = RecentValues(DECODED_BYTES)  # of all readers of this process


class DecodedRows:
    """The rows of a table as record batches: groups are decoded once while they are kept.

    A row group can only be decoded from its beginning. Whoever wants a row of it decodes up to
    there, keeps the batches that came, and goes on from where it stopped when a later row is
    wanted; batches over the bound go, the longest unused first.

    Threads share what is kept, never a decoder: it is *taken* while it is in use, so that an
    exception, a Ctrl-C too, leaves nothing behind, and whoever comes next begins anew.

    Args:
        table: The file.
        form: Its rows' JSON form.
        kept: Where batches are kept; those of all readers of this process by default.
    """

    def __init__(self, table: Table, form: RowForm, kept: RecentValues | None = None) -> None:
        self.table = table
        self.form = form
        self._kept = _decoded if kept is None else kept
        self._serial = next(_serials)
        self._bounds: dict[int, tuple[int, ...]] = {}  # group → rows at which its batches begin

    def value(self, row: int) -> dict[str, Any] | RowError:
        """One row, or why it has no JSON form."""
        first, batch = self._batch_of(row)
        return self.form.row(batch, row - first, row)

    def values(self, first: int, last: int) -> Iterator[dict[str, Any] | RowError]:
        """The rows ``first:last``, a batch at a time."""
        while first < last:
            start, checked = self._batch_of(first)
            stop = min(last, start + checked.batch.num_rows)
            yield from self.form.rows(checked.slice(first - start, stop - first), first)
            first = stop

    def _batch_of(self, row: int) -> tuple[int, CheckedBatch]:
        """The batch that holds a row, with the row that it begins at."""
        starts = self.table.starts
        group = bisect_right(starts, row) - 1
        bounds = self._bounds.get(group, (starts[group],))
        if row < bounds[-1]:
            first = bounds[bisect_right(bounds, row) - 1]
            kept = self._kept.get((self._serial, first))
            if kept is not None:
                return first, self._checked(first, kept)
        return self._decode(group, row)

    def _checked(self, first: int, kept: Any) -> CheckedBatch:
        """A batch, checked when a row of it is first wanted."""
        if isinstance(kept, CheckedBatch):
            return kept
        checked = self.form.checked(kept)
        self._kept.put((self._serial, first), checked, kept.nbytes)
        return checked

    def _decode(self, group: int, row: int) -> tuple[int, CheckedBatch]:
        process, of_group, at, coming = _decoders.pop(self._serial, (0, 0, 0, iter(())))
        if process != os.getpid() or of_group != group or row < at:
            at, coming = self.table.starts[group], self.table.group_batches(group)
        while True:
            batch = next(coming, None)
            if batch is None:
                raise SourceError(f"ends at row {at}, before row {row}", path=self.table.path)
            self._kept.put((self._serial, at), batch, batch.nbytes)
            first, at = at, at + batch.num_rows
            # Replaced whole: another thread may be on its way through the same group.
            bounds = self._bounds.get(group, (first,))
            if first == bounds[-1]:
                self._bounds[group] = (*bounds, at)
            if row < at:
                _decoders[self._serial] = (os.getpid(), group, at, coming)
                while len(_decoders) > _MOST_DECODERS:
                    with contextlib.suppress(KeyError):  # another thread was quicker
                        _decoders.popitem(last=False)
                return first, self._checked(first, batch)


def open_table(
    kind: str,
    location: str | RemoteFile,
    path: str,
    spans: Sequence[Span] = (),
    first_row: int = 0,
) -> Table:
    """Open a "parquet" or "arrow" file; of a remote Arrow file the stated spans."""
    if kind == "parquet":
        return ParquetTable(location, path)
    if isinstance(location, str):
        return ArrowTable(location, path)
    return SpannedTable(location, path, spans, first_row)
