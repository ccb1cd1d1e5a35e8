"""Where the cache is when nobody says: one rule for every room.

``$TOKENMILL_CACHE_DIR``, else ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``. Every
room that is given no directory asks here, so that rows, slices and tokenizers meet in one place.
"""

from __future__ import annotations

import os
from pathlib import Path


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
