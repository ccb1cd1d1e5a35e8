"""tokenmill as a renderer of the package `renderers`: any chat template or encoder as `Renderer`.

Ids and masks are those of `tokenmill.prepare`, and `tokenmill.Bridge` continues rollouts. Responses
are parsed if the template prints calls and reasoning in a form that can be parsed again, which is
tried on messages of our own.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.chat.calls import TOOL_ROLES
from tokenmill.chat.program import Run
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import CLOSING, TAG, before_thinking
from tokenmill.chat.turns import RenderedRow, add_unlooped, pieces_of
from tokenmill.errors import BridgeError, RowError, UsageError
from tokenmill.rl.bridge import MAX_OPENER, Bridge
from tokenmill.tokenizers.encoder import Encoder

with optional("renderers"):
    from pydantic import ConfigDict
    from renderers.base import (
        ParsedResponse,
        ParsedToolCall,
        RenderedTokens,
        ToolCallParseStatus,
        extract_message_tool_names,
        reject_assistant_in_extension,
    )
    from renderers.configs import BaseRendererConfig

__all__ = ["TemplateRenderer", "TemplateRendererConfig"]

Message = dict[str, Any]
Tools = list[Any] | None
_log = logging.getLogger(__name__)


class TemplateRendererConfig(BaseRendererConfig):  # type: ignore[misc]
    """Options of `TemplateRenderer`, named as in `tokenmill.prepare`.

    Other fields are variables of the chat template, as in the default renderer's config.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal["tokenmill"] = "tokenmill"
    chat_template: str | None = None
    encoder: str | None = None
    encoder_kwargs: dict[str, Any] | None = None
    date: str | None = None

    _internal_fields = frozenset({"chat_template", "encoder", "encoder_kwargs", "date"})
    _allow_opaque_template_kwargs = True


