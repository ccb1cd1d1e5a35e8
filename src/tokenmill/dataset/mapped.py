"""Rows given to a function before they are served.

A `MappedView` is another view whose rows go through a function of the user's, when they are served
and not before. Everything that is decided about rows (which, in what order, how packed, what a
state belongs to) goes by the stored ones: the function is part of no key. It may change token ids
and mask of a row, but not how many tokens there are, and what it gives is checked row by row.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.view import Found, PartView, Served, View, as_view
from tokenmill.errors import UsageError
from tokenmill.sampling import Int64Array
from tokenmill.store import Row, Sidecar, Store

Transform = Callable[[Row], Row | Mapping[str, Any]]


class MappedView(PartView):
    """The rows of another view, each given to a function before it is served."""

    def __init__(self, parent: View, function: Transform) -> None:
        super().__init__(parent)
        self._function = function

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self._function)
        except Exception as error:
            raise UsageError(
                f"{self._function!r} cannot travel to another process ({error}): define the "
                "function of a map at the top of a module"
            ) from error
        return MappedView, (self._parent, self._function)

    @property
    def document(self) -> Any:
        return self._parent.document

    @property
    def key(self) -> str:
        return self._parent.key

    def numbers(self, indices: Int64Array) -> Int64Array:
        return indices

    def locate(self, indices: Int64Array) -> list[Found]:
        """The parent's answer, with rows that go through the function."""
        return [
            (_Mapped(store, self._function), places, numbers)
            for store, places, numbers in self._parent.locate(indices)
        ]

    def group_starts(self, groups: Int64Array) -> Int64Array:
        return self._parent.group_starts(groups)

    @property
    def is_mapped(self) -> bool:
        return True

    @property
    def in_order(self) -> bool:
        return self._parent.in_order

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Int64Array, dict[str, Any]]]:
        return self._parent.columns(names)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self._parent.lengths

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        return self._parent.trained


class _Mapped:
    """A store whose rows go through a function."""

    def __init__(self, store: Served, function: Transform) -> None:
        self._store = store
        self._function = function

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self._store.lengths

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        return self._store.trained

    @property
    def pictures(self) -> npt.NDArray[np.int32]:
        return self._store.pictures

    @property
    def patches(self) -> npt.NDArray[np.int32]:
        return self._store.patches

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        return [_transformed(row, self._function) for row in self._store.batch(indices)]

    def trained_within(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        served = zip(self.batch(rows.tolist()), starts.tolist(), stops.tolist(), strict=True)
        return np.asarray(
            [int(row.loss_mask[start:stop].sum(dtype=np.int64)) for row, start, stop in served],
            dtype=np.int64,
        )

    def weighed_within(
        self, rows: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.float64]:
        served = zip(self.batch(rows.tolist()), starts.tolist(), stops.tolist(), strict=True)
        return np.asarray(
            [float(row.weights[start:stop].sum(dtype=np.float64)) for row, start, stop in served],
            dtype=np.float64,
        )

    def sidecar(self, name: str, made_by: str | None = None) -> Sidecar:
        return self._store.sidecar(name, made_by)


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


def mapped(data: Store | View, function: Transform) -> View:
    """Rows given to a function before they are served; see `tokenmill.store.ViewMethods.map`."""
    if not callable(function):
        raise UsageError(f"map wants a function of a row, not {type(function).__name__}")
    return MappedView(as_view(data), function)
