"""Map-style dataset: rows by number, as tensors.

`Dataset` is a store or view in the shape of `torch.utils.data.Dataset`: an item is one row with
input_ids, labels and loss_mask; `__getitems__` fetches a batch's rows at once; `collate` pads
them to the same arrays that `tokenmill.Loader` hands out. It pickles under 16 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from tokenmill.dataset import View, as_view, tokens_alone
from tokenmill.errors import UsageError
from tokenmill.integrations.hosts import Items, predicted, rows_alone
from tokenmill.packing import Batch, fill_rows, labels_of
from tokenmill.sampling import Int64Array
from tokenmill.store import Row, Store

Item = dict[str, torch.Tensor]


def as_tensors(batch: Batch) -> dict[str, Any]:
    """Arrays as tensors over the same memory; plain numbers stay."""
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }


def _item(row: Row) -> Item:
    return as_tensors(
        {
            "input_ids": row.input_ids.astype(np.int64),
            "labels": labels_of(row.input_ids, row.loss_mask),
            "loss_mask": predicted(row.loss_mask),
        }
    )


class Dataset(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows of a store or view by number.

    Args:
        data: A store or a view.
        pad_id: Token that `collate` pads with; None takes the tokenizer's pad, else its eos.
        pad_side: right or left.
        pad_to_multiple_of: `collate` rounds widths up to this.
    """

    def __init__(
        self,
        data: Store | View,
        *,
        pad_id: int | None = None,
        pad_side: str = "right",
        pad_to_multiple_of: int | None = None,
    ) -> None:
        self.view = rows_alone(tokens_alone(as_view(data), "a map-style dataset"))
        self._pad_id = self.view.pad_id if pad_id is None else pad_id
        self._pad_side = pad_side
        self._multiple = pad_to_multiple_of

    def __len__(self) -> int:
        return len(self.view)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Rows as tensors."""
        return [_item(row) for row in self.view.rows(numbers)]

    def collate(self, items: Sequence[Item]) -> dict[str, Any]:
        """Pad items into a batch, as `tokenmill.Loader` would: the ``collate_fn`` to use."""
        if self._pad_id is None:
            raise UsageError("the tokenizer names neither a pad nor an eos token: say pad_id")
        pieces = [
            (item["input_ids"].numpy().astype(np.int32), item["loss_mask"].numpy())
            for item in items
        ]
        batch = fill_rows(pieces, self._pad_id, side=self._pad_side, multiple=self._multiple)
        return as_tensors(batch)
