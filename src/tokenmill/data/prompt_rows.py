"""Render the prompt of a parsed row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from tokenmill._core import fingerprint
from tokenmill._core.options import Column, Options, Variables
from tokenmill._core.origin import Origin
from tokenmill.chat import RENDERER_VERSION
from tokenmill.chat.calls import call_list
from tokenmill.chat.shapes import row_variables
from tokenmill.chat.spec import ChatSpec, check_date
from tokenmill.errors import RowError, UsageError

SPEC_VERSION = 1  # part of the key: incremented when prompts, lengths or rejections change
MEDIA = {"image": "<image>", "video": "<video>", "audio": "<audio>"}  # placeholders in texts

MediaColumns = Annotated[
    Mapping[Annotated[str, Meta(pattern=f"^({'|'.join(MEDIA)})$")], Column],
    Meta(title='a mapping of image, video or audio to columns, like {"image": "images"}'),
]
Messages = list[dict[str, Any]]
Conversation = tuple[Messages, list[Any] | None, dict[str, Any] | None]
"""Messages, tools, and the row's own template variables."""

# Arguments of transformers' apply_chat_template that are not template variables.
_NOT_VARIABLES = {
    "messages": "the row has them",
    "tools": "set tool_key to their column",
    "add_generation_prompt": "a prompt always ends with it",
    "chat_template": "set chat_template",
    "tokenize": "prompts are text",
    "continue_final_message": "a prompt ends with the generation prompt",
    "return_dict": "prompts are text",
    "return_tensors": "prompts are text",
}


