"""Rows of a store as a data source of Grain; Grain shuffles, shards, batches and resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.data.view import View, as_view
from tokenmill.integrations.trainers import TORCH, ItemRows, RowDataset
from tokenmill.store import Row, Store
from tokenmill.store.by_source import SourceRows

__all__ = ["DataSource"]

GRAIN = replace(TORCH, name="Grain")


class DataSource(RowDataset):
    """A ``RandomAccessDataSource`` whose items are NumPy arrays: input_ids, labels, loss_mask.

    ``data`` is a store, a view, or source rows (``prepare(lazy=True)``, ``store.by_source()``), of
    which a rejected row is always replaced by the same other row.
    """

    trainer = GRAIN

    def __init__(self, data: Store | SourceRows | View) -> None:
        self.view = self.trainer.check(as_view(data))
        self.item_rows = ItemRows(len(self.view))

    def item(self, row: Row) -> Any:
        return self.trainer.arrays(row.input_ids, row.loss_mask)

    _getitems = RowDataset.__getitems__  # Grain's name for reading several items at once

    def __repr__(self) -> str:
        """Identify the data, since Grain compares the text when it loads a state."""
        return f"tokenmill.DataSource({self.view.key})"
