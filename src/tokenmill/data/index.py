"""Indexes: map the row numbers of a view to rows of its stores.

An index is immutable, has a small pickle, and its memory does not grow with its rows. Every index
contains all rows of a group, adjacent, or none of them.
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
from tokenmill._core.artifact import ArtifactKind, map_array
from tokenmill._core.paths import default_cache_dir
from tokenmill._core.process import PrivateDirectory
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

CHUNK = 1 << 18  # rows at a time when all rows are read: 2 MiB of row numbers


def chunks_of(count: int) -> Iterator[Int64Array]:
    """Yield ``range(count)`` as arrays."""
    for first in range(0, count, CHUNK):
        yield np.arange(first, min(first + CHUNK, count), dtype=np.int64)


class Index(abc.ABC):
    """Maps row numbers of a view to row numbers of its concatenated stores."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Fingerprint of the content."""

    @property
    @abc.abstractmethod
    def stores(self) -> list[Store]:
        """The stores in order; one may occur several times."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def numbers(self, indices: Int64Array) -> Int64Array:
        """Return row numbers of the stores for valid row numbers of the view."""

    @cached_property
    def group_size(self) -> int | None:
        """Rows per group, 1 without groups; None if that differs."""
        sizes = {store.group_size for store in self.stores}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def group_count(self) -> int:
        size = self.group_size
        return self._ragged_count() if size is None else len(self) // size

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """Return the first row of each group; for `group_count`, the number of rows."""
        size = self.group_size
        return self._ragged_starts(groups) if size is None else groups * size

    def rows_of_groups(self, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows of groups, concatenated, and the index of each group's first row."""
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

    # For groups of several sizes. Slices and permutations of them are `Selected`.

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
    """A slice of another index; groups must have one size."""

    def __init__(self, parent: Index, span: range) -> None:
        document = {"slice": [span.start, span.stop, span.step], "of": parent.key}
        super().__init__(parent, document)
        self._span = span

    def __len__(self) -> int:
        return len(self._span)

    def numbers(self, indices: Int64Array) -> Int64Array:
        return self._parent.numbers(indices * self._span.step + self._span.start)


class Shuffled(_Derived):
    """A permutation of another index; groups must have one size."""

    def __init__(self, parent: Index, seed: int) -> None:
        self._seed = check_seed(seed)
        document = {"shuffle": ORDER_VERSION, "seed": str(self._seed), "of": parent.key}
        super().__init__(parent, document)
        assert parent.group_size is not None, "use Selected for groups of several sizes"
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
        numbers = np.empty_like(indices)
        for owner in np.unique(owners).tolist():
            here, part = owners == owner, self.parts[owner]
            begin = int(self._ends[owner]) - len(part)
            numbers[here] = part.numbers(indices[here] - begin) + self._store_starts[owner]
        return numbers

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
_KIND = ArtifactKind("selection index", "kept.json", (NUMBERS,))
_KIND_WITH_GROUPS = replace(_KIND, files=(NUMBERS, GROUP_STARTS))
SELECTION_VERSION = 2


class _Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: dict[str, Any]
    rows: int
    checksums: dict[str, str]
    groups: int | None = None


class Selected(_Derived):
    """A list of rows of another index.

    The list is a mapped artifact ``<cache>/rows/<key>/``; with groups of several sizes it also has
    the first row of every group. It is published in the cache of a store if that is writable, else
    in the default cache, else in a temporary directory of this object. If the directory is missing
    when the index is unpickled, the rows are chosen again, except ``given`` ones.
    """

    def __init__(
        self,
        parent: Index,
        by: dict[str, Any],  # everything besides the parent that the choice depends on
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
        paths = {root: CacheLayout(root).rows / self.key for root in _caches(self)}
        for path in paths.values():
            if path.is_dir():
                return path
        for root, path in paths.items():
            try:
                self._publish(root, path, given)
            except CacheError as error:
                # Read-only or full: try the next cache. From Python 3.12 on, the frames of the
                # error would keep the index alive until the next garbage collection.
                traceback.clear_frames(error.__traceback__)
                continue
            return path
        self._private = PrivateDirectory("tokenmill-rows-")
        path = self._private.path / "rows" / self.key
        self._publish(self._private.path, path, given)
        return path

    def _publish(self, root: Path, path: Path, given: Int64Array | None) -> None:
        chosen: Iterable[Int64Array]
        if self._choose is not None:
            chosen = self._choose(self._parent)
        elif given is not None:
            chosen = [given]
        else:
            raise CacheError("the list of selected rows was removed; select them again")
        buffers = (numbers.astype("<i8", copy=False).data for numbers in chosen)
        with self._kind.stage(root) as writer:
            index = map_array(writer.write(NUMBERS, buffers), "<i8")
            record: dict[str, Any] = {"document": self._document, "rows": int(index.size)}
            if GROUP_STARTS in self._kind.files:
                starts = writer.write(GROUP_STARTS, (s.data for s in self._starts_in(index)))
                record["groups"] = int(map_array(starts, "<i8").size)
            writer.publish(path, {**record, "checksums": writer.checksums})

    def _starts_in(self, index: Int64Array) -> Iterator[Int64Array]:
        for first in range(0, index.size, CHUNK):
            rows = np.asarray(index[first : first + CHUNK], dtype=np.int64)
            starts = self._parent.group_starts(self._parent.groups_of(rows))
            yield (first + np.flatnonzero(starts == rows)).astype("<i8")

    def _open(self) -> None:
        artifact = self._kind.open(self._directory)
        record = artifact.convert(_Summary)
        artifact.require_document(self._document)

        def column(name: str, count: int) -> npt.NDArray[Any]:
            return artifact.array(name, "<i8", count, record.checksums.get(name, ""))

        self._numbers: npt.NDArray[np.int64] = column(NUMBERS, record.rows)
        if GROUP_STARTS in self._kind.files:
            self._starts: npt.NDArray[np.int64] = column(GROUP_STARTS, record.groups or 0)


def _caches(index: Index) -> Iterable[Path]:
    roots = [StoreLayout(store.path).cache_root for store in index.stores]
    return dict.fromkeys([*(root for root in roots if root is not None), default_cache_dir()])
