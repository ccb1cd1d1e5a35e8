"""OpenRLHF's SFT from the command line, over rows that tokenmill prepared.

``python -m tokenmill.integrations.openrlhf.train_sft …`` takes the arguments of
``python -m openrlhf.cli.train_sft`` and is that program: OpenRLHF's own code reads the arguments,
mixes the datasets, shards, shuffles, resumes and trains. Only what turns rows into tokens is
replaced (`SFTDataset`), and ``--data.dataset`` and ``--eval.dataset`` name stores, several with
commas between them. OpenRLHF loads their directories by ``datasets.load_from_disk``, as any other.

Its loss reads a mask one token earlier than ours: a place says whether the token after it is
trained.
"""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np

from tokenmill.dataset import as_view, tokens_alone
from tokenmill.errors import UsageError
from tokenmill.integrations.hosts import Items, is_store, rows_alone, rows_within
from tokenmill.optional import optional
from tokenmill.sampling import Int64Array
from tokenmill.store import open_store

with optional("openrlhf", "this program"):
    import torch
    from openrlhf import datasets as host
    from openrlhf.datasets import utils as host_utils

PROGRAM = "openrlhf.cli.train_sft"
_BLENDING = host_utils.blending_datasets  # before `main` puts ours in its place

Item = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


def blending_datasets(datasets: str, *given: Any, **named: Any) -> Any:
    """Stores, checked, as OpenRLHF's own function mixes them.

    Args:
        datasets: Directories, with commas between them.
        given: What OpenRLHF says beside: shares, and its strategy.
        named: The same by name.
    """
    strategy = named["strategy"] if "strategy" in named else given[1]
    for path in datasets.split(","):
        if not is_store(path.strip()):
            raise UsageError(
                "this program takes stores: tokenmill prepare FILE --tokenizer MODEL makes one",
                path=path.strip(),
            )
        rows_within(
            rows_alone(tokens_alone(as_view(open_store(path.strip())), "OpenRLHF")),
            strategy.args.data.max_len,
            "--data.max_len",
            "raise it, or prepare with --max-length",
        )
    # A store has no splits, and OpenRLHF would compare the name of one with every row.
    return _BLENDING(datasets, *given, **{**named, "dataset_split": None})


class SFTDataset(Items[Item], host.SFTDataset):  # type: ignore[misc]
    """Rows of stores; OpenRLHF's collator pads them.

    Args:
        dataset: What `blending_datasets` gave: ``input_ids`` and ``loss_mask``.
        tokenizer: OpenRLHF's, for the padding.
        max_length: Checked where the stores are opened.
        strategy: OpenRLHF's, not needed.
        pretrain_mode: Refused: it trains every token, whatever the masks say.
        how_to_render: Templates and others: rows are rendered.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        max_length: int,
        strategy: Any,
        *,
        pretrain_mode: bool = False,
        **how_to_render: Any,
    ) -> None:
        if pretrain_mode:
            raise UsageError(
                "--model.pretrain_mode_enable trains every token: prepare the rows with "
                "--train-on everything instead"
            )
        self.rows, self.tokenizer = dataset.with_format("numpy"), tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Ids, attention and mask of rows, each a batch of one."""
        found = self.rows[numbers.tolist()]
        return [
            _item(ids, mask)
            for ids, mask in zip(found["input_ids"], found["loss_mask"], strict=True)
        ]


def _item(ids: Any, mask: Any) -> Item:
    input_ids = torch.from_numpy(np.asarray(ids, np.int64))[None]
    loss_mask = torch.from_numpy(np.append(mask[1:], 0).astype(np.float32))[None]
    return input_ids, torch.ones_like(input_ids), loss_mask


def main() -> None:
    """Run OpenRLHF's program with our dataset."""
    host.SFTDataset = SFTDataset
    host_utils.blending_datasets = blending_datasets
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
