"""From a row of any known shape to one conversation.

A *shape* is how a data set writes a conversation: OpenAI messages, ShareGPT (``from``/``value``),
Alpaca (instruction, input, output), prompt+completion, plain text. `shape_of` recognises the shape
by the row's keys (or takes the one the spec names); `read` returns a `Conversation`, or a `Plain`
for text and for prompt+completion strings, which no template touches. Rows that hold several
answers to one prompt are recognised here and read by `groups`.

Nothing is invented: unknown keys pass through to the template, and the rewritings are the ones
that `calls` and `docs/masks.md` list. A row that is no conversation raises `RowError` (bad_shape).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenmill.chat.calls import (
    call_list,
    decode,
    function_call,
    join_parts,
    text_arguments,
    tool_list,
)
from tokenmill.chat.pictures import Parts, Picture, RowPictures
from tokenmill.chat.spec import RESERVED_KWARGS, TRAINABLE, ChatSpec
from tokenmill.errors import RowError, UsageError
from tokenmill.fingerprint import plain

Message = dict[str, Any]

RANKED_KEYS = ("responses", "completions")
"""Columns that hold a list of answers."""

VARIABLES_KEY = "chat_template_kwargs"
"""Column of what a row itself gives the template."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
}


@dataclass(slots=True)
class Conversation:
    """Messages in a template's language.

    ``completion`` is the index of the first message that belongs to a completion (0 where the row
    has none), ``simple`` says that every message holds a role and a text and nothing else.
    """

    shape: str
    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] | None = None
    """Further variables for the template, which go before those of the spec."""
    completion: int = 0
    simple: bool = False
    nulls: frozenset[int] = frozenset()
    """`id` of the messages whose content was null or absent and is empty text here."""
    calls: dict[int, Any] = field(default_factory=dict)
    """The calls of messages as the row has them, by their `id`."""
    hollow: frozenset[int] = frozenset()
    """`id` of the messages that are nothing but a call and whose content the row does not know."""
    pictures: dict[int, Picture] = field(default_factory=dict)
    """The pictures of parts, by their `id`."""

    def illustrate(self, found: RowPictures) -> None:
        """Give every picture of the row its part in the messages.

        Raises:
            RowError: There are more or fewer pictures than places for them.
        """
        messages, self.pictures = found.place(self.messages)
        renamed = {id(old): id(new) for old, new in zip(self.messages, messages, strict=True)}
        self.nulls = frozenset(renamed[old] for old in self.nulls)
        self.hollow = frozenset(renamed[old] for old in self.hollow)
        self.calls = {renamed[old]: calls for old, calls in self.calls.items()}
        self.simple = self.simple and messages == self.messages
        self.messages = messages

    def forms(self, *, parts: bool = False) -> Iterator[Form]:
        """The forms in which templates take such a conversation, in the order to try them.

        Args:
            parts: Whether texts as typed parts are among them, for templates of image models.
        """
        if self.nulls:
            yield Form(self._written(nulls=True), nulls=True)
        yield Form(self.messages, note="null_as_empty" if self.nulls else "")
        if self.calls:
            if self.hollow:
                yield Form(self._written(nulls=True), nulls=True)
            if self.nulls or self.hollow:
                messages = self._written(nulls=True, texts=True)
                yield Form(messages, nulls=True, note="arguments_as_text")
            yield Form(self._written(texts=True), note="arguments_as_text")
        if parts:
            yield Form([_in_parts(message) for message in self.messages], note="texts_as_parts")

    def _written(self, *, nulls: bool = False, texts: bool = False) -> list[Message]:
        """The messages with null contents, or with the arguments of calls as JSON text."""
        messages = []
        for message in self.messages:
            made = message
            if nulls and (id(message) in self.nulls or id(message) in self.hollow):
                made = {**made, "content": None}
            if texts and id(message) in self.calls:
                calls = call_list(self.calls[id(message)], text_arguments)
                made = {**made, "tool_calls": calls}
            messages.append(made)
        return messages


class Form(NamedTuple):
    """One way to write a conversation for a template."""

    messages: list[Message]
    nulls: bool = False
    """Whether it has null contents: then the template must print no null as a word."""
    note: str = ""
    """The counter of rows that were rendered in this form."""


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


@dataclass(slots=True)
class Plain:
    """Text that no template touches: ``prompt`` is not trained, ``text`` is."""

    shape: str
    prompt: str
    text: str
    pictures: list[Picture] = field(default_factory=list)


def shape_of(row: Any, spec: ChatSpec) -> str:
    """The shape of a row: the one that the spec names, else the one that its keys tell.

    Raises:
        RowError: It is no object, or has none of the known shapes.
    """
    if not isinstance(row, dict):
        if isinstance(row, RowError):  # what the parser says of it
            raise row
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    return detect(row, spec) if spec.format == "auto" else spec.format


