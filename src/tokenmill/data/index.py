"""Indexes: which rows of which stores a view has, by number.

An index is immutable, pickles small and holds no memory that grows with its rows. Rows that belong
to a group are adjacent in every index and either all there or none.
"""

from __future__ import annotations

import abc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill._core import fingerprint
from tokenmill._core.paths import default_cache_dir
from tokenmill._core.process import PrivateDirectory
from tokenmill._core.sealed import SealedKind, map_array
from tokenmill.data.order import (
    ORDER_VERSION,
    PURPOSE_VIEW,
    Int64Array,
    Permutation,
    check_seed,
    derive_key,
)
from tokenmill.errors import CacheError
from tokenmill.store import CacheLayout, Store, StoreLayout

CHUNK = 1 << 18  # rows at a time where all rows are read: 2 MiB of row numbers


def chunks_of(count: int) -> Iterator[Int64Array]:
    """``range(count)``, many numbers at a time."""
    for first in range(0, count, CHUNK):
        yield np.arange(first, min(first + CHUNK, count), dtype=np.int64)


class Index(abc.ABC):
    """Row numbers of a view → row numbers of its stores, numbered one store after the other."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Fingerprint of the content, not of the location."""

    @property
    @abc.abstractmethod
    def stores(self) -> list[Store]:
        """The stores in the order of their numbering; one may occur several times."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def numbers(self, indices: Int64Array) -> Int64Array:
        """Row numbers of the stores at valid row numbers of the view."""

    @cached_property
    def group_size(self) -> int | None:
        """Rows of every group, where all are known to have as many; 1 without groups."""
        sizes = {store.group_size for store in self.stores}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def group_count(self) -> int:
        size = self.group_size
        return self._ragged_count() if size is None else len(self) // size

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """The first row of groups by number; after the last group, the number of rows."""
        size = self.group_size
        return self._ragged_starts(groups) if size is None else groups * size

    def rows_of_groups(self, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The rows of groups, one group after the other, and where each group's begin."""
        starts, stops = self.group_starts(groups), self.group_starts(groups + 1)
        sizes = stops - starts
        bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        rows = np.arange(bounds[-1], dtype=np.int64) + np.repeat(starts - bounds[:-1], sizes)
        return rows, bounds

    def groups_of(self, rows: Int64Array) -> Int64Array:
        if self.group_size is not None:
            return rows // self.group_size
        low, high = np.zeros_like(rows), np.full_like(rows, self.group_count)
        while (high - low > 1).any():
            middle = (low + high) // 2
            is_after = self.group_starts(middle) > rows
            low, high = np.where(is_after, low, middle), np.where(is_after, middle, high)
        return low

    # Groups of several sizes. A slice or a permutation of them is a list.

    def _ragged_count(self) -> int:
        raise NotImplementedError

    def _ragged_starts(self, groups: Int64Array) -> Int64Array:
        raise NotImplementedError


class Whole(Index):
    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def key(self) -> str:
        return self._store.key

    @property
    def stores(self) -> list[Store]:
        return [self._store]

    def __len__(self) -> int:
        return len(self._store)

    def numbers(self, indices: Int64Array) -> Int64Array:
        return indices

    def _ragged_count(self) -> int:
        return self._store.group_count

    def _ragged_starts(self, groups: Int64Array) -> Int64Array:
        return self._store.group_starts(groups)


class _Derived(Index):
    def __init__(self, parent: Index, document: Any) -> None:
        self._parent = parent
        self._document = document
        self._key = fingerprint.key(document)

    @property
    def key(self) -> str:
        return self._key

    @property
    def stores(self) -> list[Store]:
        return self._parent.stores

    def __len__(self) -> int:
        return len(self._parent)


