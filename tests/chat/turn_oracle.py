"""Content of assistant messages, and where their turns begin and end in a render.

The *header* of a turn is what the generation prompt of that very prefix holds; the rest is the
model's own, with what closes the turn at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.chat.loop_oracle import (
    NO_OWNER,
    REASONING,
    Message,
    OracleTemplate,
    Owned,
    Span,
    TemplateRaised,
)

TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]")
UNIT = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]|\w+|\s|.", re.DOTALL)
THINKING_WORD = re.compile(r"think|thought|analysis|reason", re.I)
ENDING_WORD = re.compile(r"^<\W*/|^\[/|end|close|^<[a-z]+\|>$", re.I)


def spoken(message: Message, *, reasoning: bool = True) -> Iterator[list[str]]:
    yield from ([answer] for answer in _answers(message)[1])
    if reasoning:
        yield from ([thought] for thought in thoughts(message))
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict):
            yield [str(function.get("name") or "")]
            yield from _printed(function.get("arguments"))


def thoughts(message: Message) -> list[str]:
    own = next((message[k] for k in REASONING if isinstance(message.get(k), str)), "")
    return [thought for thought in (*_answers(message)[0], own.strip()) if thought]


def _answers(message: Message) -> tuple[list[str], list[str]]:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        texts = [p["text"] for p in content if isinstance(p, dict) and "text" in p]
    thinking: list[str] = []
    answers: list[str] = []
    for text in texts:
        thought, closing, answer = text.rpartition("</think>")
        if closing:
            thinking.append(re.sub(r"^\s*<think>", "", thought).strip())
        answers.append(answer.strip())
    return thinking, answers


def _printed(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            tags = [f"={key}>", f"<{key}>", f'"{key}"']
            yield from ([*forms, *tags] for forms in _printed(str(key)))
            yield from _printed(item)
    elif isinstance(value, list):
        for item in value:
            yield from _printed(item)
    elif isinstance(value, str):
        word = value.strip()
        twice = json.dumps(json.dumps(word)[1:-1])[1:-1]
        yield [
            word,
            json.dumps(word)[1:-1],
            json.dumps(word, ensure_ascii=False)[1:-1],
            twice,
            json.dumps(json.dumps(word, ensure_ascii=False)[1:-1], ensure_ascii=False)[1:-1],
            repr(word)[1:-1],
        ]
    elif value is not None:
        yield [json.dumps(value), str(value)]


def lost(messages: list[Message], found: Owned, *, every_thought: bool = True) -> str | None:
    """Return the first content of an assistant that its turn does not print, or None.

    Thinking of turns before the last assistant is history that templates may drop. A last turn that
    thinks in two places and prints one of them has lost something only for `every_thought`.
    """
    assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    for index in assistants:
        region = "".join(found.text[start:end] for start, end, who in found.runs if who == index)
        leaves = list(spoken(messages[index], reasoning=False))
        thinking = thoughts(messages[index]) if index == assistants[-1] else []
        if thinking and not every_thought:
            leaves.append(thinking)
        elif thinking:
            leaves += [[thought] for thought in thinking]
        for forms in leaves:
            short = any(len(form) < 3 for form in forms)
            words = TAG.sub("\0", region) if short else ""  # a letter in a tag is the template's
            if not any(form in (region if len(form) > 2 else words) for form in forms):
                return f"{forms[0][:60]!r} of message {index}"
    return None


def _adopt(found: Owned, messages: list[Message]) -> None:
    """Assign an ending outside every loop to the last assistant if only it is printed there.

    Some templates take the last message out of their loop and print it by itself.
    """
    last = len(messages) - 1
    if last < 0 or messages[last].get("role") != "assistant":
        return
    if any(who == last for *_, who in found.runs):
        return
    start = found.end()
    ending = found.text[start:]
    said = [forms for forms in spoken(messages[last], reasoning=False) if forms[0]]
    said = said or [thinking for thinking in [thoughts(messages[last])] if thinking]
    whole = all(any(form in ending for form in forms) for forms in said)
    if said and (start or not last) and whole and ending:
        found.runs = [run for run in found.runs if run[0] < start]
        found.runs.append((start, start + len(ending), last))


@dataclass(slots=True)
class Turn:
    """An assistant's turn in a render, as offsets into the text.

    ``opener`` is the start of a thinking opener that the header ends with, ``stop`` the end of what
    closes the turn. ``header`` is None where the oracle cannot say.
    """

    message: int
    start: int
    end: int
    header: int | None
    opener: int | None
    stop: int
    closed: bool


def common(left: str, right: str) -> int:
    if left.startswith(right):
        return len(right)
    length = 0
    for a, b in zip(UNIT.finditer(left), UNIT.finditer(right), strict=False):
        if a[0] != b[0]:
            break
        length += len(a[0])
    return length


def thinking_at_end(prompt: str) -> int:
    """Return where the thinking that a generation prompt opens at its end begins, else its length.

    A tag that names thinking, or a tag and a word that does, with nothing but its end and
    whitespace after it.
    """
    tags = list(TAG.finditer(prompt))
    for tag in reversed(tags):
        after = prompt[tag.end() :]
        opens = bool(THINKING_WORD.search(tag[0])) and not ENDING_WORD.search(tag[0])
        word = re.match(r"\s*(?:think|thinking|thought|analysis|reasoning)\b\s*", after)
        if not opens and word and not ENDING_WORD.search(tag[0]):
            after, opens = after[word.end() :], True
            after = TAG.sub("", after, count=1) if TAG.match(after) else after
        if opens:
            rest = after.strip()
            ends = TAG.fullmatch(rest)
            if not rest or (ends and ENDING_WORD.search(rest)):
                return tag.start()
            return len(prompt)
    return len(prompt)


class Conversation:
    def __init__(self, template: OracleTemplate, messages: list[Message], tools: Any) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.found = template.owned(messages, tools)
        if self.found is not None:
            _adopt(self.found, messages)
        self._prompts: dict[int, list[str]] = {}

    def prompts(self, count: int) -> list[str]:
        if count not in self._prompts:
            self._prompts[count] = self._find_prompts(count)
        return self._prompts[count]

    def _find_prompts(self, count: int) -> list[str]:
        if count < 1:
            return []
        prefix = self.messages[:count]
        try:
            given = self.template.owned(prefix, self.tools, add_generation_prompt=True)
        except TemplateRaised:
            return []
        if given is None:
            return []
        candidates = [given.text[given.end() :]] if given.end() else []
        try:
            closed = self.template.plain(prefix, self.tools)
        except TemplateRaised:
            closed = None
        if closed is not None and closed != given.text:
            same = len(closed) if given.text.startswith(closed) else common(given.text, closed)
            candidates.append(given.text[same:])
        return [c for c in dict.fromkeys(candidates) if c.strip()]

    @cached_property
    def usual(self) -> list[str]:
        key = json.dumps(self.tools)
        if key not in self.template.usual:
            user = [{"role": "user", "content": "Hello."}]
            try:
                found = Conversation(self.template, user, self.tools).prompts(1)
            except TemplateRaised:
                found = []
            self.template.usual[key] = found
        return self.template.usual[key]

    @cached_property
    def turns(self) -> dict[int, Turn]:
        assert self.found is not None
        places: dict[int, Span] = {}
        for start, end, who in self.found.runs:
            places[who] = (places.get(who, (start, end))[0], end)
        return {
            index: self._turn(index, *places[index])
            for index, message in enumerate(self.messages)
            if message.get("role") == "assistant" and index in places
        }

    def _turn(self, index: int, start: int, end: int) -> Turn:
        assert self.found is not None
        text = self.found.text
        header = self._header(index, start, end)
        opener = None
        if header is not None:
            cut = start + thinking_at_end(text[start:header]) if header > start else header
            opener = cut if cut < header else None
        own = text[start:end]
        said = [f for fs in spoken(self.messages[index]) for f in fs if f]
        content = self.messages[index].get("content")
        if isinstance(content, str) and content.strip():
            said.append(content.strip())  # it may end with thinking, and with the tag after it
        closed = bool(own.strip()) and not any(own.rstrip().endswith(s) for s in said)
        return Turn(index, start, end, header, opener, start + len(own.rstrip()), closed)

    def _header(self, index: int, start: int, end: int) -> int | None:
        """Return where the header of a turn ends; None if it is no generation prompt."""
        assert self.found is not None
        free = [run for run in self.found.runs if run[1] == start and run[2] == NO_OWNER]
        before = (free[0][0] if free else start) or start
        # After a message that a template gives no prompt for (a system alone, another assistant)
        # the opener of a turn is still no part of an answer.
        usual = self._reached(index, self.usual, before, start, end)
        own = self.prompts(index)
        if own and (reached := self._reached(index, own, before, start, end)):
            return max([*reached, *usual])
        others = [
            prompt
            for count in range(1, len(self.messages))
            if count != index and self.messages[count].get("role") == "assistant"
            for prompt in self.prompts(count)
        ]
        if not own and not others:
            others = self.prompts(len(self.messages))
        if reached := [*self._reached(index, others, before, start, end), *usual]:
            return max(reached)
        if not own or all(thinking_at_end(prompt.strip()) == 0 for prompt in own):
            return start  # no prompt here, or none but thinking: the turn has no header
        if self._joined(start):
            return start
        return None

    def _reached(
        self, index: int, prompts: list[str], before: int, start: int, end: int
    ) -> list[int]:
        return [
            place
            for prompt in dict.fromkeys(prompts)
            for place in self._aligned(index, prompt, before, start, end)
        ]

    def _joined(self, start: int) -> bool:
        """Whether a turn continues another assistant's, because the template joins the two."""
        assert self.found is not None
        who = self.found.before(start)
        return who >= 0 and self.messages[who].get("role") == "assistant"

    def _aligned(self, index: int, prompt: str, before: int, start: int, end: int) -> Iterator[int]:
        """Yield where a prompt differs from the beginning of a turn."""
        assert self.found is not None
        text = self.found.text
        core = prompt[: thinking_at_end(prompt)].strip()
        if not core:
            return
        bases = {before, start}
        end_of_turn = TAG.match(text, start, end)
        if end_of_turn and ENDING_WORD.search(end_of_turn[0]):
            bases.add(
                end_of_turn.end()
            )  # of the turn before, where a template closes it by the next
        for base in bases:
            turn = text[base:end]
            length = common(turn, prompt)
            if turn[:length].strip():
                yield max(base + length, start)
            blank = len(turn) - len(turn.lstrip())
            stripped = prompt.lstrip()
            length = common(turn[blank:], stripped)
            if turn[blank : blank + length].strip():
                yield max(base + blank + length, start)
        if text[:start].rstrip().endswith(core):
            yield start
        # A first turn may print more before its header: a bos token, a default system prompt.
        place = text.find(core, start, end)
        said = [f for fs in spoken(self.messages[index]) for f in fs if f]
        if not index and place > start and not any(f in text[start:place] for f in said):
            yield place + common(text[place:end], prompt.lstrip())
