"""open-instruct's SFT tokenization, with the tokenizer's own template.

``sft_tulu_tokenize_without_truncation_v1`` and its filter, which drops rows without labels.
"""

from __future__ import annotations

import copy
from typing import Any

from conformance.trainers import Prepared, from_labels, one_by_one

NAME = "open-instruct"
CHECKOUT = "open-instruct"
PATHS = ("",)
PACKAGE = "open-instruct"
STAND_INS = ("vllm", "deepspeed", "flash_attn", "beaker", "olmo_core", "litellm", "nltk", "ray",
             "dotenv", "wandb", "tree_sitter", "mason", "langdetect", "immutabledict", "tenacity",
             "fla", "liger_kernel")  # fmt: skip
TRAINS = "every"
HOW = "`sft_tulu_tokenize_without_truncation_v1`, `sft_tulu_filter_v1`"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as the transformation makes them."""
    from open_instruct import dataset_transformation as transformation

    def one(row: dict[str, Any]) -> Prepared:
        made = transformation.sft_tulu_tokenize_without_truncation_v1(copy.deepcopy(row), tokenizer)
        if not transformation.sft_tulu_filter_v1(made, tokenizer):
            return "dropped: no labels could be derived"
        return from_labels(made["input_ids"].tolist(), made["labels"].tolist())

    return one_by_one(rows, one)
