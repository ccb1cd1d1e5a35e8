"""SkyRL's SFT tokenization, with the loss on the last answer, which is its default.

It encodes the prompt and the whole conversation, and trains what the second adds.
"""

from __future__ import annotations

from typing import Any

from conformance.trainers import Prepared, skyrl_every
from conformance.trainers.skyrl_every import CHECKOUT, PACKAGE, PATHS, STAND_INS

__all__ = ["CHECKOUT", "HOW", "NAME", "PACKAGE", "PATHS", "STAND_INS", "TRAINS", "prepare"]

NAME = "SkyRL, last answer"
TRAINS = "last"
HOW = "`tokenize_chat_example`, its default; `TypedDict` of `typing_extensions`, as in Python 3.12"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as SkyRL's worker tokenizes them."""
    return skyrl_every.prepare(rows, tokenizer, template, mode="LAST_ASSISTANT_MESSAGE")
