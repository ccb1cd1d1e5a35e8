"""Rows of a store as a data source of Grain, and as a dataset of torchtitan, which uses Grain."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from tokenmill.data.view import View, as_view
from tokenmill.errors import check_positive
from tokenmill.integrations.trainers import TORCH, ItemRows, RowDataset, Trainer
from tokenmill.store import Row, Store, open_store
from tokenmill.store.by_source import SourceRows

__all__ = ["DataSource", "TorchtitanDataset"]


class DataSource(RowDataset):
    """A ``RandomAccessDataSource`` whose items are NumPy arrays: input_ids, labels, loss_mask.

    In lazy rows and ``store.by_source()``, a rejected row is always replaced by the same other row.
    Rows with more than ``max_length`` tokens raise an error.
    """

    trainer = replace(TORCH, name="Grain")

    def __init__(self, data: Store | SourceRows | View, max_length: int | None = None) -> None:
        view = as_view(data)
        check_positive("max_length", 1 if max_length is None else max_length)
        self.view = self.trainer.check(view, None if view.is_by_source else max_length)
        self.item_rows = ItemRows(len(self.view))
        self._max_length = max_length

    def item(self, row: Row) -> Any:
        if self._max_length is not None and len(row) > self._max_length:  # by source row
            raise self.trainer.too_long(row, self._max_length)
        return self.trainer.arrays(row.input_ids, row.loss_mask)

    _getitems = RowDataset.__getitems__  # Grain's name for reading several items at once

    def __repr__(self) -> str:
        """Identify the data, since Grain compares the text when it loads a state."""
        return f"tokenmill.DataSource({self.view.key})"


class _Sequences(DataSource):
    """Items of torchtitan: ids without the last one, and the label of the next token."""

    trainer = Trainer(
        "torchtitan",
        {"input_ids": ("ids", np.int64), "labels": ("next_labels", np.int64)},
        limit="the sum of max_context_length and 1",  # the last token is only a label
    )

    def item(self, row: Row) -> Any:
        from torchtitan.components.data import TextSequence

        arrays = super().item(row)
        return TextSequence(**{name: values[:-1] for name, values in arrays.items()})


@dataclass(frozen=True, kw_only=True)
class TorchtitanDataset:
    """A ``DatasetConfig`` for torchtitan's packing, mixing and loading.

    ``source`` is the directory of a store, or an open store, view or lazy rows.
    """

    source: str | os.PathLike[str] | Store | SourceRows | View

    def build(self, *, context: Any, dataset_iteration_policy: Any) -> Any:
        """Return the Grain dataset; torchtitan shuffles, shards and repeats it."""
        from torchtitan.components.data import SingleDatasetConfig

        data = self.source
        if isinstance(data, str | os.PathLike):
            data = open_store(os.path.expanduser(data))
        rows = _Sequences(data, context.max_context_length + 1)
        return SingleDatasetConfig(source=SimpleNamespace(build=lambda **_: rows)).build(
            context=context, dataset_iteration_policy=dataset_iteration_policy
        )
