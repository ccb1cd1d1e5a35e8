"""Views: rows by integer over stores, without copying a row."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from tokenmill.data.index import Index, Joined, Whole, chunks_of
from tokenmill.data.order import Int64Array
from tokenmill.errors import UsageError
from tokenmill.store import Groups, Row, Store, ViewMethods
from tokenmill.store.columns import row_numbers

Float32Array = npt.NDArray[np.float32]
Transform = Callable[[Row], Row | Mapping[str, Any]]


class View(ViewMethods, Sequence[Row]):
    """Rows by integer over stores.

    Filters, slices, shuffles and concatenations give views with another index; `map` gives one
    whose stores pass every row through a function when it is served. Views are stateless and pickle
    under 16 KiB.

    Args:
        stores: The stores of the index, in its order; some may be wrapped by `map`.
        row_index: Which rows of them.
    """

    def __init__(self, stores: Sequence[Store | MappedStore], row_index: Index) -> None:
        self._stores = list(stores)
        self.row_index = row_index
        self._starts = np.cumsum([0, *map(len, self._stores)], dtype=np.int64)

    def __reduce__(self) -> Any:
        if not self.is_mapped:
            return _view_of, (self.row_index,)
        return View, (self._stores, self.row_index)

    def with_index(self, index: Index) -> View:
        """The same stores with an index that is derived from this view's."""
        return View(self._stores, index)

    @property
    def key(self) -> str:
        """Fingerprint of the content, part of saved states. Functions of `map` are not in it."""
        return self.row_index.key

    @cached_property
    def stores(self) -> list[Store]:
        """The stores beneath, each once."""
        return list({store.key: store for store in self.row_index.stores}.values())

    @property
    def is_mapped(self) -> bool:
        return any(isinstance(store, MappedStore) for store in self._stores)

    @property
    def has_weights(self) -> bool:
        """Whether trained tokens count other than 1 in the loss, in any of the stores."""
        return any(store.has_weights for store in self.stores)

    @property
    def has_media(self) -> bool:
        return any(store.has_media for store in self.stores)

    # Groups: rows that belong together.

    @property
    def has_groups(self) -> bool:
        return any(store.has_groups for store in self.stores)

    @property
    def group_count(self) -> int:
        """Number of groups; as many as rows without groups."""
        return self.row_index.group_count

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """The first row of groups by number; after the last group, the number of rows."""
        return self.row_index.group_starts(groups)

    @property
    def group_size(self) -> int | None:
        """Rows of every group, where all are known to have as many; else None."""
        return self.row_index.group_size

    @property
    def groups(self) -> Groups:
        """The groups, by number; none without groups."""
        return Groups(self)

    def groups_of(self, rows: Int64Array) -> Int64Array:
        return self.row_index.groups_of(rows)

    # Rows.

    def __len__(self) -> int:
        return len(self.row_index)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | View:
        """One row, or a view of a slice."""
        if isinstance(index, slice):
            return self._range(range(len(self))[index])
        return self.batch([index])[0]

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        """Rows in the given order; negative numbers count from the end."""
        return self.rows(row_numbers(indices, len(self)))

    def locate(
        self, indices: Int64Array
    ) -> list[tuple[Store | MappedStore, Int64Array, Int64Array]]:
        """Stores of valid row numbers: each with positions in ``indices`` and its own numbers."""
        numbers = self.row_index.numbers(indices)
        if len(self._stores) == 1:
            return [(self._stores[0], np.arange(indices.size), numbers)]
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        found = []
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            found.append((self._stores[owner], places, numbers[places] - self._starts[owner]))
        return found

    def rows(self, indices: Int64Array) -> list[Row]:
        found: list[Row] = [None] * indices.size  # type: ignore[list-item]
        for store, places, numbers in self.locate(indices):
            for place, row in zip(places.tolist(), store.batch(numbers.tolist()), strict=True):
                found[place] = row
        return found

    # Stored columns.

    def _gather(self, indices: Int64Array, name: str) -> Int64Array:
        found = np.empty(indices.size, dtype=np.int64)
        for store, places, numbers in self.locate(indices):
            found[places] = getattr(store, name)[numbers]
        return found

    def lengths_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "lengths")

    def trained_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "trained")

    def pictures_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "pictures")

    def patches_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "patches")

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per row; of a whole store, its mapped column."""
        return self._column("lengths")

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Trained tokens per row; of a whole store, its mapped column."""
        return self._column("trained")

    def _column(self, name: str) -> npt.NDArray[np.int32]:
        if isinstance(self.row_index, Whole):
            column: npt.NDArray[np.int32] = getattr(self._stores[0], name)
            return column
        return self._gather(np.arange(len(self)), name).astype(np.int32)

    def total(self, name: str) -> int:
        """Sum of ``lengths`` or ``trained`` over all rows."""
        return sum(int(self._gather(rows, name).sum()) for rows in chunks_of(len(self)))

    def trained_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> Int64Array:
        return self._within("trained_within", indices, starts, stops).astype(np.int64)

    def weighed_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Sums of the weights of pieces of rows."""
        return self._within("weighed_within", indices, starts, stops)

    def _within(
        self, method: str, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        found = np.empty(indices.size, dtype=np.float64)
        for store, places, numbers in self.locate(indices):
            found[places] = getattr(store, method)(numbers, starts[places], stops[places])
        return found

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding token, else its end of sequence, where the stores agree."""
        found = set()
        for store in self.stores:
            tokenizer = store.manifest.get("tokenizer", {})
            pad = tokenizer.get("pad_id")
            found.add(tokenizer.get("eos_id") if pad is None else pad)
        return found.pop() if len(found) == 1 else None

    # Sidecars.

    def sidecar(self, name: str, made_by: str | None = None) -> ViewSidecar:
        """The values that were attached to the rows under a name.

        ``made_by`` is what computed them; needed where several did.

        Raises:
            UsageError: One of the stores lacks them, or their makers or units differ.
        """
        found = [store.sidecar(name, made_by) for store in self.stores]
        kinds = {(sidecar.made_by, sidecar.per) for sidecar in found}
        if len(kinds) > 1:
            makers = " and ".join(f"by {maker!r} per {per}" for maker, per in sorted(kinds))
            raise UsageError(
                f"sidecar {name!r} was made {makers} in the stores of this view: they differ"
            )
        maker, per = kinds.pop()
        return ViewSidecar(self, name, maker, per)

    @property
    def sidecars(self) -> list[ViewSidecar]:
        """The sidecars that every store of the view has, by name."""
        names = [{sidecar.name for sidecar in store.sidecars} for store in self.stores]
        common = sorted(set.intersection(*names)) if names else []
        return [self.sidecar(name) for name in common]

    def __repr__(self) -> str:
        return f"View({len(self):,} rows, {self.key[:12]})"


