"""What a prompt dataset says about rows: which columns they have, and how a prompt is made.

`PromptSpec` is a frozen value. Every field shapes prompts or decides whether a row is one, so all
of them are in the key of a length index; `max_length` is not, because it only compares lengths
that are there. The names are those of miles and slime.

A *convention* says what happens to messages and tools on their way into the template. By default
arguments of tool calls that are JSON text are decoded and a null content is empty text, as
everywhere in tokenmill. ``slime`` hands both over as the row has them. ``miles`` decodes arguments
and empties null contents of assistants alone, rewrites tools the way its inference server does and
tries bare functions where the template refuses the wrapped ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from tokenmill import fingerprint
from tokenmill.chat import RENDERER_VERSION
from tokenmill.chat.spec import check_date
from tokenmill.errors import UsageError
from tokenmill.options import Column, Options, Variables
from tokenmill.prompts.tools import ServedTools

SPEC_VERSION = 1
"""Raised when a row's prompt, length or rejection could come out differently: part of the key."""

MILES_VERSION = 2
"""Raised when the ``miles`` convention changes: part of the keys of its prompts alone."""
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
        convention: What happens to messages and tools on their way into the template.
        tool_form: What becomes of tools, as a digest, where a convention rewrites them. It is found
            out here and travels with the spec, so that nobody rewrites them another way.
    """

    prompt_key: Column = "text"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: Column = "metadata"
    multimodal_keys: MediaColumns | None = None
    apply_chat_template: bool = False
    template_kwargs: Variables | None = None
    date: str | None = None
    convention: Literal["default", "miles", "slime"] = "default"
    tool_form: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "template_kwargs", dict(self.template_kwargs or {}))
        for name, remedy in _NOT_VARIABLES.items():
            if name in (self.template_kwargs or ()):
                raise UsageError(f"apply_chat_template_kwargs[{name!r}] cannot be set: {remedy}")
        for name in self.__struct_fields__:
            force_setattr(self, name, fingerprint.plain(getattr(self, name), name))
        check_date(self.date)
        if self.rewrites_tools and self.tool_form is None:
            force_setattr(self, "tool_form", ServedTools().form)

    @property
    def as_conversation(self) -> bool:
        """Whether a string prompt becomes a user turn: a template or media need messages."""
        return self.apply_chat_template or self.multimodal_keys is not None

    @property
    def rewrites_tools(self) -> bool:
        """Whether tools reach the template in another form than the row has them."""
        return self.convention == "miles" and self.apply_chat_template and self.tool_key is not None

    def travelling(self) -> dict[str, Any]:
        """The fields as plain values, from which `PromptSpec` makes the same spec again."""
        return asdict(self)

    def document(self) -> dict[str, Any]:
        """The plain values of every field, for the key of a length index."""
        document = self.travelling()
        if not self.apply_chat_template:
            # Without a template these decide nothing, so they must not make another key.
            document = {**document, "template_kwargs": {}, "date": None, "convention": "default"}
        if document["convention"] == "miles":
            document["convention_version"] = MILES_VERSION
        if document["tool_form"] is None:
            del document["tool_form"]
        media = document["multimodal_keys"]
        # The order of kinds decides nothing either: placeholders are found by position.
        document["multimodal_keys"] = None if media is None else dict(sorted(media.items()))
        order = fingerprint.own_order(document["template_kwargs"])
        if order is not None:
            document["template_kwargs_order"] = order
        return {"version": SPEC_VERSION, "renderer": RENDERER_VERSION, **document}
