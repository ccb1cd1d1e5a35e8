"""What a preparation says about rows: which shape they have, and which part of them is trained.

`ChatSpec` is a frozen value. Every field shapes rows and therefore belongs to a recipe's key;
`ChatSpec.document` is the form that goes into it. A spec validates itself where it is made, so a
wrong value is a `UsageError` that names the value, never a surprise in the middle of a build.

`RENDERER_VERSION` counts our own changes: it goes up whenever a row's text, spans or rejection
could come out differently from the same bytes, so that an old store is not taken for a new one.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenmill.errors import UsageError

RENDERER_VERSION = 4

FORMATS = ("auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens")
TRAIN_ON = ("all_assistant_messages", "last_assistant_message", "completion", "everything")
TURN_ENDS = ("stop", "turn")
THINKING_OPENERS = ("prompt", "trained")
EXPANDS = ("none", "turns")
TRAILINGS = ("reject", "trim")

# What each format can be trained on; the first is what `train_on=None` means.
CONVERSATION = ("all_assistant_messages", "last_assistant_message", "everything")
TRAINABLE: dict[str, tuple[str, ...]] = {
    "messages": CONVERSATION,
    "sharegpt": CONVERSATION,
    "alpaca": (*CONVERSATION, "completion"),
    "prompt_completion": (
        "completion",
        "all_assistant_messages",
        "last_assistant_message",
        "everything",
    ),
    "text": ("everything",),
    "tokens": ("everything",),  # None: what the row's own masks say
}

# The names under which the renderer itself speaks to a template.
RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: choose one of {', '.join(allowed)}")


@dataclass(frozen=True)
class ChatSpec:
    """All options that decide how a row becomes text and trained spans.

    Args:
        format: Shape of the rows; ``auto`` looks at each row's keys.
        messages_key: Column of the conversation; None: ``messages``, else ``conversations``.
        tools_key: Column of the tool descriptions.
        system_key: Column of a system text, used when the conversation has no system turn.
        text_key: Column of plain text.
        prompt_key: Column of the prompt of a prompt+completion row.
        completion_key: Column of its completion.
        template_kwargs: Extra variables for the chat template.
        date: ``YYYY-MM-DD``, what `strftime_now` tells a template that asks for the date.
        train_on: What is trained; None: all assistant messages, for prompt+completion the
            completion, for text everything.
        turn_end: ``stop`` ends a span with the end-of-turn token, ``turn`` where the next starts.
        thinking_opener: Whether a thinking opener that the generation prompt already holds belongs
            to the ``prompt``, or is ``trained``.
        expand: ``turns`` makes one row of every assistant turn, with the turns before it.
        trailing: What to do with a conversation that ends with a user turn.
        append_eos: Whether text and string completions end with the tokenizer's eos token.
    """

    format: str = "auto"
    messages_key: str | None = None
    tools_key: str = "tools"
    system_key: str = "system"
    text_key: str = "text"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    train_on: str | None = None
    turn_end: str = "stop"
    thinking_opener: str = "prompt"
    expand: str = "none"
    trailing: str = "reject"
    append_eos: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything."""
        if self.template_kwargs is None:  # a caller's "nothing"
            object.__setattr__(self, "template_kwargs", {})
        _one_of("format", self.format, FORMATS)
        _one_of("turn_end", self.turn_end, TURN_ENDS)
        _one_of("thinking_opener", self.thinking_opener, THINKING_OPENERS)
        _one_of("expand", self.expand, EXPANDS)
        _one_of("trailing", self.trailing, TRAILINGS)
        if self.train_on is not None:
            _one_of("train_on", self.train_on, TRAIN_ON)
            if self.format != "auto":
                self.trained(self.format)
            if self.train_on == "everything" and self.expand == "turns":
                raise UsageError(
                    "expand='turns' trains one turn per row, train_on='everything' all of it:"
                    " choose one"
                )
        if self.expand == "turns" and self.format in ("text", "tokens"):
            raise UsageError(f"expand='turns' needs conversations, format={self.format!r} has none")
        for name in ("tools_key", "system_key", "text_key", "prompt_key", "completion_key"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise UsageError(f"{name}={getattr(self, name)!r}: give the name of a column")
        if self.messages_key is not None and not isinstance(self.messages_key, str):
            raise UsageError(f"messages_key={self.messages_key!r}: give the name of a column")
        if not isinstance(self.template_kwargs, Mapping) or not all(
            isinstance(name, str) for name in self.template_kwargs
        ):
            raise UsageError(f"template_kwargs={self.template_kwargs!r}: give names and values")
        for name in RESERVED_KWARGS:
            if name in self.template_kwargs:
                raise UsageError(f"template_kwargs[{name!r}] is set by the renderer itself")
        if self.date is not None:
            self._check_date()

    def _check_date(self) -> None:
        try:
            datetime.datetime.strptime(str(self.date), "%Y-%m-%d")
        except ValueError:
            raise UsageError(f'date={self.date!r}: write it as date="2026-11-15"') from None

    def trained(self, shape: str) -> str:
        """What is trained in rows of one shape; a choice it cannot satisfy is a UsageError."""
        allowed = TRAINABLE[shape]
        if self.train_on is None:
            return allowed[0]
        if self.train_on not in allowed:
            raise UsageError(
                f"train_on={self.train_on!r} has no meaning for rows of format {shape!r};"
                f" choose one of {', '.join(allowed)}"
            )
        return self.train_on

    def document(self) -> dict[str, Any]:
        """The plain values of every field, with the renderer's version, for a recipe's key."""
        return {
            "renderer": RENDERER_VERSION,
            **asdict(self),
            "template_kwargs": dict(self.template_kwargs),
        }
