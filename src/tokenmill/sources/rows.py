"""Open a source, and read it row by row on demand.

`open_rows` finds the files and describes each with a `FileEntry`, from a note in the cache or by
reading the file once. A *note* says that the file at this place, in this state, has this index. It
is written only when the file was last changed some time before it was read (git's racy rule), and
used only while size, mtime, ctime and inode (remote: size and version) are equal.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from os import pread
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from tokenmill._core.fingerprint import canonical, key
from tokenmill._core.origin import Origin
from tokenmill._core.paths import default_cache_dir, require_inside
from tokenmill._core.ranged import RemoteFile
from tokenmill._core.remote import is_remote
from tokenmill._core.sealed import publish_files
from tokenmill.errors import CacheError, RowError, SourceError, SourceMissing, UsageError
from tokenmill.sources.block import Block, Part
from tokenmill.sources.bytefile import FileEntry, LocalFile, SourceBytes
from tokenmill.sources.discover import Found, discover, parse_address
from tokenmill.sources.index import (
    Shelf,
    existing_private_shelf,
    index_key,
    is_forbidden,
    private_shelf,
    write_index,
)
from tokenmill.sources.limits import EMBEDDED_BYTES, INDEX_FORMAT, KIB, MAX_ARRAY_GAP, MIB
from tokenmill.sources.lines import PAGE_SHIFT, LineHandle, LineReader
from tokenmill.sources.parse import PARSING, SHALLOW, decode
from tokenmill.sources.scan import BOM, WHITE_SPACE, LineScan

if TYPE_CHECKING:
    from tokenmill.sources.columnar import ColumnReader

    Reader = LineReader | ColumnReader

Source = str | os.PathLike[str]
_AT_ONCE = 4  # files indexed at the same time, about 5 MiB of buffers each
_PEEKED = 64 * KIB  # bytes of text that tell an array from lines
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
_BATCH = 4096  # rows fetched at once when a view does not run in order
_LIST = "files.json"


def open_rows(
    source: Source | Iterable[Source],
    *,
    cache_dir: Source | None = None,
    rehash: bool = False,
) -> Rows:
    """Open files as one lazy sequence of rows.

    Args:
        source: A file, directory or glob, each optionally with a slice (``path@[a:b]``) or a split
            (``directory@train[:1000]``); a URL of such (``s3://bucket/*.jsonl``); a dataset of the
            hub (``owner/name:train``); or several of these, concatenated in the given order.
        cache_dir: Where indexes are kept; see `default_cache_dir`.
        rehash: Read every file again instead of trusting an unchanged stat.

    Raises:
        SourceMissing: A file is missing or empty, or there is no row at all.
        UsageError: An address is malformed, or formats are mixed.
        SourceError: A file is truncated, or not what its name says.
    """
    addresses = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not addresses:
        raise UsageError("no source was given")
    shelf = Shelf(
        Path(os.path.abspath(cache_dir if cache_dir is not None else default_cache_dir()))
    )
    chosen = []
    for text in addresses:
        if not isinstance(text, str | os.PathLike):
            raise UsageError(f"a source is a path, not {type(text).__name__}")
        address = parse_address(os.fspath(text))
        chosen.append((address, discover(address)))
    distinct = {(one.path, one.url): one for _, found in chosen for one in found}
    files = _describe_all(list(distinct.values()), shelf, rehash)
    number_of = {name: number for number, name in enumerate(distinct)}
    parts: list[Part] = []
    total = 0
    for address, found in chosen:
        numbers = [number_of[one.path, one.url] for one in found]
        runs = [Part(number, 0, files[number][0].rows) for number in numbers]
        count = sum(run.last for run in runs)
        total += count
        if address.selection is not None:
            runs = _select(runs, *address.selection.resolve(count))
        parts.extend(runs)
    if total == 0:
        raise SourceMissing("the source holds no rows", path=files[0][0].path)
    listing = Listing(files, [part for part in parts if part.first < part.last])
    return Rows(Concatenation(listing, shelf))


def _describe_all(found: list[Found], shelf: Shelf, rehash: bool) -> list[tuple[FileEntry, str]]:
    """Describe every file; many small ones wait for the disk at the same time."""

    def work(one: Found) -> tuple[FileEntry, str]:
        entry, place = describe(one, shelf, rehash=rehash)
        return entry, str(place.root)

    if len(found) < 2 * _AT_ONCE:
        return [work(one) for one in found]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(work, found))


def _select(runs: list[Part], first: int, last: int) -> list[Part]:
    chosen = []
    before = 0
    for run in runs:
        begin, end = max(first - before, 0), min(last - before, run.last)
        if begin < end:
            chosen.append(Part(run.file, begin, end))
        before += run.last
    return chosen


# --- from a file to its entry ------------------------------------------------------------------


def describe(found: Found, shelf: Shelf, *, rehash: bool = False) -> tuple[FileEntry, Shelf]:
    """Describe a file from its note, else by reading it; a read-only cache gets a private index."""
    file = _opened(found, again=rehash)
    if file.size == 0:
        raise SourceMissing("the file is empty", path=found.path)
    if not rehash:
        for place in (shelf, existing_private_shelf()):
            entry = None if place is None else _remembered(found, file, place)
            if entry is not None and place is not None:
                return entry, place
    try:
        return _read(found, file, shelf, rehash), shelf
    except CacheError as error:
        if not is_forbidden(error):
            raise
    place = private_shelf()
    return _read(found, file, place, rehash), place


def _opened(found: Found, *, again: bool) -> LocalFile | RemoteFile:
    file: LocalFile | RemoteFile
    if is_remote(found.location):
        file = RemoteFile(found.location, None if again else found.version, shared=not again)
    else:
        file = LocalFile(found.location)
    file.path = found.path
    return file


def _state(file: LocalFile | RemoteFile) -> dict[str, Any]:
    if isinstance(file, LocalFile):
        settled = file.signature.settled(file.opened_ns)
        return {"signature": tuple(file.signature), "version": "", "settled": settled}
    version = file.version
    return {
        "signature": (version.size, 0, 0, 0),
        "version": version.token,
        "settled": version.settled,
    }


def _note_key(found: Found, file: LocalFile | RemoteFile) -> str:
    state = _state(file)
    return key(
        {
            "what": "file seen",
            "format": INDEX_FORMAT,
            "location": os.path.realpath(found.path)
            if isinstance(file, LocalFile)
            else found.location,
            "family": found.family,
            "compression": found.compression,
            "signature": list(state["signature"]),
            "version": state["version"],
        }
    )


def _remembered(found: Found, file: LocalFile | RemoteFile, shelf: Shelf) -> FileEntry | None:
    if not isinstance(file, LocalFile) and not file.version.settled:
        return None
    note = shelf.note(_note_key(found, file))
    if note is None:
        return None
    try:
        entry = msgspec.convert({**note, "path": found.path, "location": found.location}, FileEntry)
    except msgspec.ValidationError:
        return None
    needed = [key for key in (entry.index, entry.copy) if key]
    return entry if all(map(shelf.has, needed)) else None


def _read(found: Found, file: LocalFile | RemoteFile, shelf: Shelf, repair: bool) -> FileEntry:
    if found.family in ("parquet", "arrow"):
        from tokenmill.sources.columnar import describe_columnar

        facts = describe_columnar(found, file)
    else:
        facts = _index(found, file, shelf, repair)
    file.check()
    entry = FileEntry(path=found.path, location=found.location, **_state(file), **facts)
    if entry.settled:
        remember(found, file, shelf, entry)
    return entry


def remember(found: Found, file: LocalFile | RemoteFile, shelf: Shelf, entry: FileEntry) -> None:
    """Write the note of a file whose signature proves its content."""
    note = msgspec.to_builtins(entry)
    del note["path"], note["location"]  # another caller may name it differently
    shelf.write_note(_note_key(found, file), note)


def _index(
    found: Found, file: LocalFile | RemoteFile, shelf: Shelf, repair: bool
) -> dict[str, Any]:
    content: SourceBytes = file
    copy = ""
    if found.compression or found.family == "json":
        from tokenmill.sources.copy import CopyFile, array_lines, decompressed, write_copy
    if not found.compression and (misnamed := _other_format(file)):
        raise SourceError(f"its name says {found.family}, but it holds {misnamed}", path=file.path)
    pieces = decompressed(file, found.compression) if found.compression else _pieces(file)
    is_array = False
    if found.family == "json":
        is_array, pieces = _peek(pieces, found.path)
    if found.compression or is_array:
        pieces = array_lines(pieces, found.path) if is_array else pieces
        copy = write_copy(pieces, shelf, repair=repair)
        content = CopyFile(shelf.place(copy), found.path)
    document = write_index(shelf, LineScan(content), repair=repair)
    return {
        "kind": "array" if is_array else "lines",
        "rows": document.rows,
        "bytes": document.bytes,
        "digest": document.digest,
        "index": index_key(document.digest),
        "copy": copy,
    }


def _other_format(file: SourceBytes) -> str:
    head = file.pread(8, 0)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def _pieces(file: SourceBytes) -> Iterator[bytes]:
    position = 0
    while data := file.pread(MIB, position):
        yield data
        position += len(data)


def _peek(pieces: Iterator[bytes], path: str) -> tuple[bool, Iterator[bytes]]:
    """Whether the content of a .json file is an array, else lines; and all pieces again."""
    head = text = b""
    for piece in pieces:
        head += piece
        text = head.removeprefix(BOM).lstrip(WHITE_SPACE)
        if len(text) >= _PEEKED or len(head) > 2 * MAX_ARRAY_GAP:
            break
    if text.split(b"\n", 1)[0].strip() == b"{":
        raise SourceError(
            "one object spread over several lines; a .json source is an array of rows, or one "
            "object per line",
            path=path,
        )
    return text.startswith(b"["), chain([head], pieces)


# --- views ---------------------------------------------------------------------------------------


class Listing(msgspec.Struct, frozen=True):
    files: list[tuple[FileEntry, str]]  # with the cache directory that holds the index
    parts: list[Part]  # in the order of the source


class Concatenation:
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
        if len(data) <= EMBEDDED_BYTES:
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
        from tokenmill.sources.columnar import ColumnReader

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
    def files(self) -> list[FileEntry]:
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
