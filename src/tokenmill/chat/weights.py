"""Weights: what messages and rows say that they count in the loss.

Comes in: messages and rows as they were read. Goes out: one number per turn, for `render` and, of
whole rows, for those that come as tokens. ``weight`` of a message is for its trained tokens,
``weight`` of a row multiplies them all; 0 leaves untrained, absent and null are 1, and so are most.
What is no weight rejects the row (bad_shape). Weights are stored in float32, and a trained token
must neither lose its weight there nor grow beyond all bounds: hence the limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.errors import RowError

LEAST, MOST = 2.0**-100, 2.0**100
"""Of a trained token."""


def message_weight(message: dict[str, Any]) -> float:
    """What a message says that it counts: 1 unless it says so, 0 where it is not to be trained.

    Raises:
        RowError: Its weight is no weight.
    """
    if len(message) <= 2:
        return 1.0
    if message.get("train") is False or _is_zero(message.get("step_loss_mask")):
        return 0.0
    return _weight(message.get("weight"), "a message")


def row_weight(row: dict[str, Any]) -> float:
    """What a row says that all of it counts.

    Raises:
        RowError: Its weight is no weight, or it is 0.
    """
    weight = _weight(row.get("weight"), "the row")
    if not weight:
        raise RowError("the weight of the row is 0", reason="no_trained_tokens")
    return weight


def _weight(value: Any, whose: str) -> float:
    if value is None:
        return 1.0
    if not isinstance(value, (int, float)) or not (value == 0 or LEAST <= value <= MOST):
        raise RowError(
            f"the weight of {whose} is {str(value)[:40]!r}; it is 0, or a number from {LEAST:.1g} "
            f"to {MOST:.1g}"
        )
    return float(value)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def of_turns(trained: Mapping[int, float], turns: int) -> list[float]:
    """What each turn counts, from what the trained ones do.

    An untrained turn counts as the trained one behind it: where the text has no token of its own
    between them, the first trained token begins in the turn before.

    Args:
        trained: The number of each trained turn, and what it counts.
        turns: How many there are.
    """
    each, weight = [1.0] * turns, trained[max(trained)]
    for number in reversed(range(turns)):
        weight = trained.get(number, weight)
        each[number] = weight
    return each


def scaled(weights: Sequence[float], row: float, turns: int) -> list[float]:
    """What each turn counts in a row that counts so much; empty where each counts 1.

    Args:
        weights: Of each turn; empty where each counts 1.
        row: What the row says.
        turns: How many there are.

    Raises:
        RowError: The two together are out of bounds.
    """
    if row == 1:
        return list(weights)
    each = [row * weight for weight in weights or [1.0] * turns]
    if not all(LEAST <= weight <= MOST for weight in each):
        raise RowError(
            f"the weights of the row and of its messages come to {min(each):.1g} to "
            f"{max(each):.1g}; they must be from {LEAST:.1g} to {MOST:.1g}"
        )
    return [] if all(weight == 1 for weight in each) else each
