"""SkyRL's SFT tokenization, with the loss on every answer.

``loss_mask`` covers the row from the first answer on; the tokens before it are untrained.
"""

from __future__ import annotations

import copy
import typing
from typing import Any

import typing_extensions

from conformance.trainers import Prepared, one_by_one

NAME = "SkyRL, all answers"
CHECKOUT = "SkyRL"
PATHS = ("", "skyrl-gym")
PACKAGE = "skyrl"
STAND_INS = ("vllm", "flash_attn", "vllm_router", "megatron", "deepspeed", "wandb")
TRAINS = "every"
HOW = (
    "`tokenize_chat_example`, `ALL_ASSISTANT_MESSAGES`; `TypedDict` of `typing_extensions`, as in "
    "Python 3.12"
)
MODE = "ALL_ASSISTANT_MESSAGES"


def prepare(
    rows: list[dict[str, Any]], tokenizer: Any, template: str, mode: str = MODE
) -> list[Prepared]:
    """Rows as SkyRL's worker tokenizes them."""
    # Pydantic takes no other on Python 3.11, where SkyRL's own class is the standard library's.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    from skyrl.train.config.sft_config import TrainOnWhat
    from skyrl.train.sft_trainer import tokenize_chat_example

    def one(row: dict[str, Any]) -> Prepared:
        made = tokenize_chat_example(
            copy.deepcopy(row), tokenizer, train_on_what=getattr(TrainOnWhat, mode)
        )
        if made is None:
            return "skipped"
        ids = list(made["input_ids"])
        mask = list(made["loss_mask"])
        return ids, [0] * (len(ids) - len(mask)) + mask

    return one_by_one(rows, one)