def read(row: Any, spec: ChatSpec, shape: str | None = None) -> Conversation | Plain:
    """Read one row that holds one conversation, of a shape that is known or is told by its keys.

    Raises:
        RowError: The row does not have that shape.
    """
    shape = shape or shape_of(row, spec)
    if shape == "text":
        return Plain("text", "", _string(row, spec.text_key))
    if shape == "prompt_completion":
        return _pair(row, spec)
    if shape == "alpaca":
        found = _alpaca(row)
    else:
        key = _messages_key(row, spec)
        turns = row[key]
        if type(turns) is not list:
            turns = _list(turns, key)
        if shape == "messages":
            found = conversation("messages", turns)
        else:
            found = _sharegpt_conversation(turns)
    add_columns(found, row, spec)
    if not found.messages:
        raise RowError("the conversation is empty")
    return found


def add_columns(found: Conversation, row: dict[str, Any], spec: ChatSpec) -> None:
    """What a row says of a conversation in columns of their own."""
    tools = row.get(spec.tools_key)
    if tools is not None:
        found.tools = tool_list(tools)
    system = row.get(spec.system_key)
    if system is not None:
        _lead_with_system(found, system)
    found.variables = row_variables(row)


def detect(row: dict[str, Any], spec: ChatSpec) -> str:
    """The shape that a row's keys tell."""
    for key in (spec.messages_key,) if spec.messages_key else ("messages", "conversations"):
        turns = row.get(key)
        if turns is not None:
            first = turns[0] if isinstance(turns, list) and turns else None
            if isinstance(first, dict) and "role" not in first and "from" in first:
                return "sharegpt"
            return "messages"
    if "chosen" in row and "rejected" in row:
        return "preference"
    if row.get(spec.prompt_key) is not None and row.get(spec.completion_key) is not None:
        return "kto" if type(row.get("label")) is bool else "prompt_completion"
    if row.get(spec.prompt_key) is not None or row.get("instruction") is not None:
        for key in RANKED_KEYS:
            if isinstance(row.get(key), list):
                return "ranked"
    if row.get("instruction") is not None and row.get("output") is not None:
        return "alpaca"
    if row.get(spec.text_key) is not None:
        return "text"
    known = ", ".join(sorted(map(str, row))[:8])
    others = "messages_key=, prompt_key=, text_key= name others"
    if "input_ids" in row:
        others = "format='tokens' reads rows that are tokenized already"
    raise RowError(
        f"no conversation, pair or text in this row; its columns are {known or 'none'} ({others})"
    )


def conversation(shape: str, turns: list[Any]) -> Conversation:
    """OpenAI messages, rewritten only where the documented normalisations say so."""
    if _is_simple(turns):
        return Conversation(shape, turns, simple=True)
    messages: list[Message] = []
    simple = True
    nulls: list[int] = []
    calls: dict[int, Any] = {}
    for turn in turns:
        message = _message(turn)
        messages.append(message)
        if turn.get("content") is None:
            nulls.append(id(message))
        if len(message) != 2 or type(message["content"]) is not str:
            simple = False
            if message.get("tool_calls"):
                calls[id(message)] = turn.get("tool_calls") or message["tool_calls"]
    known = frozenset(nulls)
    return Conversation(shape, messages, simple=simple and not nulls, nulls=known, calls=calls)


def _sharegpt_conversation(turns: list[Any]) -> Conversation:
    messages = []
    others = []
    for turn in turns:
        # Nearly every turn, without another call.
        if type(turn) is dict and len(turn) == 2:
            speaker, value = turn.get("from"), turn.get("value")
            role = SHAREGPT_ROLES.get(speaker) if type(speaker) is str else None
            if role is not None and type(value) is str and speaker != "function_call":
                messages.append({"role": role, "content": value})
                continue
        others.append(message := _sharegpt(turn))
        messages.append(message)
    calls = {id(m): m["tool_calls"] for m in others if m.get("tool_calls")}
    if not calls and all(len(m) == 2 and type(m["content"]) is str for m in others):
        return Conversation("sharegpt", messages, simple=True)
    hollow = frozenset([id(m) for m in others if id(m) in calls and not m["content"]])
    return Conversation("sharegpt", messages, calls=calls, hollow=hollow)


def _is_simple(turns: list[Any]) -> bool:
    """The common case, two lookups per message: each holds a role and a text, nothing else."""
    try:
        for turn in turns:
            role = turn["role"]
            if (
                len(turn) != 2
                or type(turn["content"]) is not str
                or type(role) is not str
                or not role
                or type(turn) is not dict
            ):
                return False
    except (KeyError, TypeError, IndexError):
        return False
    return True


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"a message must be an object, not {type(value).__name__}")
    turn: Message = value
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise RowError(f"a message has no role: its keys are {', '.join(sorted(turn)) or 'none'}")
    content = turn.get("content")
    if content is None:
        turn = {**turn, "content": ""}
    elif isinstance(content, list):
        turn = join_parts(turn, content, joined=type(content) is not Parts)
    elif isinstance(content, dict) and content.get("type"):
        turn = join_parts(turn, [content])
    elif not isinstance(content, str):
        raise RowError(f"content must be text or parts, not {type(content).__name__}")
    calls = value.get("tool_calls")
    if calls is not None and turn["tool_calls"] is calls:  # `join_parts` rewrites those it adds to
        rewritten = call_list(calls)
        if type(calls) is not list or any(map(operator.is_not, rewritten, calls)):
            turn = {**turn, "tool_calls": rewritten}
    return turn


