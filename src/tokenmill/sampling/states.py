"""Saved states: whether a dict somebody kept may move a cursor of this run.

A *state* is a flat JSON-able dict: its kind, the versions of its layout and of the order, the
fields that say which stream it belongs to, and the numbers of the cursor. `admit_state` refuses one
of another version or of another stream, naming both values, and gives the numbers back. Loading
never guesses: a state that is nearly right is a different run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.errors import StateError
from tokenmill.sampling.permutation import LARGEST, ORDER_VERSION


def admit_state(
    state: Any,
    *,
    kind: str,
    owner: str,
    version: int,
    fields: Mapping[str, Any],
    numbers: Sequence[str],
) -> dict[str, int]:
    """The numbers of a saved state that belongs to this stream.

    Args:
        state: What was saved.
        kind: Whose states it must be one of.
        owner: What loads it, for the message ("loader").
        version: Of the state's layout.
        fields: Names and values that must be the state's, too.
        numbers: Names of the whole numbers to give back.

    Raises:
        StateError: It is of another kind, version or stream, or holds no whole number where one
            must stand; the message names both values.
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
    """Whether a saved value is ours, in value and in kind.

    Somebody's array would compare member by member, and one of a single member passes for it.
    """
    if type(value) is not type(ours):
        return False
    if isinstance(ours, dict):
        return value.keys() == ours.keys() and all(_equal(value[name], ours[name]) for name in ours)
    if isinstance(ours, list):
        return len(value) == len(ours) and all(map(_equal, value, ours))
    return bool(value == ours)
