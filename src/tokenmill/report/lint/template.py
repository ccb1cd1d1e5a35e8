"""What a chat template does to a conversation, found by comparing two renders.

Are these roles the reason of a refusal: do the same words pass in alternating turns? Do the calls,
or null members, change what is printed? Is a turn printed differently once another follows? So a
finding says what happens with this template, and a harmless oddity is no finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from tokenmill.chat import Renderer
from tokenmill.chat.shapes import VARIABLES_KEY, Conversation
from tokenmill.chat.template import REASONING_KEYS, ReferenceTemplate
from tokenmill.chat.thinking import REASONING, any_of, cut, literals, thinking_tags
from tokenmill.errors import RowError, TokenmillError
from tokenmill.report.lint.checks import CALL_KEYS, Sighting, function_of
from tokenmill.report.lint.rules import excerpt

NULLABLE = (*CALL_KEYS, "tool_call_id", "name")  # a message's members about tools
MEANT = ("default", "const", "enum", "examples", "example")  # where a JSON schema may mean null

MAX_HISTORIES = 4096  # orders of roles; data has far fewer

_PROBE = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "Rome."},
]


class TemplateCritic:
    """Compares renders of one renderer's templates."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tags: dict[str, re.Pattern[str] | None] = {}
        self._histories: dict[tuple[tuple[str, ...], str], Sighting | None] = {}

    def glue(self) -> str:
        """Return the render of a plain conversation; empty without a template."""
        try:
            return self._renderer.reference().render([*_PROBE])
        except TokenmillError:
            return ""

    def refusal(self, conversation: Conversation, error: RowError) -> Sighting:
        """Return why the template refuses a conversation.

        Its roles are the reason where short words in the same roles are refused with the same
        message, and pass in alternating turns.
        """
        roles = [message["role"] for message in conversation.messages]
        turns = ["assistant" if number % 2 else "user" for number in range(len(roles))]
        said = conversation.variables
        if self._refused(roles, said) == error.message and self._refused(turns, said) is None:
            shown = " → ".join(roles[:12])
            return "role_order", f"{error.message}; the roles are {shown}", _words(conversation)
        return "template_error", error.message, _words(conversation)

    def _refused(self, roles: list[str], variables: dict[str, Any] | None) -> str | None:
        """Return the template's error for short words in these roles."""
        words = [{"role": role, "content": f"Word {n}."} for n, role in enumerate(roles)]
        try:
            self._renderer.reference(None, variables).render(words)
        except TokenmillError as error:
            return error.message
        return None

    def _render(self, conversation: Conversation) -> str | None:
        tools = conversation.tools
        try:
            reference = self._renderer.reference(tools, conversation.variables)
            return reference.render(conversation.messages, tools)
        except TokenmillError:
            return None

    def dropped(self, conversation: Conversation, error: RowError) -> Sighting:
        """Return which part of a conversation the template does not print."""
        lost = self.dropped_calls(conversation, self._render(conversation))
        return lost or ("template_drops_content", error.message, _words(conversation))

    def dropped_calls(self, conversation: Conversation, text: str | None) -> Sighting | None:
        """Return calls that the rendered text does not show."""
        if text is None:
            return None
        for number, message in enumerate(conversation.messages):
            for name in _called(message):
                if name not in text:
                    detail = f"turn {number} calls {name!r}, which the template prints nowhere"
                    return "template_drops_tool_calls", detail, excerpt(text, len(text))
        if not any(_called(message) for message in conversation.messages):
            return None
        none = [_with_calls(m, 0) for m in conversation.messages]
        if self._render(replace(conversation, messages=none)) == text:
            return (
                "template_drops_tool_calls",
                "the same is printed without the calls",
                _words(conversation),
            )
        if any(len(_called(message)) > 1 for message in conversation.messages):
            first = [_with_calls(m, 1) for m in conversation.messages]
            if self._render(replace(conversation, messages=first)) == text:
                detail = "of several calls in a turn the template prints the first alone"
                return "template_drops_tool_calls", detail, _words(conversation)
        return None

    def dropped_tools(self, conversation: Conversation, text: str) -> Sighting | None:
        """Return tools if the rendered text names none of them."""
        names = [name for name in map(_tool_name, conversation.tools or ()) if name]
        if not names or any(name in text for name in names):
            return None
        shown = ", ".join(names[:3])
        return "template_drops_tools", f"{len(names)} tools ({shown} …) are printed nowhere", ""

    def dropped_context(self, conversation: Conversation, text: str) -> Sighting | None:
        """Return a system, user or tool text that the template does not print.

        Mistral's templates print the system text before the last user turn only, and nowhere
        in a conversation that ends with an answer.
        """
        for number, message in enumerate(conversation.messages):
            content = message.get("content")
            if message["role"] == "assistant" or not isinstance(content, str):
                continue
            words = content.strip()
            if not words or words in text:
                continue
            other = [*conversation.messages]
            other[number] = {**message, "content": f"{words} {words}"}
            if self._render(replace(conversation, messages=other)) == text:
                detail = f"turn {number} ({message['role']}) is printed nowhere"
                return "template_drops_context", detail, excerpt(words)
        return None

    def nulls(self, conversation: Conversation) -> Sighting | None:
        """Return null members that change what the template prints."""
        paths: list[str] = []
        known = {_tool_name(tool): _properties(tool) for tool in conversation.tools or ()}
        tools = None if conversation.tools is None else _pruned(conversation.tools, "tools", paths)
        messages = [
            _pruned_message(message, f"turn {number}", paths, known)
            for number, message in enumerate(conversation.messages)
        ]
        if not paths:
            return None
        as_is = self._render(conversation)
        pruned = replace(conversation, messages=messages, tools=tools)
        if as_is is None or as_is == self._render(pruned):
            return None
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return (
            "null_tool_keys",
            f"{paths[0]} is null{more}",
            excerpt(as_is, max(0, as_is.find("null"))),
        )

    def lost_thinking(self, conversation: Conversation, text: str) -> Sighting | None:
        """Return earlier assistant turns whose thinking the template drops."""
        assistants = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        lost, first = [], ""
        for number in assistants[:-1]:
            thoughts = list(self._thoughts(conversation.messages[number], conversation.tools))
            missing = [thought for thought in thoughts if thought not in text]
            if missing:
                lost.append(number)
                first = first or missing[0]
        if not lost:
            return None
        numbers = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
        which = "turn" if len(lost) == 1 else "turns"
        detail = (
            f"{which} {numbers} of {len(conversation.messages)}: thinking is not printed in history"
        )
        return "rewrites_history", detail, excerpt(first)

    def _thoughts(self, message: dict[str, Any], tools: list[Any] | None) -> Iterator[str]:
        for key in REASONING_KEYS:
            value = message.get(key)
            if isinstance(value, str) and value.strip():
                yield value.strip()
        content = message.get("content")
        if isinstance(content, str) and "<" in content:
            tags = self._thinking(self._renderer.reference(tools))
            yield from (run for kind, run in cut(content, tags) if kind == REASONING)

    def _thinking(self, template: ReferenceTemplate) -> re.Pattern[str] | None:
        if template.source not in self._tags:
            self._tags[template.source] = any_of(thinking_tags(literals(template.tree)))
        return self._tags[template.source]

    def differing_history(self, conversation: Conversation) -> Sighting | None:
        """Return whether the trained text of a turn changes once another turn follows.

        Tried with short words in the same roles and the row's variables, on the first assistant
        turn: if a later turn is printed differently in history, so is the first.
        """
        roles = tuple(message["role"] for message in conversation.messages)
        asked = roles, repr(conversation.variables)
        if asked not in self._histories and len(self._histories) < MAX_HISTORIES:
            self._histories[asked] = self._ask_history(roles, conversation.variables)
        return self._histories.get(asked)

    def _ask_history(
        self, roles: tuple[str, ...], variables: dict[str, Any] | None
    ) -> Sighting | None:
        words = [{"role": role, "content": f"Word {n}."} for n, role in enumerate(roles)]
        first = roles.index("assistant") + 1
        rows = [{"messages": part, VARIABLES_KEY: variables} for part in (words[:first], words)]
        made = self._probe.render(rows)
        if made.source != [0, 1]:
            return None
        trained = []
        for text, spans in zip(made.texts, made.spans, strict=True):
            start, end = (spans or [(0, 0)])[0]
            trained.append(text[start:end])
        last, history = trained
        if last == history:
            return None
        return "history_differs", f"as the last turn {last!r}, as history {history!r}", ""

    @cached_property
    def _probe(self) -> Renderer:
        spec, own = self._renderer.spec, self._renderer
        return Renderer(
            type(spec)(template_kwargs=spec.template_kwargs, date=spec.date, trailing="trim"),
            own.reference().source,
            own.special_tokens,
            renderer="jinja2",
        )


