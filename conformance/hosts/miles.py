"""miles' SFT rollout: its `MultiTurnLossMaskGenerator`, an older relative of slime's.

The same call with the same mask types; what differs is inside of miles.
"""

from __future__ import annotations

from typing import Any

from conformance.hosts import Prepared, slime
from conformance.hosts.slime import HOW, STAND_INS, TRAINS

__all__ = ["CHECKOUT", "HOW", "NAME", "PACKAGE", "PATHS", "STAND_INS", "TRAINS", "prepare"]

NAME = "miles"
CHECKOUT = "miles"
PATHS = ("",)
PACKAGE = "miles"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as the SFT rollout makes them."""
    return slime.prepare(rows, tokenizer, template, package="miles")
