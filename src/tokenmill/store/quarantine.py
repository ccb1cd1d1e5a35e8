"""Quarantine: where corrupt files go, so that their names are free to be rebuilt.

Nothing that was published is ever replaced, with this one exception: what fails its own checks is
renamed into ``quarantine/`` (never deleted: a person may want to know what happened to it) and made
again. `quarantine_of` moves whatever an error's path belongs to: a slice as a whole, its record
first, or a tokenizer's copy. A broken store is moved by the build that commits it (`commit`).
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import CorruptionError
from tokenmill.files.sealed import quarantine
from tokenmill.store.layout import CacheLayout, SliceFiles
from tokenmill.store.slices import SliceReader


def quarantine_slice(layout: CacheLayout, key: str) -> None:
    """Move a slice out of the way."""
    files = layout.slice(key)
    # The record first: without it the slice is gone for everybody, whatever happens next.
    for path in (files.record, files.tokens, files.meta):
        quarantine(layout.root, path)


def quarantine_of(layout: CacheLayout, broken: str | None) -> bool:
    """Move away what a broken file belongs to; False when it is nothing that can be rebuilt."""
    if broken is None:
        return False
    path = Path(broken)
    if layout.slices in path.parents:
        quarantine_slice(layout, path.name.partition(".")[0])
        return True
    if layout.tokenizers in path.parents:
        quarantine(layout.root, layout.tokenizers / path.relative_to(layout.tokenizers).parts[0])
        return True
    return False


def slice_is_intact(files: SliceFiles) -> bool:
    """Whether a committed slice passes every check."""
    try:
        SliceReader(files, None, mapped=False, check=False).check_all()
    except CorruptionError:
        return False
    return True
