"""Where the cache is when nobody says, and what is inside of it: one rule for every room.

``$TOKENMILL_CACHE_DIR``, else ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``. Every
room that is given no directory asks here, so that rows, slices and tokenizers meet in one place.

Symbolic links above a root are its owner's choice; one below it that leads out is followed neither
for writing nor for reading (`require_inside`).
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenmill.errors import CacheError


def default_cache_dir() -> Path:
    """The cache directory of this user; it need not exist yet."""
    stated = os.environ.get("TOKENMILL_CACHE_DIR")
    if stated:
        return Path(stated)
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path is to be ignored.
    if shared and os.path.isabs(shared):
        return Path(shared) / "tokenmill"
    return Path.home() / ".cache" / "tokenmill"


def require_inside(path: Path, root: Path) -> None:
    """Refuse a path below a root when a symbolic link on the way leads out of the root.

    Raises:
        CacheError: It does.
    """
    place, top = os.fspath(path), os.fspath(root)
    while len(place) > len(top) and not os.path.islink(place):
        place = os.path.dirname(place)
    if len(place) <= len(top):
        return  # nothing that could lead anywhere; the usual case, at one look per directory
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath([real, real_root]) != real_root:
        raise CacheError(f"a symbolic link leads out of the cache, to {real}", path=path)
