"""OpenRLHF's `SFTDataset` with ``multiturn``, which trains every answer.

Its loss mask is shifted by one token; the driver shifts it back. It does not support tools.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from conformance.trainers import Prepared, one_by_one

NAME = "OpenRLHF"
CHECKOUT = "OpenRLHF"
PATHS = ("",)
PACKAGE = "openrlhf"
STAND_INS = ("vllm", "deepspeed", "flash_attn", "ray", "ring_flash_attn", "optree", "torchmetrics")
TRAINS = "every"
HOW = "`SFTDataset`, `multiturn=True`; a list of rows instead of a table of `datasets`"


class _Rows(list[dict[str, Any]]):
    """What the dataset class uses of `datasets`, without Arrow between the columns of calls."""

    column_names = ("messages",)

    def map(self, function: Any, **_: Any) -> _Rows:
        return _Rows(function(row) for row in self)

    def filter(self, function: Any) -> _Rows:
        return _Rows(row for row in self if function(row))

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as the dataset serves them."""
    from openrlhf.datasets.sft_dataset import SFTDataset

    data = SimpleNamespace(input_key="messages", output_key=None, apply_chat_template=True)
    strategy = SimpleNamespace(args=SimpleNamespace(data=data))

    def one(row: dict[str, Any]) -> Prepared:
        given = _Rows([copy.deepcopy(row)])
        dataset = SFTDataset(given, tokenizer, 1_000_000, strategy, multiturn=True)
        if not len(dataset):
            return "filtered out"
        ids, _, mask = dataset[0]
        shifted = [int(place) for place in mask[0].tolist()]
        return ids[0].tolist(), [0, *shifted[:-1]]

    return one_by_one(rows, one)
