"""Read rows of every known format as conversations, plain texts or groups of answers.

The format is detected from the row's columns unless the spec names it.
docs/reference/row-formats.md lists the normalizations; unknown keys are passed to the template.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from tokenmill._core.fingerprint import plain
from tokenmill._core.options import MAX_WEIGHT, MIN_WEIGHT
from tokenmill.chat.agent_traces import AGENT_TRACES, has_blocks, read_agent_trace
from tokenmill.chat.calls import (
    TOOL_ROLES,
    call_list,
    decode,
    function_call,
    join_parts,
    text_arguments,
    tool_list,
)
from tokenmill.chat.images import Image, Parts, RowImages
from tokenmill.chat.spec import GROUPED, RESERVED_KWARGS, TRAINABLE, ChatSpec
from tokenmill.errors import RowError, UsageError

Message = dict[str, Any]

RANKED_KEYS = ("responses", "completions")
VARIABLES_KEY = "chat_template_kwargs"
UNLABELLED = -1  # label of ranked answers, which have none
NULL_AS_EMPTY = "null_as_empty"
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
KNOWN_ROLES = frozenset((*USUAL_ROLES, *TOOL_ROLES, "model", "tools"))
_PROMPT_ROLES = ("system", "developer", "user")

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("observation", "tool", "function", "function_response"), "tool"),
}


@dataclass(slots=True)
class Conversation:
    """Messages in the form that templates read."""

    shape: str
    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] | None = None  # override those of the spec
    completion: int = 0  # index of the first message of the completion, 0 if the row has none
    simple: bool = False  # whether every message has a role and a text and nothing else
    # By `id` of messages and parts:
    calls: dict[int, Any] = field(default_factory=dict)  # tool calls as the row has them
    without_content: frozenset[int] = frozenset()  # calls of a format that has no content
    notes: Collection[str] = ()  # counters of the render stage
    images: dict[int, Image] = field(default_factory=dict)  # of parts

    def attach_images(self, images: RowImages) -> None:
        """Attach the images of the row to the parts of the messages."""
        messages, self.images = images.place(self.messages)
        renamed = {id(old): id(new) for old, new in zip(self.messages, messages, strict=True)}
        self.without_content = frozenset(renamed[old] for old in self.without_content)
        self.calls = {renamed[old]: calls for old, calls in self.calls.items()}
        self.simple = self.simple and messages == self.messages
        self.messages = messages

    def forms(self, *, parts: bool = False) -> Iterator[Form]:
        """Yield the forms in which templates accept the conversation, in the order to try them.

        ``parts`` adds a form with texts as typed parts, for templates of image models.
        """
        yield Form(self.messages)
        empty = [self._other_empty(message) for message in self.messages]
        differs = empty != self.messages
        if differs:
            has_null = any(message.get("content") is None for message in self.messages)
            yield Form(empty, NULL_AS_EMPTY if has_null else "")
        if self.calls:
            yield Form(self.with_text_arguments(self.messages), "arguments_as_text")
            if differs:
                yield Form(self.with_text_arguments(empty), "arguments_as_text")
        if parts:
            yield Form([_in_parts(message) for message in self.messages], "texts_as_parts")

    def _other_empty(self, message: Message) -> Message:
        """Replace null content by empty text, and the content of a bare call by null."""
        if message.get("content") is None:
            return {**message, "content": ""}
        return {**message, "content": None} if id(message) in self.without_content else message

    def with_text_arguments(self, messages: list[Message]) -> list[Message]:
        written = []
        for message, original in zip(messages, self.messages, strict=True):
            calls = self.calls.get(id(original))
            if calls is not None:
                message = {**message, "tool_calls": call_list(calls, text_arguments)}
            written.append(message)
        return written


@dataclass(slots=True)
class Form:
    messages: list[Message]
    note: str = ""  # counter of rows that were rendered in this form


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


@dataclass(slots=True)
class Plain:
    """Text that no template renders: ``prompt`` is not trained, ``text`` is."""

    shape: str
    prompt: str
    text: str
    images: list[Image] = field(default_factory=list)


@dataclass(slots=True)
class AnswerGroup:
    """The answers of one row."""

    shape: str  # preference, kto or ranked
    sides: list[Conversation | Plain]  # one for each answer, best first
    labels: tuple[int, ...]  # of each side: 1 desirable, 0 undesirable, or `UNLABELLED`
    scores: tuple[float, ...] | None = None
    margin: float | None = None  # of the first over the second

    def name(self, side: int) -> str:
        if self.shape == "preference":
            return ("chosen", "rejected")[side]
        return "the completion" if self.shape == "kto" else f"answer {side + 1} by rank"


def read_row(row: Any, spec: ChatSpec) -> Conversation | Plain | AnswerGroup:
    """Read a row.

    Raises:
        RowError: The row has no known format (bad_shape), or its answers cannot be compared
            (bad_group).
    """
    shape = _shape_of(row, spec)
    if shape not in GROUPED:
        return read(row, spec, shape)
    if shape == "preference":
        return _preference(row, spec)
    return _kto(row, spec) if shape == "kto" else _ranked(row, spec)


def incomparable(message: str) -> RowError:
    return RowError(message, reason="bad_group")


def _shape_of(row: Any, spec: ChatSpec) -> str:
    if not isinstance(row, dict):
        if isinstance(row, RowError):  # of the parser
            raise row
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    return _detect(row, spec) if spec.format == "auto" else spec.format


def read(row: Any, spec: ChatSpec, shape: str | None = None) -> Conversation | Plain:
    shape = shape or _shape_of(row, spec)
    if shape == "text":
        return Plain("text", "", _string(row, spec.column("text")))
    if shape == "prompt_completion":
        return _pair(row, spec)
    if shape == "alpaca":
        result = _alpaca(row)
    elif shape in AGENT_TRACES:
        result = _trace(shape, row, spec)
    else:
        turns = _turns(row, spec)
        if turns is None:
            raise RowError(f"no column {' or '.join(map(repr, spec.message_columns))} in this row")
        if shape == "messages":
            result = conversation("messages", turns)
        else:
            result = _sharegpt_conversation(turns)
    if shape not in AGENT_TRACES:
        _add_columns(result, row, spec)
    if not result.messages:
        raise RowError("the conversation is empty")
    return result


def _add_columns(conversation: Conversation, row: dict[str, Any], spec: ChatSpec) -> None:
    column = spec.column_of
    tools = row.get(column["tools"])
    if tools is not None:
        conversation.tools = tool_list(tools)
    system = row.get(column["system"])
    if system is not None:
        _prepend_system(conversation, system)
    if VARIABLES_KEY in row:
        conversation.variables = row_variables(row)


def _detect(row: dict[str, Any], spec: ChatSpec) -> str:
    for key in spec.message_columns:
        turns = row.get(key)
        if turns is not None:
            first = turns[0] if isinstance(turns, list) and turns else None
            if isinstance(first, dict) and "role" not in first and "from" in first:
                return "sharegpt"
            return "anthropic" if has_blocks(turns) else "messages"
    get, column = row.get, spec.column_of
    if column["chosen"] in row and column["rejected"] in row:
        return "preference"
    has_prompt = get(column["prompt"]) is not None
    if has_prompt and get(column["completion"]) is not None:
        if "example_id" in row and AGENT_TRACES["verifiers"][0](row):
            return "verifiers"
        return "kto" if type(get(column["label"])) is bool else "prompt_completion"
    has_instruction = get("instruction") is not None
    if has_prompt or has_instruction:
        for key in RANKED_KEYS:
            if isinstance(get(key), list):
                return "ranked"
    if has_instruction and get("output") is not None:
        return "alpaca"
    for name, (matches, _) in AGENT_TRACES.items():
        if matches(row):
            return name
    if get(column["text"]) is not None:
        return "text"
    known = ", ".join(sorted(map(str, row))[:8])
    tokens = "; rows with input_ids need the format 'tokens'" if "input_ids" in row else ""
    raise RowError(
        f"no conversation, pair or text in this row; its columns are {known or 'none'}{tokens}"
    )


def _trace(shape: str, row: dict[str, Any], spec: ChatSpec) -> Conversation:
    columns = {role: spec.value(row, role) for role in ("system", "tools")}
    trace = read_agent_trace({**row, **columns, "messages": _turns(row, spec)}, shape)
    result = conversation(shape, trace.messages)
    result.tools, result.completion, result.notes = trace.tools, trace.completion, trace.notes
    if columns["system"] and shape != "anthropic":  # whose reader adds it
        _prepend_system(result, columns["system"])
        trace.notes.discard("no_system_prompt")
    result.variables = row_variables(row)
    bare = (id(m) for m in result.messages if m.get("tool_calls") and m.get("content") == "")
    result.without_content = frozenset(bare)
    return result


def in_turn(error: RowError, number: int) -> RowError:
    return RowError(f"turn {number}: {error.message}", reason=error.reason)


def misspelt_role(messages: list[Message]) -> str:
    """Describe the first role that is nearly one of the usual roles; an empty string if none is."""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in KNOWN_ROLES:
            similar = difflib.get_close_matches(role.lower(), USUAL_ROLES, 1, 0.8)
            if similar:
                return f"turn {number} has the role {role!r}; did you mean {similar[0]!r}?"
    return ""


def conversation(shape: str, turns: list[Any]) -> Conversation:
    """Read OpenAI messages."""
    if _is_simple(turns):
        return Conversation(shape, turns, simple=True)
    messages: list[Message] = []
    simple = True
    calls: dict[int, Any] = {}
    for number, turn in enumerate(turns):
        try:
            message = _message(turn)
        except RowError as error:
            raise in_turn(error, number) from error
        messages.append(message)
        if len(message) != 2 or type(message.get("content")) is not str:
            simple = False
            if message.get("tool_calls"):
                calls[id(message)] = turn.get("tool_calls") or message["tool_calls"]
    return Conversation(shape, messages, simple=simple, calls=calls)


def _sharegpt_conversation(turns: list[Any]) -> Conversation:
    messages = []
    others = []
    for number, turn in enumerate(turns):
        # Nearly every turn; saves a function call.
        if type(turn) is dict and len(turn) == 2:
            speaker, value = turn.get("from"), turn.get("value")
            role = SHAREGPT_ROLES.get(speaker) if type(speaker) is str else None
            if role is not None and type(value) is str and speaker != "function_call":
                messages.append({"role": role, "content": value})
                continue
        try:
            others.append(message := _sharegpt(turn))
        except RowError as error:
            raise in_turn(error, number) from error
        messages.append(message)
    calls = {id(m): m["tool_calls"] for m in others if m.get("tool_calls")}
    if not calls and all(len(m) == 2 and type(m["content"]) is str for m in others):
        return Conversation("sharegpt", messages, simple=True)
    without_content = frozenset([id(m) for m in others if id(m) in calls and not m["content"]])
    return Conversation("sharegpt", messages, calls=calls, without_content=without_content)


def _is_simple(turns: list[Any]) -> bool:
    """Whether each message is a role and a text; fast, because nearly all are."""
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
        keys = ", ".join(sorted(map(str, turn))) or "none"
        raise RowError(f"a message has no role: its keys are {keys}")
    content = turn.get("content")
    if isinstance(content, list):
        turn = join_parts(turn, content, joined=type(content) is not Parts)
    elif isinstance(content, dict) and content.get("type"):
        turn = join_parts(turn, [content])
    elif not isinstance(content, (str, NoneType)) and not (
        role in TOOL_ROLES and isinstance(content, dict)
    ):
        raise RowError(f"content must be text or parts, not {type(content).__name__}")
    calls = value.get("tool_calls")
    if calls is not None and turn["tool_calls"] is calls:  # else `join_parts` has rewritten them
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
        raise RowError(f"a turn is from {speaker!r}; it must be one of {known}")
    value = turn.get("value", turn.get("content"))
    rest = {k: v for k, v in turn.items() if k not in ("from", "role", "value", "content")}
    if speaker == "function_call":
        rest = {"tool_calls": function_call(value, "a function_call turn"), **rest}
        value = ""
    return _message({"role": role, "content": value, **rest})


def _instruction_of(row: dict[str, Any]) -> str:
    instruction = _string(row, "instruction")
    context = row.get("input")
    if context is not None and not isinstance(context, str):
        raise RowError(f"'input' must be text, not {type(context).__name__}")
    return f"{instruction}\n\n{context}" if context else instruction


def _alpaca(row: dict[str, Any]) -> Conversation:
    messages = [
        {"role": "user", "content": _instruction_of(row)},
        {"role": "assistant", "content": _string(row, "output")},
    ]
    return Conversation("alpaca", messages, completion=1, simple=True)


def _pair(row: dict[str, Any], spec: ChatSpec) -> Conversation | Plain:
    prompt, completion = spec.value(row, "prompt"), spec.value(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str) and not spec.as_chat:
        return Plain("prompt_completion", prompt, completion)
    head = _half(prompt, "user", spec.column("prompt"))
    tail = _half(completion, "assistant", spec.column("completion"))
    result = conversation("prompt_completion", [*head, *tail])
    result.completion = len(head)
    _add_columns(result, row, spec)
    return result


def _half(value: Any, role: str, key: str) -> list[Any]:
    """Return a prompt or an answer as messages; a text becomes a message with this role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list) and value:
        return value
    raise RowError(f"{key!r} must be text or messages, not {type(value).__name__}")


