"""slime's SFT rollout: `MultiTurnLossMaskGenerator`, with the mask type that fits the model.

Its types are ``qwen`` (the default), ``qwen3`` and ``distill_qwen``.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

from conformance.trainers import Prepared, one_by_one

NAME = "slime"
CHECKOUT = "slime"
PATHS = ("",)
PACKAGE = "slime"
STAND_INS = ("sglang", "sglang_router", "megatron")
TRAINS = "every"
HOW = "`MultiTurnLossMaskGenerator.get_loss_mask`"


def prepare(
    rows: list[dict[str, Any]], tokenizer: Any, template: str, package: str = "slime"
) -> list[Prepared]:
    """Rows as the SFT rollout makes them."""
    masks = importlib.import_module(f"{package}.utils.mask_utils")
    kind = "qwen3" if template == "qwen3" else "qwen"
    generator = masks.MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=kind)

    def one(row: dict[str, Any]) -> Prepared:
        row = copy.deepcopy(row)
        ids, mask = generator.get_loss_mask(row["messages"], tools=row.get("tools"))
        return list(ids), list(mask)

    return one_by_one(rows, one)
