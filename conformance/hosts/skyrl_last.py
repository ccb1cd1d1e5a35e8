"""SkyRL's SFT tokenization, with the loss on the last answer, which is its default.

The prompt and the whole conversation are encoded, and what the second is longer by is trained.
"""

from __future__ import annotations

from typing import Any

from conformance.hosts import Prepared, skyrl_every
from conformance.hosts.skyrl_every import CHECKOUT, PACKAGE, PATHS, STAND_INS

__all__ = ["CHECKOUT", "HOW", "NAME", "PACKAGE", "PATHS", "STAND_INS", "TRAINS", "prepare"]

NAME = "SkyRL, last answer"
TRAINS = "last"
HOW = "`tokenize_chat_example`, its default"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as SkyRL's worker tokenizes them."""
    return skyrl_every.prepare(rows, tokenizer, template, mode="LAST_ASSISTANT_MESSAGE")