def row_variables(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the template variables of a row, None if it has none.

    Null counts as absent, because tables fill missing values with null.
    """
    value = row.get(VARIABLES_KEY)
    if isinstance(value, str):
        value = decode(value, VARIABLES_KEY) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RowError(f"{VARIABLES_KEY!r} must be an object, not {type(value).__name__}")
    variables = {name: item for name, item in value.items() if item is not None}
    for name in RESERVED_KWARGS:
        if name in variables:
            raise RowError(f"{VARIABLES_KEY}[{name!r}] is reserved: the renderer sets it")
    try:  # they are part of the key of a template
        return plain(variables, VARIABLES_KEY) or None
    except UsageError as error:
        raise RowError(error.message) from error


def _prepend_system(conversation: Conversation, system: Any) -> None:
    if not isinstance(system, str):
        raise RowError(f"the system column must be text, not {type(system).__name__}")
    if not system or any(m["role"] in ("system", "developer") for m in conversation.messages):
        return
    conversation.messages = [{"role": "system", "content": system}, *conversation.messages]
    if conversation.completion or "completion" in TRAINABLE[conversation.shape]:
        conversation.completion += 1


def _turns(row: dict[str, Any], spec: ChatSpec) -> list[Any] | None:
    for key in spec.message_columns:
        turns = row.get(key)
        if isinstance(turns, list | tuple):
            return list(turns) if isinstance(turns, tuple) else turns
        if turns is not None:
            raise RowError(f"{key!r} must be a list of messages, not {type(turns).__name__}")
    return None


def _as_messages(turns: list[Any]) -> list[Any]:
    """Rewrite ShareGPT turns as messages; return messages unchanged."""
    if any(isinstance(turn, dict) and "role" not in turn and "from" in turn for turn in turns):
        return [_sharegpt(turn) for turn in turns]
    return turns


def _string(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise RowError(f"{key!r} must be text, not {type(value).__name__}")
    return value


# -- groups of answers ------------------------------------------------------------------------


def _preference(row: dict[str, Any], spec: ChatSpec) -> AnswerGroup:
    answers = {spec.column(role): spec.value(row, role) for role in ("chosen", "rejected")}
    sides = _sides("preference", row, answers, spec)
    scores = [_number(row, key) for key in ("score_chosen", "score_rejected")]
    given_scores = tuple(score for score in scores if score is not None)
    if len(given_scores) == 1:
        raise incomparable("one of 'score_chosen' and 'score_rejected' is missing")
    return AnswerGroup("preference", sides, (1, 0), given_scores or None, _number(row, "margin"))


def _kto(row: dict[str, Any], spec: ChatSpec) -> AnswerGroup:
    label = spec.value(row, "label")
    if type(label) is not bool:
        raise incomparable(
            f"{spec.column('label')!r} must be true or false, not {_described(label)}"
        )
    answers = {spec.column("completion"): spec.value(row, "completion")}
    if spec.value(row, "completion") is None and (messages := _turns(row, spec)) is not None:
        answers = {"messages": messages}
    return AnswerGroup("kto", _sides("kto", row, answers, spec), (int(label),))


def _ranked(row: dict[str, Any], spec: ChatSpec) -> AnswerGroup:
    keys = (*RANKED_KEYS, spec.column_of["completion"])
    key = next((key for key in keys if row.get(key) is not None), RANKED_KEYS[0])
    answers = row.get(key)
    if not isinstance(answers, list) or len(answers) < 2:
        raise incomparable(
            f"{key!r} must be a list of two answers or more, not {_described(answers)}"
        )
    scores: list[float] | None = None
    order = list(range(len(answers)))
    if row.get("scores") is not None:
        scores = _scores(row["scores"], len(answers))
        order.sort(key=lambda index: -scores[index])  # stable: equal scores keep their order
    named = {f"{key}[{index}]": answers[index] for index in order}
    return AnswerGroup(
        "ranked",
        _sides("ranked", row, named, spec),
        (UNLABELLED,) * len(answers),
        None if scores is None else tuple(scores[index] for index in order),
    )


Answers = dict[str, Any]  # by the names of their columns


def _sides(
    shape: str, row: dict[str, Any], answers: Answers, spec: ChatSpec
) -> list[Conversation | Plain]:
    for name, answer in answers.items():
        if answer is None or (isinstance(answer, str | list | dict) and not answer):
            raise incomparable(f"{name!r} is empty")
    prompt = spec.value(row, "prompt")
    if all(isinstance(answer, str) for answer in answers.values()) and not spec.as_chat:
        sides = _texts(shape, row, prompt, answers, spec)
        if sides is not None:
            return sides
    tails = {
        name: _as_messages(_half(answer, "assistant", name)) for name, answer in answers.items()
    }
    whole = [_is_whole(tail) for tail in tails.values()]
    if any(whole) and not all(whole):
        raise incomparable("some answers are whole conversations, others are not")
    if all(whole):
        size = _shared(tails, prompt)
        heads = {name: tail[:size] for name, tail in tails.items()}
        tails = {name: tail[size:] for name, tail in tails.items()}
    else:
        head = _prompt_messages(row, prompt, spec)
        heads = dict.fromkeys(tails, head)
    sides = []
    for name, tail in tails.items():
        if not any(map(_has_content, tail)):
            raise incomparable(f"{name!r} is empty")
        side = conversation(shape, [*heads[name], *tail])
        side.completion = len(heads[name])
        _add_columns(side, row, spec)
        sides.append(side)
    return sides


def _texts(
    shape: str, row: dict[str, Any], prompt: Any, answers: Answers, spec: ChatSpec
) -> list[Conversation | Plain] | None:
    """Return answers that are texts, or None if the prompt consists of messages."""
    if prompt is None:
        if row.get("instruction") is not None or _turns(row, spec) is not None:
            return None
        if len(answers) < 2:
            raise RowError(f"no column {spec.column('prompt')!r} in this row")
        prompt = _shared_text(list(answers.values()))
        answers = {name: text[len(prompt) :] for name, text in answers.items()}
    elif not isinstance(prompt, str):
        return None
    for name, text in answers.items():
        if not text.strip():
            raise incomparable(f"{name!r} is empty, or all of it is the prompt")
    return [Plain(shape, prompt, text) for text in answers.values()]


def _prompt_messages(row: dict[str, Any], prompt: Any, spec: ChatSpec) -> list[Any]:
    if prompt is not None:
        return _as_messages(_half(prompt, "user", spec.column("prompt")))
    if messages := _turns(row, spec):
        return _as_messages(messages)
    if row.get("instruction") is not None:
        return [{"role": "user", "content": _instruction_of(row)}]
    raise RowError(f"no column {spec.column('prompt')!r} in this row, and no prompt in its answers")


def _is_whole(tail: list[Any]) -> bool:
    """Whether an answer is a conversation that begins with its prompt."""
    return isinstance(tail[0], dict) and tail[0].get("role") in _PROMPT_ROLES


def _shared(tails: dict[str, list[Any]], prompt: Any) -> int:
    """Return the number of messages that all conversations share at their start, the prompt.

    A single conversation's answer follows its last user turn.
    """
    first, *others = tails.values()
    if others:
        size = 0
        while all(size < len(tail) for tail in tails.values()) and all(
            tail[size] == first[size] for tail in others
        ):
            size += 1
    else:
        questions = [index for index, message in enumerate(first) if _role(message) == "user"]
        size = questions[-1] + 1 if questions else 0
    for name, tail in tails.items():
        if size == len(tail):
            raise incomparable(
                f"{name!r} has no answer after the messages that all conversations share"
            )
        if not size or _role(tail[size]) in _PROMPT_ROLES:
            raise incomparable("the conversations do not have the same prompt")
    if isinstance(prompt, str):
        user_messages = [message for message in first[:size] if _role(message) == "user"]
        if not any(message.get("content") == prompt for message in user_messages):
            raise incomparable("the conversations do not contain the row's prompt")
    elif isinstance(prompt, list) and prompt:
        messages = _as_messages(prompt)
        if len(messages) > size or messages != first[: len(messages)]:
            raise incomparable("the conversations do not begin with the row's prompt")
        size = len(messages)
    return size


def _shared_text(texts: Sequence[str]) -> str:
    """Return the common prefix of texts without a space at its end, which is the answers'."""
    first, last = min(texts), max(texts)  # these two differ most
    size = 0
    while size < min(len(first), len(last)) and first[size] == last[size]:
        size += 1
    return first[:size].removesuffix(" ")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _has_content(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content) or any(
        message.get(name) for name in ("tool_calls", "reasoning_content", "thinking", "reasoning")
    )


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return None if value is None else _finite(value, repr(key))


def _scores(values: Any, answers: int) -> list[float]:
    if not isinstance(values, list) or len(values) != answers:
        detail = f"{len(values)} of them" if isinstance(values, list) else _described(values)
        raise incomparable(
            f"'scores' must be one number for each of {answers} answers, not {detail}"
        )
    return [_finite(value, f"scores[{index}]") for index, value in enumerate(values)]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise incomparable(f"{name} must be a number, not {_described(value)}")
    return float32(value, name)


def float32(value: float, name: str) -> float:
    """Return a number; raise `RowError` if it would be infinite or 0 in the float32 of batches."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    single = ctypes.c_float(number).value
    if not math.isfinite(single) or (number and not single):
        raise incomparable(f"{name} must be a finite float32 number, not {value!r:.40}")
    return number


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value!r:.40}" if isinstance(value, str | int | float) else type(value).__name__


# -- weights ----------------------------------------------------------------------------------


def message_weight(message: dict[str, Any]) -> float:
    """Return the loss weight of a message, 0 if it is not trained."""
    if len(message) <= 2:
        return 1.0
    mask = message.get("step_loss_mask")
    if message.get("train") is False or (isinstance(mask, (int, float)) and mask == 0):
        return 0.0
    return _weight(message.get("weight"), "a message")


def row_weight(row: dict[str, Any], spec: ChatSpec) -> float:
    value = spec.value(row, "weight")
    if value is None:
        return 1.0
    weight = _weight(value, "the row")
    if not weight:
        raise RowError("the weight of the row is 0", reason="no_trained_tokens")
    return weight


def _weight(value: Any, owner: str) -> float:
    if value is None:
        return 1.0
    if not isinstance(value, (int, float)) or not (value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT):
        raise RowError(
            f"the weight of {owner} must be 0 or a number from {MIN_WEIGHT:.1g} to"
            f" {MAX_WEIGHT:.1g}, got {str(value)[:40]!r}"
        )
    return float(value)
