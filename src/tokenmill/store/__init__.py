"""Slices and stores on disk: write, commit, map, verify; docs/format.md describes every byte.

The read half (`open_store`, `Store`, `Row`) imports numpy, msgspec and xxhash only. The write half
(`slice_writer`, `commit`) needs pyarrow and is imported by the builders.
"""

from __future__ import annotations

from tokenmill.store.groups import Group, Groups
from tokenmill.store.layout import FORMAT, CacheLayout, StoreLayout
from tokenmill.store.record import CARRIED, Media
from tokenmill.store.sidecars import Sidecar
from tokenmill.store.store import Row, Store, open_store
from tokenmill.store.views import ViewMethods

__all__ = [
    "CARRIED",
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
