"""SkyRL's side of the bargain, as far as data goes, written from its documented behaviour.

What a pretokenized store must satisfy, what a row becomes, how rows are collated, and how its
trainer drives a StatefulDataLoader: one iterator advanced step by step, made anew where an epoch
ends, one state per checkpoint, in serial or with the next batch already fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

PAD = 0


def config(**fields: Any) -> SimpleNamespace:
    """An SFTConfig-like object with SkyRL's defaults for what concerns data."""
    stated: dict[str, Any] = {
        "train_datasets": None,
        "train_dataset_splits": None,
        "pretokenized_dataset_paths": None,
        "messages_key": "messages",
        "tools_key": "tools",
        "system_key": "system",
        "eval_datasets": None,
        "eval_dataset_splits": None,
        "eval_dataset_names": None,
        "eval_pretokenized_dataset_paths": None,
        "max_length": None,
        "num_workers": 0,
        "force_recache": False,
        "disable_cache": False,
        "train_on_what": "last_assistant_message",
    }
    return SimpleNamespace(**{**stated, **fields})


def checked_pretokenized(path: str) -> Any:
    """A ``save_to_disk`` directory with the schema SkyRL demands, or an AssertionError."""
    from datasets import Dataset

    dataset = Dataset.load_from_disk(path)
    assert dataset.column_names == ["input_ids", "loss_mask"]
    for row in dataset:
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert set(row["loss_mask"]) <= {0, 1}
    return dataset


def normalised(input_ids: list[int], loss_mask: list[int], limit: int | None) -> Any:
    """A stored row as SkyRL's collators take it; None where nothing is left to train."""
    input_ids, loss_mask = input_ids[:limit], loss_mask[:limit]
    if 1 not in loss_mask:
        return None
    first = loss_mask.index(1)
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "num_actions": len(input_ids) - first,
        "loss_mask": loss_mask[first:],
    }


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Sequences padded on the left, windows of loss masks aligned on the right."""
    width = max(len(example["input_ids"]) for example in examples)
    actions = max(example["num_actions"] for example in examples)
    sequences = np.full((len(examples), width), PAD, np.int64)
    attention = np.zeros((len(examples), width), np.int64)
    loss = np.zeros((len(examples), actions), np.int64)
    for row, example in enumerate(examples):
        sequences[row, width - len(example["input_ids"]) :] = example["input_ids"]
        attention[row, width - len(example["input_ids"]) :] = example["attention_mask"]
        loss[row, actions - example["num_actions"] :] = example["loss_mask"]
    return {
        "sequences": torch.from_numpy(sequences),
        "attention_mask": torch.from_numpy(attention),
        "loss_mask": torch.from_numpy(loss),
    }


def dataloader(
    dataset: Any, sampler: Any, batch_size: int, workers: int, start: str = "spawn"
) -> Any:
    """The training dataloader; SkyRL spawns its workers."""
    generator = torch.Generator()
    generator.manual_seed(42)
    return StatefulDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        shuffle=False,
        collate_fn=collate,
        drop_last=False,
        generator=generator,
        num_workers=workers,
        persistent_workers=False,
        multiprocessing_context=start if workers else None,
    )


def train(loader: Any, *, ahead: bool) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
    """The trainer's walk: batches with the state a checkpoint after each of them holds.

    ``ahead`` fetches the next batch before the state's batch is trained on, as SkyRL's
    asynchronous collation does; it takes the state before it does so.
    """
    batches, pending = iter(loader), []
    while True:
        batch = pending.pop() if pending else next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        state = loader.state_dict()
        if ahead:
            pending.append(next(batches, None))
        yield batch, state
