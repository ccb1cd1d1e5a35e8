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
from numpy.typing import NDArray

from tokenmill._core.optional import optional
from tokenmill.chat.calls import TOOL_ROLES
from tokenmill.chat.program import Run
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import CLOSING, TAG, before_thinking
from tokenmill.chat.turns import Span, with_unlooped
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

Message = Mapping[str, Any]
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
    is_prefix_stable = False  # unknown; `Bridge.rewrite` checks one conversation
    effective_thinking_retention = "all"  # the bridge continues all that the template does not drop

    def __init__(self, tokenizer: Any, config: TemplateRendererConfig | None = None) -> None:
        self.config = config = config or TemplateRendererConfig()
        if config.thinking_retention is not None:
            raise UsageError(
                "thinking_retention is not supported, because the template decides which thinking"
                " it keeps. Set the template's own variable."
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
        self._encoder = Encoder(self.bridge.tokenizer, "hf")
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return type(self), (self._tokenizer, self.config)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Render messages to ids with the message of each.

        Raises:
            RowError: The template raises an error, or a mask is not proven. With a generation
                prompt such a mask is left empty, which means that it is unknown.
        """
        prompt, tools = add_generation_prompt, tools or None
        given, proven, renderer = list(map(dict, messages)), None, self.bridge.renderer
        with self._lock:
            try:
                proven, accepted = renderer.conversation(given, tools)
            except RowError:
                if not prompt:
                    raise
            if prompt:
                accepted = self.bridge.messages(self.bridge.prompt(given, tools))
            text, run = renderer.printed(accepted, tools, prompt=prompt)
            if proven and (not text.startswith(proven.text) or len(proven.ends) != len(given)):
                proven = None  # the template prints another text before a generation prompt
            turns, spans = (proven.ends, proven.spans or []) if proven else ([], [])
            parts, content = _parts(run, turns, len(text))
            ends = parts[:, 0].tolist()
            encoded = self._encoder.encode([text, text], [spans, content or []], [ends, ends])
        if encoded.rejected:
            if not prompt:
                raise encoded.rejected[0][1]
            proven = None
        (ids, mask, counts), (_, is_content, _) = encoded.row(0), encoded.row(1)
        owner, turn = np.repeat(parts[:, 1:], np.diff(counts, prepend=0), axis=0).T
        # A trained token is the answer's, also where the template prints it in the next turn.
        owner = np.where(mask, turn, owner) if proven else owner
        found = RenderedTokens(token_ids=ids.tolist(), message_indices=owner.tolist())
        if proven:
            found.sampled_mask = (mask > 0).tolist()
        if proven and content is not None:
            is_answer = np.array([*(message["role"] == "assistant" for message in given), False])
            found.is_content = (np.where(is_answer[owner], mask, is_content) > 0).tolist()
        return _described(found, given)

    def render_ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
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
        if not found:
            raise UsageError("The template ends no turn with a token, and there is no eos_token.")
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
        new_messages: Sequence[Message], *, tools: Tools = None,
    ) -> RenderedTokens | None:  # fmt: skip
        """Return the ids, followed by the text that the template prints after them.

        None if this renderer did not render the prompt, or if the template would print it or the
        completion differently once the new messages follow.
        """
        new = [dict(message) for message in new_messages]
        if not previous_prompt_ids or not new or reject_assistant_in_extension(new):
            return None
        previous, sampled = [*previous_prompt_ids, *previous_completion_ids], None
        with self._lock:
            try:
                if any(message.get("role") in TOOL_ROLES for message in new):
                    sampled = self._parsed(previous_completion_ids, previous_prompt_ids, new)
                ids = self.bridge.extend(previous, new, sampled=sampled)
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
            if whole.is_content:
                own = zip(owners, whole.is_content[-count:], strict=True)
                found.is_content = [False] * len(previous) + [
                    k >= 0 and is_own for k, is_own in own
                ]
        return _described(found, new)

    def _parsed(
        self, ids: list[int], prompt: list[int], answers: Sequence[Message]
    ) -> Message | None:
        """Return a completion as a message, with the ids of its answers; None if it has no form."""
        try:
            parsed = self.parse_response(ids, tools=_TOOLS, prompt_ids=prompt)
        except UsageError:
            return None
        if any(call.status != "ok" for call in parsed.tool_calls):
            return None
        calls = [
            {"id": answer.get("tool_call_id"), "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for call, answer in zip(parsed.tool_calls, answers, strict=False)
        ]  # fmt: skip
        message = {"reasoning_content": parsed.reasoning_content, "tool_calls": calls}
        given = {name: value for name, value in message.items() if value}
        return {"role": "assistant", "content": parsed.content, **given}

    def parse_response(
        self, token_ids: list[int], *, tools: Tools = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse a completion; ``prompt_ids`` show whether the prompt opens the thinking.

        Raises:
            UsageError: The template's form of reasoning or, with ``tools``, of calls is unknown.
        """
        with self._lock:
            form = self._form
            if problem := form.problem or (form.calls_problem if tools else ""):
                raise UsageError(f"Responses of this template cannot be parsed: {problem}.")
            opened = None
            if prompt_ids:
                prompt = self.bridge.tokenizer.decode(prompt_ids[-MAX_OPENER:])
                tags = [tag[0] for tag in TAG.finditer(prompt, before_thinking(prompt))]
                opened = bool(tags) and not any(map(CLOSING.search, tags))
            return form.parse(self._text(token_ids), opened)

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
        return form


def _described(rendered: RenderedTokens, messages: list[dict[str, Any]]) -> RenderedTokens:
    rendered.message_roles = [message.get("role") or "" for message in messages]
    rendered.message_tool_names = extract_message_tool_names(messages)
    return rendered


def _parts(
    run: Run | None, turns: Sequence[int], size: int
) -> tuple[NDArray[np.int64], list[Span] | None]:
    """Cut a text at the fragments of its trace, if it was traced, and at the ends of turns.

    Returns:
        Of each part its end, the message that it belongs to, and the message in whose turn it is,
        -1 if there is none; and the spans that are text of a message, None if these are unknown.
    """
    ends: list[int] = []
    owners: list[int] = []
    content = None
    if run is not None and not run.inserted:
        position = list(itertools.accumulate(map(len, run.out), initial=0))
        owners = [-1] * len(run.out)
        pieces = with_unlooped(run, position)
        marks = itertools.pairwise([*run.marks, (len(run.out), -1)])
        spans = [(first, stop, k) for k, (first, stop) in pieces.items() if first >= 0]
        spans += [(first, stop, k) for (first, k), (stop, _) in marks if k >= 0]
        for first, stop, k in spans:
            owners[first:stop] = [k] * (stop - first)
        for index, k in run.taken:
            owners[index] = k if k not in pieces and k >= 0 else owners[index]
        own = sorted({*run.own, *(index for index, _ in run.taken)})
        content, ends = [(position[index], position[index + 1]) for index in own], position[1:]
    parts, start = [], 0
    for end in sorted({*ends, *turns, size} - {0}):
        turn = bisect_right(turns, start) if turns and start < turns[-1] else -1
        owner = owners[bisect_right(ends, start)] if ends and start < ends[-1] else turn
        parts.append((end, owner, turn))
        start = end
    return np.array(parts, np.int64), content


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
        start, calls = len(content), []
        found = self.first.match(text, start)
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
        if marker and not calls:
            broken = ToolCallParseStatus.MALFORMED_STRUCTURE
            calls.append(ParsedToolCall(text[start:], status=broken))
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
        opening = next(
            (t for t in tags if t is not closing and not text[: t.start()].strip()), None
        )
        if opening is None and not (opened or (opened is None and closing is not None)):
            return None, text
        start = 0 if opening is None else opening.end()
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
            if (parsed.content, parsed.reasoning_content, found) != (
                message["content"], reasoning, expected,
            ):  # fmt: skip
                return f"it prints {text!r:.100}"
        return ""
