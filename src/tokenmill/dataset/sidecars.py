"""Sidecars through views: what is attached to the rows that a view is made of.

A view has no values of its own: a `ViewSidecar` finds, for rows of the view, the stores and rows
beneath (`View.locate`) and asks their sidecars. So filters, selections, shuffles, splits, maps and
mixtures carry whatever is attached to their stores. It is one *name*, attached to every store of
the view by the same maker and per the same unit; anything else is refused, because batches would
mix what does not belong together. Loaders and filters come in through `View.sidecar` and
`View.sidecars`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from tokenmill.sampling import Int64Array

if TYPE_CHECKING:
    from tokenmill.dataset.view import View

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ViewSidecar:
    """Numbers attached to the rows of a view.

    Attributes:
        view: The view.
        name: What batches call them.
        made_by: What computed them.
        per: ``row`` or ``token``.
    """

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
        """As of `tokenmill.Sidecar`, by the view's row numbers."""
        if isinstance(index, slice):
            return self.batch(range(len(self))[index])
        found = self.batch([index])[0]
        return float(found) if self.per == "row" else found

    def batch(self, indices: Iterable[SupportsIndex]) -> Float32Array | list[Float32Array]:
        """Of many rows: one array of values, or per token one array for each row."""
        numbers = self.view.normalised(indices)
        return self.of_rows(numbers) if self.per == "row" else self.of_tokens(numbers)

    def of_rows(self, indices: Int64Array) -> Float32Array:
        """The values of rows by checked numbers."""
        found = np.empty(indices.size, dtype=np.float32)
        for store, places, numbers in self.view.locate(indices):
            found[places] = store.sidecar(self.name, self.made_by).batch(numbers)
        return found

    def of_tokens(self, indices: Int64Array) -> list[Float32Array]:
        """The values of the tokens of each row, by checked numbers."""
        found: list[Float32Array] = [None] * indices.size  # type: ignore[list-item]
        for store, places, numbers in self.view.locate(indices):
            values = store.sidecar(self.name, self.made_by).batch(numbers)
            for place, value in zip(places.tolist(), values, strict=True):
                found[place] = value
        return found

    @property
    def values(self) -> Float32Array:
        """All of them in the view's order, as a copy; per token, the rows one behind the other."""
        everything = np.arange(len(self), dtype=np.int64)
        if self.per == "row":
            return self.of_rows(everything)
        return np.concatenate([np.zeros(0, dtype=np.float32), *self.of_tokens(everything)])
