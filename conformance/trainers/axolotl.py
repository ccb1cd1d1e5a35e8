"""axolotl's ``chat_template`` strategy with its default options.

Templates whose turns do not end with the eos token need ``eot_tokens``, which users must set.
"""

from __future__ import annotations

import copy
from typing import Any

from conformance.trainers import Prepared, from_labels, one_by_one

NAME = "axolotl"
CHECKOUT = "axolotl"
PATHS = ("src",)
PACKAGE = "axolotl"
STAND_INS = ("axolotl_contribs_lgpl", "axolotl_contribs_mit", "flash_attn", "bitsandbytes",
             "deepspeed", "mistral_common", "kernels", "liger_kernel",
             "lm_eval", "fla", "xformers", "triton")  # fmt: skip
TRAINS = "every"
HOW = "`prompt_strategies.chat_template`, its defaults (without `eot_tokens`)"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as the strategy tokenizes them."""
    from axolotl.prompt_strategies.chat_template import load
    from axolotl.utils.dict import DictDefault

    strategy = load(
        tokenizer,
        DictDefault({"train_on_inputs": False, "sequence_len": 1_000_000}),
        DictDefault({"type": "chat_template", "field_messages": "messages"}),
    )

    def one(row: dict[str, Any]) -> Prepared:
        made = strategy.tokenize_prompt(copy.deepcopy(row))
        return from_labels(made["input_ids"], made["labels"])

    return one_by_one(rows, one)
