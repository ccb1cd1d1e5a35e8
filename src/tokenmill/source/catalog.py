"""From a file to its `FileEntry`: found by its stat, or made by reading it once.

A *note* on the shelf says "the file at this place, in this state, has this index". It is written
only when the file had come to rest before it was read (git's racy rule), and believed only while
size, mtime, ctime and inode are equal (of a remote object: size and ETag, or what stands for one);
``rehash=True`` reads in any case. A note that is missing, damaged or points to nothing costs a
scan, never a wrong row.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill.errors import CacheError, SourceError, SourceMissing
from tokenmill.files import is_remote
from tokenmill.fingerprint import key
from tokenmill.source.bytefile import ByteFile, LocalFile, location_of
from tokenmill.source.discover import Found
from tokenmill.source.entry import FileEntry
from tokenmill.source.index import Index, index_key, write_index
from tokenmill.source.limits import INDEX_FORMAT, MIB
from tokenmill.source.scan import BOM, LineScan
from tokenmill.source.shelf import Shelf, existing_private_shelf, is_forbidden, private_shelf

if TYPE_CHECKING:
    from tokenmill.files.ranged import RemoteFile

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
_WHITE_SPACE = b" \t\r\n"


def describe(found: Found, shelf: Shelf, *, rehash: bool = False) -> tuple[FileEntry, Shelf]:
    """Know a file: from its note, else by reading it.

    Returns:
        The entry and the shelf that holds its index: the given one, or a private one where that
        cannot be written.
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
        from tokenmill.files.ranged import RemoteFile as Remote

        file = Remote(found.place, None if again else found.version, shared=not again)
    else:
        file = LocalFile(os.path.abspath(found.place))
    file.path = found.path
    return file


class _State(NamedTuple):
    """What an entry says about the state of its file."""

    signature: tuple[int, int, int, int]
    version: str
    settled: bool

    @classmethod
    def of(cls, file: LocalFile | RemoteFile) -> _State:
        if isinstance(file, LocalFile):
            return cls(file.signature, "", file.signature.settled(file.opened_ns))
        seen = file.version
        return cls((seen.size, 0, 0, 0), seen.token, seen.settled)


def _note_key(found: Found, file: LocalFile | RemoteFile) -> str:
    remote = is_remote(found.place)
    state = _State.of(file)
    document = {
        "what": "file seen",
        "format": INDEX_FORMAT,
        "location": found.place if remote else os.path.realpath(found.path),
        "family": found.family,
        "compression": found.compression,
        "signature": list(state.signature),
    }
    return key({**document, "version": state.version} if remote else document)


def _remembered(found: Found, file: LocalFile | RemoteFile, shelf: Shelf) -> FileEntry | None:
    if not isinstance(file, LocalFile) and not file.version.settled:
        return None
    note = shelf.note(_note_key(found, file))
    if note is None:
        return None
    location = location_of(found.place)
    try:
        entry = msgspec.convert({**note, "path": found.path, "location": location}, FileEntry)
    except msgspec.ValidationError:
        return None
    needed = [key for key in (entry.index, entry.copy) if key]
    return entry if all(map(shelf.has, needed)) else None


def _read(found: Found, file: LocalFile | RemoteFile, shelf: Shelf, repair: bool) -> FileEntry:
    if found.family in ("parquet", "arrow"):
        from tokenmill.source.columnar import describe_columnar

        facts = describe_columnar(found, file)
    else:
        facts = _index(found, file, shelf, repair)
    file.check()
    state = _State.of(file)
    entry = FileEntry(
        path=found.path,
        location=location_of(found.place),
        signature=state.signature,
        settled=state.settled,
        version=state.version,
        **facts,
    )
    if entry.settled:
        remember(found, file, shelf, entry)
    return entry


def remember(found: Found, file: LocalFile | RemoteFile, shelf: Shelf, entry: FileEntry) -> None:
    """Write the note of a file that had come to rest before it was read."""
    note = msgspec.to_builtins(entry)
    del note["path"], note["location"]  # the next caller's words for it may be others
    shelf.write_note(_note_key(found, file), note)


def _index(
    found: Found, file: LocalFile | RemoteFile, shelf: Shelf, repair: bool
) -> dict[str, Any]:
    content: ByteFile = file
    copy = ""
    if found.compression:
        from tokenmill.source.copy import CopyFile, make_copy

        copy = make_copy(file, found.compression, shelf, repair=repair)
        content = CopyFile(shelf.place(copy), found.path)
    elif misnamed := _other_format(file):
        raise SourceError(f"its name says {found.family}, but it holds {misnamed}", path=file.path)
    kind = _kind(found, content)
    if kind == "array":
        from tokenmill.source.array import ArrayScan

        document = write_index(shelf, kind, ArrayScan(content), repair=repair)
    else:
        document = write_index(shelf, kind, LineScan(content), repair=repair)
    name = index_key(kind, document.digest)
    return {
        "kind": kind,
        "rows": Index(shelf.place(name)).document.rows,
        "bytes": document.bytes,
        "digest": document.digest,
        "index": name,
        "copy": copy,
    }


def _other_format(file: ByteFile) -> str:
    head = file.pread(8, 0)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def _kind(found: Found, content: ByteFile) -> str:
    """A .json file is one array, or one object per line."""
    if found.family != "json":
        return "lines"
    position = 0
    while True:
        data = content.pread(MIB, position)
        text = (data.removeprefix(BOM) if position == 0 else data).lstrip(_WHITE_SPACE)
        if text or not data:
            break
        position += len(data)
    if text.startswith(b"["):
        return "array"
    if text.split(b"\n", 1)[0].strip() == b"{":
        raise SourceError(
            "one object spread over several lines; a .json source is an array of rows, or one "
            "object per line",
            path=found.path,
        )
    return "lines"
