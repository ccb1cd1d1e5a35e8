"""Open a source: addresses to files, files to entries, entries to `Rows`.

`open_rows` parses each address (`address`), finds its files (`discover`) and describes each with a
`FileEntry`, from a note in the cache or by reading the file once. The entries become readers
(`lines`, `columnar`) of one `Concatenation`. In a build, ``rows.blocks()`` gives `Block` values,
and a worker calls `read_block` on each.

A *note* says that the file at this place, in this state, has this index. It is written only when
the file was last changed some time before it was read (git's racy rule), and used only while size,
mtime, ctime and inode are equal (of a remote object: size and version). ``rehash=True`` ignores it.
A note that is missing or damaged costs a scan, never a wrong row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import CacheError, SourceError, SourceMissing, UsageError
from tokenmill.files import default_cache_dir, is_remote
from tokenmill.files.ranged import RemoteFile
from tokenmill.fingerprint import key
from tokenmill.source.block import Part
from tokenmill.source.bytefile import FileEntry, LocalFile, SourceBytes
from tokenmill.source.discover import Found, discover, parse_address
from tokenmill.source.index import (
    Shelf,
    existing_private_shelf,
    index_key,
    is_forbidden,
    private_shelf,
    write_index,
)
from tokenmill.source.limits import INDEX_FORMAT, KIB, MAX_ARRAY_GAP, MIB
from tokenmill.source.rows import Concatenation, Listing, Rows
from tokenmill.source.scan import BOM, WHITE_SPACE, LineScan

Source = str | os.PathLike[str]
_AT_ONCE = 4  # files indexed at the same time, about 5 MiB of buffers each
_PEEKED = 64 * KIB  # bytes of text that tell an array from lines
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}


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
    """The rows ``first:last`` of a concatenation of whole files."""
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
    """Describe a file from its note, else by reading it.

    Returns:
        The entry, and the shelf with its index: a private one where the given one is read-only.
    """
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
    if is_remote(found.place):
        file = RemoteFile(found.place, None if again else found.version, shared=not again)
    else:
        file = LocalFile(os.path.abspath(found.place))
    file.path = found.path
    return file


def _state(file: LocalFile | RemoteFile) -> dict[str, Any]:
    """What a `FileEntry` says about the state of its file."""
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
            "location": found.place if is_remote(found.place) else os.path.realpath(found.path),
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
        entry = msgspec.convert(
            {**note, "path": found.path, "location": _location(found)}, FileEntry
        )
    except msgspec.ValidationError:
        return None
    needed = [key for key in (entry.index, entry.copy) if key]
    return entry if all(map(shelf.has, needed)) else None


def _location(found: Found) -> str:
    return found.place if is_remote(found.place) else os.path.abspath(found.place)


def _read(found: Found, file: LocalFile | RemoteFile, shelf: Shelf, repair: bool) -> FileEntry:
    if found.family in ("parquet", "arrow"):
        from tokenmill.source.columnar import describe_columnar

        facts = describe_columnar(found, file)
    else:
        facts = _index(found, file, shelf, repair)
    file.check()
    entry = FileEntry(path=found.path, location=_location(found), **_state(file), **facts)
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
        from tokenmill.source.copy import CopyFile, array_lines, decompressed, write_copy
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
