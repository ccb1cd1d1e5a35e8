"""Open a source and read its rows on demand; see docs/internals/row-index.md.

`open_rows` finds the files and describes each by a `FileEntry`, either from a cached *note* or by
reading the file once. A note maps path and state of a file to its index.
"""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from os import pread
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from tokenmill._core.artifact import publish_files
from tokenmill._core.fingerprint import canonical, key
from tokenmill._core.origin import Origin
from tokenmill._core.paths import cache_root, checked_path, require_inside
from tokenmill._core.ranged import RemoteFile
from tokenmill._core.remote import is_remote
from tokenmill.errors import RowError, SourceError, SourceMissing, UsageError
from tokenmill.sources.block import Block, Part
from tokenmill.sources.bytefile import FileEntry, LocalFile, SourceBytes
from tokenmill.sources.discover import Found, discover, parse_address
from tokenmill.sources.index import (
    IndexCache,
    existing_private_index_cache,
    in_writable,
    index_key,
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
_AT_ONCE = 4  # files indexed in parallel, with about 5 MiB of buffers each
_PEEKED = 64 * KIB  # bytes of text that distinguish an array from lines
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
_BATCH = 4096  # rows read at once from a view with a step
_LIST = "files.json"


def open_rows(
    source: Source | Iterable[Source],
    *,
    cache_dir: Source | None = None,
    force_recache: bool = False,
) -> Rows:
    """Open files as one lazy sequence of rows.

    Args:
        source: A file, directory or glob, each optionally with a slice (``path@[a:b]``) or a split
            (``directory@train[:1000]``); a URL of these (``s3://bucket/*.jsonl``); a hub dataset
            (``owner/name:train``); or several of these, concatenated in the given order.
        cache_dir: Directory of the indexes; see `default_cache_dir`.
        force_recache: Read every file again, even if its stat is unchanged.

    Raises:
        SourceMissing: A file is missing or empty, or the source has no rows.
        UsageError: An address is malformed, or formats are mixed.
        SourceError: A file is truncated, or its content does not match its name.
    """
    if isinstance(source, bytes) or not isinstance(source, str | os.PathLike | Iterable):
        raise UsageError(f"a source must be a path, got {source!r:.200}")
    addresses = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not addresses:
        raise UsageError("no source was given; pass a path, glob or URL")
    index_cache = IndexCache(Path(os.path.abspath(cache_root(cache_dir))))
    parsed = []
    for text in addresses:
        address = parse_address(checked_path("source", text))
        parsed.append((address, discover(address)))
    distinct = {(one.path, one.url): one for _, found in parsed for one in found}
    files = _describe_all(list(distinct.values()), index_cache, force_recache)
    number_of = {name: number for number, name in enumerate(distinct)}
    parts: list[Part] = []
    total = 0
    for address, found in parsed:
        numbers = [number_of[one.path, one.url] for one in found]
        runs = [Part(number, 0, files[number][0].rows) for number in numbers]
        count = sum(run.last for run in runs)
        total += count
        if address.selection is not None:
            runs = _select(runs, *address.selection.resolve(count))
        parts.extend(runs)
    if total == 0:
        raise SourceMissing("the source has no rows", path=files[0][0].path)
    listing = Listing(files, [part for part in parts if part.first < part.last])
    return Rows(Concatenation(listing, index_cache))


def _describe_all(
    found: list[Found], index_cache: IndexCache, force_recache: bool
) -> list[tuple[FileEntry, str]]:
    """Describe every file; many files in parallel threads, which mostly wait for the disk."""

    def work(one: Found) -> tuple[FileEntry, str]:
        entry, cache = describe(one, index_cache, force_recache=force_recache)
        return entry, str(cache.root)

    if len(found) < 2 * _AT_ONCE:
        return [work(one) for one in found]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(work, found))


def _select(runs: list[Part], first: int, last: int) -> list[Part]:
    selected = []
    before = 0
    for run in runs:
        begin, end = max(first - before, 0), min(last - before, run.last)
        if begin < end:
            selected.append(Part(run.file, begin, end))
        before += run.last
    return selected


# --- describe a file ---------------------------------------------------------------------------


