"""Slices and stores on disk: write, commit, map, verify (docs/internals/format.md).

Reading (`open_store`, `Store`, `Row`) imports numpy, msgspec and xxhash only. Writing
(`slice_writer`, `commit`) also needs pyarrow.
"""

from __future__ import annotations

from tokenmill.store.groups import Group as Group
from tokenmill.store.groups import Groups as Groups
from tokenmill.store.layout import FORMAT as FORMAT
from tokenmill.store.layout import CacheLayout as CacheLayout
from tokenmill.store.layout import StoreLayout as StoreLayout
from tokenmill.store.record import EXTRA as EXTRA
from tokenmill.store.record import Media as Media
from tokenmill.store.sidecars import Sidecar as Sidecar
from tokenmill.store.store import Row as Row
from tokenmill.store.store import Store as Store
from tokenmill.store.store import open_store as open_store
from tokenmill.store.views import ViewMethods as ViewMethods
