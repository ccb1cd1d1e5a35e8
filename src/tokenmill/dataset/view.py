"""Views: rows by integer over stores, without copying a row.

A `View` is anything with a length whose rows are rows of stores. `StoreView` is a store itself,
`ConcatView` several views behind each other. A `PartView` is rows of another view by a rule from
number to number: `SliceView` a range, `ShuffledView` a permutation, and a `KeptView` (see
`tokenmill.dataset.selection`) an index. All of them answer through one question: `locate`, which
maps row numbers to (store, row number in it) in bulk; lengths, trained counts and rows follow from
that.

Views are stateless, pickle as a description under 16 KiB, and hold no memory that grows with
their rows. A view's `document` says what it is made of and its `key` names that content, not
where it lies: a saved cursor names the key and is refused by other data.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.dataset.sidecars import ViewSidecar
from tokenmill.errors import UsageError
from tokenmill.sampling import (
    ORDER_VERSION,
    PURPOSE_VIEW,
    Int64Array,
    Permutation,
    check_seed,
    derive_key,
)
from tokenmill.store import Groups, Row, Sidecar, Store, ViewMethods


class Served(Protocol):
    """What rows are read from: a store, or one whose rows a function changes."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per row, as stored."""

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Trained tokens per row, as stored."""

    @property
    def pictures(self) -> npt.NDArray[np.int32]:
        """Pictures per row."""

    @property
    def patches(self) -> npt.NDArray[np.int32]:
        """Patches per row."""

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        """Rows by number."""

    def trained_within(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Trained tokens of pieces of rows, as served."""

    def weighed_within(
        self, rows: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Sums of the weights of pieces of rows, as served."""

    def sidecar(self, name: str, made_by: str | None = None) -> Sidecar:
        """What was attached to rows."""


Found = tuple[Served, Int64Array, Int64Array]
"""A store, places in the question, and row numbers in the store."""

CHUNK = 1 << 18  # rows at a time where a pass over all rows is needed: 2 MiB of row numbers


class View(ViewMethods, Sequence[Row], abc.ABC):
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
    def columns(self, names: Sequence[str]) -> Iterator[tuple[Int64Array, dict[str, Any]]]:
        """Stored columns, many rows at a time, with the rows' numbers; every row comes once."""

    @property
    @abc.abstractmethod
    def stores(self) -> list[Store]:
        """The stores beneath, each once."""

    @property
    def has_weights(self) -> bool:
        """Whether trained tokens count other than 1 in the loss, in any of the stores beneath."""
        return any(store.has_weights for store in self.stores)

    @property
    def has_media(self) -> bool:
        """Whether rows have pictures, in any of the stores beneath."""
        return any(store.has_media for store in self.stores)

    # Groups: rows that belong together follow each other in every view, and are there or not.

    @property
    def has_groups(self) -> bool:
        """Whether rows belong together, in any of the stores beneath."""
        return any(store.has_groups for store in self.stores)

    @property
    def group_count(self) -> int:
        """How many groups there are; as many as rows where these stand for themselves."""
        return len(self)

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """The first row of groups by number; behind the last group, one past the last row."""
        return groups

    @property
    def group_size(self) -> int | None:
        """Rows of every group, where all are known to have as many; else None."""
        sizes = {store.group_size for store in self.stores}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def groups(self) -> Groups:
        """The groups, by number; none where rows stand for themselves."""
        return Groups(self)

    def groups_of(self, rows: Int64Array) -> Int64Array:
        """The groups of rows by number: found by bisection, all rows at once."""
        low, high = np.zeros_like(rows), np.full_like(rows, self.group_count)
        while (high - low > 1).any():
            middle = (low + high) // 2
            behind = self.group_starts(middle) > rows
            low, high = np.where(behind, low, middle), np.where(behind, middle, high)
        return low

    # What follows from `locate`.

    @property
    def in_order(self) -> bool:
        """Whether `columns` come in the order of the rows."""
        return True

    @property
    def is_mapped(self) -> bool:
        """Whether a function changes rows when they are served: then the key does not say all."""
        return False

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per row; the stored column where rows stand as they are stored, else a copy."""
        return self.lengths_at(np.arange(len(self))).astype(np.int32)

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """Trained tokens per row; the stored column where it can be, else a copy."""
        return self.trained_at(np.arange(len(self))).astype(np.int32)

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
        """Rows in the order asked for; negative numbers count from the end."""
        return self.rows(self.normalised(indices))

    def normalised(self, indices: Iterable[SupportsIndex]) -> Int64Array:
        """Row numbers as an array, checked, without negative ones."""
        size = len(self)
        given = list(indices)
        if any(isinstance(index, bool | np.bool_) for index in given):
            raise UsageError("rows are chosen by number, not by truth values: use filter")
        numbers = np.asarray([operator.index(index) for index in given], dtype=np.int64)
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

    def pictures_at(self, indices: Int64Array) -> Int64Array:
        """Pictures of many rows."""
        return self._gather(indices, "pictures")

    def patches_at(self, indices: Int64Array) -> Int64Array:
        """What the pictures of many rows cost a vision model."""
        return self._gather(indices, "patches")

    def trained_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> Int64Array:
        """Trained tokens of pieces of rows, from the stores' columns."""
        found = np.empty(indices.size, dtype=np.int64)
        for store, places, numbers in self.locate(indices):
            found[places] = store.trained_within(numbers, starts[places], stops[places])
        return found

    def weighed_within(
        self, indices: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Sums of the weights of pieces of rows, from the stores' columns."""
        found = np.empty(indices.size, dtype=np.float64)
        for store, places, numbers in self.locate(indices):
            found[places] = store.weighed_within(numbers, starts[places], stops[places])
        return found

    def sidecar(self, name: str, made_by: str | None = None) -> ViewSidecar:
        """The numbers that were attached to the rows, under a name.

        Args:
            name: Their name; every store of the view must have them.
            made_by: What computed them; needed where several did.

        Raises:
            UsageError: One of the stores lacks them, or they do not agree.
        """
        found = [store.sidecar(name, made_by) for store in self.stores]
        kinds = {(sidecar.made_by, sidecar.per) for sidecar in found}
        if len(kinds) > 1:
            told = " and ".join(f"by {maker!r} per {per}" for maker, per in sorted(kinds))
            raise UsageError(
                f"sidecar {name!r} was made {told} in the stores of this view: they differ"
            )
        maker, per = kinds.pop()
        return ViewSidecar(self, name, maker, per)

    @property
    def sidecars(self) -> list[ViewSidecar]:
        """All that is attached to every store of the view, by name.

        Raises:
            UsageError: A name that all of them have was made by several.
        """
        names = [{sidecar.name for sidecar in store.sidecars} for store in self.stores]
        common = sorted(set.intersection(*names)) if names else []
        return [self.sidecar(name) for name in common]

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
        return self._store.key

    def __len__(self) -> int:
        return len(self._store)

    def locate(self, indices: Int64Array) -> list[Found]:
        return [(self._store, np.arange(indices.size), indices)]

    @property
    def group_count(self) -> int:
        return self._store.group_count

    def group_starts(self, groups: Int64Array) -> Int64Array:
        return self._store.group_starts(groups)

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Int64Array, dict[str, Any]]]:
        """The store's columns; ``source`` as the path that origins name."""
        paths = np.asarray([path or "" for path in self._store.sources] or [""], dtype=object)
        for first, columns in self._store.columns(names):
            if "source" in columns:
                columns["source"] = paths[columns["source"]]
            size = len(next(iter(columns.values())))
            yield np.arange(first, first + size, dtype=np.int64), columns

    @property
    def stores(self) -> list[Store]:
        return [self._store]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self._store.lengths

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        return self._store.trained


