"""From a parsed row to what its prompt is made of.

`shape_row` looks up the columns and returns a `Shaped`: text or messages, label, metadata and
tools, all from that one row. Nothing is invented and nothing is lost in silence: a row that cannot
be a prompt raises `RowError` (bad_shape) that says which column is wrong.

Media: where ``multimodal_keys`` names columns, each placeholder (``<image>`` …) in a text becomes a
typed part that holds the next item of its column, in order; text between them becomes text parts.
As many placeholders as items, or the row is refused with both counts. A content that is a list of
parts already stays as it is; the items of its image parts that bring no picture are noted beside.

A `Prompt` is what a dataset serves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.chat.shapes import row_variables
from tokenmill.errors import RowError
from tokenmill.origin import Origin
from tokenmill.prompts.spec import MEDIA, Convention, PromptSpec

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt: The rendered text, or the row's own text or messages without a template.
        label: The row's label, of whatever type the row has it.
        metadata: The row's metadata, always a dict; ``metadata["tools"]`` where there are tools.
        tools: Tool descriptions, or None.
        origin: Where the row is.
        row: Its number in the opened source, from 0.
        messages: The conversation that was rendered, or that `prompt` is; None for plain text.
        multimodal_inputs: What the processor made of the media, where one was given.
        length: Tokens of the prompt; None where it has no length (messages without a template).
    """

    prompt: str | Messages
    label: Any
    metadata: dict[str, Any]
    tools: list[Any] | None
    origin: Origin
    row: int
    messages: Messages | None = None
    multimodal_inputs: dict[str, Any] | None = None
    length: int | None = None


@dataclass(slots=True)
class Shaped:
    """A row's columns, before rendering.

    Attributes:
        bare: Images of the column that parts without a picture stand for, in order.
        variables: What the row itself gives the template, where the convention knows of it.
    """

    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    bare: list[Any] = field(default_factory=list)
    variables: dict[str, Any] | None = None


def shape_row(row: Any, spec: PromptSpec) -> Shaped:
    """Look up a row's columns.

    Raises:
        RowError: A column is missing or of a kind that no prompt has.
    """
    if not isinstance(row, dict):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    prompt, bare = prompt_of(row, spec)
    if spec.label_key is not None and spec.label_key not in row:
        raise RowError(f"no column {spec.label_key!r} (label_key); {_columns(row)}")
    metadata = _metadata(row, spec.metadata_key)
    tools = None
    if spec.tool_key is not None and row.get(spec.tool_key) is not None:
        tools = _tools(row[spec.tool_key])
        if tools is not None:
            metadata = {**metadata, "tools": tools}
    label = None if spec.label_key is None else row[spec.label_key]
    asks = spec.apply_chat_template and not Convention.load(spec.convention).is_trainer
    variables = row_variables(row) if asks else None
    return Shaped(prompt, label, metadata, tools, bare, variables)


def _columns(row: dict[str, Any]) -> str:
    names = ", ".join(sorted(map(str, row))[:8])
    return f"the row's columns are {names or 'none'}"


def prompt_of(row: dict[str, Any], spec: PromptSpec) -> tuple[str | Messages, list[Any]]:
    """The prompt of a row, and the images that its bare parts stand for.

    Raises:
        RowError: It has none.
    """
    prompt = row.get(spec.prompt_key)
    if prompt is None:
        raise RowError(f"no column {spec.prompt_key!r} (prompt_key); {_columns(row)}")
    if isinstance(prompt, str):
        if not spec.as_conversation:
            return prompt, []
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise RowError(f"{spec.prompt_key!r} must be text or messages, not {type(prompt).__name__}")
    if not spec.as_conversation:
        return prompt, []
    _check_messages(prompt)
    if not spec.multimodal_keys:
        return prompt, []
    return _expanded(prompt, row, spec.multimodal_keys)


def _check_messages(messages: list[Any]) -> None:
    """A template prints nothing of a message without a role, so such a row is refused."""
    if not messages:
        raise RowError("the conversation is empty")
    for message in messages:
        if not isinstance(message, dict):
            raise RowError(f"a message must be an object, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            keys = ", ".join(sorted(map(str, message))) or "none"
            raise RowError(f"a message has no role: its keys are {keys}")


def _metadata(row: dict[str, Any], key: str) -> dict[str, Any]:
    metadata = row.get(key)
    if isinstance(metadata, str) and metadata:
        metadata = _decoded(metadata, f"{key!r} (metadata_key)")
    if not metadata:
        return {}
    if not isinstance(metadata, dict):
        raise RowError(f"{key!r} (metadata_key) must be an object, not {type(metadata).__name__}")
    return metadata


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _decoded(value, "tools")
        if value is None:
            return None
    if not isinstance(value, list):
        raise RowError(f"tools must be a list, not {type(value).__name__}")
    return [_decoded(tool, "a tool") if isinstance(tool, str) else tool for tool in value]


def _decoded(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise RowError(f"{what} is a string but not JSON: {error}") from error


def _expanded(
    messages: Messages, row: dict[str, Any], keys: Mapping[str, str]
) -> tuple[Messages, list[Any]]:
    """Messages with their placeholders replaced by typed parts, and images that are left."""
    items = {kind: _items(row.get(column), column) for kind, column in keys.items()}
    kinds = {MEDIA[kind]: kind for kind in items}
    pattern = re.compile("(" + "|".join(map(re.escape, kinds)) + ")")
    taken = dict.fromkeys(items, 0)
    ready = dict.fromkeys(items, 0)  # parts that the row wrote out itself
    expanded: Messages = []
    for message in messages:
        content = message.get("content")
        if content is None or isinstance(content, list):
            for part in content or ():
                if isinstance(part, dict) and part.get("type") in ready:
                    ready[part["type"]] += 1
            expanded.append(message)
            continue
        if not isinstance(content, str):
            raise RowError(f"content must be text or parts, not {type(content).__name__}")
        parts: list[dict[str, Any]] = []
        for segment in filter(None, pattern.split(content)):
            kind = kinds.get(segment)
            if kind is None:
                parts.append({"type": "text", "text": segment})
                continue
            number = taken[kind]
            taken[kind] += 1
            if number < len(items[kind]):
                item = items[kind][number]
                # Newer data writes the whole part, with its pixel limits.
                parts.append(item if isinstance(item, dict) and "type" in item
                             else {"type": kind, kind: item})  # fmt: skip
        expanded.append({**message, "content": parts})
    for kind, column in keys.items():
        if len(items[kind]) not in (taken[kind], taken[kind] + ready[kind]):
            raise RowError(
                f"{taken[kind]} {MEDIA[kind]} placeholders in the prompt, but "
                f"{len(items[kind])} items in column {column!r}"
            )
    return expanded, items.get("image", [])[taken.get("image", 0) :]


def _items(value: Any, column: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | dict):  # a single one, not a list of its characters or keys
        return [value]
    if isinstance(value, list):
        return value
    raise RowError(f"{column!r} (multimodal_keys) must be a list, not {type(value).__name__}")
