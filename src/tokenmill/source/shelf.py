"""Where this room keeps what it made: directories ``rows/<key>`` that appear whole.

A `Shelf` is the cache directory seen by this room, and the only object that joins its paths. On it
stand sealed directories (see `tokenmill.files.sealed`): row indexes, seekable copies, and *notes*,
summaries alone that say "this state of that file has this index". Each is a function of its key, so
whoever comes second finds what it would have made.

Where the cache cannot be written (read-only, forbidden), a private shelf in the temporary
directory takes its place; it ends with the process that made it.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from tokenmill.errors import CacheError, CorruptionError
from tokenmill.files import has_process_directory, process_directory, require_inside
from tokenmill.files.sealed import JsonForm, SealedKind

_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_NOTE = SealedKind("note", "note.json", JsonForm("note", "check"))


class Shelf:
    """The ``rows/`` part of one cache directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, key: str) -> Path:
        """Where what a key names is, or would be; CacheError when a link leads out of here."""
        if not (len(key) == 40 and set(key) <= set("0123456789abcdef")):
            raise CorruptionError(f"not a key: {key[:60]!r}", path=self.root)
        place = self.root / "rows" / key
        require_inside(place, self.root)
        return place

    def has(self, key: str) -> bool:
        return self.place(key).is_dir()

    def note(self, key: str) -> dict[str, Any] | None:
        """The note of a key; one that does not check out is as good as none."""
        note: dict[str, Any] | None = _NOTE.admit_or_none(self.place(key), self.root)
        return note

    def write_note(self, key: str, note: dict[str, Any]) -> None:
        """Publish a note; one that is there and whole stays."""
        _NOTE.write(self.root, self.place(key), note)


def private_shelf() -> Shelf:
    """A shelf in this process's own temporary directory."""
    return Shelf(process_directory())


def existing_private_shelf() -> Shelf | None:
    """The private shelf, if this process needed one before."""
    return private_shelf() if has_process_directory() else None


def is_forbidden(error: CacheError) -> bool:
    """Whether the cache cannot be written by this user at all (rather than: is full, broken)."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FORBIDDEN