class PartView(View):
    """Rows of another view, by a rule from number to number; as many, unless it says otherwise."""

    def __init__(self, parent: View) -> None:
        self._parent = parent

    def __len__(self) -> int:
        return len(self._parent)

    @property
    def group_count(self) -> int:
        return self._parent.group_count

    @abc.abstractmethod
    def numbers(self, indices: Int64Array) -> Int64Array:
        """The parent's row numbers of some rows."""

    def locate(self, indices: Int64Array) -> list[Found]:
        return self._parent.locate(self.numbers(indices))

    @property
    def stores(self) -> list[Store]:
        return self._parent.stores

    @property
    def is_mapped(self) -> bool:
        return self._parent.is_mapped

    @property
    def in_order(self) -> bool:
        """Not known of any rule."""
        return False

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Int64Array, dict[str, Any]]]:
        """The parent's columns, as far as its rows are here; in any order, and as often."""
        ordered, places = self._ordered()
        for numbers, columns in self._parent.columns(names):
            first = np.searchsorted(ordered, numbers, side="left")
            times = np.searchsorted(ordered, numbers, side="right") - first
            within = np.repeat(np.arange(numbers.size), times)
            if not within.size:
                continue
            # The n-th time that a row is here stands n places behind the first.
            again = np.arange(within.size) - np.repeat(np.cumsum(times) - times, times)
            found = first[within] + again
            own = found if places is None else places[found]
            yield own, {name: _pick(column, within) for name, column in columns.items()}

    def _ordered(self) -> tuple[Int64Array, Int64Array | None]:
        """The parent's numbers in ascending order, and where each stands (None: there)."""
        numbers = self.numbers(np.arange(len(self), dtype=np.int64))
        places = np.argsort(numbers, kind="stable")
        return numbers[places], places


