"""Replace the words of a conversation by unique ones, to see which field a template prints.

A word that occurs in two fields does not show which of them was printed. `with_unique_words`
replaces every text, call name and argument by a word that occurs once. The template prints the new
conversation along the same path, so a word that is missing or in the wrong turn there shows that
its field is missing or in the wrong turn in the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec

from tokenmill.chat.calls import text_arguments
from tokenmill.chat.template import REASONING_KEYS

Message = dict[str, Any]
WORD = re.compile(r"w\d{5}w")


def with_unique_words(messages: list[Message], thinking: re.Pattern[str] | None) -> list[Message]:
    """Return the conversation with unique words in place of its own.

    Thinking tags, roles, blank texts, booleans and nulls stay as they are.
    """
    replacer = _Replacer(thinking)
    return [replacer.message(message) for message in messages]


class _Replacer:
    def __init__(self, thinking: re.Pattern[str] | None) -> None:
        self._thinking = thinking
        self._numbers = count(1)
        self._names: dict[str, str] = {}  # by call id

    def _word(self) -> str:
        return f"w{next(self._numbers):05d}w"

    def message(self, message: Message) -> Message:
        replaced = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            replaced["content"] = self._text(content)
        elif isinstance(content, list):
            replaced["content"] = [self._part(part) for part in content]
        elif isinstance(content, dict):
            replaced["content"] = self._value(content)
        thoughts: dict[str, str] = {}  # the same text under two names stays the same
        for key in REASONING_KEYS:
            if isinstance(thought := message.get(key), str):
                replaced[key] = thoughts.setdefault(thought, self._text(thought))
        if isinstance(message.get("tool_calls"), list):
            replaced["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if isinstance(message.get("function_call"), dict):
            replaced["function_call"] = self._call(message["function_call"])
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in self._names:
            replaced["tool_call_id"] = self._names[answered]
        return replaced

    def _text(self, text: str) -> str:
        """Replace the text between thinking tags; surrounding whitespace stays."""
        parts = self._thinking.split(text) if self._thinking is not None else [text]
        parts[::2] = [part.replace(core, self._word()) if (core := part.strip()) else part
                      for part in parts[::2]]  # fmt: skip
        return "".join(parts)

    def _part(self, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self._text(part["text"])}
        return part

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if not isinstance(call.get("function"), dict):
            return self._function(call)
        replaced = {**call, "function": self._function(call["function"])}
        name, number = call["function"].get("name"), call.get("id")
        if isinstance(name, str) and name and isinstance(number, str):
            # Some templates print only the id, which contains the name as a whole word.
            word = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"
            replaced["id"] = re.sub(word, replaced["function"]["name"], number)
            self._names[number] = replaced["id"]
        return replaced

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        replaced = dict(function)
        if isinstance(replaced.get("name"), str) and replaced["name"]:
            replaced["name"] = self._word()
        if "arguments" in replaced:
            replaced["arguments"] = self._arguments(replaced["arguments"])
        return replaced

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, str):
            try:
                decoded = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
                decoded = None
            if isinstance(decoded, dict):
                return text_arguments(self._value(decoded))
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._word(): self._value(item) for item in value.values()}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, str):
            return self._word() if value.strip() else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        return type(value)(90_000_000 + next(self._numbers))
