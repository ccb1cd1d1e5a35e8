"""Data in which a sample is a source row, so that rejected rows have numbers, too.

A source row gives one row, or one group of rows. `StoreBySource` reads them from a finished store,
`tokenmill.build.lazy.LazyRows` tokenizes them when they are requested; both give the same rows.
"""

from __future__ import annotations

import abc
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.origin import nothing_left
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.store.columns import row_numbers
from tokenmill.store.groups import Group
from tokenmill.store.manifest import Document
from tokenmill.store.record import GROUP_COUNTS, GROUP_KINDS
from tokenmill.store.slices import read_record
from tokenmill.store.store import Row, Store
from tokenmill.store.views import ViewMethods

Unit = list[Row] | RowError
"""The rows of one source row, or why it is rejected."""

MAX_PROBED = 64  # rows, spread over the data, of which one must be accepted
REMEDY = "prepare a finished store, or use the store instead of store.by_source()"


def needs_store(what: str) -> UsageError:
    return UsageError(f"{what}: not available by source row, since that needs all rows; {REMEDY}")


class SourceRows(ViewMethods, Sequence[Any]):
    """Source rows by number, of a finished store or tokenized when they are requested.

    A `Loader` replaces a rejected row by another one, which depends on seed, epoch and position
    only. So the order does not depend on which rows are rejected.
    """

    is_by_source = True
    has_weights = False  # unknown; loaders always add weights
    group_size = 1  # a source row is one unit
    sidecars = sources = ()
    key: str
    path: Any
    kind: str  # of all rows, one of `GROUP_KINDS`
    max_rejected: float | int | None
    manifest: Document
    has_media: bool

    def _describe(self, key: str, document: Document, tokenizer: Document) -> None:
        """Set what a store has in its manifest."""
        self.key = key
        self.has_media = "processor" in document
        counts = dict.fromkeys(GROUP_COUNTS, 0)
        # Whether groups have margins and scores is unknown, so batches always have them.
        counts |= {self.kind: len(self), "scores": len(self), "margins": len(self)}
        totals = {"rows": len(self)} | ({"groups": counts} if self.has_groups else {})
        self.manifest = {"document": document, "tokenizer": tokenizer, "totals": totals}

    @abc.abstractmethod
    def read(self, numbers: NDArray[np.int64]) -> list[Unit]:
        """Return the rows of some source rows, by valid numbers."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Store, name):
            raise needs_store(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: Any) -> Any:
        """Return a row or group, or a view of a slice; raise `RowError` for a rejected row."""
        if isinstance(index, slice):
            return self._range(range(len(self))[index])
        return self.batch([index])[0]

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        units: list[Any] = self.read(row_numbers(indices, len(self)))
        for unit in units:
            if isinstance(unit, RowError):
                raise unit
        return [unit[0] if len(unit) == 1 else Group(tuple(unit)) for unit in units]

    @property
    def has_groups(self) -> bool:
        return self.kind != "single"

    @property
    def group_count(self) -> int:
        return len(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} source rows, {self.key[:12]})"


def key_by_source(document: Document) -> str:
    # Images are read when a row is tokenized, so their digests are not part of the key.
    content = {name: value for name, value in document.items() if name != "images"}
    return fingerprint.key_of_parsed({"by_source": content})


def kind_of(rows: list[Row]) -> str:
    label = rows[0].label
    if len(rows) == 1:
        return "single" if label is None else "kto"
    return "ranked" if label is None else "preference"


def probe_kind(data: SourceRows) -> str:
    """Return the kind of the first accepted row among some that are spread over the data."""
    count, first = min(MAX_PROBED, len(data)), None
    for number in range(count):
        [unit] = data.read(np.asarray([number * len(data) // count]))
        if not isinstance(unit, RowError):
            return kind_of(unit)
        first = first or f"{unit.reason}: {unit}"
    raise SourceError(
        f"all of {count} rows spread over the source are rejected; the first, for {first}"
    )


def require_one_unit(expand: str, rows: str) -> None:
    """Raise `UsageError` if one source row may give several independent rows."""
    name, value = ("format", rows) if expand == "none" else ("expand", expand)
    if expand != "none" or rows.startswith("rollouts"):
        raise UsageError(
            (name, value),
            f" may make several rows of one source row, which is one sample here; {REMEDY}",
        )


class StoreBySource(SourceRows):
    """The source rows of a finished store."""

    def __init__(self, store: Store, max_rejected: float | int | None = None) -> None:
        document, totals = store.manifest["document"], store.manifest["totals"]
        recipe = document.get("recipe", {})
        require_one_unit(recipe.get("expand", "none"), recipe.get("format", "auto"))
        counts = totals.get("groups", {"single": len(store)})
        kinds = [kind for kind in GROUP_KINDS if counts.get(kind)]
        if not kinds:
            raise nothing_left("row", totals["rejected"], store.rejected_rows(), store.sources[0])
        if len(kinds) != 1:
            found = " and ".join(f"{counts[kind]:,} {kind}" for kind in kinds)
            raise UsageError(
                f"by_source() needs rows of one kind, the store has {found}", path=store.path
            )
        self.store, self.path = store, store.path
        self.max_rejected, self.kind = max_rejected, kinds[0]
        rows = (read_record(store.layout.slice(key))[0].source_rows for key in store.slice_keys())
        self._starts = np.cumsum([0, *rows], dtype=np.int64)
        self._describe(key_by_source(document), document, store.manifest["tokenizer"])
        self.processor_key, self.processor_path = store.processor_key, store.processor_path
        self.cache_root = store.cache_root

    def __reduce__(self) -> Any:
        return StoreBySource, (self.store, self.max_rejected)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, numbers: NDArray[np.int64]) -> list[Unit]:
        slices = np.searchsorted(self._starts, numbers, side="right") - 1
        within = numbers - self._starts[slices]
        return list(map(self._unit, slices.tolist(), within.tolist()))

    def _unit(self, at: int, row: int) -> Unit:
        store, reader = self.store, self.store.slice_at(at)
        first, stop = np.searchsorted(reader.column("row_in_slice"), [row, row + 1]).tolist()
        if first < stop:
            begin = int(store.table[at]["first_row"])
            return store.batch(range(begin + first, begin + stop))
        rejected = reader.record.rejected
        found = rejected[bisect_left(rejected, row, key=lambda one: one.row)]
        origin = store._origin(at, found.row, found.line, found.offset, found.length)
        return RowError(found.detail, reason=found.reason, **origin.location)
