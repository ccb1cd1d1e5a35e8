"""The cursor of a prompt stream: epoch, position, and which stream they belong to.

A state is a flat JSON-able dict of a few hundred bytes: how many prompts of which epoch were
handed out, and a *passport* (the index's key, limit, seed, order) by which another stream refuses
it with both values. Loading a state any number of times is the identity on the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.errors import StateError
from tokenmill.sampling import ORDER_VERSION, admit_state

STATE_VERSION = 1
_KIND = "tokenmill.PromptDataset"


@dataclass(frozen=True)
class PromptPassport:
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
        fields = ("index", "max_length", "seed", "order")
        admit_state(
            state,
            kind=_KIND,
            owner="prompt dataset",
            version=STATE_VERSION,
            fields={name: getattr(self, name) for name in fields},
            numbers=("epoch", "position"),
        )
        if state["position"] > rows:
            raise StateError(f"the state's position is {state['position']} of {rows} prompts")
        if not isinstance(state.get("shuffled"), bool):
            raise StateError(
                f"the state's shuffled is {state.get('shuffled')!r}, not true or false"
            )
        return state["epoch"], state["position"], state["shuffled"]