class Range(_Derived):
    """A slice of another index; with groups, of whole groups of one size."""

    def __init__(self, parent: Index, span: range) -> None:
        document = {"slice": [span.start, span.stop, span.step], "of": parent.key}
        super().__init__(parent, document)
        self._span = span

    def __len__(self) -> int:
        return len(self._span)

    def numbers(self, indices: Int64Array) -> Int64Array:
        return self._parent.numbers(indices * self._span.step + self._span.start)


class Shuffled(_Derived):
    """All rows of another index in an order of their own; groups of one size stay whole."""

    def __init__(self, parent: Index, seed: int) -> None:
        self._seed = check_seed(seed)
        document = {"shuffle": ORDER_VERSION, "seed": str(self._seed), "of": parent.key}
        super().__init__(parent, document)
        assert parent.group_size is not None, "groups of several sizes are shuffled by a list"
        self._size = parent.group_size
        self._permutation = shuffle_of(parent, self._seed)

    def __reduce__(self) -> Any:
        return Shuffled, (self._parent, self._seed)

    def numbers(self, indices: Int64Array) -> Int64Array:
        groups, within = np.divmod(indices, self._size)
        return self._parent.numbers(self._permutation.indices(groups) * self._size + within)


def shuffle_of(index: Index, seed: int) -> Permutation:
    return Permutation(index.group_count, derive_key(PURPOSE_VIEW, check_seed(seed), 0, 0))


