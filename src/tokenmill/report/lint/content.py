"""What can be seen in a row before it is rendered: empty turns, odd characters, tool calls.

Everything here takes a conversation as the chat room reads it (`Conversation` or `Plain`) and
yields *sightings*: rule, what is wrong, an excerpt. `texts_of` walks every text somebody wrote;
`ControlText` knows the tokens that may not stand in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tokenmill.chat.calls import strings
from tokenmill.chat.shapes import Conversation, Plain
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import any_of
from tokenmill.report.lint.encodings import suspicions
from tokenmill.report.lint.findings import excerpt

Sighting = tuple[str, str, str]
"""Rule, what is wrong, excerpt."""

CALL_KEYS = ("tool_calls", "function_call")
SILENT_ROLES = ("tool", "function", "ipython")  # a tool that answers nothing is an answer


def texts_of(parsed: Conversation | Plain) -> Iterator[tuple[str, str]]:
    """Every text of a row, with what a person would call the place it stands in."""
    if isinstance(parsed, Plain):
        if parsed.prompt:
            yield "the prompt", parsed.prompt
        yield "the text" if parsed.shape == "text" else "the completion", parsed.text
        return
    for number, message in enumerate(parsed.messages):
        place = f"turn {number} ({message['role']})"
        content = message.get("content")
        if isinstance(content, str):
            yield place, content
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    yield place, part["text"]
        if len(message) > 2:
            seen: set[str] = set()
            for key in REASONING_KEYS:
                value = message.get(key)
                if isinstance(value, str) and value not in seen:
                    seen.add(value)
                    yield f"the reasoning of {place}", value
            for key in CALL_KEYS:
                for text in strings(message.get(key)):
                    yield f"a call of {place}", text


class ControlText:
    """Finds the spelling of control tokens in what people wrote."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # One letter or one blank is never only a control token.
        self._pattern: re.Pattern[str] | None = any_of(t for t in tokens if len(t.strip()) > 1)

    def sightings(self, texts: Iterable[tuple[str, str]]) -> Iterator[Sighting]:
        """One per text that holds a control token."""
        if self._pattern is None:
            return
        for place, text in texts:
            found = self._pattern.search(text)
            if found is not None:
                detail = f"{place} holds {found[0]!r}, which is encoded as the control token"
                yield "control_text", detail, excerpt(text, found.start())


def odd_characters(texts: Iterable[tuple[str, str]]) -> Iterator[Sighting]:
    """Texts that went through a wrong decoder."""
    for place, text in texts:
        for rule, at in suspicions(text).items():
            sign = text[at : at + 6] if rule == "escaped_surrogate" else text[at]
            shown = f"U+{ord(sign):04X}" if len(sign) == 1 else sign
            yield rule, f"{place} has {shown} at character {at:,}", excerpt(text, at)


def empty_turns(parsed: Conversation | Plain) -> Iterator[Sighting]:
    """Turns without text, reasoning, calls or anything else to print."""
    if isinstance(parsed, Plain):
        if parsed.shape == "prompt_completion" and not parsed.prompt.strip():
            yield "empty_turn", "the prompt is empty", excerpt(parsed.text)
        if not parsed.text.strip():
            yield "empty_turn", "there is no text to train on", excerpt(parsed.prompt)
        return
    for number, message in enumerate(parsed.messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else content
        more = any(message.get(key) for key in (*REASONING_KEYS, *CALL_KEYS))
        if not said and not more and message["role"] not in SILENT_ROLES:
            before = parsed.messages[number - 1].get("content") if number else None
            shown = excerpt(before) if isinstance(before, str) else ""
            yield "empty_turn", f"turn {number} ({message['role']}) is empty", shown


def argument_texts(row: Any, key: str | None) -> Iterator[Sighting]:
    """Arguments of tool calls that are text, as the row itself writes them.

    Args:
        row: The parsed row, before any normalisation.
        key: Its column of messages, None for the usual ones.
    """
    names = (key,) if key else ("messages", "conversations")
    turns = next((row[name] for name in names if row.get(name) is not None), None)
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        calls = turn.get("tool_calls") if isinstance(turn, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = function_of(call)
            arguments, name = function.get("arguments"), function.get("name")
            if not isinstance(arguments, str):
                continue
            if _is_object(arguments):
                detail = f"turn {number} calls {name!r} with JSON text as arguments"
                yield "string_arguments", detail, excerpt(arguments)
            else:
                detail = f"turn {number} calls {name!r} with text that is no JSON object"
                yield "broken_arguments", detail, excerpt(arguments)


def function_of(value: Any) -> dict[str, Any]:
    """The function of a tool or a call, which may stand bare; empty where there is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    return function if isinstance(function, dict) else {}


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
