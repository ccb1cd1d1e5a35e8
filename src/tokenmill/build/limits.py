"""Limits built before, and whose slices can serve another: the planning half of `derive`.

Which limits were built before for the same *base* (everything that shapes a row except the limit)
is remembered as empty directories ``<cache>/limits/<base>/<limit>``: a hint, whose absence costs
only time. A slice of a larger limit (or none) holds every row that a smaller one keeps; a slice of
a smaller limit does so when it dropped nothing as overlong. The copying itself is a worker's task.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tokenmill.build.keys import shape_key
from tokenmill.errors import CorruptionError
from tokenmill.files import make_directory
from tokenmill.store import CacheLayout
from tokenmill.store.slices import read_record

_NO_LIMIT = "none"


def base_key(recipe: dict[str, Any], identity: str) -> str:
    """Everything that shapes a row except its limit."""
    return shape_key({**recipe, "max_length": None, "overlong": None}, identity)


def known_limits(root: Path, base: str) -> list[int | None]:
    """Limits built before for a base: none first, then the largest, whose slices hold the most."""
    try:
        names = [path.name for path in (root / "limits" / base).iterdir()]
    except OSError:
        return []
    numbers = sorted((int(name) for name in names if name.isdigit()), reverse=True)
    return [None, *numbers] if _NO_LIMIT in names else list(numbers)


def remember_limit(root: Path, base: str, limit: int | None) -> None:
    """Note that slices of this limit are being built."""
    directory = root / "limits" / base
    with contextlib.suppress(OSError):  # a hint only
        make_directory(directory / (_NO_LIMIT if limit is None else str(limit)), root)


def can_serve(layout: CacheLayout, key: str, limit: int | None, wanted: int | None) -> bool:
    """Whether the slice of one limit holds every row that another would keep."""
    files = layout.slice(key)
    if not files.record.exists():
        return False
    if limit is None or (wanted is not None and limit >= wanted):
        return True
    try:
        record, _ = read_record(files)
    except CorruptionError:
        return False
    return all(row.reason != "overlong" for row in record.rejected)