class Joined(Index):
    def __init__(self, parts: Sequence[Index]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __reduce__(self) -> Any:
        return Joined, (self.parts,)

    @cached_property
    def key(self) -> str:
        return fingerprint.key({"concat": [part.key for part in self.parts]})

    @cached_property
    def stores(self) -> list[Store]:
        return [store for part in self.parts for store in part.stores]

    @cached_property
    def _store_starts(self) -> list[int]:
        rows = [sum(map(len, part.stores)) for part in self.parts]
        starts: list[int] = np.cumsum([0, *rows[:-1]]).tolist()
        return starts

    @cached_property
    def _group_ends(self) -> Int64Array:
        return np.cumsum([part.group_count for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def numbers(self, indices: Int64Array) -> Int64Array:
        owners = np.searchsorted(self._ends, indices, side="right")
        found = np.empty_like(indices)
        for owner in np.unique(owners).tolist():
            here, part = owners == owner, self.parts[owner]
            begin = int(self._ends[owner]) - len(part)
            found[here] = part.numbers(indices[here] - begin) + self._store_starts[owner]
        return found

    def _ragged_count(self) -> int:
        return int(self._group_ends[-1])

    def _ragged_starts(self, groups: Int64Array) -> Int64Array:
        owners = np.searchsorted(self._group_ends, groups, side="right")
        owners = np.minimum(owners, len(self.parts) - 1)  # after the last group
        starts = np.empty_like(groups)
        for owner in np.unique(owners).tolist():
            here, part = owners == owner, self.parts[owner]
            own = groups[here] - (self._group_ends[owner] - part.group_count)
            starts[here] = part.group_starts(own) + (self._ends[owner] - len(part))
        return starts


# A list of rows, on disk.

NUMBERS, GROUP_STARTS = "index.bin", "group_starts.bin"
_KIND = SealedKind("selection index", "kept.json", (NUMBERS,))
_KIND_WITH_GROUPS = replace(_KIND, files=(NUMBERS, GROUP_STARTS))
SELECTION_VERSION = 2


class _Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: dict[str, Any]
    rows: int
    checksums: dict[str, str]
    groups: int | None = None


class Selected(_Derived):
    """A list of rows of another index.

    The list is an artifact ``<cache>/rows/<key>/`` and mapped; with groups of several sizes it also
    says where groups begin. It is published beside a store where that cache can be written, else
    in the user's own cache, else in a temporary directory that lives as long as this object. If the
    directory is gone when the index is unpickled, the rows are chosen again; ``given`` rows cannot.
    """

    def __init__(
        self,
        parent: Index,
        by: dict[str, Any],  # what the choice depends on besides the parent
        choose: Callable[[Index], Iterable[Int64Array]] | None = None,
        directory: str | None = None,
        given: Int64Array | None = None,
    ) -> None:
        super().__init__(parent, {"kept": SELECTION_VERSION, "of": parent.key, "by": by})
        self._choose = choose
        self._kind = _KIND if self.group_size is not None else _KIND_WITH_GROUPS
        self._private: PrivateDirectory | None = None
        self._directory = self._find_or_make(directory, given)
        self._open()

    def __reduce__(self) -> Any:
        return Selected, (
            self._parent,
            self._document["by"],
            self._choose,
            str(self._directory),
        )

    def __len__(self) -> int:
        return int(self._numbers.size)

    def numbers(self, indices: Int64Array) -> Int64Array:
        return self._parent.numbers(np.asarray(self._numbers[indices]))

    def _ragged_count(self) -> int:
        return int(self._starts.size)

    def _ragged_starts(self, groups: Int64Array) -> Int64Array:
        starts = self._starts
        if not starts.size:
            return np.zeros_like(groups)
        is_after = groups == starts.size
        return np.where(is_after, len(self), starts[np.where(is_after, 0, groups)])

    def _find_or_make(self, directory: str | None, given: Int64Array | None) -> Path:
        if directory is not None and Path(directory).is_dir():
            return Path(directory)
        places = {root: CacheLayout(root).rows / self.key for root in _caches(self)}
        for place in places.values():
            if place.is_dir():
                return place
        for root, place in places.items():
            try:
                self._publish(root, place, given)
            except CacheError as error:
                # Read-only or full: try the next place. From Python 3.12 on, frames that the error
                # went through would keep it, and the index, until cycles are collected.
                traceback.clear_frames(error.__traceback__)
                continue
            return place
        self._private = PrivateDirectory("tokenmill-rows-")
        place = self._private.path / "rows" / self.key
        self._publish(self._private.path, place, given)
        return place

    def _publish(self, root: Path, place: Path, given: Int64Array | None) -> None:
        chosen: Iterable[Int64Array]
        if self._choose is not None:
            chosen = self._choose(self._parent)
        elif given is not None:
            chosen = [given]
        else:
            raise CacheError("the index of selected rows is gone: select them again")
        buffers = (numbers.astype("<i8", copy=False).data for numbers in chosen)
        with self._kind.stage(root) as draft:
            index = map_array(draft.write(NUMBERS, buffers), "<i8")
            record: dict[str, Any] = {"document": self._document, "rows": int(index.size)}
            if GROUP_STARTS in self._kind.files:
                starts = draft.write(GROUP_STARTS, (s.data for s in self._starts_in(index)))
                record["groups"] = int(map_array(starts, "<i8").size)
            draft.publish(place, {**record, "checksums": draft.checksums})

    def _starts_in(self, index: Int64Array) -> Iterator[Int64Array]:
        for first in range(0, index.size, CHUNK):
            rows = np.asarray(index[first : first + CHUNK], dtype=np.int64)
            starts = self._parent.group_starts(self._parent.groups_of(rows))
            yield (first + np.flatnonzero(starts == rows)).astype("<i8")

    def _open(self) -> None:
        sealed = self._kind.admit(self._directory)
        record = sealed.convert(_Summary)
        sealed.require_document(self._document)

        def column(name: str, count: int) -> npt.NDArray[Any]:
            return sealed.array(name, "<i8", count, record.checksums.get(name, ""))

        self._numbers: npt.NDArray[np.int64] = column(NUMBERS, record.rows)
        if GROUP_STARTS in self._kind.files:
            self._starts: npt.NDArray[np.int64] = column(GROUP_STARTS, record.groups or 0)


def _caches(index: Index) -> Iterable[Path]:
    beside = [StoreLayout(store.path).cache_root for store in index.stores]
    return dict.fromkeys([*(root for root in beside if root is not None), default_cache_dir()])
