"""Rows: an opened source, read row by row on demand.

A `Rows` is a view: a range of positions over a `Concatenation`, which is a list of *parts*, each a
run of rows of one file. Slicing gives another view of the same concatenation.

A pickled view contains its file entries, so a worker neither lists directories nor scans; each file
is compared with its entry when it is first read. A long list of files is published in the cache,
and the pickle contains its key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from os import pread
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from tokenmill.errors import CacheError, RowError, SourceError, UsageError
from tokenmill.files import require_inside
from tokenmill.files.sealed import publish_files
from tokenmill.fingerprint import canonical, key
from tokenmill.origin import Origin
from tokenmill.source.block import Block, Part
from tokenmill.source.bytefile import FileEntry, SourceFile
from tokenmill.source.index import Shelf, is_forbidden, private_shelf
from tokenmill.source.limits import EMBEDDED_FILES, INDEX_FORMAT
from tokenmill.source.lines import PAGE_SHIFT, LineHandle, LineReader
from tokenmill.source.parse import PARSING, SHALLOW, decode

if TYPE_CHECKING:
    from tokenmill.source.columnar import ColumnReader

    Reader = LineReader | ColumnReader

_BATCH = 4096  # rows fetched at once when a view does not run in order
_LIST = "files.json"


class Listing(msgspec.Struct, frozen=True):
    """Files and parts of a concatenation."""

    files: list[tuple[FileEntry, str]]  # with the cache directory that holds the index
    parts: list[Part]  # in the order of the source


class Concatenation:
    """What all views of one opened source share."""

    def __init__(self, listing: Listing, shelf: Shelf) -> None:
        self._listing = listing
        self._shelf = shelf
        self.readers = [
            _reader(entry, Shelf(Path(root)), number)
            for number, (entry, root) in enumerate(listing.files)
        ]
        self.parts = listing.parts
        self.starts = [0, *accumulate(part.last - part.first for part in self.parts)]

    def __reduce__(self) -> Any:
        data = canonical(msgspec.to_builtins(self._listing))
        if len(self._listing.files) <= EMBEDDED_FILES and len(data) < 12_000:
            return _embedded, (data,)
        name = _list_key(data)
        try:
            root = _publish(self._shelf, name, data)
        except CacheError as error:
            if not is_forbidden(error):
                raise
            root = _publish(private_shelf(), name, data)
        return _published, (str(root), name)

    def at(self, position: int) -> tuple[Reader, int]:
        number = bisect_right(self.starts, position) - 1
        part = self.parts[number]
        return self.readers[part.file], part.first + position - self.starts[number]

    def runs(self, first: int, last: int) -> Iterator[tuple[int, Part]]:
        """The parts of a contiguous range, with the position at which each begins."""
        number = bisect_right(self.starts, first) - 1
        while first < last:
            part = self.parts[number]
            begin = part.first + first - self.starts[number]
            end = min(part.last, part.first + last - self.starts[number])
            if begin < end:
                yield first, Part(part.file, begin, end)
            first += end - begin
            number += 1


def _reader(entry: FileEntry, shelf: Shelf, number: int) -> Reader:
    if entry.kind in ("parquet", "arrow"):
        from tokenmill.source.columnar import ColumnReader

        return ColumnReader(entry, shelf, number)
    return LineReader(entry, shelf, number)


def _list_key(data: bytes) -> str:
    listed = data.decode(errors="replace")
    return key({"what": "files", "format": INDEX_FORMAT, "list": listed})


def _publish(shelf: Shelf, name: str, data: bytes) -> Path:
    if not shelf.has(name):
        publish_files(shelf.root, shelf.place(name), {_LIST: data})
    return shelf.root


def _embedded(data: bytes) -> Concatenation:
    listing = msgspec.json.decode(data, type=Listing)
    return Concatenation(listing, Shelf(Path(listing.files[0][1])))


def _published(root: str, name: str) -> Concatenation:
    shelf = Shelf(Path(root))
    require_inside(shelf.place(name) / _LIST, shelf.root)
    try:
        data = (shelf.place(name) / _LIST).read_bytes()
    except OSError as error:
        raise SourceError(
            f"the list of files of a pickled view is gone: {error.strerror}", path=error.filename
        ) from error
    if _list_key(data) != name:
        raise SourceError("the list of files of a pickled view is damaged", path=shelf.place(name))
    return Concatenation(msgspec.json.decode(data, type=Listing), shelf)


class Rows(Sequence[dict[str, Any]]):
    """A lazy sequence of rows: those at some places of a concatenation, all by default."""

    def __init__(self, whole: Concatenation, places: range | None = None) -> None:
        self._whole = whole
        self._places = range(whole.starts[-1]) if places is None else places
        # A contiguous run of rows of one file, the usual case, needs no search.
        self._only = whole.readers[whole.parts[0].file] if len(whole.parts) == 1 else None
        self._shift = whole.parts[0].first if self._only is not None else 0
        simple = self._only is not None and self._places.step == 1
        self._plain = len(self._places) if simple else 0
        self._base = self._places.start + self._shift
        self._fast: LineHandle | None = None

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        fast = self._fast
        if fast is not None and index.__class__ is int and 0 <= index < self._plain:
            # `LineReader.value` for short rows, inlined: the calls cost a third of the row.
            row = index + self._base
            if fast.checked[row >> PAGE_SHIFT]:
                start = fast.starts[row]
                length = fast.starts[row + 1] - start
                if length <= SHALLOW:
                    try:
                        return decode(pread(fast.fd, length, start))
                    except PARSING:
                        pass
        return self._slow_path(index)

    def _slow_path(self, index: int | slice) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            return Rows(self._whole, self._places[index])
        reader, row = self._at(index)
        if self._plain and self._fast is None and isinstance(reader, LineReader):
            handle = reader.open()
            self._fast = handle if handle.fd >= 0 else None
        return reader.value(row)

    def _at(self, index: int) -> tuple[Reader, int]:
        try:
            return self._whole.at(self._places[index])
        except IndexError:
            raise IndexError(f"row {index} of {len(self)}") from None

    def raw(self, index: int) -> bytes:
        """The bytes of a row; for Parquet and Arrow its compact JSON."""
        reader, row = self._at(index)
        return reader.raw(row)

    def origin(self, index: int, value: dict[str, Any] | None = None) -> Origin:
        """Where a row is; a columnar row given as ``value`` is not read again."""
        reader, row = self._at(index)
        return reader.origin(row, value)

    def batch(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Rows in the given order, neighbouring ones read together.

        Raises:
            RowError: The first bad row among them.
        """
        values = self._values(indices)
        for value in values:
            if isinstance(value, RowError):
                raise value
        return values  # type: ignore[return-value]

    def _values(self, indices: Sequence[int]) -> list[dict[str, Any] | RowError]:
        if self._only is not None:
            try:
                return self._only.values([self._places[n] + self._shift for n in indices])
            except IndexError:
                pass  # raised below, with the index
        by_reader: dict[int, tuple[Reader, list[int], list[int]]] = {}
        for position, index in enumerate(indices):
            reader, row = self._at(index)
            _, rows, positions = by_reader.setdefault(id(reader), (reader, [], []))
            rows.append(row)
            positions.append(position)
        values: list[Any] = [None] * len(indices)
        for reader, rows, positions in by_reader.values():
            for position, value in zip(positions, reader.values(rows), strict=True):
                values[position] = value
        return values

    def scan(self) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """Every row in order with its index: a dict, or the RowError it would raise."""
        if self._places.step != 1:
            for first in range(0, len(self), _BATCH):
                chosen = range(first, min(first + _BATCH, len(self)))
                yield from zip(chosen, self._values(chosen), strict=True)
            return
        begin = self._places.start
        for place, part in self._whole.runs(begin, self._places.stop):
            reader = self._whole.readers[part.file]
            for first, values in reader.stream(part.first, part.last):
                yield from enumerate(values, place - begin + first - part.first)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, value in self.scan():
            if isinstance(value, RowError):
                raise value
            yield value

    @property
    def files(self) -> list[SourceFile]:
        """The files of the source; Parquet and Arrow files are hashed on first use."""
        return [reader.source_file() for reader in self._whole.readers]

    def blocks(self) -> Iterator[Block]:
        """The view as blocks, the first and last cut down to its rows.

        Raises:
            UsageError: The view has a step.
        """
        if self._places.step != 1:
            raise UsageError("blocks need a contiguous view, not one with a step")
        for _, part in self._whole.runs(self._places.start, self._places.stop):
            yield from self._whole.readers[part.file].blocks(part)

    def __repr__(self) -> str:
        paths = [reader.entry.path for reader in self._whole.readers[:3]]
        more = len(self._whole.readers) - len(paths)
        names = ", ".join(paths) + (f" and {more} more" if more > 0 else "")
        return f"<Rows {len(self)} of {names}>"

    def __reduce__(self) -> Any:
        return Rows, (self._whole, self._places)
