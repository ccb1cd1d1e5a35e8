"""Rows with pictures for TRL's `SFTTrainer`: a dataset of row numbers, and the collator for it.

TRL's own way with pictures is a collator that renders, encodes and runs the processor for every
batch. Here the tokens are in the store: an item of the dataset is the number of a row, and
`VisionCollator` reads tokens and labels of a batch's rows and runs the image processor, nothing
else. What it hands out is what TRL's collator would, to the bit, with the labels of the store. A
trainer that was not given the collator stumbles over the dataset, which has no ``input_ids``, and
does not train on tokens without pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenmill.dataset import Mixture, View, as_view
from tokenmill.errors import UsageError
from tokenmill.loader.filler import Filler
from tokenmill.loader.media import Pixels
from tokenmill.loader.samples import Step, Units
from tokenmill.store import Store

ROW = "row"
"""The one column of the dataset: the number of a row in the data."""

_TOKENS = ("input_ids", "attention_mask", "labels")


class VisionCollator:
    """Makes batches of rows with pictures: the ``data_collator`` beside `for_trl`'s dataset.

    Args:
        data: What the dataset was made of.
        processor: As for `tokenmill.Loader`.
        pad_id: Token of the padding; None takes the tokenizer's pad, else its eos.
        pad_to_multiple_of: Widths are rounded up to this.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        processor: Any = None,
        pad_id: int | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        view = data.view if isinstance(data, Mixture) else as_view(data)
        if not view.has_media:
            raise UsageError("rows of this data have no pictures: TRL's own collator will do")
        pad_id = view.pad_id if pad_id is None else pad_id
        if pad_id is None:
            raise UsageError("the tokenizer names neither a pad nor an eos token: say pad_id")
        self._filler = Filler(view, pad_id, multiple=pad_to_multiple_of)
        self._pixels = Pixels(view, processor)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of tensors, under the names that the model takes and no others."""
        import torch

        numbers = np.asarray([int(item[ROW]) for item in items], dtype=np.int64)
        view = self._filler.view
        packs = Units(view).as_packs(numbers)
        filled = self._filler.fill(Step(packs, 0, numbers.size))
        batch = {name: filled[name] for name in _TOKENS}
        batch["attention_mask"] = batch["attention_mask"].astype(np.int64)
        rows = [(row, row.media) for row in view.rows(numbers)]
        batch |= self._pixels.features(rows)
        own = self._pixels.processor.token_types_name
        if own is not None:
            width = batch["input_ids"].shape[1]
            lines = ((line * width, *row) for line, row in enumerate(rows))
            told = self._pixels.token_types(batch["input_ids"], lines)
            batch[own] = told.get(own, np.zeros_like(batch["input_ids"]))
        return {name: torch.from_numpy(value) for name, value in batch.items()}
