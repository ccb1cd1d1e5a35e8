"""miles' SFT rollout: its `MultiTurnLossMaskGenerator`, which is called like slime's."""

from __future__ import annotations

from typing import Any

from conformance.trainers import Prepared, slime
from conformance.trainers.slime import HOW, STAND_INS, TRAINS

__all__ = ["CHECKOUT", "HOW", "NAME", "PACKAGE", "PATHS", "STAND_INS", "TRAINS", "prepare"]

NAME = "miles"
CHECKOUT = "miles"
PATHS = ("",)
PACKAGE = "miles"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as the SFT rollout makes them."""
    return slime.prepare(rows, tokenizer, template, package="miles")
