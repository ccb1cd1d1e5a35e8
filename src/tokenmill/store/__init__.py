"""Slices and stores on disk: write, commit, map, verify (docs/internals/format.md).

Reading (`open_store`, `Store`, `Row`) imports numpy, msgspec and xxhash only. Writing
(`slice_writer`, `commit`) also needs pyarrow.
"""

from __future__ import annotations

from tokenmill.store.groups import Group, Groups
from tokenmill.store.layout import FORMAT, CacheLayout, StoreLayout
from tokenmill.store.record import EXTRA, Media
from tokenmill.store.sidecars import Sidecar
from tokenmill.store.store import Row, Store, open_store
from tokenmill.store.views import ViewMethods

__all__ = [
    "EXTRA",
    "FORMAT",
    "CacheLayout",
    "Group",
    "Groups",
    "Media",
    "Row",
    "Sidecar",
    "Store",
    "StoreLayout",
    "ViewMethods",
    "open_store",
]
