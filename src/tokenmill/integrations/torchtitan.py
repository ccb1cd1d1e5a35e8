"""tokenmill as a dataset of torchtitan's data pipeline, which is built on Grain."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.data.view import View, as_view
from tokenmill.errors import SourceError
from tokenmill.integrations.grain import DataSource
from tokenmill.integrations.trainers import Trainer
from tokenmill.store import Row, Store, open_store
from tokenmill.store.by_source import SourceRows

__all__ = ["StoreDataset"]

TORCHTITAN = Trainer(
    "torchtitan",
    {"input_ids": ("ids", np.int64), "labels": ("next_labels", np.int64)},
    limit="the sum of max_context_length and 1",  # the last token is only a label
)


class _Sequences(DataSource):
    """Rows as ``TextSequence``: ids without the last one, and the label of the next token."""

    trainer = TORCHTITAN

    def __init__(self, data: Store | SourceRows | View, max_length: int) -> None:
        super().__init__(data)
        self._max_length = max_length
        if not self.view.is_by_source:
            self.trainer.check(self.view, max_length)

    def build(self, *, dataset_iteration_policy: Any) -> _Sequences:
        return self

    def item(self, row: Row) -> Any:
        from torchtitan.components.data import TextSequence

        if len(row) > self._max_length:  # torchtitan would drop it
            raise SourceError(
                f"The row has {len(row)} tokens, but {self.trainer.limit} is {self._max_length}."
                f" {self.trainer.advice}.",
                **row.origin.location,
            )
        arrays = super().item(row)
        return TextSequence(**{name: values[:-1] for name, values in arrays.items()})


@dataclass(frozen=True, kw_only=True)
class StoreDataset:
    """A ``DatasetConfig`` that reads a store, for torchtitan's packing, mixing and loading.

    Args:
        source: The directory of a store, or an open store, view or lazy rows.
    """

    source: str | os.PathLike[str] | Store | SourceRows | View

    def build(self, *, context: Any, dataset_iteration_policy: Any) -> Any:
        """Return the Grain dataset; torchtitan shuffles, shards and repeats it."""
        with optional("torchtitan", "its data pipeline"):
            from torchtitan.components.data import SingleDatasetConfig
        data = self.source
        if isinstance(data, str | os.PathLike):
            data = open_store(os.path.expanduser(data))
        source = _Sequences(as_view(data), context.max_context_length + 1)
        return SingleDatasetConfig(source=source).build(
            context=context, dataset_iteration_policy=dataset_iteration_policy
        )
