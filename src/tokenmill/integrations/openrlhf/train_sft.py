"""OpenRLHF's SFT program over stores; only its tokenization is replaced."""

from __future__ import annotations

import runpy
from typing import Any

from tokenmill._core.optional import optional
from tokenmill.data.order import Int64Array
from tokenmill.data.view import as_view
from tokenmill.errors import UsageError
from tokenmill.integrations.trainers import OPENRLHF, Items, is_store
from tokenmill.store import open_store

with optional("openrlhf", "this program"):
    import torch
    from openrlhf import datasets as original
    from openrlhf.datasets import utils as original_utils

PROGRAM = "openrlhf.cli.train_sft"
_BLENDING = original_utils.blending_datasets  # before `main` replaces it

Item = tuple["torch.Tensor", ...]


def blending_datasets(datasets: str, *given: Any, **named: Any) -> Any:
    """Check the stores, then mix them with OpenRLHF's own function."""
    strategy = named["strategy"] if "strategy" in named else given[1]
    for path in map(str.strip, datasets.split(",")):
        if not is_store(path):
            raise UsageError(
                "Not a store. Create one with: tokenmill prepare FILE --tokenizer MODEL",
                path=path,
            )
        OPENRLHF.check(as_view(open_store(path)), strategy.args.data.max_len)
    # A store has no splits, and OpenRLHF would compare the name of one with every row.
    return _BLENDING(datasets, *given, **{**named, "dataset_split": None})


class SFTDataset(Items[Item], original.SFTDataset):  # type: ignore[misc]
    """Rows of `blending_datasets` as ids, attention and mask; OpenRLHF's collator pads them."""

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        max_length: int,
        strategy: Any,
        *,
        pretrain_mode: bool = False,
        **_: Any,
    ) -> None:
        if pretrain_mode:
            raise UsageError(
                "--model.pretrain_mode_enable is not supported. To train every token, prepare the "
                "rows with --train-on everything."
            )
        self.rows, self.tokenizer = dataset.with_format("numpy"), tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        found = self.rows[numbers.tolist()]
        rows = zip(found["input_ids"], found["loss_mask"], strict=True)
        return [tuple(part[None] for part in OPENRLHF.item(*row).values()) for row in rows]


def main() -> None:
    original.SFTDataset = SFTDataset
    original_utils.blending_datasets = blending_datasets
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
