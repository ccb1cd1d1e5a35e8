"""The cursor of a prompt stream: epoch, position, and which stream they belong to.

A state is a flat JSON-able dict of a few hundred bytes: how many prompts of which epoch were
handed out, and a *passport* (the index's key, limit, seed, order) by which another stream refuses
it with both values. Loading a state any number of times is the identity on the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.errors import StateError
from tokenmill.sampling import ORDER_VERSION

STATE_VERSION = 1
_KIND = "tokenmill.PromptDataset"


@dataclass(frozen=True)
class Passport:
    """Which stream a cursor belongs to.

    Args:
        index: Key of the length index.
        max_length: The limit.
        seed: Of the run.
        order: Name of the order.
    """

    index: str
    max_length: int | None
    seed: int
    order: str

    def stamp(self, epoch: int, position: int, shuffled: bool) -> dict[str, Any]:
        """The state to save."""
        return {
            "kind": _KIND,
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "epoch": epoch,
            "position": position,
            "shuffled": shuffled,
            "index": self.index,
            "max_length": self.max_length,
            "seed": self.seed,
            "order": self.order,
        }

    def admit(self, state: Any, rows: int) -> tuple[int, int, bool]:
        """Epoch, position and whether shuffled, of a saved state.

        Raises:
            StateError: It is of another version, index, limit, seed or order; the message says
                which, with both values.
        """
        if not isinstance(state, dict) or state.get("kind") != _KIND:
            raise StateError("not a state of a tokenmill prompt dataset")
        for name, expected in (("version", STATE_VERSION), ("order_version", ORDER_VERSION)):
            if state.get(name) != expected:
                raise StateError(
                    f"the state has {name} {state.get(name)!r}, this tokenmill has {expected}: "
                    "finish the run with the release that started it"
                )
        differing = []
        for name in ("index", "max_length", "seed", "order"):
            ours, theirs = getattr(self, name), state.get(name)
            if ours != theirs:
                differing.append(f"{name} (the state's: {theirs!r}, this dataset's: {ours!r})")
        if differing:
            raise StateError(f"the state is of another {'; and of another '.join(differing)}")
        for name in ("epoch", "position"):
            number = state.get(name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise StateError(f"the state's {name} is {number!r}, not a whole number")
        if state["position"] > rows:
            raise StateError(f"the state's position is {state['position']} of {rows} prompts")
        if not isinstance(state.get("shuffled"), bool):
            raise StateError(
                f"the state's shuffled is {state.get('shuffled')!r}, not true or false"
            )
        return state["epoch"], state["position"], state["shuffled"]
