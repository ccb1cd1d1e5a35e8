"""Loader state: a position in the sample stream, and the stream it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.data.order import ORDER_VERSION
from tokenmill.data.states import admit_state
from tokenmill.errors import StateError

STATE_VERSION = 1
_KIND = "tokenmill.Loader"


@dataclass(frozen=True)
class Cursor:
    """Position of the next global batch.

    `window` and `packs_before` are used only when packing. They let a resumed loader rebuild a
    single packing window instead of the whole epoch.
    """

    epoch: int = 0
    position: int = 0  # samples of this epoch already served
    window: int = 0
    packs_before: int = 0  # packs of this epoch in earlier windows

    def next_epoch(self) -> Cursor:
        return Cursor(self.epoch + 1)


@dataclass(frozen=True)
class StreamSpec:
    """What determines the sample stream. Loaders with equal specs serve equal streams."""

    dataset: str  # content key
    seed: int
    order: str
    packing: dict[str, Any] | None

    def save(self, cursor: Cursor, first_epoch: int) -> dict[str, Any]:
        """Return a JSON-serializable state, identical on every rank."""
        state = {
            "kind": _KIND,
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "first_epoch": first_epoch,
            "epoch": cursor.epoch,
            "position": cursor.position,
            **self._identity(),
        }
        if self.packing is not None:
            state |= {"window": cursor.window, "packs_before": cursor.packs_before}
        return state

    def load(self, state: Any) -> tuple[Cursor, int]:
        """Return the cursor and first epoch of a saved state.

        Raises:
            StateError: The state belongs to another dataset, seed, order, packing or version.
        """
        names = ["epoch", "position", "first_epoch"]
        if self.packing is not None:
            names += ["window", "packs_before"]
        numbers = admit_state(
            state,
            kind=_KIND,
            owner="loader",
            version=STATE_VERSION,
            fields=self._identity(),
            numbers=names,
        )
        first_epoch = numbers.pop("first_epoch")
        cursor = Cursor(**numbers)
        if cursor.packs_before > cursor.position:
            raise StateError(
                f"Invalid state: packs_before={cursor.packs_before} exceeds "
                f"position={cursor.position}."
            )
        return cursor, first_epoch

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "seed": self.seed,
            "order": self.order,
            "packing": self.packing,
        }
