"""Datasets for NeMo RL: rows as the ``dataset_name`` of its SFT, pairs for DPO and reward models.

Its trainer takes a ``message_log``, pieces of tokens with a role, and trains the pieces of role
``assistant``, or the last piece. `message_log` splits a row where its mask changes and leaves out
what follows the last trained token, so that the last piece is trained.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from tokenmill._core.optional import optional
from tokenmill._core.options import check_names
from tokenmill.build.recipe import Recipe
from tokenmill.data.group_batches import group_kind
from tokenmill.data.mixture import Mixture
from tokenmill.data.order import Int64Array
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import View, as_view
from tokenmill.errors import UsageError
from tokenmill.integrations.trainers import (
    NEMO_RL,
    ItemRows,
    Items,
    RowDataset,
    is_store,
    prepared,
    stated_date,
)
from tokenmill.store import Row, Store, open_store

with optional("torch"):
    import torch
    from torch.utils import data as torch_data

__all__ = ["MessageLogs", "PreferenceLogs", "SFTDataset", "message_log"]

TASK = "tokenmill"
PROMPT_FILES = {"prompt_file", "system_prompt_file"}
# Names in NeMo RL's own config sections that do not concern rows; its ``processor`` is one.
TRAINER_KEYS = {
    "dataset_name", "processor", "env_name", "split", "subset", "input_key", "output_key",
}  # fmt: skip
RECIPE_KEYS = set(Recipe.__struct_fields__) - {"sources", "tokenizer"} - TRAINER_KEYS

Item = dict[str, Any]


def message_log(row: Row) -> list[Item]:
    """Split a row into pieces of one role each, up to its last trained token."""
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


def _tokens(log: list[Item]) -> int:
    return sum(len(piece["token_ids"]) for piece in log)


class MessageLogs(RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Message logs of a view's rows in our order, or in the view's without a seed."""

    trainer = NEMO_RL

    def __init__(self, view: View, seed: int | None = 42, epochs: int = 1) -> None:
        self.view = self.trainer.check(view)
        order = "sequential" if seed is None else "feistel"
        self.item_rows = ItemRows(len(view), order, seed or 0, epochs)

    def item(self, row: Row) -> Item:
        return {"task_name": TASK, "message_log": message_log(row)}


class PreferenceLogs(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Pairs in our order for ``preference_collate_fn``, which trains the last piece of a log.

    NeMo RL's ``setup_preference_data`` always renders and encodes messages itself, so your own copy
    of ``run_dpo.py`` or ``run_rm.py`` must create them.
    """

    def __init__(
        self, data: Store | View | Mixture, seed: int | None = 42, epochs: int = 1
    ) -> None:
        view = data.view if isinstance(data, Mixture) else as_view(data)
        if group_kind(view) != "preference":
            raise UsageError(
                "NeMo RL's DPO and reward models need pairs, but this data has other rows."
            )
        order = "sequential" if seed is None else "feistel"
        self._run = RunIndex(data, epochs=epochs, seed=seed or 0, order=order, unit="groups")

    def __len__(self) -> int:
        return len(self._run)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        packs = self._run.packs(numbers.tolist())
        logs = [message_log(row) for row in self._run.view.rows(packs.rows)]
        pairs = [logs[first:stop] for first, stop in pairwise(packs.bounds.tolist())]
        return [
            {
                "message_log_chosen": chosen,
                "message_log_rejected": rejected,
                "length_chosen": _tokens(chosen),
                "length_rejected": _tokens(rejected),
                "loss_multiplier": 1.0,
                "idx": number,
                "task_name": TASK,
            }
            for number, (chosen, rejected) in zip(numbers.tolist(), pairs, strict=True)
        ]


def as_datum(
    datum_dict: Item,
    task_data_spec: Any,
    tokenizer: Any,
    max_seq_length: int | None,
    idx: int,
    **_: Any,
) -> Item:
    """Convert an item of `MessageLogs`, as NeMo RL's processor; nothing is rendered or encoded.

    Rows of ``max_seq_length`` tokens or more are not trained, as in NeMo RL's own processor.
    """
    log = datum_dict["message_log"]
    length = _tokens(log)
    multiplier = float(any(piece["role"] == "assistant" for piece in log))
    if max_seq_length is not None and length >= max_seq_length:
        warnings.warn(
            "NeMo RL does not train rows of data.max_input_seq_length tokens or more. Set a "
            "smaller data.train.max_length, or prepare the store with one.",
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
    """NeMo RL creates it from ``data.train`` or ``data.validation`` (docs/trainers/nemo-rl.md)."""

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
                given = sorted([*recipe, *(["tokenizer"] if tokenizer else [])])
                raise UsageError(
                    f"A store is already prepared. Remove {', '.join(given)}.", path=path
                )
            store = open_store(path)
        elif tokenizer is None:
            raise UsageError(
                "Raw files need a tokenizer: ++data.train.tokenizer='${policy.tokenizer.name}'",
                path=path,
            )
        else:
            stated = {"turn_end": "turn", **recipe, "date": recipe.get("date") or stated_date()}
            where = {"cache_dir": cache_dir, "num_workers": num_workers}
            store = prepared(tokenizer, "++data.train.date", sources=path, **stated, **where)
        view = as_view(store)
        self.task_name = TASK
        self.val_dataset = None
        if split_validation_size:
            share = float(split_validation_size)
            views = view.split({"train": 1 - share, "validation": share}, seed=seed)
            view = views["train"]
            self.val_dataset = MessageLogs(views["validation"], None)
        self.dataset = MessageLogs(view, seed, epochs)
        self.processor = as_datum
        self.preprocessor = None
        self.task_spec: Any = None

    def set_task_spec(self, data_config: Mapping[str, Any]) -> None:
        from nemo_rl.data.interfaces import TaskDataSpec

        self.data_config = data_config
        self.task_spec = TaskDataSpec(task_name=self.task_name)

    def set_processor(self) -> None:
        """Keep `as_datum`, whatever the config names; NeMo RL calls this."""


def _recipe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in sorted(PROMPT_FILES):
        if options.get(name) is not None:
            raise UsageError(f"{name} is not supported. Put its text into the rows.")
    check_names(options, RECIPE_KEYS | TRAINER_KEYS | PROMPT_FILES, "settings of a dataset")
    return {name: value for name, value in options.items() if name in RECIPE_KEYS}
