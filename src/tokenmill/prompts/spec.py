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

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tokenmill import fingerprint
from tokenmill.chat import RENDERER_VERSION
from tokenmill.errors import UsageError
from tokenmill.prompts.tools import ServedTools

SPEC_VERSION = 1
"""Raised when a row's prompt, length or rejection could come out differently: part of the key."""

CONVENTIONS = ("default", "miles", "slime")
MILES_VERSION = 2
"""Raised when the ``miles`` convention changes: part of the keys of its prompts alone."""
MEDIA = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
"""Kinds of media and the placeholder that stands for one of them in a text."""

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


@dataclass(frozen=True)
class PromptSpec:
    """The arguments of `PromptDataset` that shape a row; it describes them.

    Attributes:
        tool_form: What becomes of tools, as a digest, where a convention rewrites them. It is found
            out here and travels with the spec, so that nobody rewrites them another way.
    """

    prompt_key: str = "text"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: Mapping[str, str] | None = None
    apply_chat_template: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    convention: str = "default"
    tool_form: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything."""
        if self.template_kwargs is None:  # a caller's "nothing"
            object.__setattr__(self, "template_kwargs", {})
        for name in ("prompt_key", "metadata_key"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it is the name of a column")
        for name in ("label_key", "tool_key"):
            if not isinstance(getattr(self, name), str | None):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it names a column, or None")
        if not isinstance(self.apply_chat_template, bool):
            raise UsageError(
                f"apply_chat_template is {self.apply_chat_template!r}; it is true or false"
            )
        if self.convention not in CONVENTIONS:
            raise UsageError(
                f"convention is {self.convention!r}; it is one of {', '.join(CONVENTIONS)}"
            )
        self._check_media()
        self._check_kwargs()
        for each in fields(self):
            value = fingerprint.plain(getattr(self, each.name), each.name)
            object.__setattr__(self, each.name, value)
        if self.date is not None:
            try:
                datetime.datetime.strptime(str(self.date), "%Y-%m-%d")
            except ValueError:
                raise UsageError(f'date={self.date!r}: write it as date="2026-11-15"') from None
        if self.rewrites_tools and self.tool_form is None:
            object.__setattr__(self, "tool_form", ServedTools().form)

    def _check_media(self) -> None:
        if self.multimodal_keys is None:
            return
        if not isinstance(self.multimodal_keys, Mapping):
            raise UsageError(
                f"multimodal_keys is {self.multimodal_keys!r}; it maps kinds to columns, "
                'like {"image": "images"}'
            )
        for kind, column in self.multimodal_keys.items():
            if kind not in MEDIA:
                raise UsageError(f"multimodal_keys names {kind!r}; known are {', '.join(MEDIA)}")
            if not isinstance(column, str) or not column:
                raise UsageError(f"multimodal_keys[{kind!r}] is {column!r}; it names a column")

    def _check_kwargs(self) -> None:
        if not isinstance(self.template_kwargs, Mapping) or not all(
            isinstance(name, str) for name in self.template_kwargs
        ):
            raise UsageError(
                f"apply_chat_template_kwargs is {self.template_kwargs!r}; give names and values"
            )
        for name, remedy in _NOT_VARIABLES.items():
            if name in self.template_kwargs:
                raise UsageError(f"apply_chat_template_kwargs[{name!r}] cannot be set: {remedy}")

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
        media = self.multimodal_keys
        return {
            **asdict(self),
            "template_kwargs": dict(self.template_kwargs),
            "multimodal_keys": None if media is None else dict(media),
        }

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
