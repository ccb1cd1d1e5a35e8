"""TRL, DPO: the chosen side of pairs as `DPOTrainer` prepares them.

The chosen answer is the last one of the conversation; the rejected answer is another text.
"""

from __future__ import annotations

import tempfile
from typing import Any

from conformance.trainers import Prepared, in_halves
from conformance.trainers.trl_sft import (
    CHECKOUT,
    PACKAGE,
    PATHS,
    STAND_INS,
    arrow,
    tiny_model,
    untimed,
)

__all__ = ["CHECKOUT", "HOW", "NAME", "PACKAGE", "PATHS", "STAND_INS", "TRAINS", "prepare",
           "untimed"]  # fmt: skip

NAME = "TRL, DPO"
TRAINS = "last"
HOW = "`DPOTrainer`, the chosen side"


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    made = {
        "prompt": row["messages"][:-1],
        "chosen": row["messages"][-1:],
        "rejected": [{"role": "assistant", "content": "I would rather not say."}],
    }
    return {**made, "tools": row["tools"]} if row.get("tools") else made


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """All pairs at once; where that raises, in halves, to see which."""
    from trl import DPOConfig, DPOTrainer

    model, reference = tiny_model(tokenizer), tiny_model(tokenizer)

    def made(some: list[dict[str, Any]]) -> list[Prepared]:
        with tempfile.TemporaryDirectory() as directory:
            config = DPOConfig(
                output_dir=directory, max_length=None, report_to="none", use_cpu=True, bf16=False
            )
            trainer = DPOTrainer(
                model,
                ref_model=reference,
                args=config,
                processing_class=tokenizer,
                train_dataset=arrow([_pair(row) for row in some]),
            )
            dataset = list(trainer.train_dataset)
        return [
            (
                list(row["prompt_ids"]) + list(row["chosen_ids"]),
                [0] * len(row["prompt_ids"]) + [1] * len(row["chosen_ids"]),
            )
            for row in dataset
        ]

    return in_halves(rows, made)
