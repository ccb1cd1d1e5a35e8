"""Validate saved states: flat JSON dicts that identify a stream and a position in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.data.order import LARGEST, ORDER_VERSION
from tokenmill.errors import StateError


def admit_state(
    state: Any,
    *,
    kind: str,
    owner: str,
    version: int,
    fields: Mapping[str, Any],
    numbers: Sequence[str],
) -> dict[str, int]:
    """Return the integers of a saved state after checking that it belongs to this stream.

    Raises:
        StateError: It is of another kind, version or stream, or a number is missing; the message
            names both values.
    """
    if not isinstance(state, dict) or not _equal(state.get("kind"), kind):
        raise StateError(f"not a state of a tokenmill {owner}")
    for name, expected in (("version", version), ("order_version", ORDER_VERSION)):
        if not _equal(state.get(name), expected):
            raise StateError(
                f"the state has {name} {state.get(name)!r}, this tokenmill has {expected}: "
                "finish the run with the release that started it"
            )
    differing = [
        f"{name} (the state's: {state.get(name)!r}, this {owner.split()[-1]}'s: {ours!r})"
        for name, ours in fields.items()
        if not _equal(state.get(name), ours)
    ]
    if differing:
        raise StateError(f"the state is of another {'; and of another '.join(differing)}")
    found: dict[str, int] = {}
    for name in numbers:
        number = state.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateError(f"the state's {name} is {number!r}, not a whole number")
        if number > LARGEST:
            raise StateError(f"the state's {name} is {number}: no run comes that far")
        found[name] = number
    return found


def _equal(value: Any, ours: Any) -> bool:
    # An array would compare element by element, and one with a single element would pass.
    if type(value) is not type(ours):
        return False
    if isinstance(ours, dict):
        return value.keys() == ours.keys() and all(_equal(value[name], ours[name]) for name in ours)
    if isinstance(ours, list):
        return len(value) == len(ours) and all(map(_equal, value, ours))
    return bool(value == ours)
