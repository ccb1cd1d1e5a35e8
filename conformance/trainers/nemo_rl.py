"""NeMo RL's SFT: `sft_processor`, then the loss mask that its collator adds.

As in its example configuration, bos and eos are added if the template has none, and the generation
prompt is part of the user's turn, so that the header is not trained.
"""

from __future__ import annotations

import copy
from typing import Any

from conformance.trainers import Prepared, one_by_one

NAME = "NeMo RL"
CHECKOUT = "NeMo-RL"
PATHS = ("",)
PACKAGE = "nemo-rl"
STAND_INS = ("vllm", "megatron", "nemo_automodel", "decord", "ray")
TRAINS = "every"
HOW = "`sft_processor`, `add_loss_mask_to_message_log`"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as dataset and collator make them."""
    from nemo_rl.data.interfaces import TaskDataSpec
    from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log
    from nemo_rl.data.processors import sft_processor

    specification = TaskDataSpec(task_name="conformance")

    def one(row: dict[str, Any]) -> Prepared:
        given = {**copy.deepcopy(row), "task_name": "conformance"}
        made = sft_processor(
            given, specification, tokenizer, 1_000_000, 0, add_generation_prompt=True
        )
        log = made["message_log"]
        add_loss_mask_to_message_log([log], roles_to_train_on=["assistant"])
        ids = [token for message in log for token in message["token_ids"].tolist()]
        mask = [place for message in log for place in message["token_loss_mask"].tolist()]
        return ids, mask

    return one_by_one(rows, one)
