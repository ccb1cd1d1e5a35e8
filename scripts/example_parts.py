"""The small parts that the scripts which compose example rows share.

A *message* is one turn with its role; `Numbers` draws the figures of a problem from a seed, so
that the same script always writes the same bytes; `ELEMENTS` is the table that both the tool rows
and the editing rows look things up in.
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
    """A user's turn."""
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    """An assistant's turn, with reasoning_content or tool_calls where given."""
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    """A system prompt."""
    return {"role": "system", "content": text}


class Numbers:
    """Numbers drawn from a seed with `random.random` alone, whose sequence Python guarantees."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self._generator.random() * (high - low + 1))

    def shuffled(self, items: list[Any]) -> list[Any]:
        """The items in an order that depends on the seed alone."""
        places = sorted((self._generator.random(), place) for place in range(len(items)))
        return [items[place] for _, place in places]
