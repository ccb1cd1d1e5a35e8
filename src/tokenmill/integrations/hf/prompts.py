"""A whole run of prompts for TRL's `GRPOTrainer`, and those of its kind.

These trainers take a dataset with a column ``prompt`` and hand all other columns to the reward
functions. `for_grpo` makes one of a `PromptDataset`: all epochs one after another in its order,
prompts over its limit left out by their stored lengths, rows read when they are asked for. The
table behind it holds the sample's number alone; a transform reads the rows of a batch, so columns
may hold anything that JSON can.

The prompt is handed over as messages, not as text: TRL renders by itself, with the tools and the
template's arguments of its own config.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from tokenmill import fingerprint
from tokenmill.errors import UsageError, check_positive
from tokenmill.integrations.hf.table import LazyTable
from tokenmill.prompts import PromptDataset, shape_row

_SAMPLE = "sample"


def for_grpo(prompts: PromptDataset, *, epochs: int = 1) -> tuple[datasets.Dataset, dict[str, Any]]:
    """A dataset of prompts in their order for `GRPOTrainer`, and the arguments its config needs.

    Args:
        prompts: The prompts; ``apply_chat_template=True`` counts their lengths as TRL renders them.
        epochs: How many epochs the run has; they are unrolled, for the trainer it is one.

    Returns:
        The dataset, and keyword arguments for ``GRPOConfig``. They must win over your own.
    """
    check_positive("epochs", epochs)
    if not len(prompts):
        raise UsageError(f"no prompt is left: {prompts.rejected}")
    document = {
        "prompts": prompts.key,
        "max_length": prompts.max_length,
        "seed": prompts.seed,
        "order": prompts.order,
        "epochs": epochs,
    }
    table = LazyTable.of(_Numbers(len(prompts) * epochs))
    dataset = datasets.Dataset(table).with_transform(partial(_rows_of, prompts))
    # By content: `datasets` would hash the transform, and with it where `prompts` stands.
    dataset._fingerprint = fingerprint.key(document)[:16]
    arguments = {
        "num_train_epochs": 1,  # the epochs are in the dataset
        "shuffle_dataset": False,  # and so is the order
        "remove_unused_columns": False,  # rewards are computed from them
        "ignore_data_skip": False,  # the skip is what makes a resume exact
    }
    return dataset, arguments


class _Numbers:
    """The samples of a run by their numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def schema(self) -> pa.Schema:
        """One column."""
        return pa.schema({_SAMPLE: pa.int64()})

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers together."""
        return 8 * self._size

    def __len__(self) -> int:
        return self._size

    def read(self, indices: Sequence[int]) -> pa.Table:
        """Samples by number."""
        return pa.table({_SAMPLE: np.asarray(indices, dtype=np.int64)}, schema=self.schema)


def _rows_of(prompts: PromptDataset, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
    """From a batch of sample numbers to its rows."""
    numbers = prompts.numbers_at(np.asarray(batch[_SAMPLE], dtype=np.int64))
    rows, spec = prompts.source_rows_at(numbers), prompts.spec
    for row in rows:
        prompt = shape_row(row, spec).prompt
        del row[spec.prompt_key]
        row["prompt"] = prompt
    # Rewards look for the columns of the first row in all of them, as in a table.
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