def describe(
    found: Found, index_cache: IndexCache, *, force_recache: bool = False
) -> tuple[FileEntry, IndexCache]:
    """Describe a file from its note, or read it; a read-only cache is replaced by a private one."""
    file = _opened(found, again=force_recache)
    if file.size == 0:
        raise SourceMissing("the file is empty", path=found.path)
    if not force_recache:
        for cache in (index_cache, existing_private_index_cache()):
            entry = None if cache is None else _cached_entry(found, file, cache)
            if entry is not None and cache is not None:
                return entry, cache
    return in_writable(index_cache, lambda to: (_read(found, file, to, force_recache), to))


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
        is_stable = file.signature.is_stable(file.opened_ns)
        return {"signature": tuple(file.signature), "version": "", "is_stable": is_stable}
    version = file.version
    return {
        "signature": (version.size, 0, 0, 0),
        "version": version.token,
        "is_stable": version.is_stable,
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


def _cached_entry(
    found: Found, file: LocalFile | RemoteFile, index_cache: IndexCache
) -> FileEntry | None:
    if not isinstance(file, LocalFile) and not file.version.is_stable:
        return None
    note = index_cache.note(_note_key(found, file))
    if note is None:
        return None
    try:
        entry = msgspec.convert({**note, "path": found.path, "location": found.location}, FileEntry)
    except msgspec.ValidationError:
        return None
    needed = [key for key in (entry.index, entry.copy) if key]
    return entry if all(map(index_cache.has, needed)) else None


def _read(
    found: Found, file: LocalFile | RemoteFile, index_cache: IndexCache, repair: bool
) -> FileEntry:
    if found.family in ("parquet", "arrow"):
        from tokenmill.sources.columnar import describe_columnar

        fields = describe_columnar(found, file)
    else:
        fields = _index(found, file, index_cache, repair)
    file.check()
    entry = FileEntry(path=found.path, location=found.location, **_state(file), **fields)
    if entry.is_stable:
        write_note(found, file, index_cache, entry)
    return entry


def write_note(
    found: Found, file: LocalFile | RemoteFile, index_cache: IndexCache, entry: FileEntry
) -> None:
    """Write the note of a file whose signature proves its content."""
    note = msgspec.to_builtins(entry)
    del note["path"], note["location"]  # another caller may use another path
    index_cache.write_note(_note_key(found, file), note)


def _index(
    found: Found, file: LocalFile | RemoteFile, index_cache: IndexCache, repair: bool
) -> dict[str, Any]:
    content: SourceBytes = file
    copy = ""
    if found.compression or found.family == "json":
        from tokenmill.sources.copy import CopyFile, array_lines, decompressed, write_copy
    if not found.compression and (actual := _other_format(file)):
        message = f"the file is named {found.family}, but contains {actual}; rename it"
        raise SourceError(message, path=file.path)
    pieces = decompressed(file, found.compression) if found.compression else _pieces(file)
    is_array = False
    if found.family == "json":
        is_array, pieces = _peek(pieces, found.path)
    if found.compression or is_array:
        pieces = array_lines(pieces, found.path) if is_array else pieces
        copy = write_copy(pieces, index_cache, repair=repair)
        content = CopyFile(index_cache.path(copy), found.path)
    document = write_index(index_cache, LineScan(content), repair=repair)
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
    """Return whether a .json file contains an array (else lines), and all pieces again."""
    head = text = b""
    for piece in pieces:
        head += piece
        text = head.removeprefix(BOM).lstrip(WHITE_SPACE)
        if len(text) >= _PEEKED or len(head) > 2 * MAX_ARRAY_GAP:
            break
    if text.split(b"\n", 1)[0].strip() == b"{":
        raise SourceError(
            "the file contains one object over several lines; a .json source must be an array of "
            "rows, or one object per line",
            path=path,
        )
    return text.startswith(b"["), chain([head], pieces)


# --- views ---------------------------------------------------------------------------------------


class Listing(msgspec.Struct, frozen=True):
    files: list[tuple[FileEntry, str]]  # with the cache directory of the index
    parts: list[Part]  # in the order of the source


class Concatenation:
    def __init__(self, listing: Listing, index_cache: IndexCache) -> None:
        self._listing = listing
        self._index_cache = index_cache
        self.readers = [
            _reader(entry, IndexCache(Path(root)), number)
            for number, (entry, root) in enumerate(listing.files)
        ]
        self.parts = listing.parts
        self.starts = [0, *accumulate(part.last - part.first for part in self.parts)]

    def __reduce__(self) -> Any:
        data = canonical(msgspec.to_builtins(self._listing))
        if len(data) <= EMBEDDED_BYTES:
            return _embedded, (data,)
        name = _list_key(data)
        root = in_writable(self._index_cache, lambda cache: _publish(cache, name, data))
        return _published, (str(root), name)

    def at(self, position: int) -> tuple[Reader, int]:
        number = bisect_right(self.starts, position) - 1
        part = self.parts[number]
        return self.readers[part.file], part.first + position - self.starts[number]

    def runs(self, first: int, last: int) -> Iterator[tuple[int, Part]]:
        """Yield the parts of a contiguous range, each with its first position."""
        number = bisect_right(self.starts, first) - 1
        while first < last:
            part = self.parts[number]
            begin = part.first + first - self.starts[number]
            end = min(part.last, part.first + last - self.starts[number])
            if begin < end:
                yield first, Part(part.file, begin, end)
            first += end - begin
            number += 1


def _reader(entry: FileEntry, index_cache: IndexCache, number: int) -> Reader:
    if entry.kind in ("parquet", "arrow"):
        from tokenmill.sources.columnar import ColumnReader

        return ColumnReader(entry, index_cache, number)
    return LineReader(entry, index_cache, number)


def _list_key(data: bytes) -> str:
    listed = data.decode(errors="replace")
    return key({"what": "files", "format": INDEX_FORMAT, "list": listed})


def _publish(index_cache: IndexCache, name: str, data: bytes) -> Path:
    if not index_cache.has(name):
        publish_files(index_cache.root, index_cache.path(name), {_LIST: data})
    return index_cache.root


def _embedded(data: bytes) -> Concatenation:
    listing = msgspec.json.decode(data, type=Listing)
    return Concatenation(listing, IndexCache(Path(listing.files[0][1])))


def _published(root: str, name: str) -> Concatenation:
    index_cache = IndexCache(Path(root))
    require_inside(index_cache.path(name) / _LIST, index_cache.root)
    try:
        data = (index_cache.path(name) / _LIST).read_bytes()
    except OSError as error:
        raise SourceError(
            f"cannot read the list of files of a pickled view: {error.strerror}",
            path=error.filename,
        ) from error
    if _list_key(data) != name:
        raise SourceError(
            "the list of files of a pickled view is damaged", path=index_cache.path(name)
        )
    return Concatenation(msgspec.json.decode(data, type=Listing), index_cache)


class Rows(Sequence[dict[str, Any]]):
    """Rows of files by number, read when they are accessed; slices are views. See `open_rows`."""

    def __init__(self, whole: Concatenation, positions: range | None = None) -> None:
        self._whole = whole
        self._positions = range(whole.starts[-1]) if positions is None else positions
        # Contiguous rows of a single file, the usual case, need no search.
        self._only = whole.readers[whole.parts[0].file] if len(whole.parts) == 1 else None
        self._shift = whole.parts[0].first if self._only is not None else 0
        simple = self._only is not None and self._positions.step == 1
        self._plain = len(self._positions) if simple else 0
        self._base = self._positions.start + self._shift
        self._fast: LineHandle | None = None

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        fast = self._fast
        if fast is not None and index.__class__ is int and 0 <= index < self._plain:
            # `LineReader.value` inlined for short rows: the calls would take a third of the time.
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
            return Rows(self._whole, self._positions[index])
        reader, row = self._at(index)
        if self._plain and self._fast is None and isinstance(reader, LineReader):
            handle = reader.open()
            self._fast = handle if handle.fd >= 0 else None
        return reader.value(row)

    def _at(self, index: int) -> tuple[Reader, int]:
        try:
            return self._whole.at(self._positions[operator.index(index)])
        except IndexError:
            raise IndexError(f"row {index} is out of range: there are {len(self)}") from None
        except TypeError:
            raise TypeError(f"the number of a row must be an integer, got {index!r:.200}") from None

    def raw(self, index: int) -> bytes:
        """Return the bytes of a row; for Parquet and Arrow its compact JSON."""
        reader, row = self._at(index)
        return reader.raw(row)

    def origin(self, index: int, value: dict[str, Any] | None = None) -> Origin:
        """Return the origin of a row. Pass a columnar row as ``value`` to avoid a second read."""
        reader, row = self._at(index)
        return reader.origin(row, value)

    def file_of(self, index: int) -> Reader:
        return self._at(index)[0]

    def batch(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows in the given order, read together; raise the first `RowError`."""
        if not isinstance(indices, Iterable):
            raise TypeError(f"numbers of rows must be a list of integers, got {indices!r:.200}")
        values = self.values(indices)
        for value in values:
            if isinstance(value, RowError):
                raise value
        return values  # type: ignore[return-value]

    def values(self, indices: Sequence[int]) -> list[dict[str, Any] | RowError]:
        """Return the row, or why it is bad, for each index."""
        indices = list(indices)  # an iterator could not be read again below
        if self._only is not None:
            try:
                return self._only.values([self._positions[n] + self._shift for n in indices])
            except (IndexError, TypeError):
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
        """Yield every row in order with its index: a dict, or the `RowError` of a bad row."""
        if self._positions.step != 1:
            for first in range(0, len(self), _BATCH):
                indices = range(first, min(first + _BATCH, len(self)))
                yield from zip(indices, self.values(indices), strict=True)
            return
        begin = self._positions.start
        for position, part in self._whole.runs(begin, self._positions.stop):
            reader = self._whole.readers[part.file]
            for first, values in reader.stream(part.first, part.last):
                yield from enumerate(values, position - begin + first - part.first)

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
        """Yield the blocks of the view; the first and last are cut to its rows."""
        if self._positions.step != 1:
            raise UsageError("a view with a step has no blocks; use a contiguous slice")
        for _, part in self._whole.runs(self._positions.start, self._positions.stop):
            yield from self._whole.readers[part.file].blocks(part)

    def __repr__(self) -> str:
        paths = [reader.entry.path for reader in self._whole.readers[:3]]
        more = len(self._whole.readers) - len(paths)
        names = ", ".join(paths) + (f" and {more} more" if more > 0 else "")
        return f"<Rows {len(self)} of {names}>"

    def __reduce__(self) -> Any:
        return Rows, (self._whole, self._positions)
