"""Views: rows by integer over stores, without copying a row.

A `View` is anything with a length whose rows are rows of stores. `StoreView` is a store itself,
`SliceView` a range of another view, `ConcatView` several behind each other, and a `KeptView` (see
`tokenmill.dataset.selection`) an ascending choice of another's rows. All of them answer through one
question: `locate`, which maps row numbers to (store, row number in it) in bulk; lengths,
trained counts and rows follow from that.

Views are stateless, pickle as a description under 16 KiB, and hold no memory that grows with
their rows. A view's `document` says what it is made of and its `key` names that content, not
where it lies: a saved cursor names the key and is refused by other data.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.errors import UsageError
from tokenmill.optional import adapter
from tokenmill.store import Row, Store

Int64Array = npt.NDArray[np.int64]
Found = tuple[Store, Int64Array, Int64Array]
"""A store, places in the question, and row numbers in the store."""

CHUNK = 1 << 18  # rows at a time where a pass over all rows is needed: 2 MiB of row numbers


class View(Sequence[Row], abc.ABC):
    """Rows by integer over stores."""

    @property
    @abc.abstractmethod
    def document(self) -> Any:
        """What the view is made of, as plain values, by content."""

    @property
    def key(self) -> str:
        """Name of the view's content."""
        return fingerprint.key(self.document)

    @abc.abstractmethod
    def locate(self, indices: Int64Array) -> list[Found]:
        """Map row numbers (already checked) to stores, in bulk."""

    @abc.abstractmethod
    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Meta columns, a stretch of rows at a time, with the number of the first row."""

    @property
    @abc.abstractmethod
    def stores(self) -> list[Store]:
        """The stores beneath, each once."""

    @property
    @abc.abstractmethod
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per row (mapped, except for a concatenation, which copies)."""

    @property
    @abc.abstractmethod
    def trained(self) -> npt.NDArray[np.int32]:
        """Trained tokens per row (mapped, except for a concatenation, which copies)."""

    # What follows from `locate`.

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | View:
        """One row, or a view of a slice."""
        if isinstance(index, slice):
            return SliceView(self, range(len(self))[index])
        return self.batch([index])[0]

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        """Rows in the order asked for; negative numbers count from the end."""
        return self.rows(self.normalised(indices))

    def normalised(self, indices: Iterable[SupportsIndex]) -> Int64Array:
        """Row numbers as an array, checked, without negative ones."""
        size = len(self)
        numbers = np.asarray([operator.index(index) for index in indices], dtype=np.int64)
        wrong = (numbers < -size) | (numbers >= size)
        if wrong.any():
            raise IndexError(f"row {int(numbers[wrong][0])} of a view of {size}")
        return np.where(numbers < 0, numbers + size, numbers)

    def rows(self, indices: Int64Array) -> list[Row]:
        """Rows by checked numbers."""
        found: list[Row] = [None] * indices.size  # type: ignore[list-item]
        for store, places, numbers in self.locate(indices):
            for place, row in zip(places.tolist(), store.batch(numbers.tolist()), strict=True):
                found[place] = row
        return found

    def lengths_at(self, indices: Int64Array) -> Int64Array:
        """Tokens of many rows."""
        return self._gather(indices, "lengths")

    def trained_at(self, indices: Int64Array) -> Int64Array:
        """Trained tokens of many rows."""
        return self._gather(indices, "trained")

    def trained_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> Int64Array:
        """Trained tokens of pieces of rows, from the stores' columns."""
        found = np.empty(indices.size, dtype=np.int64)
        for store, places, numbers in self.locate(indices):
            found[places] = store.trained_within(numbers, starts[places], stops[places])
        return found

    def _gather(self, indices: Int64Array, name: str) -> Int64Array:
        found = np.empty(indices.size, dtype=np.int64)
        for store, places, numbers in self.locate(indices):
            found[places] = getattr(store, name)[numbers]
        return found

    def total(self, name: str) -> int:
        """Sum of ``lengths`` or ``trained`` over all rows, a stretch at a time."""
        size = len(self)
        return sum(
            int(self._gather(np.arange(first, min(first + CHUNK, size)), name).sum())
            for first in range(0, size, CHUNK)
        )

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding token, else its end of sequence, where the stores agree."""
        found = set()
        for store in self.stores:
            tokenizer = store.manifest.get("tokenizer", {})
            pad = tokenizer.get("pad_id")
            found.add(tokenizer.get("eos_id") if pad is None else pad)
        return found.pop() if len(found) == 1 else None

    def torch(self, batch_size: int = 8, **arguments: Any) -> Any:
        """As `tokenmill.Store.torch`."""
        return adapter("torch").DataLoader(self, batch_size=batch_size, **arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} rows, {self.key[:12]})"


class StoreView(View):
    """A store, whole."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def document(self) -> Any:
        """The store's own key stands for its content."""
        return {"store": self._store.key}

    @property
    def key(self) -> str:
        """The store's own key."""
        return self._store.key

    def __len__(self) -> int:
        return len(self._store)

    def locate(self, indices: Int64Array) -> list[Found]:
        """Row numbers are the store's own."""
        return [(self._store, np.arange(indices.size), indices)]

    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The store's columns; ``source`` as the path that origins name."""
        paths = np.asarray([path or "" for path in self._store.sources] or [""], dtype=object)
        for first, columns in self._store.columns(names):
            if "source" in columns:
                columns["source"] = paths[columns["source"]]
            yield first, columns

    @property
    def stores(self) -> list[Store]:
        """The one store."""
        return [self._store]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Mapped."""
        return self._store.lengths

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Mapped."""
        return self._store.trained


