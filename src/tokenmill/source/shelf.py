"""Where this room keeps what it made: directories ``rows/<key>`` that appear whole.

A `Shelf` is the cache directory seen by this room, and the only object that joins its paths. Its
artefacts are directories published by one rename: row indexes, seekable copies, and *notes*, small
self-checking JSON documents that say "this state of that file has this index". An artefact is a
function of its key, so whoever comes second finds what it would have made.

Where the cache cannot be written (read-only, forbidden), a private shelf in the temporary
directory takes its place; it ends with the process that made it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import CacheError, CorruptionError
from tokenmill.files import (
    PrivateDirectory,
    ProcessLock,
    Staging,
    make_directory,
    require_inside,
)
from tokenmill.fingerprint import canonical, checksum

_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_NOTE = "note.json"


class Shelf:
    """The ``rows/`` part of one cache directory.

    Args:
        root: The cache directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, key: str) -> Path:
        """Where the artefact of a key is, or would be; CacheError when a link leads out of here."""
        if not (len(key) == 40 and set(key) <= set("0123456789abcdef")):
            raise CorruptionError(f"not a key: {key[:60]!r}", path=self.root)
        place = self.root / "rows" / key
        require_inside(place, self.root)
        return place

    def has(self, key: str) -> bool:
        """Whether the artefact is there."""
        return self.place(key).is_dir()

    def publish(self, staging: Staging, staged: Path, key: str) -> Path:
        """Make a staged directory the artefact of a key, unless there is one."""
        staging.publish(staged, self.place(key))
        return self.place(key)

    def set_aside(self, key: str) -> None:
        """Move a corrupt artefact out of the way; whoever reads it keeps what it has open."""
        aside = self.root / "quarantine"
        with contextlib.suppress(FileNotFoundError):
            make_directory(aside, self.root)
            os.rename(self.place(key), aside / f"rows-{key}-{secrets.token_hex(4)}")

    def note(self, key: str) -> dict[str, Any] | None:
        """The note of a key; one that does not check out is as good as none."""
        path = self.place(key) / _NOTE
        require_inside(path, self.root)
        try:
            data = path.read_bytes()
            sealed = msgspec.json.decode(data)
            if checksum(canonical(sealed["note"])) == sealed["check"]:
                note: dict[str, Any] = sealed["note"]
                return note
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        return None

    def write_note(self, key: str, note: dict[str, Any]) -> None:
        """Publish a note; one that is there and whole stays."""
        sealed = {"note": note, "check": checksum(canonical(note))}
        with Staging(self.root) as staging:
            staging.write(f"note/{_NOTE}", canonical(sealed))
            self.publish(staging, staging.path / "note", key)
            if self.note(key) is None:
                self.set_aside(key)
                self.publish(staging, staging.path / "note", key)


_private: list[PrivateDirectory] = []
_making = ProcessLock()


def private_shelf() -> Shelf:
    """A shelf in the temporary directory, one per process, removed when it ends."""
    with _making:
        found = existing_private_shelf()
        if found is not None:
            return found
        _private.append(PrivateDirectory("tokenmill-rows-"))
        return Shelf(_private[-1].path)


def existing_private_shelf() -> Shelf | None:
    """The private shelf, if this process needed one before."""
    if _private and _private[-1].process == os.getpid():  # a forked child makes one of its own
        return Shelf(_private[-1].path)
    return None


def require_artefact(directory: Path, files: Iterable[str]) -> None:
    """Refuse files of an artefact when a symbolic link leads out of the cache it stands in."""
    for name in files:
        require_inside(directory / name, directory.parent.parent)


def is_forbidden(error: CacheError) -> bool:
    """Whether the cache cannot be written by this user at all (rather than: is full, broken)."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FORBIDDEN
