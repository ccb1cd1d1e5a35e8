"""NeMo RL's SFT rows from a store.

NeMo RL's trainer takes items with a ``message_log``, pieces of tokens with a role, and trains the
pieces of role ``assistant``; with ``sft.only_unmask_final`` it trains the last piece, whatever its
role. `message_log` cuts a row where its mask changes. What follows the last trained token cannot
be read by any loss, and is left out, so that the last piece is the last trained stretch:

    row    [user] Hi [end] ↵ [assistant] ↵ | Hello [end] | ↵
    log    └──────────── user ───────────┘ └─ assistant ┘ left out

`MessageLogs` are the items of a view in our order; `SFTDataset` is what NeMo RL makes of a part of
its config and asks for datasets, a processor and a task.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.dataset import View, as_view, split, tokens_alone
from tokenmill.errors import UsageError, check_positive
from tokenmill.integrations.hosts import (
    Items,
    check_names,
    is_store,
    prepared,
    rows_alone,
    stated_date,
)
from tokenmill.sampling import Int64Array, make_order, unroll
from tokenmill.store import Row, open_store

TASK = "tokenmill"
HOST_KEYS = {"dataset_name", "processor", "env_name", "split", "subset", "input_key", "output_key"}
"""Names that NeMo RL's own sections have and that say nothing of our rows, ``processor`` a function
of its own among them."""
RECIPE_KEYS = set(Recipe.__struct_fields__) - {"sources", "tokenizer"} - HOST_KEYS

Item = dict[str, Any]


def message_log(row: Row) -> list[Item]:
    """A row as pieces of one role each, up to its last trained token."""
    trained = np.flatnonzero(row.loss_mask)
    stop = int(trained[-1]) + 1 if trained.size else len(row)
    mask, tokens = row.loss_mask[:stop], row.input_ids[:stop].astype(np.int64)
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), stop]
    return [
        {
            "role": "assistant" if mask[start] else "user",
            "content": "",
            "token_ids": torch.from_numpy(tokens[start:end]),
        }
        for start, end in pairwise(cuts)
    ]


class MessageLogs(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Message logs of a view's rows in our order, one epoch after the other.

    Args:
        view: The rows.
        seed: Of the order; None: as they stand.
        epochs: Epochs in the dataset.
    """

    def __init__(self, view: View, seed: int | None = 42, epochs: int = 1) -> None:
        check_positive("epochs", epochs)
        self.view, self.epochs = rows_alone(tokens_alone(view, "NeMo RL")), epochs
        self._order = make_order("sequential" if seed is None else "feistel", len(view), seed or 0)

    def __len__(self) -> int:
        return len(self.view) * self.epochs

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Message logs of rows."""
        rows = self.view.rows(unroll(self._order, numbers))
        return [{"task_name": TASK, "message_log": message_log(row)} for row in rows]


def as_datum(
    datum_dict: Item,
    task_data_spec: Any,
    tokenizer: Any,
    max_seq_length: int | None,
    idx: int,
    **how_to_render: Any,
) -> Item:
    """NeMo RL's processor of an item: nothing is left to render or to encode.

    Args:
        datum_dict: An item of `MessageLogs`.
        task_data_spec: NeMo RL's, not needed.
        tokenizer: NeMo RL's, not needed.
        max_seq_length: Rows must be shorter; others are not trained, as NeMo RL does it.
        idx: Number of the item.
        how_to_render: ``add_bos`` and others: rows are rendered.
    """
    log = datum_dict["message_log"]
    length = sum(len(piece["token_ids"]) for piece in log)
    multiplier = float(any(piece["role"] == "assistant" for piece in log))
    if max_seq_length is not None and length >= max_seq_length:
        warnings.warn(
            "rows as long as data.max_input_seq_length are not trained by NeMo RL: set "
            "data.train.max_length to less, or prepare the store so",
            stacklevel=2,
        )
        kept = min(4, max_seq_length // len(log))  # of every piece, as NeMo RL's own processor
        log = [{**piece, "token_ids": piece["token_ids"][:kept]} for piece in log]
        multiplier = 0.0
    return {
        "message_log": log,
        "length": length,
        "extra_env_info": None,
        "loss_multiplier": multiplier,
        "idx": idx,
        "task_name": TASK,
    }


class SFTDataset:
    """What NeMo RL makes of ``data.train`` or ``data.validation``.

    Args:
        data_path: A store's directory, or raw files, which are prepared on first use.
        tokenizer: For raw files: as for `tokenmill.prepare`.
        seed: Of the order and of the split; the order is served with ``data.shuffle=false``.
        epochs: Epochs in the dataset, each in an order of its own.
        split_validation_size: Share of the rows that are kept for validation.
        cache_dir: Where stores live.
        num_workers: Processes that prepare; 0 runs inline.
        options: Of the recipe, as for `tokenmill.prepare`, with NeMo RL's ``turn_end="turn"``;
            names of NeMo RL's own are left alone.
    """

    def __init__(
        self,
        data_path: str | os.PathLike[str],
        tokenizer: str | None = None,
        seed: int = 42,
        epochs: int = 1,
        split_validation_size: float = 0,
        cache_dir: str | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> None:
        path = os.path.expanduser(os.fspath(data_path))
        recipe = _recipe_options(options)
        if is_store(path):
            if recipe or tokenizer is not None:
                given = ", ".join(sorted({*recipe, *(["tokenizer"] if tokenizer else [])}))
                raise UsageError(f"a store has its recipe: take out {given}", path=path)
            view = as_view(open_store(path))
        elif tokenizer is None:
            raise UsageError(
                "raw rows need a tokenizer: ++data.train.tokenizer='${policy.tokenizer.name}'",
                path=path,
            )
        else:
            stated = {"turn_end": "turn", **recipe, "date": recipe.get("date") or stated_date()}
            store = prepared(
                Recipe(sources=(path,), tokenizer=tokenizer, **stated),
                RunOptions(cache_dir=cache_dir, num_workers=num_workers),
                flag="++data.train.date",
            )
            view = as_view(store)
        self.task_name = TASK
        self.val_dataset = None
        if split_validation_size:
            share = float(split_validation_size)
            view, held_out = split(view, {"train": 1 - share, "validation": share}, seed=seed)
            self.val_dataset = MessageLogs(held_out, None)
        self.dataset = MessageLogs(view, seed, epochs)
        self.processor = as_datum
        self.preprocessor = None
        self.task_spec: Any = None

    def set_task_spec(self, data_config: Mapping[str, Any]) -> None:
        """Called by NeMo RL with the config; its tasks are described by a class of its own."""
        from nemo_rl.data.interfaces import TaskDataSpec

        self.data_config = data_config
        self.task_spec = TaskDataSpec(task_name=self.task_name)

    def set_processor(self) -> None:
        """Called by NeMo RL: whatever the config names, rows need no other than ours."""


def _recipe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a recipe; what would be silently ignored is refused."""
    for name in ("prompt_file", "system_prompt_file"):
        if options.get(name) is not None:
            raise UsageError(f"{name} is not applied to rows here: put it into the rows")
    known = RECIPE_KEYS | HOST_KEYS | {"prompt_file", "system_prompt_file"}
    check_names(options, known, "of a dataset")
    return {name: value for name, value in options.items() if name in RECIPE_KEYS}
