"""verl's `MultiTurnSFTDataset` with ``ignore_input_ids_mismatch``, as its error message advises."""

from __future__ import annotations

from typing import Any

from conformance.trainers import Prepared, verl
from conformance.trainers.verl import CHECKOUT, PACKAGE, PATHS, STAND_INS, TRAINS

__all__ = ["CHECKOUT", "HOW", "NAME", "PACKAGE", "PATHS", "STAND_INS", "TRAINS", "prepare"]

NAME = "verl, mismatch ignored"
HOW = "`MultiTurnSFTDataset`, `ignore_input_ids_mismatch=True`"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as the dataset serves them."""
    return verl.prepare(rows, tokenizer, template, ignore_input_ids_mismatch=True)