class TemplateRenderer:
    """Renders conversations by the tokenizer's chat template, another template or an encoder."""

    config_class = TemplateRendererConfig
    is_prefix_stable = False  # in general; `tm.Bridge.rewrite` checks a conversation

    def __init__(self, tokenizer: Any, config: TemplateRendererConfig | None = None) -> None:
        self.config = config = config or TemplateRendererConfig()
        if config.thinking_retention is not None:
            raise UsageError(
                "thinking_retention is not supported: the template decides which thinking it"
                " keeps. Set the template's own variable instead."
            )
        self._tokenizer = tokenizer
        self.bridge = Bridge(
            tokenizer,
            chat_template=config.chat_template,
            chat_template_kwargs=config.model_extra,
            encoder=config.encoder,
            encoder_kwargs=config.encoder_kwargs,
            date=config.date,
        )
        self.effective_thinking_retention = "all"  # the bridge refuses where the template rewrites
        self._encoder = Encoder(self.bridge.tokenizer, "hf")
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return type(self), (self._tokenizer, self.config)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Render messages to ids with the message of each id.

        Raises:
            RowError: The template raises an error, or a mask cannot be proven. With a generation
                prompt, such a mask is left empty, which means that it is unknown.
        """
        conversation = [dict(message) for message in messages]
        with self._lock:
            rendered = self._render(conversation, tools or None, prompt=add_generation_prompt)
        rendered.message_roles = [message.get("role") or "" for message in conversation]
        rendered.message_tool_names = extract_message_tool_names(conversation)
        return rendered

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        rendered = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return list(rendered.token_ids)

    def _render(self, messages: list[Message], tools: Tools, *, prompt: bool) -> RenderedTokens:
        renderer, rendered = self.bridge.renderer, None
        if prompt:
            accepted = self.bridge.messages(self.bridge.prompt(messages, tools))
            text, run = renderer.printed(accepted, tools, prompt=True)
            with suppress(RowError):
                rendered = renderer.conversation(messages, tools)[0]
            if rendered is not None and not text.startswith(rendered.text):
                rendered = None
        else:
            rendered, accepted = renderer.conversation(messages, tools)
            text, run = renderer.printed(accepted, tools, prompt=False)
        if rendered is not None and len(rendered.ends) != len(messages):
            rendered = None  # an encoder's text without answers
        parts = _parts(run, rendered, text)
        spans = rendered.spans if rendered is not None else None
        encoded = self._encoder.encode([text], [spans or []], [[part.end for part in parts]])
        if encoded.rejected:
            if not prompt:
                raise encoded.rejected[0][1]
            rendered = None
        ids, mask, ends = encoded.row(0)
        found = np.repeat(np.array(parts)[:, 1:], np.diff(ends, prepend=0), axis=0)
        owner, turn, is_content = found.T
        sampled = mask > 0
        result = RenderedTokens(token_ids=ids.tolist())
        # A trained token is the answer's, also where the template prints it at the next message.
        result.message_indices = np.where(sampled, turn, owner).tolist()
        if rendered is not None:
            result.sampled_mask = sampled.tolist()
            if run is not None:
                is_answer = np.array([m["role"] == "assistant" for m in [*accepted, {"role": ""}]])
                result.is_content = np.where(is_answer[owner], sampled, is_content > 0).tolist()
        return result

    @cached_property
    def _stop_token_ids(self) -> list[int]:
        tokenizer, found = self.bridge.tokenizer, []
        for message in (_PLAIN, _calling(1)):
            with suppress(RowError):
                ids = self._answer(message)
                found += ids[-1:] if tokenizer.table.is_added[ids[-1]] else []
        if tokenizer.eos_token_id is not None:
            found.append(tokenizer.eos_token_id)
        if not found:
            raise UsageError(
                "The template prints no end-of-turn token, and the tokenizer has no eos_token."
            )
        return list(dict.fromkeys(found))

    def _answer(self, message: Message) -> list[int]:
        """Return the ids that a model would sample for a message."""
        rendered = self.render([{"role": "user", "content": "Hello."}, message], tools=_TOOLS)
        return [
            number
            for number, sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=True)
            if sampled
        ]

    def get_stop_token_ids(self) -> list[int]:
        """Return the end-of-turn tokens of an answer and of a call, and the eos token."""
        with self._lock:
            return list(self._stop_token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools = None,
    ) -> RenderedTokens | None:
        """Return the ids with the text that the template prints after them.

        None if the prompt is not one that this renderer returned, or if the template would print
        the turn differently once more messages follow.
        """
        new = [dict(message) for message in new_messages]
        if not previous_prompt_ids or not new or reject_assistant_in_extension(new):
            return None
        previous = [*previous_prompt_ids, *previous_completion_ids]
        with self._lock:
            try:
                sampled = None
                if any(message.get("role") in TOOL_ROLES for message in new):
                    sampled = self._parsed(previous_prompt_ids, previous_completion_ids, new)
                ids = self.bridge.extend(previous, new, sampled=sampled)
                messages = self.bridge.messages(ids)
                whole = self._render(messages, tools or None, prompt=True)
            except (BridgeError, RowError, UsageError) as error:
                _log.info("the prompt has to be rendered again: %s", error)
                return None
        count, first = len(ids) - len(previous), len(messages) - len(new)
        result = RenderedTokens(token_ids=ids, sampled_mask=[False] * len(ids))
        result.message_indices = [-1] * len(ids)
        if whole.token_ids[-count:] == ids[-count:]:
            own = [max(number - first, -1) for number in whole.message_indices[-count:]]
            result.message_indices[-count:] = own
            if whole.is_content:
                is_content = zip(own, whole.is_content[-count:], strict=True)
                result.is_content = [False] * len(previous)
                result.is_content += [owner >= 0 and content for owner, content in is_content]
        result.message_roles = [message.get("role") or "" for message in new]
        result.message_tool_names = extract_message_tool_names(new)
        return result

    def _parsed(
        self, prompt: list[int], completion: list[int], answers: list[Message]
    ) -> Message | None:
        """Return a sampled turn as a message; None if it cannot be parsed."""
        try:
            parsed = self.parse_response(completion, tools=_TOOLS, prompt_ids=prompt)
        except UsageError:
            return None
        if any(call.status != ToolCallParseStatus.OK for call in parsed.tool_calls):
            return None
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
        for call, answer in zip(calls, answers, strict=False):
            if answer.get("tool_call_id"):
                call["id"] = answer["tool_call_id"]
        message = {"content": parsed.content, "reasoning_content": parsed.reasoning_content}
        given = {name: value for name, value in {**message, "tool_calls": calls}.items() if value}
        return {"role": "assistant", "content": "", **given}

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: Tools = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """Parse a completion; ``prompt_ids`` show whether the prompt opens the thinking.

        Raises:
            UsageError: The template's form of reasoning or, with ``tools``, of calls is unknown.
        """
        with self._lock:
            form = self._form
            problem = form.problem or (form.calls_problem if tools else "")
            if problem:
                raise UsageError(f"Responses of this template cannot be parsed: {problem}.")
            return form.parse(self._text(token_ids), self._opens_thinking(prompt_ids))

    def _text(self, ids: list[int]) -> str:
        stops = set(self._stop_token_ids)
        own = list(itertools.takewhile(lambda number: number not in stops, ids))
        return self.bridge.tokenizer.decode(own)

    @cached_property
    def _form(self) -> _Form:
        form = _Form(self.bridge.renderer.resolver(_TOOLS).thinking)
        plain = self._text(self._answer(_PLAIN))
        before, _, after = (form.split(plain)[1] or "").partition(_ANSWER)
        form = replace(form, around=(before.strip(), after.strip()))
        texts = [(plain, _PLAIN), *self._printed(_REASONED)]
        if not all(form.accepts(*pair) for pair in texts):
            return replace(form, problem=f"it prints {texts[-1][0]!r:.100}")
        one, more = self._printed(_calling(1)), self._printed(_calling(2))
        if not one:
            return replace(form, calls_problem="it prints no calls")
        try:
            calls = _CallForm.of([form.split(text)[1] or "" for text, _ in (*one, *more)])
        except (ValueError, IndexError):
            calls = None
        found = replace(form, calls=calls)
        texts = [*one, *more, *self._printed(_calling(1, _ANSWER))]
        if calls is None or not all(found.accepts(*pair) for pair in texts):
            return replace(form, calls_problem=f"it prints {one[0][0]!r:.100}")
        return found

    def _printed(self, message: Message) -> list[tuple[str, Message]]:
        """Return the text that a model would sample for a message, if the template takes it."""
        with suppress(RowError):
            return [(self._text(self._answer(message)), message)]
        return []

    def _opens_thinking(self, prompt_ids: list[int] | None) -> bool | None:
        if not prompt_ids:
            return None
        prompt = self.bridge.tokenizer.decode(prompt_ids[-MAX_OPENER:])
        tags = [tag[0] for tag in TAG.finditer(prompt, before_thinking(prompt))]
        return bool(tags) and not any(map(CLOSING.search, tags))


# Attribution


class _Part(NamedTuple):
    """A part of a rendered text, up to ``end``."""

    end: int
    owner: int  # the message that it belongs to; -1: none
    turn: int  # the message in whose turn it is; -1: none
    is_content: int  # whether it is text of the message


def _parts(run: Run | None, rendered: RenderedRow | None, text: str) -> list[_Part]:
    """Cut a text at the fragments of its trace, if it was traced, and at the ends of turns."""
    turns = [] if rendered is None else rendered.ends
    last = turns[-1] if turns else 0
    ends, owners, content = [], [], set()
    if run is not None:
        position = list(itertools.accumulate(map(len, run.out), initial=0))
        ends, owners = position[1:], [-1] * len(run.out)
        pieces = pieces_of(run, position)
        add_unlooped(run, position, pieces)
        marks = itertools.pairwise([*run.marks, (len(run.out), -1)])
        whole = [(first, stop, k) for k, (first, stop) in pieces.items() if first >= 0]
        for first, stop, k in [*whole, *((first, stop, k) for (first, k), (stop, _) in marks)]:
            if k >= 0:
                owners[first:stop] = [k] * (stop - first)
        for index, k in run.taken:
            owners[index] = k if k >= 0 else owners[index]
        content = {*run.own, *(index for index, _ in run.taken)}
    parts = []
    start = 0
    for end in sorted({*ends, *turns, len(text)} - {0}):
        turn = bisect_right(turns, start) if start < last else -1
        at = bisect_right(ends, start)
        owner = turn if run is None else owners[at] if at < len(owners) else -1
        parts.append(_Part(end, owner, turn, at in content))
        start = end
    return parts


# Responses, learned from messages with unique words

_ANSWER, _THOUGHT = "Quaddle answers.", "Quoddle thinks."
_PLAIN = {"role": "assistant", "content": _ANSWER}
_REASONED = {**_PLAIN, **dict.fromkeys(REASONING_KEYS, _THOUGHT)}
_ARGUMENTS = [{"quimble": 'One "quoted" \u00fc\nline'}, {"quemble": [2, {"deep": None}]}]
_FUNCTIONS = [
    {"name": name, "arguments": given}
    for name, given in zip(("quibble_a", "quabble_b"), _ARGUMENTS, strict=True)
]
_IDS = ("quc00000a", "quc00000b")
_CALLS = [
    {"id": number, "type": "function", "function": function}
    for number, function in zip(_IDS, _FUNCTIONS, strict=True)
]
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": one["name"], "description": "", "parameters": _SCHEMA},
    }
    for one in _FUNCTIONS
]
_NAME = r"([^\s{}\[\]\"'<>|]+)"
_JSON = json.JSONDecoder()


def _calling(count: int, content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": _CALLS[:count]}


def _loosely(text: str) -> str:
    """Return a pattern of a text that allows other whitespace and other ids of calls."""
    pattern = r"\s*".join(["", *map(re.escape, re.findall(r"\w+|[^\w\s]", text)), ""])
    for number in _IDS:
        pattern = pattern.replace(number, r"([\w.:-]+)")
    return pattern


@dataclass(frozen=True)
class _CallForm:
    """Calls that print a name and its arguments as JSON, between texts of the template."""

    marker: str  # at the start of the first call
    first: re.Pattern[str]  # up to the arguments of the first call
    again: re.Pattern[str] | None  # from there to the arguments of the next one
    end: re.Pattern[str]

    @classmethod
    def of(cls, texts: Sequence[str]) -> _CallForm:
        """Return the form of texts with one call, two calls, …; `ValueError` if it is another."""
        for count, text in enumerate(texts, 1):
            end, patterns = 0, []
            for function in _FUNCTIONS[:count]:
                begin = text.index(function["name"], end)
                brace = text.index("{", begin)
                between = text[begin + len(function["name"]) : brace]
                patterns.append(re.compile(_loosely(text[end:begin]) + _NAME + _loosely(between)))
                value, end = _JSON.raw_decode(text, brace)
                if value != function["arguments"]:
                    raise ValueError
        marker = text.split()[0]
        if (marker[0] in "{[" and not marker.endswith("]")) or marker[0].isalpha():
            raise ValueError  # nothing shows where a call begins
        tail = re.compile(_loosely(text[end:]))
        return cls(marker, patterns[0], patterns[1] if len(patterns) > 1 else None, tail)

    def parse(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Return the content of a text and its calls."""
        content, marker, _ = text.partition(self.marker)
        start, calls = len(content), []
        found = self.first.match(text, start) if marker else None
        if marker and found is None:
            raw, status = text[start:], ToolCallParseStatus.MALFORMED_STRUCTURE
            return content, [ParsedToolCall(raw, status=status)]
        while found is not None:
            call = ParsedToolCall(text[start:], found[1])
            calls.append(call)
            try:
                call.arguments, end = _JSON.raw_decode(text, found.end())
            except ValueError:
                call.status = ToolCallParseStatus.INVALID_JSON
                return content, calls
            call.raw, start = text[start:end], end
            found = None if self.again is None else self.again.match(text, end)
        if calls and not self.end.match(text, start):
            calls[-1].status = ToolCallParseStatus.UNCLOSED_BLOCK
        return content, calls


