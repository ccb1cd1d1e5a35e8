"""Parquet and Arrow files as runs of record batches.

A `Table` knows its *groups* (Parquet's row groups, Arrow's record batches) with their rows and
decoded bytes, and gives the record batches of any range of rows. Counting needs only footers and
metadata. `plan_ranges` makes blocks of it: a pure function of the groups' sizes, splitting large
groups evenly and joining small neighbours. A `Cursor` reads ranges in turn, `DecodedRows` single
rows with their neighbours.

pyarrow's errors become `SourceError` here, with the file's name.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.errors import RowError, SourceError
from tokenmill.files import is_network
from tokenmill.source.jsonform import RowForm, encode
from tokenmill.source.limits import COLUMNAR_BLOCK, PORTION_BYTES

if TYPE_CHECKING:
    from tokenmill.files.ranged import RemoteFile

BATCH_ROWS = 1024  # rows decoded at once
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
ARROW_FILE = b"ARROW1"


class Group(NamedTuple):
    """A row group or record batch."""

    rows: int
    bytes: int  # decoded


def plan_ranges(
    groups: Sequence[Group], target: int = COLUMNAR_BLOCK
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
    """An opened Parquet or Arrow file.

    Args:
        location: The file, or the remote object.
        path: What to call it in errors.

    Attributes:
        groups: Its row groups or record batches.
        schema: Its columns.
    """

    def __init__(self, location: str | RemoteFile, path: str) -> None:
        self.path = path
        self.location = location
        self.groups: list[Group] = []
        self.schema: Any = None

    def _ready(self) -> None:
        self.starts = [0, *accumulate(group.rows for group in self.groups)]

    @property
    def rows(self) -> int:
        """Rows in the file."""
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
            file = pq.ParquetFile(self._source())
            footer = self._footer = file.metadata
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                self.groups.append(Group(group.num_rows, group.total_byte_size))
            self.schema = file.schema_arrow
        self._ready()

    def _source(self) -> Any:
        if isinstance(self.location, str):
            return self.location
        from tokenmill.files.ranged import RangedStream

        return RangedStream(self.location)

    def group_batches(self, group: int) -> Iterator[Any]:
        """Decode one row group, a thousand rows at a time."""
        with arrow_errors(self.path):
            # A reader of its own, as cheap as opening a file: threads must not share one.
            file = pq.ParquetFile(self._source(), metadata=self._footer)
            yield from file.iter_batches(
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
                    self.groups.append(Group(batch.num_rows, batch.nbytes))
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
        """One record batch, in portions."""
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
        while position < group:
            reader.read_next_batch()
            position += 1
        batch = reader.read_next_batch()
        self._spare[:] = [(os.getpid(), group + 1, reader)]
        return batch


class Cursor:
    """Reads ranges of one table, going on from where the last one ended.

    A row group can only be decoded from its beginning; whoever takes its ranges in order decodes
    it once. What is left behind a range is *taken* while the next one is read: an exception, a
    Ctrl-C too, leaves nothing behind, and the range after it begins anew.

    Args:
        table: The file.

    Attributes:
        decoded: Rows decoded so far, those passed over included.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.decoded = 0
        self._left: tuple[int, Any, Iterator[tuple[int, Any]]] | None = None

    def take(self, first: int, last: int) -> list[tuple[int, Any]]:
        """Record batches of the rows ``first:last`` with the row each begins at."""
        left, self._left = self._left, None
        row, held, coming = left if left is not None else self._from(first)
        starts = self.table.starts
        other_group = bisect_right(starts, first) != bisect_right(starts, row)
        if first < row or (other_group and first != row):
            row, held, coming = self._from(first)
        taken: list[tuple[int, Any]] = []
        while row < last:
            if held is None:
                row, held = next(coming, (row, None))
                if held is None:
                    raise SourceError(f"ends at row {row}, before row {last}", path=self.table.path)
                self.decoded += held.num_rows
            begin, end = max(first, row), min(last, row + held.num_rows)
            if begin < end:
                taken.append((begin, held.slice(begin - row, end - begin)))
            rest = held.slice(end - row)
            row, held = end, rest if rest.num_rows else None
        self._left = row, held, coming
        return taken

    def _from(self, first: int) -> tuple[int, Any, Iterator[tuple[int, Any]]]:
        starts = self.table.starts
        self.decoded += first - starts[bisect_right(starts, first) - 1]
        return first, None, self.table.batches(first, self.table.rows)


class DecodedRows:
    """Single rows of a table, a portion of a thousand decoded at a time and kept as JSON.

    Threads share what is kept, never a cursor: it is taken while it is in use.

    Args:
        table: The file.
        form: Its rows' JSON form.

    Attributes:
        decoded: Rows decoded so far.
    """

    def __init__(self, table: Table, form: RowForm) -> None:
        self.decoded = 0
        self._table = table
        self._form = form
        self._cursors: list[Cursor] = []  # at most one
        self._kept: dict[int, tuple[int, list[bytes | RowError]]] = {}  # first row → bytes, rows

    def raw(self, row: int) -> bytes | RowError:
        """The JSON of one row, or why it has none."""
        starts = self._table.starts
        group = bisect_right(starts, row) - 1
        first = row - (row - starts[group]) % BATCH_ROWS
        kept = self._kept.get(first)
        if kept is None:
            kept = self._decode(first, min(first + BATCH_ROWS, starts[group + 1]))
        return kept[1][row - first]

    def _decode(self, first: int, last: int) -> tuple[int, list[bytes | RowError]]:
        try:
            cursor = self._cursors.pop()
        except IndexError:
            cursor = Cursor(self._table)
        before = cursor.decoded
        rows = [
            value if isinstance(value, RowError) else encode(value)
            for at, batch in cursor.take(first, last)
            for value in self._form.rows(batch, at)
        ]
        self._cursors[:] = [cursor]
        self.decoded += cursor.decoded - before
        portion = sum(len(raw) for raw in rows if isinstance(raw, bytes)), rows
        self._kept[first] = portion
        # Without a lock: single operations on a dict are atomic, and losing a portion is harmless.
        for oldest in list(self._kept)[:-1]:
            if sum(size for size, _ in list(self._kept.values())) <= PORTION_BYTES:
                break
            self._kept.pop(oldest, None)
        return portion


def open_table(kind: str, location: str, path: str) -> Table:
    """Open a "parquet" or "arrow" file of this machine."""
    return (ParquetTable if kind == "parquet" else ArrowTable)(location, path)