def _sharegpt(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"a turn must be an object, not {type(turn).__name__}")
    speaker = turn.get("from", turn.get("role"))
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join(SHAREGPT_ROLES)
        raise RowError(f"a turn is from {speaker!r}; known are {known}")
    value = turn.get("value", turn.get("content"))
    if len(turn) == 2 and type(value) is str and speaker != "function_call":
        return {"role": role, "content": value}
    rest = {k: v for k, v in turn.items() if k not in ("from", "role", "value", "content")}
    if speaker == "function_call":
        calls = function_call(value, "a function_call turn")
        if not rest:
            return {"role": role, "content": "", "tool_calls": calls}
        return _message({"role": role, "content": "", "tool_calls": calls, **rest})
    return _message({"role": role, "content": value, **rest})


def instruction_of(row: dict[str, Any]) -> str:
    """Alpaca's instruction, with its input."""
    instruction = _string(row, "instruction")
    context = row.get("input")
    if context is not None and not isinstance(context, str):
        raise RowError(f"'input' must be text, not {type(context).__name__}")
    return f"{instruction}\n\n{context}" if context else instruction


def _alpaca(row: dict[str, Any]) -> Conversation:
    messages = [
        {"role": "user", "content": instruction_of(row)},
        {"role": "assistant", "content": _string(row, "output")},
    ]
    return Conversation("alpaca", messages, completion=1, simple=True)


def _pair(row: dict[str, Any], spec: ChatSpec) -> Conversation | Plain:
    prompt, completion = row.get(spec.prompt_key), row.get(spec.completion_key)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Plain("prompt_completion", prompt, completion)
    head = half(prompt, "user", spec.prompt_key)
    tail = half(completion, "assistant", spec.completion_key)
    found = conversation("prompt_completion", [*head, *tail])
    found.completion = len(head)
    add_columns(found, row, spec)
    return found


def half(value: Any, role: str, key: str) -> list[Any]:
    """A prompt or an answer as messages; text becomes one of the given role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list) and value:
        return value
    raise RowError(f"{key!r} must be text or messages, not {type(value).__name__}")


def row_variables(row: dict[str, Any]) -> dict[str, Any] | None:
    """What a row itself gives the template, None where it gives nothing.

    Null says nothing: tables write it where another row has a variable and this one has not.

    Raises:
        RowError: These are no variables.
    """
    value = row.get(VARIABLES_KEY)
    if isinstance(value, str):
        value = decode(value, VARIABLES_KEY) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RowError(f"{VARIABLES_KEY!r} must be an object, not {type(value).__name__}")
    said = {name: given for name, given in value.items() if given is not None}
    for name in RESERVED_KWARGS:
        if name in said:
            raise RowError(f"{VARIABLES_KEY}[{name!r}] is set by the renderer itself")
    try:  # templates are told apart by what they are given, as keys are
        return plain(said, VARIABLES_KEY) or None
    except UsageError as error:
        raise RowError(error.message) from error


def _lead_with_system(found: Conversation, system: Any) -> None:
    if not isinstance(system, str):
        raise RowError(f"the system column must be text, not {type(system).__name__}")
    if not system or any(m["role"] in ("system", "developer") for m in found.messages):
        return
    found.messages = [{"role": "system", "content": system}, *found.messages]
    if found.completion or "completion" in TRAINABLE[found.shape]:
        found.completion += 1


def messages_column(row: dict[str, Any], spec: ChatSpec) -> list[Any] | None:
    """The messages of a row's conversation, ShareGPT's turns rewritten; None where it has none."""
    try:
        key = _messages_key(row, spec)
    except RowError:
        return None
    turns = row[key]
    return as_messages(turns if type(turns) is list else _list(turns, key))


def as_messages(turns: list[Any]) -> list[Any]:
    """Turns in the language of messages: ShareGPT's are rewritten, others stay as they are."""
    if any(isinstance(turn, dict) and "role" not in turn and "from" in turn for turn in turns):
        return [_sharegpt(turn) for turn in turns]
    return turns


def _messages_key(row: dict[str, Any], spec: ChatSpec) -> str:
    names = (spec.messages_key,) if spec.messages_key else ("messages", "conversations")
    for name in names:
        if row.get(name) is not None:
            return name
    raise RowError(f"no column {' or '.join(map(repr, names))} in this row")


def _list(value: Any, key: str) -> list[Any]:
    if isinstance(value, tuple):
        return list(value)
    raise RowError(f"{key!r} must be a list of messages, not {type(value).__name__}")


def _string(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise RowError(f"{key!r} must be text, not {type(value).__name__}")
    return value
