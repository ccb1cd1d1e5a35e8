"""Selections: an ascending choice of a view's rows, indexed on disk and mapped.

A filter or one side of a split is a *choice*: a function from columns to "kept or not". Choosing
is done once; the *selection index*, the numbers of the kept rows with lengths and trained counts
beside them, is a sealed directory ``<cache>/rows/<key>/`` and mapped, so that a `KeptView` costs no
memory and pickles as a path and a description. The key is the content: the parent's key and the
choice's document.

Published beside the store where its cache can be written, else in the user's own cache, else in a
temporary directory that lives as long as the view. Who unpickles a view whose directory is
gone chooses again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.dataset.view import CHUNK, Found, Int64Array, View
from tokenmill.errors import CacheError
from tokenmill.files import PrivateDirectory, default_cache_dir
from tokenmill.files.sealed import JsonForm, SealedKind, map_array
from tokenmill.store import CacheLayout, Store, StoreLayout

FILES = {"index.bin": "<i8", "lengths.bin": "<i4", "trained.bin": "<i4"}
_KIND = SealedKind("selection index", "kept.json", JsonForm(end=b"\n"), tuple(FILES))
KEPT_VERSION = 1


class Choice(Protocol):
    """A function from columns to "kept or not" that can describe itself."""

    @property
    def columns(self) -> list[str]:
        """The columns it looks at."""

    def document(self, parent: View) -> Any:
        """What it depends on, as plain values."""

    def __call__(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        """Which rows of a stretch are kept."""


class KeptView(View):
    """Some rows of another view, in its order.

    Args:
        parent: The other view.
        choice: Which rows.
        directory: Where the published index is; None chooses (or finds) it.
    """

    def __init__(self, parent: View, choice: Choice, directory: str | None = None) -> None:
        self._parent = parent
        self._choice = choice
        self._document = {
            "kept": KEPT_VERSION,
            "of": parent.key,
            "by": choice.document(parent),
        }
        self._key = fingerprint.key(self._document)
        self.home: PrivateDirectory | None = None
        """Holds the index where no cache could, as long as this view."""
        self._directory = _find_or_make(self, directory)
        self._index, self._lengths, self._trained = _open(self._directory, self._document)

    def __reduce__(self) -> Any:
        return KeptView, (self._parent, self._choice, str(self._directory))

    @property
    def document(self) -> Any:
        """Parent and choice."""
        return self._document

    @property
    def key(self) -> str:
        """Name of the published index."""
        return self._key

    def __len__(self) -> int:
        return int(self._index.size)

    def locate(self, indices: Int64Array) -> list[Found]:
        """Through the index, then the parent."""
        return self._parent.locate(self._index[indices])

    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The parent's columns, kept rows only."""
        for first, columns in self._parent.columns(names):
            size = len(next(iter(columns.values())))
            start, stop = np.searchsorted(self._index, [first, first + size]).tolist()
            within = self._index[start:stop] - first
            if within.size:
                yield start, {name: _pick(column, within) for name, column in columns.items()}

    @property
    def stores(self) -> list[Store]:
        """The parent's."""
        return self._parent.stores

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Mapped."""
        return self._lengths

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Mapped."""
        return self._trained

    def choose(self) -> Iterator[Int64Array]:
        """The kept row numbers of the parent, a stretch at a time."""
        for first, columns in self._parent.columns(self._choice.columns):
            yield np.flatnonzero(self._choice(columns)).astype("<i8") + first

    def gathered(self, index: Int64Array, name: str) -> Iterator[npt.NDArray[np.int32]]:
        """Lengths or trained counts of kept rows, a stretch at a time."""
        for first in range(0, index.size, CHUNK):
            numbers = np.asarray(index[first : first + CHUNK], dtype=np.int64)
            asked = self._parent.lengths_at if name == "lengths" else self._parent.trained_at
            yield asked(numbers).astype("<i4")


def _pick(column: Any, within: Int64Array) -> Any:
    if isinstance(column, np.ndarray):
        return column[within]
    return [column[place] for place in within.tolist()]


def _caches(view: View) -> Iterable[Path]:
    """Where an index may lie: beside the stores, then in the user's own cache."""
    beside = [StoreLayout(store.path).cache_root for store in view.stores]
    return dict.fromkeys([*(root for root in beside if root is not None), default_cache_dir()])


def _find_or_make(view: KeptView, directory: str | None) -> Path:
    if directory is not None and Path(directory).is_dir():
        return Path(directory)
    places = {root: CacheLayout(root).rows / view.key for root in _caches(view)}
    for place in places.values():
        if place.is_dir():
            return place
    for root, place in places.items():
        try:
            _publish(view, root, place)
        except CacheError:
            continue  # read-only or full: the next place will do
        return place
    view.home = PrivateDirectory("tokenmill-rows-")
    place = view.home.path / "rows" / view.key
    _publish(view, view.home.path, place)
    return place


def _publish(view: KeptView, root: Path, place: Path) -> None:
    with _KIND.stage(root) as draft:
        index = map_array(draft.write("index.bin", (c.data for c in view.choose())), "<i8")
        for name in ("lengths", "trained"):
            draft.write(f"{name}.bin", (c.data for c in view.gathered(index, name)))
        rows = int(index.size)
        record = {"document": view.document, "rows": rows, "checksums": draft.checksums}
        draft.publish(place, record)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the summary says."""

    document: dict[str, Any]
    rows: int
    checksums: dict[str, str]


def _open(
    directory: Path, document: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Map a published index, refusing one that is not what was written."""
    sealed = _KIND.admit(directory)
    record = sealed.convert(_Record)
    sealed.require_document(document)
    index, lengths, trained = (
        sealed.array(name, dtype, record.rows, record.checksums.get(name, ""))
        for name, dtype in FILES.items()
    )
    return index, lengths, trained