class SliceView(View):
    """A range of another view, as ``view[a:b:c]`` makes it.

    Args:
        parent: The other view.
        numbers: Its row numbers.
    """

    def __init__(self, parent: View, numbers: range) -> None:
        self._parent = parent
        self._numbers = numbers

    @property
    def document(self) -> Any:
        """Parent and range."""
        numbers = self._numbers
        return {"slice": [numbers.start, numbers.stop, numbers.step], "of": self._parent.key}

    def __len__(self) -> int:
        return len(self._numbers)

    def locate(self, indices: Int64Array) -> list[Found]:
        """Arithmetic, then the parent."""
        return self._parent.locate(indices * self._numbers.step + self._numbers.start)

    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The parent's columns, as far as they lie in the range."""
        numbers = self._numbers
        if numbers.step != 1:
            raise UsageError("filter or split first, then take every n-th row")
        for first, columns in self._parent.columns(names):
            size = len(next(iter(columns.values())))
            start, stop = max(first, numbers.start), min(first + size, numbers.stop)
            if start < stop:
                cut = slice(start - first, stop - first)
                yield start - numbers.start, {name: c[cut] for name, c in columns.items()}

    @property
    def stores(self) -> list[Store]:
        """The parent's."""
        return self._parent.stores

    def _cut(self, column: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        numbers = self._numbers
        stop = None if numbers.step < 0 and numbers.stop < 0 else numbers.stop
        return column[numbers.start : stop : numbers.step]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """A numpy view of the parent's."""
        return self._cut(self._parent.lengths)

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """A numpy view of the parent's."""
        return self._cut(self._parent.trained)


class ConcatView(View):
    """Several views behind each other.

    Args:
        parts: The views, in order.
    """

    def __init__(self, parts: Sequence[View]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    @property
    def document(self) -> Any:
        """The parts, in order."""
        return {"concat": [part.key for part in self._parts]}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, indices: Int64Array) -> list[Found]:
        """Ask each part that is concerned."""
        owners = np.searchsorted(self._ends, indices, side="right")
        found = []
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            part = self._parts[owner]
            begin = int(self._ends[owner]) - len(part)
            for store, within, numbers in part.locate(indices[places] - begin):
                found.append((store, places[within], numbers))
        return found

    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The parts' columns, one part after the other."""
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            for first, columns in part.columns(names):
                yield end - len(part) + first, columns

    @property
    def stores(self) -> list[Store]:
        """Of all parts."""
        return list({store.key: store for part in self._parts for store in part.stores}.values())

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """A copy, 4 bytes per row: nothing in tokenmill asks for it."""
        return np.concatenate([part.lengths for part in self._parts])

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """A copy, 4 bytes per row: nothing in tokenmill asks for it."""
        return np.concatenate([part.trained for part in self._parts])


def as_view(data: Store | View) -> View:
    """A view of a store, or the view that was given."""
    if isinstance(data, View):
        return data
    if isinstance(data, Store):
        return StoreView(data)
    raise UsageError(f"expected a store or a view of one, not {type(data).__name__}")


def concat(parts: Iterable[Store | View]) -> View:
    """Several stores or views behind each other, without copying."""
    views = [as_view(part) for part in parts]
    if not views:
        raise UsageError("concat needs at least one store")
    return views[0] if len(views) == 1 else ConcatView(views)
