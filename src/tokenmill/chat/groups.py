"""From a row that holds several answers to one conversation for each of them.

A *group* is what such a row becomes: answers to one prompt that a trainer must see together. There
are three kinds:

- ``preference``: ``chosen`` and ``rejected``, with ``margin``, ``score_chosen``, ``score_rejected``
  where the row has them;
- ``kto``: one ``completion`` and whether it is wanted, ``label``;
- ``ranked``: ``responses`` (or ``completions``), best first, or by their ``scores``.

Answers are texts, messages, or whole conversations that begin with the prompt; then the messages
they share are the prompt. A prompt stands in a column of its own, in the messages that come before
(``messages``, ``conversations``), or is Alpaca's instruction. `read_row` is what the renderer
calls: it gives an `AnswerGroup`, or what `shapes` makes of a row with one conversation. Each *side*
of a group is an ordinary conversation of which the answer is trained; whatever makes the answers
incomparable raises `RowError` (bad_group).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.chat import shapes
from tokenmill.chat.shapes import Conversation, Plain
from tokenmill.chat.spec import GROUPED, ChatSpec
from tokenmill.errors import RowError

UNLABELLED = -1
"""The label of an answer that is neither wanted nor unwanted by itself, as ranked ones are."""

_PROMPT_ROLES = ("system", "developer", "user")


@dataclass(slots=True)
class AnswerGroup:
    """The answers of one row.

    Attributes:
        shape: preference, kto or ranked.
        sides: One conversation for each answer, the best first.
        labels: Of each side: 1 wanted, 0 unwanted, or `UNLABELLED`.
        scores: Of each side, where the row has them.
        margin: By how much the first is better, where the row says so.
    """

    shape: str
    sides: list[Conversation | Plain]
    labels: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    margin: float | None = None

    def name(self, side: int) -> str:
        """What a person calls a side."""
        if self.shape == "preference":
            return ("chosen", "rejected")[side]
        return "the completion" if self.shape == "kto" else f"answer {side + 1} by rank"


def read_row(row: Any, spec: ChatSpec) -> Conversation | Plain | AnswerGroup:
    """Recognise and read one row.

    Raises:
        RowError: The row has none of the known shapes, or not the one the spec names; or its
            answers make no group.
    """
    shape = shapes.shape_of(row, spec)
    if shape not in GROUPED:
        return shapes.read(row, spec, shape)
    if shape == "preference":
        return _preference(row, spec)
    return _kto(row, spec) if shape == "kto" else _ranked(row, spec)


def incomparable(message: str) -> RowError:
    """What is said of answers that make no group."""
    return RowError(message, reason="bad_group")


def _preference(row: dict[str, Any], spec: ChatSpec) -> AnswerGroup:
    sides = _sides("preference", row, {key: row.get(key) for key in ("chosen", "rejected")}, spec)
    scores = [_number(row, key) for key in ("score_chosen", "score_rejected")]
    known = tuple(score for score in scores if score is not None)
    if len(known) == 1:
        raise incomparable("one of 'score_chosen' and 'score_rejected' is missing")
    return AnswerGroup("preference", sides, (1, 0), known or None, _number(row, "margin"))


def _kto(row: dict[str, Any], spec: ChatSpec) -> AnswerGroup:
    label = row.get("label")
    if type(label) is not bool:
        raise incomparable(f"'label' must be true or false, not {_told(label)}")
    key = spec.completion_key
    answers = {key: row.get(key)}
    if row.get(key) is None and (messages := shapes.messages_column(row, spec)) is not None:
        answers = {"messages": messages}
    return AnswerGroup("kto", _sides("kto", row, answers, spec), (int(label),))


def _ranked(row: dict[str, Any], spec: ChatSpec) -> AnswerGroup:
    keys = (*shapes.RANKED_KEYS, spec.completion_key)
    key = next((key for key in keys if row.get(key) is not None), keys[0])
    answers = row.get(key)
    if not isinstance(answers, list) or len(answers) < 2:
        raise incomparable(f"{key!r} must be a list of two answers or more, not {_told(answers)}")
    scores: list[float] | None = None
    order = list(range(len(answers)))
    if row.get("scores") is not None:
        scores = _scores(row["scores"], len(answers))
        order.sort(key=lambda place: -scores[place])  # stable: of equal ones the first comes first
    named = {f"{key}[{place}]": answers[place] for place in order}
    return AnswerGroup(
        "ranked",
        _sides("ranked", row, named, spec),
        (UNLABELLED,) * len(answers),
        None if scores is None else tuple(scores[place] for place in order),
    )


# The sides

Answers = dict[str, Any]
"""Answers by the names of their columns."""


def _sides(
    shape: str, row: dict[str, Any], answers: Answers, spec: ChatSpec
) -> list[Conversation | Plain]:
    for name, answer in answers.items():
        if answer is None or (isinstance(answer, str | list | dict) and not answer):
            raise incomparable(f"{name!r} is empty")
    prompt = row.get(spec.prompt_key)
    if all(isinstance(answer, str) for answer in answers.values()):
        sides = _texts(shape, row, prompt, answers, spec)
        if sides is not None:
            return sides
    tails = {
        name: shapes.as_messages(shapes.half(answer, "assistant", name))
        for name, answer in answers.items()
    }
    whole = [_is_whole(tail) for tail in tails.values()]
    if any(whole) and not all(whole):
        raise incomparable("some answers are whole conversations, others answers alone")
    if all(whole):
        size = _shared(tails, prompt)
        heads = {name: tail[:size] for name, tail in tails.items()}
        tails = {name: tail[size:] for name, tail in tails.items()}
    else:
        head = _prompt_messages(row, prompt, spec)
        heads = dict.fromkeys(tails, head)
    sides = []
    for name, tail in tails.items():
        if not any(map(_says_something, tail)):
            raise incomparable(f"{name!r} is empty")
        side = shapes.conversation(shape, [*heads[name], *tail])
        side.completion = len(heads[name])
        shapes.add_columns(side, row, spec)
        sides.append(side)
    return sides


def _texts(
    shape: str, row: dict[str, Any], prompt: Any, answers: Answers, spec: ChatSpec
) -> list[Conversation | Plain] | None:
    """Answers that are texts, after a text or with it; None where the prompt is of messages."""
    if prompt is None and _has_another_prompt(row, spec):
        return None
    if prompt is not None and not isinstance(prompt, str):
        return None
    if prompt is None:
        if len(answers) < 2:
            raise RowError(f"no column {spec.prompt_key!r} in this row")
        prompt = _shared_text(list(answers.values()))
        answers = {name: text[len(prompt) :] for name, text in answers.items()}
    for name, text in answers.items():
        if not text.strip():
            raise incomparable(f"{name!r} is empty, or all of it is the prompt")
    return [Plain(shape, prompt, text) for text in answers.values()]


def _has_another_prompt(row: dict[str, Any], spec: ChatSpec) -> bool:
    return row.get("instruction") is not None or shapes.messages_column(row, spec) is not None


def _prompt_messages(row: dict[str, Any], prompt: Any, spec: ChatSpec) -> list[Any]:
    if prompt is not None:
        return shapes.as_messages(shapes.half(prompt, "user", spec.prompt_key))
    messages = shapes.messages_column(row, spec)
    if messages:
        return messages
    if row.get("instruction") is not None:
        return [{"role": "user", "content": shapes.instruction_of(row)}]
    raise RowError(f"no column {spec.prompt_key!r} in this row, and no prompt in its answers")


def _is_whole(tail: list[Any]) -> bool:
    """Whether an answer is a conversation that begins with its prompt."""
    return isinstance(tail[0], dict) and tail[0].get("role") in _PROMPT_ROLES


def _shared(tails: dict[str, list[Any]], prompt: Any) -> int:
    """How many messages all conversations begin with; the answers follow them.

    A single conversation's answer is what follows its last question.
    """
    first, *others = tails.values()
    if others:
        size = 0
        while all(size < len(tail) for tail in tails.values()) and all(
            tail[size] == first[size] for tail in others
        ):
            size += 1
    else:
        questions = [place for place, message in enumerate(first) if _role(message) == "user"]
        size = questions[-1] + 1 if questions else 0
    for name, tail in tails.items():
        if size == len(tail):
            raise incomparable(f"{name!r} holds nothing after what all conversations begin with")
        if not size or _role(tail[size]) in _PROMPT_ROLES:
            raise incomparable("the conversations do not have the same prompt")
    if isinstance(prompt, str):
        asked = [message for message in first[:size] if _role(message) == "user"]
        if not any(message.get("content") == prompt for message in asked):
            raise incomparable("the conversations do not hold the row's prompt")
    elif isinstance(prompt, list) and prompt:
        given = shapes.as_messages(prompt)
        if len(given) > size or given != first[: len(given)]:
            raise incomparable("the conversations do not begin with the row's prompt")
        size = len(given)
    return size


def _shared_text(texts: Sequence[str]) -> str:
    """What all texts begin with; a blank before the place where they part is the answers'."""
    first, last = min(texts), max(texts)  # of sorted texts the ends part first
    size = 0
    while size < min(len(first), len(last)) and first[size] == last[size]:
        size += 1
    return first[:size].removesuffix(" ")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _says_something(message: Any) -> bool:
    """Whether an assistant's message holds anything to compare."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content) or any(
        message.get(name) for name in ("tool_calls", "reasoning_content", "thinking", "reasoning")
    )


# The numbers


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return None if value is None else _finite(value, repr(key))


def _scores(values: Any, answers: int) -> list[float]:
    if not isinstance(values, list) or len(values) != answers:
        told = f"{len(values)} of them" if isinstance(values, list) else _told(values)
        raise incomparable(f"'scores' must be one number for each of {answers} answers, not {told}")
    return [_finite(value, f"scores[{place}]") for place, value in enumerate(values)]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise incomparable(f"{name} must be a number, not {_told(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise incomparable(f"{name} must be a finite number, not {value!r:.40}")
    return number


def _told(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value!r:.40}" if isinstance(value, str | int | float) else type(value).__name__
