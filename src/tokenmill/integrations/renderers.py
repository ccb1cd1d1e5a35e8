"""tokenmill as a renderer of the package `renderers`: any chat template or encoder as `Renderer`.

Ids and masks are those of `tokenmill.prepare`, and `tokenmill.Bridge` continues rollouts. How a
template prints reasoning and calls is learned from messages with unique words.
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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.chat.program import Run
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import CLOSING, TAG, before_thinking
from tokenmill.chat.turns import Span, common_prefix
from tokenmill.errors import BridgeError, RowError, UsageError
from tokenmill.rl.bridge import MAX_OPENER, Bridge, as_array, check_messages
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

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = list[Any] | None
_log = logging.getLogger(__name__)


class TemplateRendererConfig(BaseRendererConfig):  # type: ignore[misc]
    """Options, named as in `tokenmill.prepare`; other fields are variables of the template."""

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
    is_prefix_stable = False  # unknown; `Bridge.rewrite` checks one conversation

    def __init__(self, tokenizer: Any, config: TemplateRendererConfig | None = None) -> None:
        self.config = config = config or TemplateRendererConfig()
        if config.thinking_retention is not None:
            raise UsageError("Remove thinking_retention: the template decides what stays.")
        self._tokenizer = tokenizer
        self.bridge = Bridge(
            tokenizer,
            chat_template=config.chat_template,
            chat_template_kwargs=config.model_extra,
            encoder=config.encoder,
            encoder_kwargs=config.encoder_kwargs,
            date=config.date,
        )
        self._encoder = Encoder(self.bridge.tokenizer, "hf")
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return type(self), (self._tokenizer, self.config)

    def render(
        self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render messages to ids with the message of each.

        `RowError` if the template raises an error, or a mask is not proven. With a generation
        prompt such a mask is left empty, which means that it is unknown.
        """
        tools, given, proven = tools or None, check_messages("messages", messages), None
        renderer, prompt = self.bridge.renderer, add_generation_prompt
        with self._lock:
            try:
                proven, accepted = renderer.conversation(given, tools)
            except RowError:
                if not prompt:
                    raise
            if prompt:
                accepted = self.bridge.messages(self.bridge.prompt(given, tools))
            text, run = renderer.printed(accepted, tools, prompt=prompt)
            turns, spans = (proven.ends, proven.spans or []) if proven else ([], [])
            same = len(common_prefix(text, proven.text)) if proven else 0
            if len(turns) != len(given) or max([0, *turns[:-1], *sum(spans, ())]) > same:
                turns, spans = [], []  # the template prints another text before a generation prompt
            turns = [*turns[:-1], same] if turns else []
            ends, content = [*turns, len(text)], _content(run, turns)
            encoded = self._encoder.encode([text, text], [spans, content], [ends, ends])
        if encoded.rejected and not prompt:
            raise encoded.rejected[0][1]
        (ids, mask, counts), (_, is_content, _) = encoded.row(0), encoded.row(1)
        owner = np.repeat([*range(len(turns)), -1], np.diff(counts, prepend=0))
        found = RenderedTokens(token_ids=ids.tolist(), message_indices=owner.tolist())
        if turns and not encoded.rejected:
            found.sampled_mask = (mask > 0).tolist()
            if content:
                is_answer = np.array(
                    [*(message["role"] == "assistant" for message in given), False]
                )
                found.is_content = (np.where(is_answer[owner], mask, is_content) > 0).tolist()
        return _described(found, given)

    def render_ids(self, messages: Messages, **options: Any) -> list[int]:
        return list(self.render(messages, **options).token_ids)

    def get_stop_token_ids(self) -> list[int]:
        """Return the end-of-turn tokens of an answer and of a call, and the eos token."""
        with self._lock:
            return list(self._stop_token_ids)

    @cached_property
    def _stop_token_ids(self) -> list[int]:
        tokenizer, found = self.bridge.tokenizer, []
        for message in (_PLAIN, _calling(1)):
            with suppress(RowError):
                ids = self._answer(message, _TOOLS if message is not _PLAIN else None)
                while ids and not tokenizer.decode(ids[-1:]).strip():
                    ids.pop()  # some templates train the line break after the token
                found += ids[-1:] if ids and tokenizer.table.is_added[ids[-1]] else []
        if tokenizer.eos_token_id is not None:
            found.append(tokenizer.eos_token_id)
        return list(dict.fromkeys(found))

    def _answer(self, message: Message, tools: Tools = None) -> list[int]:
        """Return the ids that a model would sample for a message."""
        conversation = [{"role": "user", "content": "Hello."}, message]
        try:
            rendered = self.render(conversation, tools=tools)
        except RowError:  # some templates take no conversation without tools
            rendered = self.render(conversation, tools=_TOOLS)
        return list(itertools.compress(rendered.token_ids, rendered.sampled_mask))

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int],
        new_messages: Messages, *, tools: Tools = None,
    ) -> RenderedTokens | None:  # fmt: skip
        """Return the ids, followed by the text that the template prints after them.

        None if this renderer did not render the prompt, or if the template would print it or the
        completion differently once the new messages follow.
        """
        new = check_messages("new_messages", new_messages)
        before, sampled = as_array(previous_prompt_ids), as_array(previous_completion_ids)
        if not before.size or not new or reject_assistant_in_extension(new):
            return None
        previous = [*before.tolist(), *sampled.tolist()]
        with self._lock:
            try:
                ids = self.bridge.extend(previous, new)
                messages = self.bridge.messages(ids)
                whole = self.render(messages, tools=tools, add_generation_prompt=True)
            except (BridgeError, RowError, UsageError) as error:
                _log.info("The prompt has to be rendered again: %s", error)
                return None
        count, first = len(ids) - len(previous), len(messages) - len(new)
        found = RenderedTokens(ids, [-1] * len(ids), [False] * len(ids))
        if whole.token_ids[-count:] == ids[-count:]:
            owners = [max(owner - first, -1) for owner in whole.message_indices[-count:]]
            found.message_indices[-count:] = owners
            if own := whole.is_content[-count:]:
                new_content = [k >= 0 and is_own for k, is_own in zip(owners, own, strict=True)]
                found.is_content = [False] * len(previous) + new_content
        return _described(found, new)

    def parse_response(
        self, token_ids: list[int], *, tools: Tools = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse a completion; ``prompt_ids`` show whether the prompt opens the thinking.

        `UsageError` if the template's form of reasoning or, with ``tools``, of calls is unknown.
        """
        with self._lock:
            form = self._form
            if problem := form.problem or (form.calls_problem if tools else ""):
                raise UsageError(f"Responses of this template cannot be parsed: {problem}.")
            opened = None
            if prompt_ids is not None and (prompt_array := as_array(prompt_ids)).size:
                prompt = self.bridge.tokenizer.decode(prompt_array[-MAX_OPENER:].tolist())
                tags = [tag[0] for tag in TAG.finditer(prompt, before_thinking(prompt))]
                opened = bool(tags) and not any(map(CLOSING.search, tags))
            return form.parse(self._text(as_array(token_ids).tolist()), opened)

    def _text(self, ids: list[int]) -> str:
        own = itertools.takewhile(lambda number: number not in self._stop_token_ids, ids)
        return self.bridge.tokenizer.decode(own)

    @cached_property
    def _form(self) -> _Form:
        def texts(tools: Tools, *messages: Message) -> list[tuple[str, Message]]:
            found = []
            for message in messages:
                with suppress(RowError):  # a template need not accept all of them
                    found.append((self._text(self._answer(message, tools)), message))
            return found

        form = _Form(self.bridge.renderer.resolver(_TOOLS).thinking)
        plain = texts(None, _PLAIN, _REASONED)
        if plain:
            before, _, after = (form.split(plain[0][0])[1] or "").partition(_ANSWER)
            form.around = before.strip(), after.strip()
        form.problem = form.mismatch(plain) if plain else "it accepts no answer"
        calling = texts(_TOOLS, _calling(1), _calling(2), _calling(1, _ANSWER), _PLAIN)
        alone = [form.split(text)[1] or "" for text, message in calling if not message["content"]]
        with suppress(ValueError):
            form.calls = _CallForm.of(alone) if alone else None
        form.calls_problem = form.mismatch(calling) if alone else "it prints no calls"
        form.calls = None if form.calls_problem else form.calls
        return form


def _described(rendered: RenderedTokens, messages: list[dict[str, Any]]) -> RenderedTokens:
    rendered.message_roles = [message.get("role") or "" for message in messages]
    rendered.message_tool_names = extract_message_tool_names(messages)
    return rendered


def _content(run: Run | None, turns: list[int]) -> list[Span]:
    """Return the spans of a traced text that come from the message in whose turn they are."""
    if run is None or run.inserted:
        return []  # unknown
    position = list(itertools.accumulate(map(len, run.out), initial=0))
    own = {*run.own, *(index for index, _ in run.taken)}
    own -= {index for index, k in run.taken if 0 <= k != bisect_right(turns, position[index])}
    return [(position[index], position[index + 1]) for index in sorted(own)]


# How a template prints reasoning and calls

_ANSWER, _THOUGHT = "Quaddle answers.", "Quoddle thinks."
_PLAIN = {"role": "assistant", "content": _ANSWER}
_REASONED = {**_PLAIN, **dict.fromkeys(REASONING_KEYS, _THOUGHT)}
_FUNCTIONS: dict[str, Any] = {
    "quibble_a": {"quimble": 'One "quoted" \u00fc\nline'},
    "quabble_b": {"quemble": [2, {"deep": None}]},
}
_CALLS = [
    {"id": f"id{name}"[:9], "type": "function", "function": {"name": name, "arguments": given}}
    for name, given in _FUNCTIONS.items()
]
_SCHEMA = {"description": "A tool.", "parameters": {"type": "object", "properties": {}}}
_TOOLS: list[Any] = [{"type": "function", "function": {"name": n, **_SCHEMA}} for n in _FUNCTIONS]
_NAME = r"([^\s{}\[\]\"'<>|]+)"
_JSON = json.JSONDecoder()


def _calling(count: int, content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": _CALLS[:count]}


def _loosely(text: str) -> str:
    """Return a pattern of a text that allows other whitespace and other ids of calls."""
    pattern = r"\s*".join(["", *map(re.escape, re.findall(r"\w+|[^\w\s]", text)), ""])
    for call in _CALLS:
        pattern = pattern.replace(str(call["id"]), r"[\w.:-]+")
    return pattern


@dataclass
class _CallForm:
    """Calls that print a name and its arguments as JSON, between texts of the template."""

    marker: str  # at the start of the first call
    first: re.Pattern[str]  # up to the arguments of the first call
    again: re.Pattern[str] | None  # from there to those of another one
    end: re.Pattern[str]

    @classmethod
    def of(cls, texts: Sequence[str]) -> _CallForm:
        """Return the form of texts with one call, two calls, …; `ValueError` if it is another."""
        patterns: list[re.Pattern[str]] = []
        for count, text in enumerate(texts, 1):
            end, patterns = 0, []
            for name, given in list(_FUNCTIONS.items())[:count]:
                begin, brace = text.index(name, end), text.index("{", text.index(name, end))
                between = text[begin + len(name) : brace]
                patterns.append(re.compile(_loosely(text[end:begin]) + _NAME + _loosely(between)))
                value, end = _JSON.raw_decode(text, brace)
                if value != given:
                    raise ValueError
        marker = re.split(r'[\s{"]|quibble_a', f"{text.strip()} ")[0].rstrip("[")
        if not marker:
            raise ValueError  # nothing shows where calls begin
        again = patterns[1] if len(patterns) > 1 else None
        return cls(marker, patterns[0], again, re.compile(_loosely(text[end:])))

    def parse(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Return the content of a text and its calls."""
        content, marker, _ = text.partition(self.marker)
        start, calls, pattern = len(content), [], self.first if marker else None
        while pattern and (found := pattern.match(text, start)):
            calls.append(call := ParsedToolCall(text[start:], found[1]))
            try:
                call.arguments, end = _JSON.raw_decode(text, found.end())
            except ValueError:
                call.status = ToolCallParseStatus.INVALID_JSON
                return content, calls
            call.raw, start, pattern = text[start:end], end, self.again
        if marker and not calls:
            calls = [ParsedToolCall(text[start:], status=ToolCallParseStatus.MALFORMED_STRUCTURE)]
        elif calls and not self.end.match(text, start):
            calls[-1].status = ToolCallParseStatus.UNCLOSED_BLOCK
        return content, calls


@dataclass
class _Form:
    thinking: re.Pattern[str] | None
    around: tuple[str, str] = ("", "")  # text before and after every content
    calls: _CallForm | None = None
    problem: str = ""  # why responses cannot be parsed
    calls_problem: str = ""  # why their calls cannot be parsed

    def split(self, text: str, opened: bool | None = None) -> tuple[str | None, str | None]:
        """Return the reasoning of a response and the rest; None if there is none.

        ``opened`` is whether the prompt opens the thinking, None if this is unknown.
        """
        tags = [] if self.thinking is None else list(self.thinking.finditer(text))
        closing = next((tag for tag in tags if CLOSING.search(tag[0])), None)
        opening = [t for t in tags[:1] if t is not closing and not text[: t.start()].strip()]
        if not opening and not (opened or (opened is None and closing is not None)):
            return None, text
        start = opening[0].end() if opening else 0
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

    def mismatch(self, texts: list[tuple[str, Message]]) -> str:
        """Return a problem if a text is not parsed as its message."""
        for text, message in texts:
            parsed = self.parse(text)
            expected = [(*c["function"].values(), "ok") for c in message.get("tool_calls", ())]
            reasoning = _THOUGHT if _THOUGHT in text else None
            found = [(call.name, call.arguments, call.status) for call in parsed.tool_calls]
            own = parsed.content, parsed.reasoning_content, found
            if own != (message["content"], reasoning, expected):
                return f"it prints {text!r:.100}"
        return ""
