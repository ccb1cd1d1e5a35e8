"""An ordered view: our order for trainers that own the sampler.

A trainer that insists on sampling by itself can be told not to shuffle: item i of an
`OrderedView` is then the row at position i of the current epoch of our order. Its `set_epoch`
chooses the epoch; the trainer's own "skip the first n" is an exact resume, because item i is a
function of (seed, epoch, i).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, SupportsIndex, overload

import numpy as np

from tokenmill.dataset import Mixture, View
from tokenmill.errors import UsageError
from tokenmill.loader.stream import LengthGrouped, Stream
from tokenmill.sampling import Int64Array
from tokenmill.store import Row, Store


class OrderedView(Sequence[Row]):
    """The rows of one epoch, in our order.

    Args:
        data: A store, a view or a mixture.
        seed: Of the order.
        order: As for the loader.
        epoch: The epoch to begin with.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        seed: int = 42,
        order: str | LengthGrouped = "feistel",
        epoch: int = 0,
    ) -> None:
        self._data = data
        self._options: dict[str, Any] = {"seed": seed, "order": order}
        # Rows are handed out as they are: padding plays no part.
        self._stream = Stream(data, pad_id=0, unit="rows", **self._options)
        if self._stream.view.has_groups:
            raise UsageError(
                "rows one by one would part the groups of this data: serve it with a Loader"
            )
        self.set_epoch(epoch)

    def __reduce__(self) -> Any:
        return partial(OrderedView, epoch=self.epoch, **self._options), (self._data,)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is served."""
        self.epoch = self._stream.checked_epoch(epoch)

    def __len__(self) -> int:
        return self._stream.order.rows

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return self.batch(range(len(self))[index])
        return self.batch([index])[0]

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        """Rows at many positions."""
        return self._stream.view.rows(self.row_numbers(indices))

    def row_numbers(self, indices: Iterable[SupportsIndex]) -> Int64Array:
        """Row numbers of the data at positions of the current epoch."""
        size = len(self)
        positions = np.asarray([operator.index(index) for index in indices], dtype=np.int64)
        wrong = (positions < -size) | (positions >= size)
        if wrong.any():
            raise IndexError(f"position {int(positions[wrong][0])} of an epoch of {size}")
        return self._stream.order.indices(
            self.epoch, np.where(positions < 0, positions + size, positions)
        )

    def __iter__(self) -> Iterator[Row]:
        for position in range(len(self)):
            yield self[position]
