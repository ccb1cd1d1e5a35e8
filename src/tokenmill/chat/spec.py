"""`ChatSpec`: the options for rendering a row (see `tokenmill._core.options`)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta
from msgspec.structs import force_setattr

from tokenmill._core.options import Column, Options, Variables, check_names
from tokenmill.chat.agent_traces import AGENT_TRACES
from tokenmill.errors import UsageError

# Part of the key; incremented when a row's text, spans or rejection could change.
RENDERER_VERSION = 13

GROUPED = ("preference", "kto", "ranked")  # formats with several answers to one prompt
RowFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "kto", "ranked",
    "atif", "verifiers", "responses", "nemo_gym", "anthropic", "text", "tokens", "rollouts",
    "rollouts-openai", "rollouts-rollout", "rollouts-miles", "rollouts-skyrl", "rollouts-verl",
    "rollouts-trl", "rollouts-slime", "rollouts-atif", "rollouts-nemo_gym", "rollouts-verifiers",
]  # fmt: skip
ROLLOUTS = tuple(name for name in get_args(RowFormat) if name.startswith("rollouts"))
UNRENDERED = ("text", "tokens", *ROLLOUTS)  # formats without a template

ROLES = (
    "messages", "tools", "system", "text", "prompt", "completion", "chosen", "rejected", "label",
    "images", "weight",
)  # fmt: skip
IMAGE_COLUMNS = ("images", "image")  # the first that is not null is used
OPTIONAL_ROLES = ("tools", "system", "label", "images", "weight")
Columns = Annotated[Mapping[str, Column | None], Meta(title="a mapping of roles to column names")]

# Values of `train_on` by format; the first is the default.
ANSWER = ("completion", "last_assistant_message")
CONVERSATION = ("all_assistant_messages", "last_assistant_message", "everything")
TRAINABLE: dict[str, tuple[str, ...]] = {
    "messages": CONVERSATION,
    "sharegpt": CONVERSATION,
    "alpaca": (*CONVERSATION, "completion"),
    **dict.fromkeys(("prompt_completion", *AGENT_TRACES), ("completion", *CONVERSATION)),
    **dict.fromkeys(GROUPED, ANSWER),
    "text": ("everything",),
    "tokens": ("everything",),  # default: the masks of the row
    **dict.fromkeys(ROLLOUTS, ()),  # default: the sampled tokens
}


# Arguments of ``apply_chat_template`` that are not template variables.
RESERVED_KWARGS = (
    "messages", "conversation", "tools", "add_generation_prompt", "chat_template",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


class ChatSpec(Options, frozen=True, kw_only=True):
    """How to render a row and what to train; see `tokenmill.prepare` for the options."""

    format: RowFormat = "auto"
    columns: Columns | None = None
    chat_template_kwargs: Variables | None = None
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
    as_chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "chat_template_kwargs", dict(self.chat_template_kwargs or {}))
        columns = dict(self.columns or {})
        check_names(columns, ROLES, "roles in ", ("columns",))
        for role, name in tuple(columns.items()):
            # A role with one default column may name it: the key must not change.
            if name == role and role not in ("messages", "images"):
                del columns[role]
        force_setattr(self, "columns", columns)
        if self.train_on is not None:
            if self.format != "auto":
                self.trained(self.format)
            if self.train_on == "everything" and self.expand != "none":
                raise UsageError(
                    ("expand", self.expand), " trains one turn per row, so it cannot be combined"
                    " with ", ("train_on", "everything"),
                )  # fmt: skip
        if self.expand != "none" and self.format in UNRENDERED:
            raise UsageError(
                ("expand", self.expand), " needs conversations, but ",
                ("format", self.format), " has none",
            )  # fmt: skip
        if self.expand != "none" and self.format in GROUPED:
            raise UsageError(
                ("expand", self.expand),
                " splits conversations into rows, which is not possible for groups of answers",
            )
        if self.expand == "append" and self.turn_end == "turn":
            raise UsageError(
                ("expand", "append"), " makes rows as a model samples them, up to the end-of-turn"
                " token, so it cannot be combined with ", ("turn_end", "turn"),
            )  # fmt: skip
        for name in RESERVED_KWARGS:
            if name in (self.chat_template_kwargs or ()):
                raise UsageError(
                    ("chat_template_kwargs",), f"[{name!r}] cannot be set: the renderer sets it"
                )
        check_date(self.date)

    @cached_property
    def column_of(self) -> dict[str, Any]:
        """The column of every role; None if it is ignored."""
        return {role: role for role in ROLES} | dict(self.columns or {})

    @cached_property
    def message_columns(self) -> tuple[str, ...]:
        """Columns that may contain the conversation, in the order to try them."""
        return self._columns_or("messages", "messages", "conversations")

    @cached_property
    def image_columns(self) -> tuple[str, ...]:
        """Columns that may contain the images of placeholders, in the order to try them."""
        return self._columns_or("images", *IMAGE_COLUMNS)

    def _columns_or(self, role: str, *default: str) -> tuple[str, ...]:
        if role not in (self.columns or {}):
            return default
        name = self.column_of[role]
        return () if name is None else (name,)

    def column(self, role: str) -> str:
        """Return the name of a role's column, for messages."""
        return self.column_of[role] or role

    def value(self, row: Mapping[str, Any], role: str) -> Any:
        """Return a row's value of the column with a role; None if there is none."""
        name = self.column_of[role]
        return None if name is None else row.get(name)

    def trained(self, row_format: str) -> str:
        """Return what is trained in rows of one format.

        Raises:
            UsageError: `train_on` cannot be used for that format.
        """
        allowed = TRAINABLE[row_format]
        if self.train_on is None:
            return allowed[0]
        if self.train_on not in allowed:
            raise UsageError(
                ("train_on", self.train_on),
                f" cannot be used for rows of format {row_format!r}; use one of "
                f"{', '.join(allowed)}",
            )
        return self.train_on

    def document(self) -> dict[str, Any]:
        """Return the fields and the version of the renderer, for a key."""
        fields = {name: getattr(self, name) for name in ChatSpec.__struct_fields__}
        if not self.as_chat:
            del fields["as_chat"]  # the key of other rows does not depend on it
        return {"renderer": RENDERER_VERSION, **fields}


def check_date(date: str | None) -> None:
    if date is None:
        return
    try:
        datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise UsageError(("date",), f" must be like 2026-11-15, got {date!r}") from None
