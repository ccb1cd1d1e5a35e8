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

from tokenmill.dataset import View, as_view
from tokenmill.errors import UsageError
from tokenmill.integrations.trainers import TORCH, ItemRows, RowDataset
from tokenmill.packing import Batch, fill_rows
from tokenmill.store import Store

Item = dict[str, torch.Tensor]


def as_tensors(batch: Batch) -> dict[str, Any]:
    """Arrays as tensors over the same memory; plain numbers stay."""
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }


class Dataset(RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows of a store or view by number.

    Args:
        data: A store or a view.
        pad_id: Token that `collate` pads with; None takes the tokenizer's pad, else its eos.
        pad_side: right or left.
        pad_to_multiple_of: `collate` rounds widths up to this.
    """

    trainer = TORCH

    def __init__(
        self,
        data: Store | View,
        *,
        pad_id: int | None = None,
        pad_side: str = "right",
        pad_to_multiple_of: int | None = None,
    ) -> None:
        self.view = self.trainer.check(as_view(data))
        self.item_rows = ItemRows(len(self.view))
        self._pad_id = self.view.pad_id if pad_id is None else pad_id
        self._pad_side = pad_side
        self._multiple = pad_to_multiple_of

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
