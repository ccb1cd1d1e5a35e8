"""`ChatSpec`: the options that shape a row (see `tokenmill._core.options`)."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from msgspec.structs import force_setattr

from tokenmill._core.options import Column, Options, Variables
from tokenmill.errors import UsageError

# Incremented whenever a row's text, spans or rejection could differ, since it belongs to the key.
RENDERER_VERSION = 9

GROUPED = ("preference", "kto", "ranked")  # formats with several answers to one prompt
UNRENDERED = ("text", "tokens", "rollouts")  # formats whose rows no template renders

# What each format can be trained on; the first is what `train_on=None` means.
ANSWER = ("completion", "last_assistant_message")
CONVERSATION = ("all_assistant_messages", "last_assistant_message", "everything")
TRAINABLE: dict[str, tuple[str, ...]] = {
    "messages": CONVERSATION,
    "sharegpt": CONVERSATION,
    "alpaca": (*CONVERSATION, "completion"),
    "prompt_completion": ("completion", *CONVERSATION),
    **dict.fromkeys(GROUPED, ANSWER),
    "text": ("everything",),
    "tokens": ("everything",),  # None: what the row's own masks say
    "rollouts": (),  # None: what was sampled
}

TURNS_OF_GROUPS = (
    " makes rows of turns, and a group of answers is one row of every answer: choose one"
)

# Arguments of ``apply_chat_template`` that are no variables of a template.
RESERVED_KWARGS = (
    "messages", "conversation", "tools", "add_generation_prompt", "chat_template",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


class ChatSpec(Options, frozen=True, kw_only=True):
    """How a row becomes text and trained spans; `tokenmill.prepare` describes the arguments."""

    format: Literal[
        "auto",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "preference",
        "kto",
        "ranked",
        "text",
        "tokens",
        "rollouts",
    ] = "auto"
    messages_key: str | None = None
    tools_key: Column = "tools"
    system_key: Column = "system"
    text_key: Column = "text"
    prompt_key: Column = "prompt"
    completion_key: Column = "completion"
    template_kwargs: Variables | None = None
    date: str | None = None
    train_on: (
        Literal["all_assistant_messages", "last_assistant_message", "completion", "everything"]
        | None
    ) = None
    turn_end: Literal["stop", "turn"] = "stop"
    thinking_opener: Literal["prompt", "trained"] = "prompt"
    expand: Literal["none", "turns", "append"] = "none"
    trailing: Literal["reject", "trim"] = "reject"
    append_eos: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "template_kwargs", dict(self.template_kwargs or {}))
        if self.train_on is not None:
            if self.format != "auto":
                self.trained(self.format)
            if self.train_on == "everything" and self.expand != "none":
                raise UsageError(
                    ("expand", self.expand), " trains each turn in one row, ",
                    ("train_on", "everything"), " all of it: choose one",
                )  # fmt: skip
        if self.expand != "none" and self.format in UNRENDERED:
            raise UsageError(
                ("expand", self.expand), " needs conversations, ",
                ("format", self.format), " has none",
            )  # fmt: skip
        if self.expand != "none" and self.format in GROUPED:
            raise UsageError(("expand", self.expand), TURNS_OF_GROUPS)
        if self.expand == "append" and self.turn_end == "turn":
            raise UsageError(
                ("expand", "append"), " makes rows as a model samples them, which ends with the"
                " end-of-turn token: ", ("turn_end", "turn"), " trains what nobody samples",
            )  # fmt: skip
        for name in RESERVED_KWARGS:
            if name in (self.template_kwargs or ()):
                raise UsageError(("template_kwargs",), f"[{name!r}] is set by the renderer itself")
        check_date(self.date)

    @property
    def message_columns(self) -> tuple[str, ...]:
        """Columns that may hold the conversation, in the order to try them."""
        return (self.messages_key,) if self.messages_key else ("messages", "conversations")

    def trained(self, row_format: str) -> str:
        """Return what is trained in rows of one format.

        Raises:
            UsageError: `train_on` has no meaning for that format.
        """
        allowed = TRAINABLE[row_format]
        if self.train_on is None:
            return allowed[0]
        if self.train_on not in allowed:
            raise UsageError(
                ("train_on", self.train_on),
                f" has no meaning for rows of format {row_format!r}; choose one of "
                f"{', '.join(allowed)}",
            )
        return self.train_on

    def document(self) -> dict[str, Any]:
        """Return the fields and the renderer's version, for a recipe's key."""
        fields = {name: getattr(self, name) for name in ChatSpec.__struct_fields__}
        return {"renderer": RENDERER_VERSION, **fields}


def check_date(date: str | None) -> None:
    if date is None:
        return
    try:
        datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise UsageError(("date",), f" is {date!r}; write it like 2026-11-15") from None
