"""One training row, as a store serves it.

A `Row` is two views, token ids and loss mask, and a note of where they came from. The views cost
nothing and keep the mapped file alive; origin, turns and carried columns are looked up in the
slice's meta file when they are read, because a trainer never asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.origin import Origin

if TYPE_CHECKING:
    from tokenmill.store.store import Store


class Row:
    """One training row: token ids and loss mask, and on demand where it comes from."""

    __slots__ = ("_number", "_slice", "_store", "input_ids", "loss_mask")

    def __init__(
        self,
        store: Store,
        at: int,
        number: int,
        input_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
    ) -> None:
        self._store = store
        self._slice = at
        self._number = number
        self.input_ids = input_ids
        self.loss_mask = loss_mask

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def origin(self) -> Origin:
        """The source row this was made from."""
        return self._store.origin_in(self._slice, self._number)

    @property
    def turns(self) -> list[tuple[str, int, int]]:
        """``(role, start, end)`` over tokens; turns follow one another without a gap."""
        return self._store.slice_at(self._slice).turns(self._number)

    @property
    def part(self) -> int:
        """Which turn of its source row this is under ``expand="turns"``, else 0."""
        return int(self._store.slice_at(self._slice).column("part")[self._number])

    @property
    def carried(self) -> dict[str, Any]:
        """The carried columns."""
        return self._store.slice_at(self._slice).carried(self._number)

    @property
    def carried_json(self) -> dict[str, str]:
        """The carried columns as the JSON text that is stored, number for number."""
        return self._store.slice_at(self._slice).carried_json(self._number)

    def with_tokens(self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> Row:
        """This row, from the same place, with other tokens."""
        return Row(self._store, self._slice, self._number, input_ids, loss_mask)

    def __repr__(self) -> str:
        trained = int(self.loss_mask.sum())
        return f"Row({len(self)} tokens, {trained} trained, {self.origin})"