@dataclass(frozen=True)
class _Form:
    """How a template prints reasoning, content and calls."""

    thinking: re.Pattern[str] | None
    around: tuple[str, str] = ("", "")  # text before and after every content
    calls: _CallForm | None = None
    problem: str = ""  # why responses cannot be parsed
    calls_problem: str = ""

    def split(self, text: str, opened: bool | None = None) -> tuple[str | None, str | None]:
        """Return reasoning and the rest; None if there is none.

        ``opened`` is whether the prompt opens the thinking, None if it is unknown.
        """
        tags = [] if self.thinking is None else list(self.thinking.finditer(text))
        closing = next((tag for tag in tags if CLOSING.search(tag[0])), None)
        opening = next((tag for tag in tags if not text[: tag.start()].strip()), closing)
        if opening is closing and not (opened or (opened is None and closing is not None)):
            return None, text
        start = 0 if opening is None or opening is closing else opening.end()
        if closing is None:
            return text[start:].strip(), None
        return text[start : closing.start()].strip(), text[closing.end() :]

    def parse(self, text: str, opened: bool | None = None) -> ParsedResponse:
        reasoning, rest = self.split(text, opened)
        if rest is None:
            return ParsedResponse("", reasoning, reasoning_complete=False)
        content, calls = (rest, []) if self.calls is None else self.calls.parse(rest)
        before, after = self.around
        content = content.strip().removeprefix(before).removesuffix(after).strip()
        return ParsedResponse(content, reasoning or None, calls)

    def accepts(self, text: str, message: Message) -> bool:
        """Whether the text of a message is parsed as that message."""
        parsed, calls = self.parse(text), message.get("tool_calls", ())
        found = [(call.name, call.arguments, call.status) for call in parsed.tool_calls]
        return (parsed.content, parsed.reasoning_content, found) == (
            message["content"],
            _THOUGHT if _THOUGHT in text else None,
            [(*call["function"].values(), ToolCallParseStatus.OK) for call in calls],
        )