def _with_calls(message: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a message with its first calls only."""
    kept = {key: value for key, value in message.items() if key not in CALL_KEYS}
    calls = message.get("tool_calls")
    return {**kept, "tool_calls": calls[:count]} if count and isinstance(calls, list) else kept


def _words(conversation: Conversation) -> str:
    content = conversation.messages[0].get("content") if conversation.messages else ""
    return excerpt(content) if isinstance(content, str) else ""


def _called(message: dict[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    found = [*(calls if isinstance(calls, list) else ()), message.get("function_call")]
    names = (function_of(call).get("name") for call in found)
    return [name for name in names if isinstance(name, str)]


def _tool_name(tool: Any) -> str:
    name = function_of(tool).get("name")
    return name if isinstance(name, str) else ""


def _properties(tool: Any) -> set[str]:
    parameters = function_of(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return set(properties) if isinstance(properties, dict) else set()


def _pruned(
    value: Any, path: str, paths: list[str], keep: tuple[str, ...] | set[str] = MEANT
) -> Any:
    """Return the value without null members, and append their paths to ``paths``."""
    if isinstance(value, list):
        return [_pruned(item, f"{path}[{n}]", paths, keep) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        if item is None and name not in keep:
            paths.append(f"{path}.{name}")
        else:
            kept[name] = item if name in MEANT else _pruned(item, f"{path}.{name}", paths, keep)
    return kept


def _pruned_message(
    message: dict[str, Any], path: str, paths: list[str], known: dict[str, set[str]]
) -> dict[str, Any]:
    """Return a message without null members about tools; a declared argument may be null."""
    if len(message) <= 2:
        return message
    kept: dict[str, Any] = {}
    declared = set().union(*(known.get(name, set()) for name in _called(message)), MEANT)
    for name, item in message.items():
        if name in NULLABLE and item is None:
            paths.append(f"{path}.{name}")
        elif name in CALL_KEYS:
            kept[name] = _pruned(item, f"{path}.{name}", paths, declared)
        else:
            kept[name] = item
    return kept
