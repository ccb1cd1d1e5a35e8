"""What a prompt dataset says about rows: which columns they have, and how a prompt is made.

`PromptSpec` is a frozen value. Every field shapes prompts or decides whether a row is one, so all
of them are in the key of a length index; `max_length` is not, because it only compares lengths
that are there.

A `Convention` says what happens to messages and tools on their way into the template. By default
JSON text of tool-call arguments is decoded and a null content becomes empty text. An integration
whose trainer renders differently names its own subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from tokenmill import fingerprint
from tokenmill.chat import RENDERER_VERSION
from tokenmill.chat.calls import call_list
from tokenmill.chat.spec import check_date
from tokenmill.errors import RowError, UsageError
from tokenmill.options import Column, Options, Variables

if TYPE_CHECKING:
    from tokenmill.prompts.shaping import Shaped

SPEC_VERSION = 1
"""Raised when a row's prompt, length or rejection could come out differently: part of the key."""
MEDIA = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
"""Kinds of media and the placeholder that stands for one of them in a text."""

MediaColumns = Annotated[
    Mapping[Annotated[str, Meta(pattern=f"^({'|'.join(MEDIA)})$")], Column],
    Meta(title='a mapping of image, video or audio to columns, like {"image": "images"}'),
]

# What apply_chat_template of transformers takes beside template variables.
_NOT_VARIABLES = {
    "messages": "it is the row's prompt",
    "tools": "name their column with tool_key",
    "add_generation_prompt": "a prompt always ends with it",
    "chat_template": "give chat_template itself",
    "tokenize": "prompts are text; the length is stored beside them",
    "continue_final_message": "a prompt ends with the generation prompt",
    "return_dict": "prompts are text",
    "return_tensors": "prompts are text",
}


Conversation = tuple[list[dict[str, Any]], list[Any] | None, dict[str, Any] | None]
"""Messages, tools, and the row's own template variables."""


class Convention:
    """How a row's messages and tools reach the template; this one is tokenmill's own.

    An integration names a subclass as ``module:Class`` in `PromptSpec.convention`, so that worker
    processes can load it.
    """

    is_trainer = False
    """Whether a trainer serves the prompt: it ignores a row's own template variables, opens any
    file from the working directory, and may load images with a function of its own."""
    version: int | None = None  # part of the key
    vision_module: str | None = None  # has the trainer's ``process_vision_info``

    def __init__(self, spec: PromptSpec) -> None:
        self.spec = spec

    @staticmethod
    def load(name: str) -> type[Convention]:
        """Return the class that a spec names."""
        if not name:
            return Convention
        module, _, attribute = name.partition(":")
        try:
            found: type[Convention] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(f"convention is {name!r}, which has no class: {error}") from error
        return found

    @classmethod
    def form(cls, spec: PromptSpec) -> str | None:
        """A digest of what the installed libraries make of tools, if they rewrite them."""
        return None

    def conversation(self, shaped: Shaped) -> Conversation:
        """What the template is called with."""
        assert isinstance(shaped.prompt, list)
        return [_decoded(message) for message in shaped.prompt], shaped.tools, shaped.variables

    def retry(self, asked: Conversation, error: RowError) -> Conversation:
        """What to try after the template raised an error, or raise it."""
        raise error


def _decoded(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("content") is None:
        message = {**message, "content": ""}
    if calls:
        message = {**message, "tool_calls": call_list(calls)}
    return message


class PromptSpec(Options, frozen=True, kw_only=True):
    """The arguments of `PromptDataset` that shape a row.

    Args:
        prompt_key: Column of the prompt: text, or messages.
        label_key: Column of the label.
        tool_key: Column of the tools: a list, or its JSON text.
        metadata_key: Column of the metadata.
        multimodal_keys: Kinds of media and their columns, like ``{"image": "images"}``.
        apply_chat_template: Render the conversation with the generation prompt.
        template_kwargs: Further variables for the chat template.
        date: ``YYYY-MM-DD`` for templates that print the date; such a template is refused without
            it.
        convention: ``module:Class`` of a trainer's `Convention`; empty: tokenmill's own.
        tool_form: `Convention.form` in the process that made the spec; a worker process in which
            it differs refuses to render.
    """

    prompt_key: Column = "text"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: Column = "metadata"
    multimodal_keys: MediaColumns | None = None
    apply_chat_template: bool = False
    template_kwargs: Variables | None = None
    date: str | None = None
    convention: str = ""
    tool_form: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "template_kwargs", dict(self.template_kwargs or {}))
        for name, remedy in _NOT_VARIABLES.items():
            if name in (self.template_kwargs or ()):
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

    def travelling(self) -> dict[str, Any]:
        """The fields as plain values, from which `PromptSpec` makes the same spec again."""
        return asdict(self)

    def document(self) -> dict[str, Any]:
        """The plain values of every field, for the key of a length index."""
        document = self.travelling()
        if not self.apply_chat_template:
            # Without a template these decide nothing, so they must not make another key.
            document = {**document, "template_kwargs": {}, "date": None, "convention": ""}
        version = Convention.load(document["convention"]).version
        if version is not None:
            document["convention_version"] = version
        if document["tool_form"] is None:
            del document["tool_form"]
        media = document["multimodal_keys"]
        # The order of kinds decides nothing either: placeholders are found by position.
        document["multimodal_keys"] = None if media is None else dict(sorted(media.items()))
        order = fingerprint.own_order(document["template_kwargs"])
        if order is not None:
            document["template_kwargs_order"] = order
        return {"version": SPEC_VERSION, "renderer": RENDERER_VERSION, **document}
