"""Opening a source: addresses to files, files to entries, entries to `Rows`.

The way of one row. `open_rows` reads each address (`address`), finds its files (`discover`, `hub`)
and what is known of each (`catalog.describe`: a `FileEntry`, from a note or by reading the file
once). The entries become readers (`lines`, `columnar`) of one `Concatenation`, and ``rows[i]`` asks
the reader of the file that holds row i. In a build, ``rows.blocks()`` gives `Block` values, and a
worker calls `read_block` on each: no index, no listing, the bytes held against their digest.

A pickled view takes its entries along, so that a worker neither lists directories nor scans; each
file is compared with its entry when it is first read. Up to a couple of dozen files travel inside
the pickle; a longer list is published on the shelf and only its key travels.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import CacheError, SourceError, SourceMissing, UsageError
from tokenmill.files import default_cache_dir, require_inside
from tokenmill.files.sealed import publish_files
from tokenmill.fingerprint import canonical, key
from tokenmill.source.address import parse_address
from tokenmill.source.block import Part
from tokenmill.source.catalog import describe
from tokenmill.source.discover import Found, discover
from tokenmill.source.entry import FileEntry
from tokenmill.source.limits import EMBEDDED_FILES, INDEX_FORMAT
from tokenmill.source.lines import LineReader
from tokenmill.source.rows import Concatenation, Reader, Rows
from tokenmill.source.shelf import Shelf, is_forbidden, private_shelf

Source = str | os.PathLike[str]
_LISTING = "files.json"
_AT_ONCE = 4  # files indexed at the same time, about 5 MiB of buffers each


class _State(msgspec.Struct, frozen=True):
    """What a concatenation is made of."""

    files: list[tuple[FileEntry, str]]  # with the cache directory that holds the index
    parts: list[Part]


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
    distinct = list({one.place: one for _, found in chosen for one in found}.values())
    files = _describe_all(distinct, shelf, rehash)
    number_of = {found.place: number for number, found in enumerate(distinct)}
    parts: list[Part] = []
    total = 0
    for address, found in chosen:
        numbers = [number_of[one.place] for one in found]
        runs = [Part(number, 0, files[number][0].rows) for number in numbers]
        count = sum(run.last for run in runs)
        total += count
        if address.selection is not None:
            runs = _select(runs, *address.selection.resolve(count))
        parts.extend(runs)
    if total == 0:
        raise SourceMissing("the source holds no rows", path=files[0][0].path)
    return _rows(_State(files, [part for part in parts if part.first < part.last]), shelf)


def _describe_all(found: list[Found], shelf: Shelf, rehash: bool) -> list[tuple[FileEntry, str]]:
    """Know every file; many small ones wait for the disk together instead of in turn."""

    def work(one: Found) -> tuple[FileEntry, str]:
        entry, place = describe(one, shelf, rehash=rehash)
        return entry, str(place.root)

    if len(found) < 2 * _AT_ONCE:
        return [work(one) for one in found]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(work, found))


def _select(runs: list[Part], first: int, last: int) -> list[Part]:
    """The rows ``first:last`` of a concatenation of whole files."""
    chosen = []
    before = 0
    for run in runs:
        begin, end = max(first - before, 0), min(last - before, run.last)
        if begin < end:
            chosen.append(Part(run.file, begin, end))
        before += run.last
    return chosen


def _rows(state: _State, shelf: Shelf) -> Rows:
    return Rows(_concatenated(state, _Pickled(state, shelf)))


def _concatenated(state: _State, pickled: Any) -> Concatenation:
    readers = [_reader(entry, Shelf(Path(root)), n) for n, (entry, root) in enumerate(state.files)]
    return Concatenation(readers, state.parts, pickled)


def _reader(entry: FileEntry, shelf: Shelf, number: int) -> Reader:
    if entry.kind in ("parquet", "arrow"):
        from tokenmill.source.columnar import ColumnReader

        return ColumnReader(entry, shelf, number)
    return LineReader(entry, shelf, number)


class _Pickled:
    """The pickled form of a concatenation: small whatever the number of files.

    Args:
        state: What the concatenation is made of.
        shelf: Where a long list of files is published, when somebody pickles.
    """

    def __init__(self, state: _State, shelf: Shelf) -> None:
        self._state = state
        self._shelf = shelf

    def __reduce__(self) -> Any:
        data = canonical(msgspec.to_builtins(self._state))
        if len(self._state.files) <= EMBEDDED_FILES and len(data) < 12_000:
            return _embedded, (data,)
        name = key({"what": "files", "format": INDEX_FORMAT, "list": data.decode()})
        try:
            root = _publish(self._shelf, name, data)
        except CacheError as error:
            if not is_forbidden(error):
                raise
            root = _publish(private_shelf(), name, data)
        return _published, (str(root), name)


def _publish(shelf: Shelf, name: str, data: bytes) -> Path:
    if not shelf.has(name):
        publish_files(shelf.root, shelf.place(name), {_LISTING: data})
    return shelf.root


def _embedded(data: bytes) -> Concatenation:
    state = msgspec.json.decode(data, type=_State)
    return _concatenated(state, _Pickled(state, Shelf(Path(state.files[0][1]))))


def _published(root: str, name: str) -> Concatenation:
    shelf = Shelf(Path(root))
    require_inside(shelf.place(name) / _LISTING, shelf.root)
    try:
        data = (shelf.place(name) / _LISTING).read_bytes()
    except OSError as error:
        raise SourceError(
            f"the list of files of a pickled view is gone: {error.strerror}", path=error.filename
        ) from error
    listed = data.decode(errors="replace")
    if key({"what": "files", "format": INDEX_FORMAT, "list": listed}) != name:
        raise SourceError("the list of files of a pickled view is damaged", path=shelf.place(name))
    state = msgspec.json.decode(data, type=_State)
    return _concatenated(state, _Pickled(state, shelf))


def reopen(whole: Concatenation, places: tuple[int, int, int]) -> Rows:
    """A pickled view, opened again."""
    return Rows(whole, range(*places))
