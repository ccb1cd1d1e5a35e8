"""Members of archives, one by one: ZIP, and TAR that is not compressed.

A directory of the members is read once per archive and kept for a few archives. In a compressed TAR
a member can only be reached by decompressing all before it, for every picture again; such an
archive is refused by name.
"""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import threading
import zipfile
import zlib
from collections import OrderedDict

from tokenmill.errors import RowError, SourceError
from tokenmill.media.reference import Reference, bad_media, missing, require_size

MOST_ARCHIVES = 8  # whose directories are kept
MOST_MEMBERS = 1_000_000  # of one archive: about 200 MB of directory

DAMAGED = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, EOFError, RuntimeError,
    ValueError,
)  # fmt: skip
"""What reading a damaged archive raises; bz2 raises an OSError of no number."""

Members = dict[str, tuple[int, int]]
_Version = tuple[int, int, int, int]


class OpenArchives:
    """Directories of archives that were read lately; safe to share between threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Version, Members | zipfile.ZipFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, file: io.FileIO, reference: Reference, size: int) -> bytes:
        """The bytes of a member.

        Args:
            file: The archive.
            reference: The member.
            size: Most bytes that it may have.

        Raises:
            RowError: There is none of that name, it is too large, or cannot be unpacked.
        """
        try:
            with self._lock:
                return self._read(file, reference, size)
        except RowError:
            raise
        except (*DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # without: bz2's damage
                raise SourceError(f"cannot be read: {error}", path=reference.path) from error
            raise bad_media(f"{reference.name} cannot be unpacked: {error}") from error

    def _read(self, file: io.FileIO, reference: Reference, size: int) -> bytes:
        status = os.fstat(file.fileno())
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        members = self._known.get(version)
        if members is None:
            members = _directory(file, reference)
            self._known[version] = members
            while len(self._known) > MOST_ARCHIVES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(version)
        name = reference.member
        if isinstance(members, zipfile.ZipFile):
            try:
                stated = members.getinfo(name).file_size
            except KeyError:
                raise missing(f"{reference.name} is not in the archive") from None
            require_size(stated, size, reference.name)
            members.fp = file  # the one that the directory was read from may be closed
            with members.open(name) as member:
                data = member.read(size + 1)  # which a header may understate
            require_size(len(data), size, reference.name)
            return data
        place = members.get(name) or members.get(f"./{name}")
        if place is None:
            raise missing(f"{reference.name} is not in the archive")
        at, stated = place
        require_size(stated, size, reference.name)
        data = os.pread(file.fileno(), stated, at)
        if len(data) != stated:
            raise bad_media(f"{reference.name} is cut off: the archive ends before it")
        return data


def _directory(file: io.FileIO, reference: Reference) -> Members | zipfile.ZipFile:
    start = os.pread(file.fileno(), 4, 0)
    if start[:2] == b"PK":
        archive = zipfile.ZipFile(file)
        if len(archive.namelist()) > MOST_MEMBERS:
            raise bad_media(f"{reference.path} has more than {MOST_MEMBERS} members")
        return archive
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
        raise bad_media(
            f"{reference.path} is a compressed archive, in which no picture can be reached without"
            " unpacking all before it; make it a .zip or an uncompressed .tar"
        )
    members: Members = {}
    with tarfile.open(fileobj=file, mode="r:") as archive_of_files:
        for entry in archive_of_files:
            if entry.isreg() and not entry.issparse():
                members[entry.name] = (entry.offset_data, entry.size)
            if len(members) > MOST_MEMBERS:
                raise bad_media(f"{reference.path} has more than {MOST_MEMBERS} members")
            archive_of_files.members = []  # type: ignore[attr-defined]  # or it keeps them all
    return members