@dataclass(slots=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt: The rendered text, or the row's own text or messages without a template.
        label: The row's label, of any type.
        metadata: The row's metadata, always a dict; ``metadata["tools"]`` has the tools, if any.
        tools: Tool descriptions, or None.
        origin: Location of the row.
        row: Its number in the opened source, from 0.
        messages: The conversation of the prompt; None for plain text.
        multimodal_inputs: Media as inputs of the processor, if there is one.
        length: Number of tokens; None without a template or tokenizer.
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
    """A row's columns, before rendering."""

    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    unnamed_images: list[Any] = field(default_factory=list)  # parts without a value, in order
    variables: dict[str, Any] | None = None  # template variables of the row


class Convention:
    """How messages and tools of a row are passed to the template; this is tokenmill's default.

    It decodes JSON text of tool-call arguments and replaces null content by empty text. An
    integration for a trainer that renders differently sets a subclass as ``module:Class`` in
    `PromptSpec.convention`, so that worker processes can load it.
    """

    is_trainer = False
    """Whether this is a trainer's convention: it ignores template variables of rows, opens any
    file relative to the working directory, and may load images with its own function."""
    version: int | None = None  # part of the key
    vision_module: str | None = None  # has the trainer's ``process_vision_info``

    def __init__(self, spec: PromptSpec) -> None:
        self.spec = spec

    @staticmethod
    def load(name: str) -> type[Convention]:
        if not name:
            return Convention
        module, _, attribute = name.partition(":")
        try:
            convention: type[Convention] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(
                f"convention must be an importable class, got {name!r}: {error}"
            ) from error
        return convention

    @classmethod
    def form(cls, spec: PromptSpec) -> str | None:
        """Return a digest of how installed libraries rewrite tools; None if they do not."""
        return None

    def conversation(self, shaped: Shaped) -> Conversation:
        """Return the arguments for the template."""
        assert isinstance(shaped.prompt, list)
        return [_normalized(message) for message in shaped.prompt], shaped.tools, shaped.variables

    def retry(self, conversation: Conversation, error: RowError) -> Conversation:
        """Return arguments to try after the template raised an error, or raise the error."""
        raise error


def _normalized(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("content") is None:
        message = {**message, "content": ""}
    if calls:
        message = {**message, "tool_calls": call_list(calls)}
    return message


class PromptSpec(Options, frozen=True, kw_only=True):
    """The arguments of `PromptDataset` that determine a prompt; part of a length index's key.

    Args:
        prompt_key: Column of the prompt: text, or messages.
        label_key: Column of the label.
        tool_key: Column of the tools: a list, or its JSON text.
        metadata_key: Column of the metadata.
        multimodal_keys: Kinds of media and their columns, like ``{"image": "images"}``.
        apply_chat_template: Render the conversation with the generation prompt.
        apply_chat_template_kwargs: Additional variables for the chat template.
        date: ``YYYY-MM-DD`` for templates that print the date, which require it.
        convention: ``module:Class`` of a trainer's `Convention`; empty: tokenmill's own.
        tool_form: `Convention.form`; a worker process in which it differs does not render.
    """

    prompt_key: Column = "text"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: Column = "metadata"
    multimodal_keys: MediaColumns | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Variables | None = None
    date: str | None = None
    convention: str = ""
    tool_form: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        variables = dict(self.apply_chat_template_kwargs or {})
        force_setattr(self, "apply_chat_template_kwargs", variables)
        for name, remedy in _NOT_VARIABLES.items():
            if name in variables:
                raise UsageError(
                    ("apply_chat_template_kwargs",), f"[{name!r}] cannot be set: {remedy}"
                )
        for name in self.__struct_fields__:
            force_setattr(self, name, fingerprint.plain(getattr(self, name), name))
        check_date(self.date)
        if self.tool_form is None:
            force_setattr(self, "tool_form", Convention.load(self.convention).form(self))

    @property
    def as_conversation(self) -> bool:
        """Whether a string prompt becomes a user turn: a template or media need messages."""
        return self.apply_chat_template or self.multimodal_keys is not None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def document(self) -> dict[str, Any]:
        """Return the fields for the key of a length index."""
        document = self.as_dict()
        if not self.apply_chat_template:
            # Without a template these have no effect, so they must not change the key.
            document |= {"apply_chat_template_kwargs": {}, "date": None, "convention": ""}
        version = Convention.load(document["convention"]).version
        if version is not None:
            document["convention_version"] = version
        if document["tool_form"] is None:
            del document["tool_form"]
        media = document["multimodal_keys"]
        # The order of kinds has no effect: placeholders are found by position.
        document["multimodal_keys"] = None if media is None else dict(sorted(media.items()))
        order = fingerprint.own_order(document["apply_chat_template_kwargs"])
        if order is not None:
            document["apply_chat_template_kwargs_order"] = order
        return {"version": SPEC_VERSION, "renderer": RENDERER_VERSION, **document}


# Columns


def shape_row(row: Any, spec: PromptSpec) -> Shaped:
    """Read the columns of a row; RowError if one is missing or has a wrong type."""
    if not isinstance(row, dict):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    prompt, unnamed_images = prompt_of(row, spec)
    if spec.label_key is not None and spec.label_key not in row:
        raise RowError(f"no column {spec.label_key!r} (label_key); {_columns(row)}")
    metadata = _metadata(row, spec.metadata_key)
    tools = None
    if spec.tool_key is not None and row.get(spec.tool_key) is not None:
        tools = _tools(row[spec.tool_key])
        if tools is not None:
            metadata = {**metadata, "tools": tools}
    label = None if spec.label_key is None else row[spec.label_key]
    has_variables = spec.apply_chat_template and not Convention.load(spec.convention).is_trainer
    return Shaped(
        prompt,
        label,
        metadata,
        tools,
        unnamed_images,
        row_variables(row) if has_variables else None,
    )


def _columns(row: dict[str, Any]) -> str:
    names = ", ".join(sorted(map(str, row))[:8])
    return f"the row's columns are {names or 'none'}"


def prompt_of(row: dict[str, Any], spec: PromptSpec) -> tuple[str | Messages, list[Any]]:
    """Return the prompt of a row, and the images of its parts without a value."""
    prompt = row.get(spec.prompt_key)
    if prompt is None:
        raise RowError(f"no column {spec.prompt_key!r} (prompt_key); {_columns(row)}")
    if isinstance(prompt, str) and spec.as_conversation:
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str | list):
        raise RowError(f"{spec.prompt_key!r} must be text or messages, not {type(prompt).__name__}")
    if isinstance(prompt, str) or not spec.as_conversation:
        return prompt, []
    _check_messages(prompt)
    if not spec.multimodal_keys:
        return prompt, []
    return _with_media(prompt, row, spec.multimodal_keys)


def _check_messages(messages: list[Any]) -> None:
    """Reject messages without a role: a template would not print them."""
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
        metadata = _decode(metadata, f"{key!r} (metadata_key)")
    if not metadata:
        return {}
    if not isinstance(metadata, dict):
        raise RowError(f"{key!r} (metadata_key) must be an object, not {type(metadata).__name__}")
    return metadata


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _decode(value, "tools") if value.strip() else None
        if value is None:
            return None
    if not isinstance(value, list):
        raise RowError(f"tools must be a list, not {type(value).__name__}")
    return [_decode(tool, "a tool") if isinstance(tool, str) else tool for tool in value]


def _decode(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise RowError(f"{what} is a string but not JSON: {error}") from error


def _with_media(
    messages: Messages, row: dict[str, Any], keys: Mapping[str, str]
) -> tuple[Messages, list[Any]]:
    """Replace placeholders with typed parts that contain the items of the columns, in order.

    Content that is a list of parts is not changed. Also return the images without a placeholder,
    which belong to the row's own image parts.
    """
    items = {kind: _items(row.get(column), column) for kind, column in keys.items()}
    kinds = {MEDIA[kind]: kind for kind in items}
    pattern = re.compile("(" + "|".join(map(re.escape, kinds)) + ")")
    used = dict.fromkeys(items, 0)
    ready = dict.fromkeys(items, 0)  # typed parts in the row
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
            number = used[kind]
            used[kind] += 1
            if number < len(items[kind]):
                item = items[kind][number]
                # Newer data has whole parts, with pixel limits.
                is_part = isinstance(item, dict) and "type" in item
                parts.append(item if is_part else {"type": kind, kind: item})
        expanded.append({**message, "content": parts})
    for kind, column in keys.items():
        if len(items[kind]) not in (used[kind], used[kind] + ready[kind]):
            raise RowError(
                f"{used[kind]} {MEDIA[kind]} placeholders in the prompt, but "
                f"{len(items[kind])} items in column {column!r}"
            )
    return expanded, items.get("image", [])[used.get("image", 0) :]


def _items(value: Any, column: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | dict):  # a single item
        return [value]
    if isinstance(value, list):
        return value
    raise RowError(f"{column!r} (multimodal_keys) must be a list, not {type(value).__name__}")


# Texts


class PromptMaker:
    def __init__(
        self,
        spec: PromptSpec,
        template: Any,
        special_tokens: Mapping[str, str] | None,
        tokenizer: Any = None,
    ) -> None:
        from tokenmill.chat import Renderer

        self.spec = spec
        self._convention = Convention.load(spec.convention)(spec)
        # Without apply_chat_template, a template that does not compile is no error.
        used = template if spec.apply_chat_template else None
        shape = ChatSpec(chat_template_kwargs=spec.apply_chat_template_kwargs, date=spec.date)
        self._renderer = Renderer(shape, used, special_tokens, tokenizer=tokenizer, as_text=True)

    def text(self, shaped: Shaped) -> str | Messages:
        """Return the prompt of a row; RowError if the template raises an error."""
        if not self.spec.apply_chat_template:
            return shaped.prompt
        conversation = self._convention.conversation(shaped)
        try:
            return self._renderer.prompt(*conversation)
        except RowError as error:
            return self._retry(conversation, error)

    def texts(self, rows: Sequence[Shaped]) -> list[str | Messages | RowError]:
        """Return `text` for many rows; the error for a rejected row."""
        from tokenmill.chat.render import PromptRequest
        from tokenmill.sources.parse import attempt

        if not self.spec.apply_chat_template:
            return [shaped.prompt for shaped in rows]
        requests = [attempt(self._convention.conversation, shaped) for shaped in rows]
        conversations = [PromptRequest(*one) for one in requests if not isinstance(one, RowError)]
        rendered = iter(self._renderer.prompts(conversations))
        texts: list[str | Messages | RowError] = []
        for one in requests:
            text = one if isinstance(one, RowError) else next(rendered)
            if isinstance(text, RowError) and not isinstance(one, RowError):
                text = attempt(self._retry, one, text)
            texts.append(text)
        return texts

    def _retry(self, conversation: Conversation, error: RowError) -> str:
        return self._renderer.prompt(*self._convention.retry(conversation, error))
