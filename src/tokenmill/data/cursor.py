"""Loader state: a position in the sample stream, and the stream it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.data.order import LARGEST, ORDER_VERSION
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
    """Everything that determines the sample stream. Equal specs give equal streams."""

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
            **asdict(self),
        }
        if self.packing is not None:
            state |= {"window": cursor.window, "packs_before": cursor.packs_before}
        return state

    def load(self, state: Any) -> tuple[Cursor, int]:
        """Return the cursor and first epoch of a saved state of this stream, else `StateError`."""
        names = ["epoch", "position", "first_epoch"]
        if self.packing is not None:
            names += ["window", "packs_before"]
        numbers = validate_state(
            state,
            kind=_KIND,
            owner="loader",
            fields=asdict(self),
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


def validate_state(
    state: Any,
    *,
    kind: str,
    owner: str,
    fields: Mapping[str, Any],
    numbers: Sequence[str],
) -> dict[str, int]:
    """Return the integers of a saved state; `StateError` unless it belongs to this stream."""
    if not isinstance(state, dict) or not _equal(state.get("kind"), kind):
        raise StateError(f"not the state of a tokenmill {owner}")
    for name, expected in (("version", STATE_VERSION), ("order_version", ORDER_VERSION)):
        if not _equal(state.get(name), expected):
            raise StateError(
                f"the state has {name} {state.get(name)!r}, this tokenmill has {expected}; "
                "finish the run with the version that started it"
            )
    differing = [
        f"{name} (state: {state.get(name)!r}, this {owner.split()[-1]}: {ours!r})"
        for name, ours in fields.items()
        if not _equal(state.get(name), ours)
    ]
    if differing:
        raise StateError(f"the state belongs to another {' and another '.join(differing)}")
    result: dict[str, int] = {}
    for name in numbers:
        number = state.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateError(f"{name} in the state must be a non-negative integer, got {number!r}")
        if number > LARGEST:
            raise StateError(f"{name} in the state must be at most 2**62, got {number}")
        result[name] = number
    return result


def _equal(value: Any, ours: Any) -> bool:
    # Compare types first, because an array of one element would compare as equal.
    if type(value) is not type(ours):
        return False
    if isinstance(ours, dict):
        return value.keys() == ours.keys() and all(_equal(value[name], ours[name]) for name in ours)
    if isinstance(ours, list):
        return len(value) == len(ours) and all(map(_equal, value, ours))
    return bool(value == ours)
