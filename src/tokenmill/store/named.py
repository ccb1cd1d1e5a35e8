"""Names of the stores of a cache, and the ways to refer to a store.

A name is a file with the key of a store. It may be moved to another store, so it is part of no key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tokenmill._core.paths import default_cache_dir
from tokenmill._core.publish import Staging
from tokenmill._core.remote import is_remote, local_path
from tokenmill.errors import SourceMissing, UsageError
from tokenmill.store.layout import MANIFEST, CacheLayout, is_key

LAST = "@last"  # the store of the last `tokenmill prepare` on the command line
MIN_KEY = 4  # characters of a shortened key
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHORT_KEY = re.compile(rf"[0-9a-f]{{{MIN_KEY},}}")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            ("name",),
            f" must be up to 64 letters, digits, dots, dashes and underscores, got {name!r}",
        )


def write_name(root: Path, name: str, key: str) -> None:
    """Give a store of a cache a name; another store of this name loses it."""
    path = CacheLayout(root).names / name
    if _read(path) == key:
        return
    with Staging(root) as staging:
        staging.replace(staging.write("name", key.encode()), path)


def names_in(root: Path) -> Iterator[tuple[str, str]]:
    """Yield every name of a cache and its key."""
    directory = CacheLayout(root).names
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            yield path.name, _read(path)


def find_store(text: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None) -> str:
    """Return the path or URL of a store, given as one, or as its name, key or ``@last``.

    The start of a key is enough if no other store of the cache has it. An existing store at a path
    is preferred.
    """
    text = os.fspath(text)
    if is_remote(text):
        return text
    path = local_path(text)
    if os.path.lexists(os.path.join(path, MANIFEST)):
        return path
    layout = CacheLayout(Path(cache_dir or default_cache_dir()).absolute())
    key = _read(layout.names / text) if text == LAST or _NAME.fullmatch(text) else ""
    if key:
        found = layout.store(key)
        if found.manifest.exists():
            return str(found.directory)
        message = (
            f"the store named {text} was removed from the cache; run `tokenmill prepare` again"
        )
        raise SourceMissing(message, path=found.directory)
    if text == LAST:
        message = f"{LAST} needs a store that `tokenmill prepare` built with this cache"
        raise SourceMissing(message, path=layout.root)
    if _SHORT_KEY.fullmatch(text) and layout.stores.is_dir():
        keys = [one.name for one in layout.stores.iterdir() if one.name.startswith(text)]
        if len(keys) > 1:
            shown = ", ".join(sorted(one[:12] for one in keys))
            raise UsageError(f"several stores have a key that starts with {text}: {shown}")
        if keys:
            return str(layout.store(keys[0]).directory)
    if not os.path.lexists(path) and (os.sep not in text):
        raise SourceMissing(
            "no such path, and no store of this name or key in the cache; `tokenmill cache list` "
            "lists them",
            path=text,
        )
    return path


def _read(path: Path) -> str:
    """Return the key in a file; an empty string if there is none."""
    try:
        key = path.read_bytes().decode()
    except (OSError, ValueError):
        return ""
    return key if is_key(key) else ""
