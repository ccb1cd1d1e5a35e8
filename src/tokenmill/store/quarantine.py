"""Quarantine: where corrupt files go, so that their names are free to be rebuilt.

Nothing that was published is ever replaced, with this one exception: what fails its own checks is
renamed into ``quarantine/`` (never deleted: a person may want to know what happened to it) and made
again. `quarantine_of` moves whatever an error's path belongs to: a slice as a whole, its record
first; a store's directory; a tokenizer's copy.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tokenmill.errors import CorruptionError
from tokenmill.files import make_directory, sync_directory, writing_errors
from tokenmill.store.layout import CacheLayout, SliceFiles
from tokenmill.store.slices import SliceReader


def quarantine(layout: CacheLayout, path: Path) -> None:
    """Move a corrupt file or directory where nobody reads it."""
    with writing_errors(path):
        make_directory(layout.quarantine, layout.root)
        target = layout.quarantine / f"{path.name}.{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):  # another builder was quicker
            os.rename(path, target)
            sync_directory(path.parent)


def quarantine_slice(layout: CacheLayout, key: str) -> None:
    """Move a slice out of the way."""
    files = layout.slice(key)
    # The record first: without it the slice is gone for everybody, whatever happens next.
    for path in (files.record, files.tokens, files.meta):
        quarantine(layout, path)


def quarantine_of(layout: CacheLayout, broken: str | None) -> bool:
    """Move away what a broken file belongs to; False when it is nothing that can be rebuilt."""
    if broken is None:
        return False
    path = Path(broken)
    if layout.slices in path.parents:
        quarantine_slice(layout, path.name.partition(".")[0])
        return True
    if layout.tokenizers in path.parents:
        quarantine(layout, layout.tokenizers / path.relative_to(layout.tokenizers).parts[0])
        return True
    return False


def slice_is_intact(files: SliceFiles) -> bool:
    """Whether a committed slice passes every check."""
    try:
        SliceReader(files, None, mapped=False, check=False).check_all()
    except CorruptionError:
        return False
    return True
