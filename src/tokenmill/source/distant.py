"""Arrow files elsewhere: record batches by their bytes.

Parquet's footer says where its row groups are; an Arrow file's batches must be walked once, and the
*spans* found are remembered with the file, so that a worker fetches the bytes of its batches and
nothing else (`SpannedTable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from tokenmill.errors import SourceError
from tokenmill.files.ranged import RangedStream, RemoteFile
from tokenmill.source.entry import Span
from tokenmill.source.tables import (
    ARROW_FILE,
    BATCH_ROWS,
    STREAM_END,
    Group,
    Table,
    arrow_errors,
)


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
    """Record batches of a remote Arrow file, by their spans.

    Args:
        file: The bytes.
        path: What to call it in errors.
        spans: The schema's span, and those of the batches concerned, one after another.
        first_row: Number of the first batch's first row.
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
        self.groups = [Group(span.rows, span.bytes) for span in self._spans]
        self.starts = list(accumulate((group.rows for group in self.groups), initial=first_row))

    def group_batches(self, group: int) -> Iterator[Any]:
        """One record batch, in portions."""
        span = self._spans[group]
        with arrow_errors(self.path):
            data = self._file.pread(span.stop - span.start, span.start)
            message = pa.ipc.read_message(pa.py_buffer(data))
            batch = pa.ipc.read_record_batch(message, self.schema)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)