def _view_of(index: Index) -> View:
    return View(index.stores, index)


def as_view(data: Store | View) -> View:
    """A view of a store, or the view that was given."""
    if isinstance(data, View):
        return data
    if isinstance(data, Store):
        return View([data], Whole(data))
    raise UsageError(f"expected a store or a view of one, not {type(data).__name__}")


def concat(parts: Iterable[Store | View]) -> View:
    """Several stores or views one after the other, without copying."""
    views = [as_view(part) for part in parts]
    if not views:
        raise UsageError("concat needs at least one store")
    if len(views) == 1:
        return views[0]
    stores = [store for view in views for store in view._stores]
    return View(stores, Joined([view.row_index for view in views]))


@dataclass(frozen=True)
class ViewSidecar:
    """Values attached to the rows of a view: one name, maker and unit (row or token)."""

    view: View
    name: str
    made_by: str
    per: str

    def __len__(self) -> int:
        return len(self.view)

    @overload
    def __getitem__(self, index: SupportsIndex) -> float | Float32Array: ...
    @overload
    def __getitem__(self, index: slice) -> Float32Array | list[Float32Array]: ...
    def __getitem__(
        self, index: SupportsIndex | slice
    ) -> float | Float32Array | list[Float32Array]:
        """Like `tokenmill.Sidecar`, by the view's row numbers."""
        if isinstance(index, slice):
            return self.batch(range(len(self))[index])
        found = self.batch([index])[0]
        return float(found) if self.per == "row" else found

    def batch(self, indices: Iterable[SupportsIndex]) -> Float32Array | list[Float32Array]:
        """Of many rows: one array of values, or per token one array for each row."""
        numbers = row_numbers(indices, len(self))
        return self.of_rows(numbers) if self.per == "row" else self.of_tokens(numbers)

    def of_rows(self, indices: Int64Array) -> Float32Array:
        found = np.empty(indices.size, dtype=np.float32)
        for store, places, numbers in self.view.locate(indices):
            found[places] = store.sidecar(self.name, self.made_by).batch(numbers)
        return found

    def of_tokens(self, indices: Int64Array) -> list[Float32Array]:
        found: list[Float32Array] = [None] * indices.size  # type: ignore[list-item]
        for store, places, numbers in self.view.locate(indices):
            values = store.sidecar(self.name, self.made_by).batch(numbers)
            for place, value in zip(places.tolist(), values, strict=True):
                found[place] = value
        return found

    @property
    def values(self) -> Float32Array:
        """All values in the view's order; per token, the rows one after the other."""
        everything = np.arange(len(self), dtype=np.int64)
        if self.per == "row":
            return self.of_rows(everything)
        return np.concatenate([np.zeros(0, dtype=np.float32), *self.of_tokens(everything)])


