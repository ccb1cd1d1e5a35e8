"""Normalize tools, tool calls and typed content parts (docs/reference/row-formats.md).

Where parts remain that are not text, the content stays a list, its text parts spelled
``{"type": "text", "text": …}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tokenmill.errors import RowError

TOOL_ROLES = ("tool", "function", "ipython", "tool_response", "observation")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_PARTS = ("reasoning", "thinking")
CALL_PARTS = ("tool_call", "function_call")
IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")
AUDIO_PARTS = ("audio", "audio_url", "input_audio")
MEDIA_PARTS = frozenset((*IMAGE_PARTS, *VIDEO_PARTS, *AUDIO_PARTS))


def decode(text: str, what: str) -> Any:
    """Decode JSON text inside a row."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise RowError(f"{what} is a string but not JSON: {error}") from error


def strings(value: Any) -> Iterator[str]:
    """Yield every string inside a value except keys."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += reversed(item.values())
        elif isinstance(item, list):
            pending += reversed(item)


def _as_list(value: Any, what: str) -> list[Any] | None:
    """Return a list, one object, or either as JSON text, as a list; None for null or blank text."""
    if isinstance(value, str):
        value = decode(value, what) if value.strip() else None
    if value is None:
        return None
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise RowError(f"{what} must be a list, not {type(value).__name__}")
    return value


def tool_list(value: Any) -> list[Any] | None:
    tools = _as_list(value, "tools")
    if tools is None or set(map(type, tools)) == {dict}:  # nearly always
        return tools
    decoded = [decode(tool, "a tool") if isinstance(tool, str) else tool for tool in tools]
    for tool in decoded:
        if not isinstance(tool, dict):
            raise RowError(f"a tool must be an object, not {type(tool).__name__}")
    return decoded


def call_list(value: Any, arguments: Callable[[Any], Any] | None = None) -> list[dict[str, Any]]:
    """Return tool calls as a list of objects; ``arguments`` rewrites their arguments."""
    rewrite = arguments or _decoded_arguments
    return [_call(call, rewrite) for call in _as_list(value, "tool_calls") or ()]


def _call(call: Any, rewrite: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(call, str):
        call = decode(call, "a tool call")
    if not isinstance(call, dict):
        raise RowError(f"a tool call must be an object, not {type(call).__name__}")
    function = call.get("function")
    if isinstance(function, dict):
        rewritten = _function(function, rewrite)
        return call if rewritten is function else {**call, "function": rewritten}
    return _function(call, rewrite)


def _function(function: dict[str, Any], rewrite: Callable[[Any], Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    rewritten = rewrite(arguments)
    return function if rewritten is arguments else {**function, "arguments": rewritten}


def _decoded_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return arguments  # not JSON: the template gets the text unchanged
    return value if isinstance(value, dict) else arguments


def text_arguments(arguments: Any) -> Any:
    """Return an object as JSON text; other values unchanged."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def function_call(value: Any, what: str) -> list[dict[str, Any]]:
    """Return calls written as ``{"name": …, "arguments": …}``, or its text, in OpenAI's form."""
    decoded = decode(value, what) if isinstance(value, str) else value
    calls = decoded if isinstance(decoded, list) else [decoded]
    named = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function", call), dict):
            raise RowError(f"{what} must be an object with a name and arguments")
        if not isinstance(call.get("function", call).get("name"), str):
            raise RowError(f"{what} has no name")
        named.append(call if "function" in call else {"type": "function", "function": call})
    return call_list(named)


def join_parts(message: dict[str, Any], parts: list[Any], *, joined: bool = True) -> dict[str, Any]:
    """Return a message with its typed content parts in the fields that templates read.

    With ``joined``, text parts become one string and images are rejected. Without it the content
    stays a list, as templates of image models expect.
    """
    texts: list[str] = []
    shown: list[tuple[Any, str | None]] = []  # parts to keep if not all are text, with their text
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    mixed = False
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise RowError(f"a content part must be an object, not {type(part).__name__}")
        kind = part.get("type") or ("text" if "text" in part else None)
        if kind in TEXT_PARTS:
            text = _text(part, "text")
            texts.append(text)
            shown.append((part, text))
        elif kind in REASONING_PARTS:
            reasoning.append(_text(part, str(kind)))
        elif kind in CALL_PARTS:
            calls += function_call(part.get("value", part.get("text", part)), "a tool_call part")
        else:
            if joined and is_media(part):
                raise RowError(
                    f"a content part has type {part.get('type') or 'image'!r}; a processor is"
                    " required for rows with images",
                    reason="bad_media",
                )
            mixed = True
            shown.append((part, None))
    content: Any = "".join(texts)
    if mixed or (shown and not joined):
        content = [part if text is None else _spelled(part, text) for part, text in shown]
    result = {**message, "content": content}
    if reasoning and result.get("reasoning_content") is None:
        result["reasoning_content"] = "".join(reasoning)
    if calls:
        result["tool_calls"] = call_list(result.get("tool_calls")) + calls
    return result


def _spelled(part: dict[str, Any], text: str) -> dict[str, Any]:
    rest = {name: value for name, value in part.items() if name != "value"}
    return {**rest, "type": "text", "text": text}


def is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind:
        return isinstance(kind, str) and kind in MEDIA_PARTS
    return any(part.get(name) is not None for name in ("image", "image_url"))


def _text(part: dict[str, Any], kind: str) -> str:
    for name in (kind, "text", "value", "content"):
        value = part.get(name)
        if isinstance(value, str):
            return value
    if any(name in part and part[name] is None for name in (kind, "text", "value")):
        return ""
    raise RowError(f"a content part of type {kind!r} has no text")
