"""Views: rows of stores by number, without copying."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from tokenmill.data.index import Index, Joined, Whole, chunks_of
from tokenmill.data.order import Int64Array
from tokenmill.errors import MAX_INT32, RowError, UsageError, check_integer
from tokenmill.store import Groups, Row, Store, ViewMethods
from tokenmill.store.by_source import SourceRows, Unit
from tokenmill.store.columns import row_numbers

if TYPE_CHECKING:
    from tokenmill.tokenizers.tokenizer import Tokenizer

Float32Array = npt.NDArray[np.float32]
Transform = Callable[[Row], Row | Mapping[str, Any]]


class View(ViewMethods, Sequence[Row]):
    """Rows of one or more stores by number.

    Filters, slices, shuffles and concatenations return views with another index; `map` returns a
    view whose stores pass rows through a function. Views are stateless, and their pickles are
    smaller than 16 KiB.

    Args:
        stores: The stores of the index, in its order.
        row_index: The rows of the view.
    """

    def __init__(
        self, stores: Sequence[Store | SourceRows | MappedStore], row_index: Index
    ) -> None:
        self._stores = list(stores)
        self.row_index = row_index
        self._starts = np.cumsum([0, *map(len, self._stores)], dtype=np.int64)

    def __reduce__(self) -> Any:
        if not self.is_mapped:
            return _view_of, (self.row_index,)
        return View, (self._stores, self.row_index)

    def with_index(self, index: Index) -> View:
        """Return a view of the same stores with another index."""
        return View(self._stores, index)

    @property
    def key(self) -> str:
        """Fingerprint of the content, part of saved states. Functions of `map` are not in it."""
        return self.row_index.key

    @cached_property
    def stores(self) -> list[Store]:
        """The stores of the view, each once."""
        return list({store.key: store for store in self.row_index.stores}.values())

    @property
    def is_mapped(self) -> bool:
        return any(isinstance(store, MappedStore) for store in self._stores)

    @property
    def is_by_source(self) -> bool:
        """Whether rows are source rows, which may be rejected; see `Store.by_source`."""
        return any(store.is_by_source for store in self.stores)

    @property
    def has_weights(self) -> bool:
        """Whether a trained token of any store has a loss weight other than 1."""
        return any(store.has_weights for store in self.stores)

    @property
    def has_media(self) -> bool:
        return any(store.has_media for store in self.stores)

    # Groups.

    @property
    def has_groups(self) -> bool:
        return any(store.has_groups for store in self.stores)

    @property
    def group_count(self) -> int:
        """Number of groups; without groups, of rows."""
        return self.row_index.group_count

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """Return the first row of each group; for `group_count`, the number of rows."""
        return self.row_index.group_starts(groups)

    @property
    def group_size(self) -> int | None:
        """Rows per group; None if that differs."""
        return self.row_index.group_size

    @property
    def groups(self) -> Groups:
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
        """Return a row, or a view of a slice."""
        if isinstance(index, slice):
            return self._range(range(len(self))[index])
        return self.batch([index])[0]

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        """Return rows in this order; numbers may be negative."""
        return self.rows(row_numbers(indices, len(self)))

    def locate(self, indices: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
        """Return stores, each with positions in ``indices`` and its own row numbers."""
        numbers = self.row_index.numbers(indices)
        if len(self._stores) == 1:
            return [(self._stores[0], np.arange(indices.size), numbers)]
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        result = []
        for owner in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == owner)
            result.append(
                (self._stores[owner], positions, numbers[positions] - self._starts[owner])
            )
        return result

    def units(self, indices: Int64Array) -> list[Unit]:
        """Return the rows of source rows, or why they are rejected."""
        return self.collect(indices, lambda store, numbers: store.read(numbers))

    def rows(self, indices: Int64Array) -> list[Row]:
        return self.collect(indices, lambda store, numbers: store.batch(numbers.tolist()))

    def collect(
        self, indices: Int64Array, read: Callable[[Any, Int64Array], Iterable[Any]]
    ) -> list[Any]:
        """Return one value per row; ``read`` returns those of some rows of a store."""
        values: list[Any] = [None] * indices.size
        for store, positions, numbers in self.locate(indices):
            for at, value in zip(positions.tolist(), read(store, numbers), strict=True):
                values[at] = value
        return values

    # Stored columns.

    def _gather(self, indices: Int64Array, name: str) -> Int64Array:
        result = np.empty(indices.size, dtype=np.int64)
        for store, positions, numbers in self.locate(indices):
            result[positions] = getattr(store, name)[numbers]
        return result

    def lengths_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "lengths")

    def trained_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "trained")

    def images_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "images")

    def patches_at(self, indices: Int64Array) -> Int64Array:
        return self._gather(indices, "patches")

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per row."""
        return self._column("lengths")

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Trained tokens per row."""
        return self._column("trained")

    def _column(self, name: str) -> npt.NDArray[np.int32]:
        if isinstance(self.row_index, Whole):
            column: npt.NDArray[np.int32] = getattr(self._stores[0], name)
            return column
        return self._gather(np.arange(len(self)), name).astype(np.int32)

    def total(self, name: str) -> int:
        """Return the sum of ``lengths`` or ``trained`` over all rows."""
        return sum(int(self._gather(rows, name).sum()) for rows in chunks_of(len(self)))

    def trained_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> Int64Array:
        return self._within("trained_within", indices, starts, stops).astype(np.int64)

    def weighed_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Return sums of the weights in ``start:stop`` of rows."""
        return self._within("weighed_within", indices, starts, stops)

    def _within(
        self, method: str, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        result = np.empty(indices.size, dtype=np.float64)
        for store, positions, numbers in self.locate(indices):
            result[positions] = getattr(store, method)(numbers, starts[positions], stops[positions])
        return result

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token, else its eos token; None if the stores differ."""
        ids = set()
        for store in self.stores:
            tokenizer = store.manifest.get("tokenizer", {})
            pad = tokenizer.get("pad_token_id")
            ids.add(tokenizer.get("eos_token_id") if pad is None else pad)
        return ids.pop() if len(ids) == 1 else None

    def pad_token_or(self, given: int | None) -> int | None:
        if given is None:
            return self.pad_token_id
        return check_integer("pad_token_id", given, 0, MAX_INT32)

    # Sidecars.

    def sidecar(self, name: str, producer: str | None = None) -> ViewSidecar:
        """Return the values attached under a name; ``producer`` is needed if there are several.

        Raises:
            UsageError: A store has no such values, or producers or units differ.
        """
        sidecars = [store.sidecar(name, producer) for store in self.stores]
        kinds = {(sidecar.producer, sidecar.per) for sidecar in sidecars}
        if len(kinds) > 1:
            listed = " and ".join(f"by {producer!r} per {per}" for producer, per in sorted(kinds))
            raise UsageError(f"sidecar {name!r} differs between the stores of this view: {listed}")
        own_producer, per = kinds.pop()
        return ViewSidecar(self, name, own_producer, per)

    @property
    def sidecars(self) -> list[ViewSidecar]:
        """The sidecars that all stores of the view have, by name."""
        names = [{sidecar.name for sidecar in store.sidecars} for store in self.stores]
        common = sorted(set.intersection(*names)) if names else []
        return [self.sidecar(name) for name in common]

    def __repr__(self) -> str:
        total = sum(map(len, self.stores))
        stores = "a store" if len(self.stores) == 1 else f"{len(self.stores)} stores"
        return f"View({self.key[:12]}, {len(self):,} of {total:,} rows of {stores})"


def _view_of(index: Index) -> View:
    return View(index.stores, index)


def tokenizer_of(store: Store) -> Tokenizer:
    # Imported when called: reading a store needs no tokenizer library.
    from tokenmill.tokenizers.loading import load

    return load(str(store.tokenizer_path), backend="file")


def as_view(data: Store | SourceRows | View) -> View:
    if isinstance(data, View):
        return data
    if isinstance(data, Store | SourceRows):
        store: Any = data
        return View([store], Whole(store))
    if isinstance(data, str | os.PathLike):
        raise UsageError(f"expected a store, got a path; write tm.open_store({data!r})")
    raise UsageError(f"expected a store or a view, got {data!r:.200} ({type(data).__name__})")


def concat(parts: Iterable[Store | SourceRows | View]) -> View:
    """Return a view of several stores or views, one after the other."""
    if not isinstance(parts, Iterable):
        raise UsageError(f"concat needs a list of stores or views, got {parts!r}")
    views = [as_view(part) for part in parts]
    if not views:
        raise UsageError("concat needs at least one store")
    if len(views) == 1:
        return views[0]
    stores: list[Any] = [store for view in views for store in view._stores]
    paths = {store.manifest["tokenizer"]["identity"]: store.path for store in stores}
    if len(paths) > 1:
        listed = ", ".join(f"{path} has {identity}" for identity, path in paths.items())
        raise UsageError(
            f"stores of different tokenizers cannot be combined: {listed}; prepare them with the "
            "same tokenizer and chat template"
        )
    if len({view.is_by_source for view in views}) > 1:
        raise UsageError(
            "stores and rows tokenized on request cannot be combined; use store.by_source()"
        )
    if len({view.has_groups for view in views if view.is_by_source}) > 1:
        raise UsageError("source rows with groups and without groups cannot be combined")
    return View(stores, Joined([view.row_index for view in views]))


@dataclass(frozen=True)
class ViewSidecar:
    """Values attached to the rows of a view: one name, producer and unit (row or token)."""

    view: View
    name: str
    producer: str
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
        result = self.batch([index])[0]
        return float(result) if self.per == "row" else result

    def batch(self, indices: Iterable[SupportsIndex]) -> Float32Array | list[Float32Array]:
        """Return one array with a value for each row; per token, one array for each row."""
        numbers = row_numbers(indices, len(self))
        return self.of_rows(numbers) if self.per == "row" else self.of_tokens(numbers)

    def of_rows(self, indices: Int64Array) -> Float32Array:
        result = np.empty(indices.size, dtype=np.float32)
        for store, positions, numbers in self.view.locate(indices):
            result[positions] = store.sidecar(self.name, self.producer).batch(numbers)
        return result

    def of_tokens(self, indices: Int64Array) -> list[Float32Array]:
        return self.view.collect(
            indices, lambda store, rows: store.sidecar(self.name, self.producer).batch(rows)
        )

    @property
    def values(self) -> Float32Array:
        """All values in the view's order; per token, rows are concatenated."""
        everything = np.arange(len(self), dtype=np.int64)
        if self.per == "row":
            return self.of_rows(everything)
        return np.concatenate([np.zeros(0, dtype=np.float32), *self.of_tokens(everything)])


# Map.


def mapped(data: Store | View, function: Transform) -> View:
    if not callable(function):
        raise UsageError(f"map() needs a function of a row, got {type(function).__name__}")
    view = as_view(data)
    return View([MappedStore(store, function) for store in view._stores], view.row_index)


class SumsOfRows:
    """Sums over tokens of rows in memory."""

    batch: Any

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


class MappedStore(SumsOfRows):
    """A store whose rows pass through a function.

    The function may not change the number of tokens, so orders, packs and keys are the store's.
    """

    def __init__(self, store: Store | SourceRows | MappedStore, function: Transform) -> None:
        self._store = store
        self._function = function

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self._function)
        except Exception as error:
            raise UsageError(
                f"the map function {self._function!r} cannot be pickled ({error}); define it at "
                "the top level of a module"
            ) from error
        return MappedStore, (self._store, self._function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        return [_transformed(row, self._function) for row in self._store.batch(indices)]

    def read(self, numbers: Int64Array) -> list[Unit]:
        source: Any = self._store
        return [
            unit
            if isinstance(unit, RowError)
            else [_transformed(row, self._function) for row in unit]
            for unit in source.read(numbers)
        ]


def _transformed(row: Row, function: Transform) -> Row:
    result = function(row)
    if isinstance(result, Row):
        result = {"input_ids": result.input_ids, "loss_mask": result.loss_mask}
    if not isinstance(result, Mapping) or not set(result) <= {"input_ids", "loss_mask"}:
        what = sorted(result) if isinstance(result, Mapping) else type(result).__name__
        raise UsageError(
            "the map function must return a Row, or a dict with input_ids and loss_mask, got "
            f"{what} ({row.origin})"
        )
    arrays: list[npt.NDArray[Any]] = []
    for name, stored in (("input_ids", row.input_ids), ("loss_mask", row.loss_mask)):
        values = np.asarray(result.get(name, stored))
        if values.shape != stored.shape:
            raise UsageError(
                f"the map function returned {name} of shape {values.shape} for a row of "
                f"{stored.size} tokens ({row.origin}); it may not change the number of tokens"
            )
        if name == "loss_mask":
            fits = values.dtype.kind in "biu" and bool(((values == 0) | (values == 1)).all())
        else:
            limit = np.iinfo(stored.dtype).max
            fits = values.dtype.kind in "iu" and bool(((values >= 0) & (values <= limit)).all())
        if not fits:
            raise UsageError(
                f"the map function must return {name} that are "
                f"{'token ids' if name == 'input_ids' else '0 or 1'} ({row.origin})"
            )
        arrays.append(values.astype(stored.dtype, copy=False))
    return row.with_tokens(arrays[0], arrays[1])


# Checks for readers that support less than a loader.


def unweighted(view: View, reader: str) -> View:
    """Return the view; raise `UsageError` if it has loss weights."""
    if view.has_weights:
        raise UsageError(
            f"this data has loss weights, which {reader} does not support; use a tm.Loader, or "
            "prepare the rows with weights of 0 and 1"
        )
    return view


def tokens_alone(view: View, reader: str) -> View:
    """Return the view; raise `UsageError` if it has loss weights or images."""
    if view.has_media:
        raise UsageError(
            f"this data has images, which {reader} does not support; use tm.Loader(media='pixels')"
        )
    return unweighted(view, reader)
