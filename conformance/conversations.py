"""Conversations with unique words in every message: real rows and constructed formats.

Each text of a message begins and ends with a unique word, and long texts have one in the middle, so
a token with a part of a word belongs to that message. Words are inside surrounding white space,
since templates strip it.

`forms` returns the forms of a row that templates may require: tool-call arguments as objects or as
text, null contents as null or as empty text.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]

LONG = 200
"""Texts of at least this many characters have a word in the middle."""
MAX_CHARACTERS = 12_000
"""Longer real rows are left out, because they would take most of the time."""
THOUGHT = re.compile(r"\A(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)\Z", re.DOTALL)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Which city."}},
                "required": ["city"],
            },
        },
    }
]


@dataclass(frozen=True)
class Word:
    """An inserted word and its message."""

    text: str
    message: int
    role: str
    part: str
    """``content``, ``thinking`` or ``call``."""


@dataclass
class Case:
    """A row and its inserted words."""

    name: str
    row: Row
    words: list[Word] = field(default_factory=list)


class _Planter:
    """Gives out words that occur once in a row and in no corpus."""

    def __init__(self, words: list[Word], message: int, role: str) -> None:
        self.words, self.message, self.role = words, message, role

    def word(self, part: str) -> str:
        # Consonants in an order that no language has; the number keeps one from holding another.
        text = f"Zqv{len(self.words):03d}kx"
        self.words.append(Word(text, self.message, self.role, part))
        return text

    def text(self, text: str, part: str) -> str:
        """A text with words at both ends, inside of its white space."""
        inner = text.strip()
        if not inner:
            return text
        start = text.index(inner)
        first = self.word(part)
        if len(inner) > LONG and " " in inner[LONG // 2 : -1]:
            middle = inner.index(" ", LONG // 2)
            inner = f"{inner[:middle]} {self.word(part)}{inner[middle:]}"
        return f"{text[:start]}{first} {inner} {self.word(part)}{text[start + len(text.strip()) :]}"

    def content(self, text: str) -> str:
        """A content, whose thinking is planted apart from the answer."""
        thought = THOUGHT.match(text) if self.role == "assistant" else None
        if thought is None:
            return self.text(text, "content")
        opener, thinking, end_of_turn, answer = thought.groups()
        return opener + self.text(thinking, "thinking") + end_of_turn + self.text(answer, "content")

    def arguments(self, given: Any) -> Any:
        """Arguments of a call with a word in the first value that is text, or in one of its own."""
        decoded = json.loads(given) if isinstance(given, str) else copy.deepcopy(given)
        name = next((name for name, value in decoded.items() if isinstance(value, str)), "note")
        decoded[name] = f"{decoded.get(name, '')} {self.word('call')}".strip()
        return json.dumps(decoded) if isinstance(given, str) else decoded


def plant(name: str, row: Row) -> Case:
    """A case of a row: the same conversation, with words in every text of it."""
    words: list[Word] = []
    messages = []
    for number, original in enumerate(row["messages"]):
        message = copy.deepcopy(original)
        planter = _Planter(words, number, message["role"])
        if message.get("reasoning_content"):
            message["reasoning_content"] = planter.text(message["reasoning_content"], "thinking")
        if message.get("content"):
            message["content"] = planter.content(message["content"])
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = planter.arguments(call["function"]["arguments"])
        messages.append(message)
    planted: Row = {"messages": messages}
    if row.get("tools"):
        planted["tools"] = row["tools"]
    return Case(name, planted, words)


def forms(row: Row) -> Iterator[Row]:
    """The row in the forms that templates expect, the usual one first.

    Arguments of calls are objects, or JSON text; a null content is empty text, or null. Nothing
    that is not null becomes so, and nothing else changes.
    """
    for texts in (False, True):
        for nulls in (False, True):
            messages = copy.deepcopy(row["messages"])
            for message in messages:
                if message.get("content") is None:
                    message["content"] = None if nulls else ""
                for call in message.get("tool_calls") or ():
                    arguments = call["function"]["arguments"]
                    decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
                    call["function"]["arguments"] = json.dumps(decoded) if texts else decoded
            yield {**row, "messages": messages}


def _said(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _called(city: str, number: int, *, as_text: bool = False) -> Message:
    arguments = {"city": city}
    call = {
        "id": f"call0000{number}",
        "type": "function",
        "function": {
            "name": "find_weather",
            "arguments": json.dumps(arguments) if as_text else arguments,
        },
    }
    return _said("assistant", None if as_text else "", tool_calls=[call])


def _result(text: str, number: int) -> Message:
    return _said("tool", text, name="find_weather", tool_call_id=f"call0000{number}")


def shapes() -> Iterator[Case]:
    """Constructed conversations, one for each habit that data sets and templates have."""
    ask, more = _said("user", "How warm is it in Rome?"), _said("user", "And in Oslo?")
    warm, cold = _said("assistant", "About thirty degrees."), _said("assistant", "Much colder.")
    system = _said("system", "You answer in one sentence.")
    think = "<think>\nRome is in the south.\n</think>\n\n"
    made: dict[str, Row] = {
        "one answer": {"messages": [ask, warm]},
        "system and one answer": {"messages": [system, ask, warm]},
        "two answers": {"messages": [ask, warm, more, cold]},
        "system and three answers": {
            "messages": [system, ask, warm, more, cold, _said("user", "Thanks."),
                         _said("assistant", "You are welcome.")],
        },
        "white space around texts": {
            "messages": [_said("user", "  How warm is it in Rome?\n"),
                         _said("assistant", "\n About thirty degrees. \n")],
        },
        "thinking in the last answer": {
            "messages": [ask, _said("assistant", think + "About thirty degrees.")],
        },
        "thinking in every answer": {
            "messages": [ask, _said("assistant", think + "About thirty degrees."), more,
                         _said("assistant", think.replace("Rome", "Oslo") + "Much colder.")],
        },
        "reasoning_content": {
            "messages": [ask, _said("assistant", "About thirty degrees.",
                                    reasoning_content="Rome is in the south.")],
        },
        "a call": {"messages": [ask, _called("Rome", 1)], "tools": TOOLS},
        "a call, its result, an answer": {
            "messages": [system, ask, _called("Rome", 1), _result("30 degrees", 1), warm],
            "tools": TOOLS,
        },
        "calls in two turns": {
            "messages": [ask, _called("Rome", 1), _result("30 degrees", 1), warm, more,
                         _called("Oslo", 2), _result("5 degrees", 2), cold],
            "tools": TOOLS,
        },
        "arguments as JSON text, content null": {
            "messages": [ask, _called("Rome", 1, as_text=True), _result("30 degrees", 1), warm],
            "tools": TOOLS,
        },
    }  # fmt: skip
    for name, row in made.items():
        yield plant(name, row)


def _alpaca(row: Row) -> Row:
    asked = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
    return {"messages": [_said("user", asked), _said("assistant", row["output"])]}


def _messages(row: Row) -> Row:
    made: Row = {"messages": row["messages"]}
    if row.get("tools"):
        made["tools"] = row["tools"]
    return made


CORPORA: dict[str, Callable[[Row], Row]] = {
    "alpaca_eval_en": _messages,
    "smilechat_zh": _messages,
    "codealpaca": _alpaca,
    "alpaca_zh": _alpaca,
    "toy_chat": _messages,
    "think_traces": _messages,
    "drone_tool_calls": _messages,
    "tau_bench_trajectories": _messages,
}


def _usable(row: Row) -> bool:
    return (
        any(message["role"] == "assistant" for message in row["messages"])
        and all(isinstance(m.get("content") or "", str) for m in row["messages"])
        and sum(len(message.get("content") or "") for message in row["messages"]) < MAX_CHARACTERS
    )


def corpus_cases(
    directory: Path, count: int, corpora: Sequence[str] = tuple(CORPORA)
) -> Iterator[Case]:
    """So many rows of the corpora, equally many of each, cut behind their last answer."""
    shares = [count // len(corpora) + (n < count % len(corpora)) for n in range(len(corpora))]
    for name, share in zip(corpora, shares, strict=True):
        convert = CORPORA[name]
        with open(directory / "corpora" / f"{name}.jsonl", encoding="utf-8") as lines:
            found = 0
            for number, line in enumerate(lines):
                if found == share:
                    break
                row = convert(json.loads(line))
                while row["messages"] and row["messages"][-1]["role"] != "assistant":
                    row["messages"].pop()
                if _usable(row):
                    found += 1
                    yield plant(f"{name} row {number}", row)


def all_cases(directory: Path, count: int) -> list[Case]:
    """The shapes, and so many rows of the corpora."""
    return [*shapes(), *corpus_cases(directory, count)]
