"""Selections: a choice of a view's rows, indexed on disk and mapped.

A filter, one side of a split or a list of row numbers is a *choice*, made in
`tokenmill.dataset.choices`. Choosing is done once; the *selection index*, the row numbers with
lengths and trained counts beside them, is a sealed directory ``<cache>/rows/<key>/`` and mapped, so
that a `KeptView` costs no memory and pickles as a path and a description. The key is the content:
the parent's key and the choice's document. Where rows belong to groups of several sizes, the index
also says where groups begin.

Published beside the store where its cache can be written, else in the user's own cache, else in a
temporary directory that lives as long as this process. Who unpickles a view whose directory is
gone chooses again, if the choice can be made again.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.dataset.view import CHUNK, PartView, View
from tokenmill.errors import CacheError
from tokenmill.files import PrivateDirectory, default_cache_dir
from tokenmill.files.sealed import JsonForm, SealedKind, map_array
from tokenmill.sampling import Int64Array
from tokenmill.store import CacheLayout, StoreLayout

INDEX, LENGTHS, TRAINED = "index.bin", "lengths.bin", "trained.bin"
GROUP_STARTS = "group_starts.bin"
_KIND = SealedKind("selection index", "kept.json", JsonForm(end=b"\n"), (INDEX, LENGTHS, TRAINED))
_KIND_WITH_GROUPS = replace(_KIND, files=(*_KIND.files, GROUP_STARTS))
KEPT_VERSION = 1


class Choice(Protocol):
    """Which rows of a view, in which order."""

    @property
    def ascending(self) -> bool:
        """Whether rows keep the view's order and come once at most."""

    def document(self, parent: View) -> Any:
        """What it depends on, as plain values."""

    def numbers(self, parent: View) -> Iterator[Int64Array]:
        """The numbers of the chosen rows, many at a time."""


class KeptView(PartView):
    """Some rows of another view, by a published index.

    Args:
        parent: The other view.
        choice: Which rows.
        directory: Where the published index is; None chooses (or finds) it.
    """

    def __init__(self, parent: View, choice: Choice, directory: str | None = None) -> None:
        super().__init__(parent)
        self._choice = choice
        self._document = {
            "kept": KEPT_VERSION,
            "of": parent.key,
            "by": choice.document(parent),
        }
        self._key = fingerprint.key(self._document)
        self._kind = _KIND if self.group_size is not None else _KIND_WITH_GROUPS
        # Holds the index where no cache could, as long as this view.
        self._home: PrivateDirectory | None = None
        self._directory = self._find_or_make(directory)
        self._open()

    def __reduce__(self) -> Any:
        return KeptView, (self._parent, self._choice, str(self._directory))

    @property
    def document(self) -> Any:
        return self._document

    @property
    def key(self) -> str:
        """Name of the published index."""
        return self._key

    def __len__(self) -> int:
        return int(self._index.size)

    def numbers(self, indices: Int64Array) -> Int64Array:
        return self._index[indices]

    @property
    def group_count(self) -> int:
        """By the size of groups, else by the index."""
        if self._group_starts is not None:
            return int(self._group_starts.size)
        return len(self) // (self.group_size or 1)

    def group_starts(self, groups: Int64Array) -> Int64Array:
        starts = self._group_starts
        if starts is None:
            return groups * (self.group_size or 1)
        if not starts.size:
            return np.zeros_like(groups)
        behind = groups == starts.size
        return np.where(behind, len(self), starts[np.where(behind, 0, groups)])

    @property
    def in_order(self) -> bool:
        return self._choice.ascending and self._parent.in_order

    def _ordered(self) -> tuple[Int64Array, Int64Array | None]:
        return (self._index, None) if self._choice.ascending else super()._ordered()

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self._lengths

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        return self._trained

    def _find_or_make(self, directory: str | None) -> Path:
        if directory is not None and Path(directory).is_dir():
            return Path(directory)
        places = {root: CacheLayout(root).rows / self.key for root in _caches(self)}
        for place in places.values():
            if place.is_dir():
                return place
        for root, place in places.items():
            try:
                self._publish(root, place)
            except CacheError as error:
                # Read-only or full: the next place will do. From Python 3.12 on, frames that the
                # error went through would keep it, and the view, until cycles are collected.
                traceback.clear_frames(error.__traceback__)
                continue
            return place
        self._home = PrivateDirectory("tokenmill-rows-")
        place = self._home.path / "rows" / self.key
        self._publish(self._home.path, place)
        return place

    def _publish(self, root: Path, place: Path) -> None:
        parent = self._parent
        with self._kind.stage(root) as draft:
            index = map_array(draft.write(INDEX, (c.data for c in self._chosen())), "<i8")
            for name, counts_at in ((LENGTHS, parent.lengths_at), (TRAINED, parent.trained_at)):
                counts = (counts_at(rows).astype("<i4") for _, rows in _stretches(index))
                draft.write(name, (c.data for c in counts))
            record: dict[str, Any] = {"document": self._document, "rows": int(index.size)}
            if GROUP_STARTS in self._kind.files:
                starts = draft.write(GROUP_STARTS, (c.data for c in self._beginnings(index)))
                record["groups"] = int(map_array(starts, "<i8").size)
            draft.publish(place, {**record, "checksums": draft.checksums})

    def _chosen(self) -> Iterator[Int64Array]:
        """The kept row numbers of the parent, many at a time; chosen when they are asked for."""
        for numbers in self._choice.numbers(self._parent):
            yield numbers.astype("<i8", copy=False)

    def _beginnings(self, index: Int64Array) -> Iterator[Int64Array]:
        """The places in an index at which groups begin, a stretch at a time."""
        for first, rows in _stretches(index):
            begun = self._parent.group_starts(self._parent.groups_of(rows))
            yield (first + np.flatnonzero(begun == rows)).astype("<i8")

    def _open(self) -> None:
        """Map the published index, refusing one that is not what was written."""
        sealed = self._kind.admit(self._directory)
        record = sealed.convert(_Summary)
        sealed.require_document(self._document)

        def column(name: str, dtype: str, count: int) -> npt.NDArray[Any]:
            return sealed.array(name, dtype, count, record.checksums.get(name, ""))

        self._index: npt.NDArray[np.int64] = column(INDEX, "<i8", record.rows)
        self._lengths: npt.NDArray[np.int32] = column(LENGTHS, "<i4", record.rows)
        self._trained: npt.NDArray[np.int32] = column(TRAINED, "<i4", record.rows)
        self._group_starts: npt.NDArray[np.int64] | None = None
        if GROUP_STARTS in self._kind.files:
            self._group_starts = column(GROUP_STARTS, "<i8", record.groups or 0)


def _caches(view: View) -> Iterable[Path]:
    """Where an index may lie: beside the stores, then in the user's own cache."""
    beside = [StoreLayout(store.path).cache_root for store in view.stores]
    return dict.fromkeys([*(root for root in beside if root is not None), default_cache_dir()])


def _stretches(index: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """The rows of an index, many at a time, with the place of the first."""
    for first in range(0, index.size, CHUNK):
        yield first, np.asarray(index[first : first + CHUNK], dtype=np.int64)


class _Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the summary says."""

    document: dict[str, Any]
    rows: int
    checksums: dict[str, str]
    groups: int | None = None
