"""A stand-in for SkyRL's data handling, by its documented behaviour."""

from __future__ import annotations

import json
import sys
from abc import ABCMeta
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integrations.conftest import stand_in

PAD = 0


def config(**fields: Any) -> SimpleNamespace:
    unset = (
        "train_datasets", "train_dataset_splits", "pretokenized_dataset_paths", "eval_datasets",
        "eval_dataset_splits", "eval_dataset_names", "eval_pretokenized_dataset_paths",
        "max_length",
    )  # fmt: skip
    stated: dict[str, Any] = {
        "messages_key": "messages", "tools_key": "tools", "system_key": "system", "num_workers": 0,
        "force_recache": False, "disable_cache": False, "train_on_what": "last_assistant_message",
    }  # fmt: skip
    return SimpleNamespace(**{**dict.fromkeys(unset), **stated, **fields})


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


# Its programs, as far as data goes: stand-ins that are used where SkyRL itself is not installed.


def install_main_sft(monkeypatch: pytest.MonkeyPatch) -> Any:
    class SFTTrainer:
        def __init__(self, cfg: Any, skyrl_cfg: Any) -> None:
            self.sft_cfg, self.tokenizer = cfg, None

        def setup(self) -> None:
            self.tokenizer = self.sft_cfg.model.path

        def load_dataset(self) -> Any:
            raise AssertionError("SkyRL's own tokenization")

        load_eval_datasets = load_dataset

        def train(self) -> None:
            host.loaded = self.load_dataset(), self.load_eval_datasets()

    def sft_entrypoint(cfg: Any, skyrl_cfg: Any) -> None:
        trainer = host.SFTTrainer(cfg, skyrl_cfg=skyrl_cfg)
        trainer.setup()
        trainer.train()

    def main() -> None:
        stated = dict(word.split("=", 1) for word in sys.argv[1:])
        cfg = config(
            train_datasets=[stated["train"]], eval_datasets=[stated["eval"]],
            eval_dataset_splits=["train"], cache_dir=stated["cache_dir"],
            model=SimpleNamespace(path=stated["model"]),
        )  # fmt: skip
        host.sft_entrypoint.remote(cfg, None)

    task = SimpleNamespace(_function=sft_entrypoint)
    host = stand_in(
        monkeypatch, "skyrl.train.main_sft", SFTTrainer=SFTTrainer, main=main, sft_entrypoint=task
    )
    return host


def install_main_base(monkeypatch: pytest.MonkeyPatch) -> Any:
    def skyrl_entrypoint(cfg: Any) -> None:
        host.loaded = host.PromptDataset(
            datasets=cfg["train_data"], tokenizer=cfg["model"], max_prompt_length=30, num_workers=8
        )

    def main() -> None:
        stated = dict(word.split("=", 1) for word in sys.argv[1:])
        if "trainer.override_entrypoint" in stated:
            return import_module(stated["trainer.override_entrypoint"]).main()
        return host.skyrl_entrypoint.remote(stated)

    host = stand_in(
        monkeypatch, "skyrl.train.entrypoints.main_base", PromptDataset=None, main=main,
        skyrl_entrypoint=SimpleNamespace(_function=skyrl_entrypoint),
    )  # fmt: skip
    return host


def install_pretokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_from_pretokenized(path: str, max_length: int | None = None) -> Any:
        import pyarrow.parquet as pq

        rows = pq.read_table(path).to_pylist()
        found = (normalised(row["input_ids"], row["loss_mask"], max_length) for row in rows)
        return [row for row in found if row is not None]

    home = "skyrl.train.dataset"
    stand_in(monkeypatch, f"{home}.pretokenized", load_from_pretokenized=load_from_pretokenized)
    concat = ABCMeta("Concat", (torch.utils.data.ConcatDataset,), {})
    stand_in(monkeypatch, f"{home}.sft_dataset", ConcatSFTDataset=concat)


def eager_prompts(
    path: str, tokenizer: Any, limit: int
) -> list[tuple[Any, Any, dict[str, Any], str]]:
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    kept = [
        row
        for row in rows
        if len(
            tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
        <= limit
    ]
    return [
        (row.pop("prompt"), row.pop("env_class", None), row, str(number))
        for number, row in enumerate(kept)
    ]