# Map.


def mapped(data: Store | View, function: Transform) -> View:
    """Pass rows through a function when they are served; see `tokenmill.store.ViewMethods.map`."""
    if not callable(function):
        raise UsageError(f"map wants a function of a row, not {type(function).__name__}")
    view = as_view(data)
    return View([MappedStore(store, function) for store in view._stores], view.row_index)


class MappedStore:
    """A store whose rows pass through a function.

    The function may change token ids and mask of a row, but not how many tokens there are, so
    orders, packs and keys are those of the store.
    """

    def __init__(self, store: Store | MappedStore, function: Transform) -> None:
        self._store = store
        self._function = function

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self._function)
        except Exception as error:
            raise UsageError(
                f"{self._function!r} cannot travel to another process ({error}): define the "
                "function of a map at the top of a module"
            ) from error
        return MappedStore, (self._store, self._function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        return [_transformed(row, self._function) for row in self._store.batch(indices)]

    def trained_within(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        served = zip(self.batch(rows.tolist()), starts.tolist(), stops.tolist(), strict=True)
        sums = [int(row.loss_mask[start:stop].sum(dtype=np.int64)) for row, start, stop in served]
        return np.asarray(sums, dtype=np.int64)

    def weighed_within(
        self, rows: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        served = zip(self.batch(rows.tolist()), starts.tolist(), stops.tolist(), strict=True)
        sums = [float(row.weights[start:stop].sum(dtype=np.float64)) for row, start, stop in served]
        return np.asarray(sums, dtype=np.float64)


def _transformed(row: Row, function: Transform) -> Row:
    given = function(row)
    if isinstance(given, Row):
        given = {"input_ids": given.input_ids, "loss_mask": given.loss_mask}
    if not isinstance(given, Mapping) or not set(given) <= {"input_ids", "loss_mask"}:
        what = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise UsageError(
            "the function of a map gives a row, or a mapping of input_ids and loss_mask, not "
            f"{what} ({row.origin})"
        )
    arrays: list[npt.NDArray[Any]] = []
    for name, stored in (("input_ids", row.input_ids), ("loss_mask", row.loss_mask)):
        values = np.asarray(given.get(name, stored))
        if values.shape != stored.shape:
            raise UsageError(
                f"the function of a map gave {name} of shape {values.shape} for a row of "
                f"{stored.size} tokens ({row.origin}): orders and packs go by stored lengths, so "
                "prepare the rows with the tokens they shall have"
            )
        if name == "loss_mask":
            fits = values.dtype.kind in "biu" and bool(((values == 0) | (values == 1)).all())
        else:
            limit = np.iinfo(stored.dtype).max
            fits = values.dtype.kind in "iu" and bool(((values >= 0) & (values <= limit)).all())
        if not fits:
            raise UsageError(
                f"the function of a map gave {name} that are no "
                f"{'token ids' if name == 'input_ids' else 'zeros and ones'} ({row.origin})"
            )
        arrays.append(values.astype(stored.dtype, copy=False))
    return row.with_tokens(arrays[0], arrays[1])


# Views for readers that know less than a loader.


def unweighted(view: View, reader: str) -> View:
    """Return the view for a reader that knows masks only; UsageError if it has weights."""
    if view.has_weights:
        raise UsageError(
            f"trained tokens of this data weigh other than 1 (docs/batches.md#weights), and "
            f"{reader} knows no weights: serve it with a Loader, or prepare the rows with weights "
            "of 0 and 1"
        )
    return view


def tokens_alone(view: View, reader: str) -> View:
    """Return the view for a reader that knows tokens and masks only.

    Raises:
        UsageError: It has weights or images.
    """
    if view.has_media:
        raise UsageError(
            f"rows of this data have pictures, and {reader} would train on their tokens as if "
            "there were none: serve it with a Loader (media='pixels', docs/images.md)"
        )
    return unweighted(view, reader)