def _pick(column: Any, within: Int64Array) -> Any:
    if isinstance(column, np.ndarray):
        return column[within]
    return [column[place] for place in within.tolist()]


class SliceView(PartView):
    """A range of another view, as ``view[a:b:c]`` makes it.

    Args:
        parent: The other view.
        numbers: Its row numbers.

    Raises:
        UsageError: The rows belong together, and the range would part them.
    """

    def __init__(self, parent: View, numbers: range) -> None:
        super().__init__(parent)
        self._numbers = numbers
        self._first_group, self._groups = numbers.start, len(numbers)
        if parent.has_groups and len(numbers):
            self._first_group, self._groups = self._whole_groups(numbers)

    def _whole_groups(self, numbers: range) -> tuple[int, int]:
        """The first group of the range, and how many there are."""
        if numbers.step == 1:
            ends = np.asarray([numbers.start, numbers.stop - 1], dtype=np.int64)
            first, last = self._parent.groups_of(ends).tolist()
            bounds = self._parent.group_starts(np.asarray([first, last + 1], dtype=np.int64))
            if bounds.tolist() == [numbers.start, numbers.stop]:
                return first, last + 1 - first
        raise UsageError(
            f"rows {numbers.start}:{numbers.stop}:{numbers.step} would part a group: take whole "
            "groups, data.groups[a:b].rows"
        )

    @property
    def group_count(self) -> int:
        return self._groups

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """The parent's, from the range's first on."""
        if not self.has_groups or not self._groups:
            return groups
        return self._parent.group_starts(groups + self._first_group) - self._numbers.start

    @property
    def document(self) -> Any:
        numbers = self._numbers
        return {"slice": [numbers.start, numbers.stop, numbers.step], "of": self._parent.key}

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, indices: Int64Array) -> Int64Array:
        return indices * self._numbers.step + self._numbers.start

    @property
    def in_order(self) -> bool:
        """Where it does not run backwards."""
        return self._numbers.step > 0 and self._parent.in_order

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Int64Array, dict[str, Any]]]:
        """The parent's columns, as far as they lie in the range."""
        for numbers, columns in self._parent.columns(names):
            own, beside = np.divmod(numbers - self._numbers.start, self._numbers.step)
            within = np.flatnonzero((beside == 0) & (own >= 0) & (own < len(self)))
            if within.size:
                yield own[within], {name: _pick(c, within) for name, c in columns.items()}

    def _cut(self, column: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        numbers = self._numbers
        if not numbers:
            return column[:0]  # its bounds may lie outside, where they would count from the end
        stop = None if numbers.step < 0 and numbers.stop < 0 else numbers.stop
        return column[numbers.start : stop : numbers.step]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self._cut(self._parent.lengths)

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        return self._cut(self._parent.trained)


class ShuffledView(PartView):
    """All rows of another view, in an order of their own; groups of one size are shuffled whole."""

    def __init__(self, parent: View, seed: int) -> None:
        super().__init__(parent)
        self._seed = check_seed(seed)
        assert parent.group_size is not None, "groups of several sizes are shuffled by an index"
        self._size = parent.group_size
        self._permutation = Permutation(
            parent.group_count, derive_key(PURPOSE_VIEW, self._seed, 0, 0)
        )

    def __reduce__(self) -> Any:
        return ShuffledView, (self._parent, self._seed)

    @property
    def document(self) -> Any:
        """Parent, seed, and the version of the function."""
        return {"shuffle": ORDER_VERSION, "seed": str(self._seed), "of": self._parent.key}

    def numbers(self, indices: Int64Array) -> Int64Array:
        """By the permutation, without memory."""
        if self._size == 1:
            return self._permutation.indices(indices)
        groups, within = np.divmod(indices, self._size)
        return self._permutation.indices(groups) * self._size + within

    def group_starts(self, groups: Int64Array) -> Int64Array:
        return groups * self._size


class ConcatView(View):
    """Several views behind each other."""

    def __init__(self, parts: Sequence[View]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        self._group_ends = np.cumsum([part.group_count for part in self._parts], dtype=np.int64)

    @property
    def document(self) -> Any:
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

    @property
    def group_count(self) -> int:
        return int(self._group_ends[-1])

    def group_starts(self, groups: Int64Array) -> Int64Array:
        """Each part's own, behind the rows of the parts before it."""
        owners = np.searchsorted(self._group_ends, groups, side="right")
        owners = np.minimum(owners, len(self._parts) - 1)  # behind the last group
        starts = np.empty_like(groups)
        for owner in np.unique(owners).tolist():
            here = owners == owner
            part = self._parts[owner]
            own = groups[here] - (self._group_ends[owner] - part.group_count)
            starts[here] = part.group_starts(own) + (self._ends[owner] - len(part))
        return starts

    @property
    def is_mapped(self) -> bool:
        return any(part.is_mapped for part in self._parts)

    @property
    def in_order(self) -> bool:
        return all(part.in_order for part in self._parts)

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Int64Array, dict[str, Any]]]:
        """The parts' columns, one part after the other."""
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            for numbers, columns in part.columns(names):
                yield numbers + (end - len(part)), columns

    @property
    def stores(self) -> list[Store]:
        return list({store.key: store for part in self._parts for store in part.stores}.values())


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


def unweighted(view: View, reader: str) -> View:
    """A view in which every trained token counts 1, for a reader that knows masks alone.

    Raises:
        UsageError: Some count other than 1.
    """
    if view.has_weights:
        raise UsageError(
            f"trained tokens of this data weigh other than 1 (docs/batches.md#weights), and "
            f"{reader} knows no weights: serve it with a Loader, or prepare the rows with weights "
            "of 0 and 1"
        )
    return view


def tokens_alone(view: View, reader: str) -> View:
    """A view for a reader that knows tokens and masks and nothing else.

    Raises:
        UsageError: Trained tokens count other than 1, or rows have pictures.
    """
    if view.has_media:
        raise UsageError(
            f"rows of this data have pictures, and {reader} would train on their tokens as if "
            "there were none: serve it with a Loader (media='pixels', docs/images.md)"
        )
    return unweighted(view, reader)
