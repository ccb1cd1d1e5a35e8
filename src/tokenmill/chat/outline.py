"""Outlines: what two conversations have in common that differ in their words alone.

In goes a conversation, out come its *outline*, which can be looked up, and its *leaves*: the texts
of its messages and the arguments of its calls, in the order in which they stand there. Roles, keys
and their order, the number of calls and which contents are null are outline::

    [{"role": "user", "content": "Warm?"},                 outline: "user",
     {"role": "assistant", "content": "", "tool_calls": [    ("assistant", False, "content",
        {"name": "look", "arguments": {"city": "Rome"}}]}]    (("name", str, "arguments", dict),))
                                                          leaves: "Warm?", "", "look", {"city": …}

`render` remembers by outlines what is trained, `unrolled` whole renders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

Outline = tuple[Any, ...]
MOST_MESSAGES = 16  # of a conversation with calls: longer ones seldom are built like another


def outline_of(
    messages: list[dict[str, Any]], nulls: Collection[int] = ()
) -> tuple[Outline, list[Any]] | None:
    """Outline and leaves of a conversation; None where it holds what no outline describes.

    Args:
        messages: The conversation.
        nulls: `id` of the messages whose content is null in the row and empty text here.
    """
    if len(messages) > MOST_MESSAGES:
        return None
    outline: list[Any] = []
    leaves: list[Any] = []
    for message in messages:
        content, role = message.get("content"), message["role"]
        if len(message) == 2 and type(content) is str:
            outline.append(role if not nulls or id(message) not in nulls else (role, True))
            leaves.append(content)
            continue
        entry = [role, id(message) in nulls]
        for key, value in message.items():
            if type(value) is str:
                if key != "role":
                    entry.append(key)
                    leaves.append(value)
            elif value is None:
                entry.append((key, None))
            elif key != "tool_calls" or type(value) is not list:
                return None
            else:
                calls = [_outline_of_call(call, leaves) for call in value]
                if None in calls:
                    return None
                entry.append(tuple(calls))
        outline.append(tuple(entry))
    return tuple(outline), leaves


def _outline_of_call(call: Any, leaves: list[Any]) -> Outline | None:
    if type(call) is not dict:
        return None
    entry: list[Any] = []
    for key, value in call.items():
        kind = type(value)
        if kind is str or (kind is dict and key == "arguments"):
            entry += key, kind
            leaves.append(value)
        elif key == "function" and kind is dict:
            function = _outline_of_call(value, leaves)
            if function is None:
                return None
            entry += key, function
        else:
            return None
    return tuple(entry)


def with_leaves(
    messages: list[dict[str, Any]],
    nulls: Collection[int],
    leaf: Callable[[int, str, Any], Any],
    content: bool,
) -> list[dict[str, Any]]:
    """The same conversation with something else for each of its leaves.

    Args:
        messages: A conversation that has an outline.
        nulls: As for `outline_of`.
        leaf: What stands for a leaf: from the number of its message, its key and its value, asked
            in the order of the leaves.
        content: Whether a null content is that, and not the leaf in its place.
    """
    made = []
    for k, message in enumerate(messages):
        copy: dict[str, Any] = {}
        for key, value in message.items():
            if key == "tool_calls" and type(value) is list:
                copy[key] = [_call_with_leaves(call, k, leaf) for call in value]
            else:
                copy[key] = value if key == "role" or value is None else leaf(k, key, value)
        if content and id(message) in nulls:
            copy["content"] = None
        made.append(copy)
    return made


def _call_with_leaves(
    call: dict[str, Any], k: int, leaf: Callable[[int, str, Any], Any]
) -> dict[str, Any]:
    return {
        key: _call_with_leaves(value, k, leaf)
        if key == "function" and type(value) is dict
        else leaf(k, f"call.{key}", value)
        for key, value in call.items()
    }
