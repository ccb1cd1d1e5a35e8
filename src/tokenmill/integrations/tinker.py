"""tokenmill as a supervised dataset of the tinker-cookbook: batches of `tinker.Datum` from a store.

The position of a batch follows from epoch and index alone, so the cookbook's resume is exact.
"""

from __future__ import annotations

import os
from typing import Literal

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.data.view import View, as_view
from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.integrations.trainers import ItemRows, RowDataset, require_ungrouped
from tokenmill.store import Row, Store, open_store

with optional("tinker_cookbook"):
    import chz
    import tinker
    from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

__all__ = ["Dataset", "DatasetBuilder", "datum"]

Reduction = Literal["mean", "none"]
Source = Store | View | str | os.PathLike[str]


def datum(row: Row, reduction: Reduction = "mean") -> tinker.Datum:
    """Return a row as inputs, targets and the weights of the targets.

    As in the cookbook, the last target is the last trained token. ``mean``, its default, divides
    the weights by their sum; ``none`` keeps them.
    """
    trained = np.flatnonzero(row.weights[1:])
    if not trained.size:
        raise UsageError("Only the first token of the row is trained.", **row.origin.location)
    size = int(trained[-1]) + 1
    ids, weights = row.input_ids[: size + 1].tolist(), row.weights[1 : size + 1]
    if reduction == "mean":
        weights = weights / weights.sum()
    values = {
        "weights": tinker.TensorData(data=weights.tolist(), dtype="float32", shape=[size]),
        "target_tokens": tinker.TensorData(data=ids[1:], dtype="int64", shape=[size]),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=values)


class _Datums(RowDataset):
    def __init__(self, view: View, item_rows: ItemRows, reduction: Reduction) -> None:
        self.view, self.item_rows, self.reduction = view, item_rows, reduction

    def item(self, row: Row) -> tinker.Datum:
        return datum(row, self.reduction)


class Dataset(SupervisedDataset):  # type: ignore[misc]
    """Batches of a store, a view, source rows, or the path of a store.

    As in the cookbook, an incomplete last batch is not served. ``shuffle`` uses our order of
    ``seed`` and epoch. The length limit is that of ``prepare``.
    """

    def __init__(
        self, data: Source, batch_size: int, *, shuffle: bool = True, seed: int = 0,
        reduction: Reduction = "mean",
    ) -> None:  # fmt: skip
        check_positive("batch_size", batch_size)
        check_one_of("reduction", reduction, ("mean", "none"))
        if isinstance(data, str | os.PathLike):
            data = open_store(data)
        view = require_ungrouped(as_view(data))
        if view.has_media:
            raise UsageError("This data has images, which this dataset does not support.")
        if len(view) < batch_size:
            raise UsageError(f"The data has {len(view)} rows, fewer than batch_size={batch_size}.")
        order = ItemRows(len(view), "feistel" if shuffle else "sequential", seed)
        self._datums = _Datums(view, order, reduction)
        self.batch_size, self.epoch = batch_size, 0

    def __len__(self) -> int:
        return len(self._datums) // self.batch_size

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first = self.epoch * len(self._datums) + index * self.batch_size
        return self._datums.items_at(np.arange(first, first + self.batch_size))

    def set_epoch(self, seed: int = 0) -> None:
        """Set the epoch, for which the cookbook's loop passes its number as ``seed``."""
        self.epoch = seed


@chz.chz
class DatasetBuilder(SupervisedDatasetBuilder):  # type: ignore[misc]
    """``dataset_builder`` of the cookbook's config."""

    store: str
    batch_size: int
    eval_store: str | None = None  # its rows are one batch
    seed: int = 0

    def __call__(self) -> tuple[Dataset, Dataset | None]:
        held_out = open_store(self.eval_store) if self.eval_store else None
        evaluation = Dataset(held_out, len(held_out), shuffle=False) if held_out else None
        return Dataset(self.store, self.batch_size, seed=self.seed), evaluation
