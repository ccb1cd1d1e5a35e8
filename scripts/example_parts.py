"""Helpers of the scripts that write example rows.

`Numbers` draws the numbers of a problem from a seed, so that a script always writes the same bytes.
"""

from __future__ import annotations

import random
from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]

ELEMENTS = {
    "hydrogen": ("H", 1), "helium": ("He", 2), "carbon": ("C", 6), "oxygen": ("O", 8),
    "neon": ("Ne", 10), "sodium": ("Na", 11), "iron": ("Fe", 26), "copper": ("Cu", 29),
    "silver": ("Ag", 47), "tin": ("Sn", 50), "gold": ("Au", 79), "lead": ("Pb", 82),
}  # fmt: skip
"""Symbol and atomic number by name."""


def user(text: str) -> Message:
    """Return a user turn."""
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    """Return an assistant turn, optionally with reasoning_content or tool_calls."""
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    """Return a system turn."""
    return {"role": "system", "content": text}


class Numbers:
    """Numbers drawn with `random.random`, whose sequence for a seed is guaranteed by Python."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self._generator.random() * (high - low + 1))

    def shuffled(self, items: list[Any]) -> list[Any]:
        """Return the items in an order that depends only on the seed."""
        places = sorted((self._generator.random(), place) for place in range(len(items)))
        return [items[place] for _, place in places]
