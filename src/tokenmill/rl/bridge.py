"""Continue rollouts in token ids, for any chat template.

A bridge appends the text that the template prints after a sampled turn in the whole conversation.
It never changes an id. It finds the conversation by the longest earlier prompt that the ids begin
with. docs/guides/bridge.md explains the rules.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill._core.encoders import arguments_of
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.append import Rewrite, excerpt, first_difference, rewrite_between
from tokenmill.chat.calls import TOOL_ROLES
from tokenmill.chat.program import Run
from tokenmill.chat.shapes import Form, Message, conversation
from tokenmill.chat.thinking import CLOSING, TAG, before_thinking
from tokenmill.chat.turns import SpanResolver, common_prefix, tail
from tokenmill.chat.unique_words import WORD, with_unique_words
from tokenmill.errors import BridgeError, RowError, UsageError
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.tokenizer import Tokenizer

MAX_PROMPTS = 65_536  # each has references to its messages, not its text
MAX_OPENER = 256  # characters of a generation prompt that are searched for thinking
HINT_BY_TEXT = (
    " (only the text of the sampled turn is known; pass the parsed message, with its tool_calls and"
    " reasoning_content, as `sampled`)"
)
_SPREAD, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)

Ids = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class _KnownPrompt:
    """A prompt that was returned or remembered."""

    messages: list[Message]
    tools: list[Any] | None
    characters: int
    text_digest: int
    opened: str  # the thinking that the generation prompt opens
    tokens: int
    ids_digest: int

    def begins(self, text: str) -> bool:
        return len(text) >= self.characters and self.text_digest == _digest(text[: self.characters])


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A turn sampled after a prompt, and the messages that follow it."""

    prompt: _KnownPrompt
    own: str  # its text
    stop: str  # the special token at its end, as text; may be empty
    answer: list[Message]
    by_text: bool  # whether only its text is known, not its message

    @property
    def turn(self) -> int:
        return len(self.prompt.messages)

    def complete(self, form: Form) -> Form:
        """Return the conversation in which the turn has this form."""
        return Form([*self.prompt.messages, *form.messages, *self.answer], form.note)

    def is_in(self, text: str) -> bool:
        return self.prompt.begins(text) and text.startswith(self.own, self.prompt.characters)


@dataclass(frozen=True, slots=True)
class _Printed:
    """A rendered conversation."""

    messages: list[Message]
    text: str
    run: Run | None
    check: SpanResolver
    render: Callable[[list[Message], bool], str]

    def closing(self, k: int) -> tuple[int, int]:
        """Return where the words of a sampled turn end, and where its end-of-turn token ends."""
        if self.run is not None:
            try:
                words, close = self.check.closing(self.run, k)
                if close is not None:
                    return words, close
            except RowError:
                pass  # the trace does not show the turn in one piece
        try:
            return self._closing_by_render(k)
        except RowError as error:
            raise BridgeError(error.message, turn=k) from error

    def _closing_by_render(self, k: int) -> tuple[int, int]:
        """Return `closing` from the renders before and after the turn."""
        before, after = (
            self.render(self.messages[:k], True),
            self.render(self.messages[: k + 1], False),
        )
        if not self.text.startswith(before):
            raise BridgeError(f"the start of turn {k} is unknown", turn=k)
        close = len(common_prefix(after, self.text).rstrip())
        turn, content = self.text[len(before) : close], self.messages[k].get("content")
        if isinstance(content, str) and content.strip() and not self.messages[k].get("tool_calls"):
            position = turn.rfind(content.strip())
            if position >= 0:
                return len(before) + position + len(content.strip()), close
        endings = [tag for tag in TAG.finditer(turn) if tag.end() == len(turn)]
        return close - len(endings[0][0] if endings else ""), close

    def ends(self) -> list[int]:
        if self.run is None:
            return []
        ends = self.check.resolve_spans(self.run, self.messages, None).ends
        return [*ends[:-1], ends[-1] - len(tail(self.run))]


class Bridge:
    """Continues rollouts in token ids, for any chat template.

    Threads may share a bridge. A copy in another process starts without prompts.

    Args:
        tokenizer: Directory, ``tokenizer.json``, hub id, ``tokenizers.Tokenizer`` or a
            transformers tokenizer.
        tools: Tool descriptions for conversations without their own.
        chat_template: Jinja source or a file with it; None: the tokenizer's own.
        chat_template_kwargs: Further variables for the chat template.
        encoder: Python function that encodes conversations, as for `prepare`.
        encoder_kwargs: Additional arguments of the encoder.
        date: ``YYYY-MM-DD``, required by templates that print the date.
        tokenizer_backend: ``auto``, ``transformers`` or ``file``.
        trust_remote_code: Allow a tokenizer to run its own code.
        renderer: ``auto``, or ``jinja2`` to compare every render with the reference.
        remembered: Maximum number of known prompts; the least recently used is dropped.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: list[Any] | None = None,
        chat_template: Any = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        encoder: Any = None,
        encoder_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        tokenizer_backend: str = "auto",
        trust_remote_code: bool = False,
        renderer: str = "auto",
        remembered: int = MAX_PROMPTS,
    ) -> None:
        self.tokenizer: Tokenizer = load(
            tokenizer,
            backend=tokenizer_backend,
            chat_template=chat_template,
            encoder=encoder,
            encoder_kwargs=encoder_kwargs,
            trust_remote_code=trust_remote_code,
        )
        self.tools = tools
        self._options: dict[str, Any] = {
            "chat_template_kwargs": chat_template_kwargs, "date": date, "renderer": renderer,
            "remembered": remembered,
        }  # fmt: skip
        if self.tokenizer.template is None:
            hint = self.tokenizer.notes.get("no_template")
            either = () if hint is None else (", or ", *arguments_of(hint))
            raise UsageError(
                "The tokenizer has no chat template. Set ", ("chat_template",), *either, "."
            )
        spec = ChatSpec(format="messages", chat_template_kwargs=chat_template_kwargs, date=date)
        self.renderer = Renderer(
            spec,
            self.tokenizer.template,
            self.tokenizer.special_tokens,
            renderer=renderer,
            tokenizer=self.tokenizer,
            as_text=True,
        )
        self._prompts: OrderedDict[tuple[int, int], _KnownPrompt] = OrderedDict()
        self._powers: NDArray[np.uint64] = np.ones(1, np.uint64)
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return partial(Bridge, **self._options), (self.tokenizer, self.tools)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> list[int]:
        """Return the ids of a conversation and its generation prompt.

        ``tools`` defaults to the bridge's, here and below. `RowError` if the template raises an
        error on the conversation.
        """
        with self._lock:
            if not check_messages("messages", messages):
                raise UsageError(("messages",), " must contain at least one message.")
            tools = self.tools if tools is None else tools
            printed = self._print_whole(messages, tools)
            ids = self._encode(printed.text)
            self._keep(as_array(ids), printed, tools)
            return ids

    def extend(
        self,
        ids: Ids,
        messages: Sequence[Mapping[str, Any]],
        *,
        sampled: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the same ids, followed by the template's text after the sampled turn.

        The end-of-turn token is added first if it was not sampled (a length limit). Any other token
        that stopped the engine is part of the turn.

        Args:
            ids: The ids of `prompt` or `extend`, and everything that was sampled after them.
            messages: The messages after the sampled turn: tool results, a user or system message.
            sampled: The sampled turn as a parsed message, with its calls and reasoning. None: its
                text, which is enough for most templates.

        Raises:
            BridgeError: The template would rewrite earlier text, or raises an error.
            UsageError: The ids do not begin with a known prompt, or `sampled` is required.
        """
        if sampled is not None:
            check_messages("sampled", [sampled])
        if not check_messages("messages", messages):
            raise UsageError(("messages",), " is empty; pass the messages after the sampled turn.")
        with self._lock:
            numbers = as_array(ids)
            self._check_ids(numbers)
            prompt = self._find(numbers)
            own = numbers[prompt.tokens :]
            try:
                new = conversation("messages", check_messages("messages", messages)).messages
            except RowError as error:
                raise BridgeError(error.message) from error
            if any(message["role"] == "assistant" for message in new):
                raise UsageError(
                    ("messages",),
                    " must not contain an assistant message; pass the sampled turn as ",
                    ("sampled",),
                    ".",
                )
            if not len(own) and sampled is None:
                raise UsageError(
                    "Nothing was sampled after the prompt. Pass all messages to `prompt`, or"
                    " sampled={'role': 'assistant', 'content': ''} for an empty turn."
                )
            try:
                printed, following = self._follow(prompt, numbers, new, sampled)
            except RowError as error:
                raise BridgeError(error.message, turn=len(prompt.messages)) from error
            added = self._encode_after(numbers, following)
            whole = np.concatenate([numbers, as_array(added)])
            self._keep(whole, printed, prompt.tools)
            return [*(ids if type(ids) is list else numbers.tolist()), *added]

    def is_append_only(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> bool:
        """Whether the template never rewrites a rollout of this conversation; see `rewrite`."""
        return self.rewrite(messages, tools) is None

    def rewrite(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> Rewrite | None:
        """Return the first turn that the template would rewrite; None if there is none.

        Every assistant's turn after the first message counts as sampled, as the template prints it
        when it is the last one.
        """
        with self._lock:
            tools = self.tools if tools is None else tools
            messages = check_messages("messages", messages)
            ends_open = bool(messages) and messages[-1].get("role") != "assistant"
            conversation = self._print_whole(messages, tools, prompt=ends_open).messages
            assistants = [k for k, m in enumerate(conversation) if m["role"] == "assistant" and k]
            nexts = [*assistants[1:], len(conversation)]
            for k, following in zip(assistants, nexts, strict=False):
                prompt = self._print(conversation[:k], tools, prompt=True)
                last = self._print(conversation[: k + 1], tools, prompt=False)
                sampled = last.text[: last.closing(k)[1]]
                if not sampled.startswith(prompt.text):
                    return rewrite_between(prompt.text, sampled, prompt.ends(), last.ends())
                if len(conversation) == k + 1:
                    break  # no message follows it
                later = self._print(conversation[:following], tools, prompt=True)
                if not later.text.startswith(sampled):
                    ends = [*last.ends()[:-1], len(sampled)]
                    return rewrite_between(sampled, later.text, ends, later.ends())
            return None

    def remember(
        self, ids: Ids, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> None:
        """Add a prompt that another process or library created.

        Raises:
            UsageError: Ids and conversation are different texts.
        """
        with self._lock:
            tools = self.tools if tools is None else tools
            numbers = as_array(ids)
            self._check_ids(numbers)
            printed = self._print_whole(messages, tools)
            decoded, text = self._text(numbers, 0), printed.text
            if decoded != text and numbers.tolist() != self._encode(text):
                position = first_difference(decoded, text)
                raise UsageError(
                    f"The ids are not the prompt of this conversation: they decode to"
                    f" {excerpt(decoded, position)}, the template prints {excerpt(text, position)}."
                )
            self._keep(numbers, printed, tools)

    def messages(self, ids: Ids) -> list[Message]:
        """Return the conversation of the longest known prompt that the ids begin with.

        A sampled turn is a message in the form in which the template printed it.
        """
        with self._lock:
            return list(self._find(as_array(ids)).messages)

    def clear_cache(self) -> None:
        """Remove every known prompt."""
        with self._lock:
            self._prompts.clear()

    def _print_whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None,
        *,
        prompt: bool = True,
    ) -> _Printed:
        """Render a conversation in the first form that the template accepts."""
        forms = conversation("messages", check_messages("messages", messages)).forms()
        return next(self._accepted(forms, tools, prompt=prompt))

    def _accepted(
        self, forms: Iterable[Form], tools: Any, hint: str = "", *, prompt: bool = True
    ) -> Iterator[_Printed]:
        """Yield every form of a conversation that the template accepts; raise if there is none."""
        first_error: RowError | None = None
        is_accepted = False
        for form in forms:
            try:
                printed = self._print(form.messages, tools, prompt=prompt)
            except RowError as error:
                first_error = first_error or error
                continue
            is_accepted = True
            yield printed
        if not is_accepted:
            assert first_error is not None
            raise RowError(
                f"{first_error.message}{hint}", reason=first_error.reason
            ) from first_error

    def _print(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> _Printed:
        def render(messages: list[Message], prompt: bool) -> str:
            return self.renderer.printed(messages, tools, prompt=prompt)[0]

        text, run = self.renderer.printed(messages, tools, prompt=prompt)
        return _Printed(messages, text, run, self.renderer.resolver(tools), render)

    # The text after a sampled turn

    def _follow(
        self,
        prompt: _KnownPrompt,
        numbers: NDArray[np.int64],
        new: list[Message],
        sampled: Mapping[str, Any] | None,
    ) -> tuple[_Printed, str]:
        """Return the conversation with the turn and its answer, and the text after the turn."""
        own = self._text(numbers, prompt.tokens)
        stop = ""
        if len(numbers) > prompt.tokens and self.tokenizer.table.is_special[numbers[-1]]:
            stop = self._token(numbers[-1])
        turn = _Sampled(prompt, own, stop, new, sampled is None)
        forms = self._candidate_messages(turn)
        if sampled is not None:
            forms = conversation("messages", [dict(sampled)]).forms()
        candidates: list[_Printed] = []
        hint = HINT_BY_TEXT if turn.by_text else ""
        for printed in self._accepted(map(turn.complete, forms), prompt.tools, hint):
            if turn.is_in(printed.text):
                printed, following = self._continue_exact(turn, printed)
                break
            candidates.append(printed)
        else:
            printed = candidates[0]
            stop, following = self._continue_reworded(turn, printed)
        if turn.by_text:
            self._require_calls_if_needed(turn, printed, stop + following)
        return printed, following

    def _candidate_messages(self, turn: _Sampled) -> Iterator[Form]:
        """Yield messages that a sampled text may represent, the most likely first.

        First with its thinking as reasoning_content, then unchanged. Stop at a message for which
        the template prints the sampled text at the end: if it prints other text when more messages
        follow, that is a rewrite.
        """
        prompt, own, words = turn.prompt, turn.own, turn.own.removesuffix(turn.stop)
        whole = prompt.opened + words
        parted = self._split_reasoning(whole, prompt.tools)
        contents = dict.fromkeys((words, whole, own, prompt.opened + own))
        plain = [{"role": "assistant", "content": content} for content in contents]
        for message in plain if parted is None else [parted, *plain]:
            yield Form([message])
            try:
                alone = self._print([*prompt.messages, message], prompt.tools, prompt=False).text
            except RowError:
                continue
            if prompt.begins(alone) and alone.startswith(words, prompt.characters):
                return

    def _split_reasoning(self, text: str, tools: list[Any] | None) -> Message | None:
        """Return a text with thinking as content and reasoning_content; None if it has none."""
        tags = self.renderer.resolver(tools).thinking
        matches = list(tags.finditer(text)) if tags is not None else []
        closing = next((tag for tag in matches if CLOSING.search(tag[0])), None)
        if closing is None:
            return None
        opening = next((tag for tag in matches if tag.start() < closing.start()), None)
        start = 0 if opening is None else opening.end()
        return {
            "role": "assistant",
            "content": text[closing.end() :].lstrip("\n"),
            "reasoning_content": text[start : closing.start()].strip("\n"),
        }

    def _continue_exact(self, sampled: _Sampled, printed: _Printed) -> tuple[_Printed, str]:
        """Continue after a turn that the template prints exactly as it was sampled."""
        end = sampled.prompt.characters + len(sampled.own)
        turn, stop = printed.messages[sampled.turn], sampled.stop
        if sampled.by_text and not (stop and not (turn.get("content") or "").endswith(stop)):
            printed = self._without_end_of_turn(sampled, printed)
        elif not sampled.by_text:
            words, _ = printed.closing(sampled.turn)
            if printed.text[end:words].strip():
                raise UsageError(
                    ("sampled",),
                    f" contains text that was not sampled: {excerpt(printed.text[end:words], 0)}",
                )
        return printed, printed.text[end:]

    def _without_end_of_turn(self, sampled: _Sampled, printed: _Printed) -> _Printed:
        """Print the turn without an end-of-turn text that was sampled as part of its content.

        If it is not a special token, only the render shows which text ends a turn.
        """
        prompt, own = sampled.prompt, sampled.own
        words, close = printed.closing(sampled.turn)
        end_of_turn = printed.text[words:close]
        if prompt.characters + len(own) != words or not _closed(
            own, end_of_turn, printed.text[close:]
        ):
            return printed
        turn = printed.messages[sampled.turn]
        core = turn["content"] if end_of_turn.isspace() else turn["content"].rstrip()
        form = sampled.complete(Form([{**turn, "content": core.removesuffix(end_of_turn)}]))
        closed = self._print(form.messages, prompt.tools, prompt=True)
        return closed if sampled.is_in(closed.text) else printed

    def _continue_reworded(self, sampled: _Sampled, printed: _Printed) -> tuple[str, str]:
        """Continue after a turn that the template prints differently; raise if it rewrites it.

        A difference is allowed if the template prints the same text with and without the following
        messages: trimmed whitespace, JSON with other spaces. Returns the sampled end-of-turn text
        and the text after it.
        """
        prompt, own, stop, k = sampled.prompt, sampled.own, sampled.stop, sampled.turn
        if not prompt.begins(printed.text):
            before = self._print(prompt.messages, prompt.tools, prompt=True)
            rewrite = rewrite_between(
                before.text + own, printed.text, before.ends(), printed.ends()
            )
            raise _bridge_error(rewrite, sampled.by_text)
        words, close = printed.closing(k)
        last_render = self._print(printed.messages[: k + 1], prompt.tools, prompt=False)
        last_text, (alone_words, alone_close) = last_render.text, last_render.closing(k)
        words = alone_words = min(words, alone_words)
        text, start = printed.text, prompt.characters
        end_of_turn, alone_closer = text[words:close], last_text[alone_words:alone_close]
        if last_text[:alone_words] != text[:words] or (
            stop and alone_closer.endswith(stop) and not end_of_turn.endswith(stop)
        ):
            raise _bridge_error(
                Rewrite(k, last_text[start:alone_close], text[start:close]), sampled.by_text
            )
        if not (end_of_turn.endswith(stop) if stop else _closed(own, end_of_turn, text[close:])):
            return "", self._end_of_turn(end_of_turn) + text[close:]
        blank = "" if stop or end_of_turn.isspace() else own[len(own.rstrip()) :]
        return stop, text[close + len(blank) :]

    def _end_of_turn(self, end_of_turn: str) -> str:
        """Return the end-of-turn token without other text before it."""
        ids = self._encode(end_of_turn)
        if ids and self.tokenizer.table.is_added[ids[-1]]:
            last = self._token(ids[-1])
            return last if end_of_turn.endswith(last) else end_of_turn
        return end_of_turn

    def _require_calls_if_needed(
        self, sampled: _Sampled, printed: _Printed, following: str
    ) -> None:
        """Raise if the same turn with tool calls, with or without ids, is followed by other text.

        A turn before tool messages has called tools, which its text alone does not show. Some
        templates print no tool message without a call.
        """
        tools = sampled.prompt.tools
        answers = [message for message in sampled.answer if message["role"] in TOOL_ROLES]
        if not answers:
            return
        calls = [_call(message, tools) for message in answers]
        without_ids = [{"type": "function", "function": call["function"]} for call in calls]
        after_turn = _text_after(printed, sampled.turn)
        before, after = printed.messages[: sampled.turn + 1], printed.messages[sampled.turn + 1 :]
        unique = with_unique_words([{**m, "content": m.get("content") or "-"} for m in after], None)
        words = set(WORD.findall(self._print([*before, *unique], tools, prompt=True).text))
        is_same = []
        for tool_calls in (calls, without_ids):
            turn = {**printed.messages[sampled.turn], "tool_calls": tool_calls}
            forms = map(sampled.complete, conversation("messages", [turn]).forms())
            with contextlib.suppress(RowError):
                called = next(self._accepted(forms, tools))
                calling = [*called.messages[: sampled.turn + 1], *unique]
                is_same.append(
                    words.issuperset(WORD.findall(self._print(calling, tools, prompt=True).text))
                    and called.text.endswith(following)
                    and _text_after(called, sampled.turn) == after_turn
                )
        if after_turn is None or not is_same or not all(is_same):
            raise UsageError(
                "This template may print a tool message differently after a call than after a text."
                " Pass the sampled turn as a message with its tool_calls as ",
                ("sampled",),
                ".",
            )

    # Ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.reference.encode(text, add_special_tokens=False).ids
        return ids

    def _token(self, number: int) -> str:
        return self.tokenizer.table.piece(int(number)).decode("utf-8", "replace")

    def _text(self, numbers: NDArray[np.int64], start: int) -> str:
        """Return the text of the ids from `start` on, as a continuation of the ids before."""
        first = max(start - 1, 0)
        table = self.tokenizer.table
        ids = numbers[first:].astype(np.int32)
        starts, joined = table.joined(table.prefixless_ids(ids, np.array([0, len(ids)])))
        data: bytes = joined.to_pybytes()
        return data[int(starts[start - first]) :].decode("utf-8", "replace")

    def _encode_after(self, numbers: NDArray[np.int64], text: str) -> list[int]:
        """Return the ids of a text that follows ids, as in the encoding of both.

        Text before an added token does not change the ids after it. A text that does not begin with
        one is encoded together with the text since the last added token, or, if that changes the
        sampled ids, after that token alone.
        """
        table = self.tokenizer.table
        if table.is_added[numbers[-1]]:
            ids = self._encode(self._token(numbers[-1]) + text)
            if ids[0] == numbers[-1]:
                return ids[1:]
        alone = self._encode(text)
        if not alone or (
            table.is_added[alone[0]] and alone[0] not in self.tokenizer.left_stripping_ids
        ):
            return alone
        added = np.flatnonzero(table.is_added[numbers])
        start = int(added[-1]) if len(added) else 0
        recent = numbers[start:].tolist()
        ids = self._encode(self._text(numbers, start) + text)
        if ids[: len(recent)] == recent:
            return ids[len(recent) :]
        if len(added):
            ids = self._encode(self._token(numbers[start]) + text)
            if ids[0] == recent[0]:
                return ids[1:]
        return alone

    # Known prompts

    def _check_ids(self, numbers: NDArray[np.int64]) -> None:
        size = len(self.tokenizer.table)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
            index = int(np.flatnonzero((numbers < 0) | (numbers >= size))[0])
            raise UsageError(
                f"ids[{index}] is {int(numbers[index])}, but the tokenizer has {size} ids."
            )

    def _sums(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a hash of every prefix of the ids."""
        with np.errstate(over="ignore"):
            if len(self._powers) < len(numbers):
                size = max(2 * len(self._powers), len(numbers))
                self._powers = np.cumprod(np.full(size, _SPREAD), dtype=np.uint64)
            return np.cumsum((numbers.astype(np.uint64) + _ONE) * self._powers[: len(numbers)])

    def _keep(self, numbers: NDArray[np.int64], printed: _Printed, tools: list[Any] | None) -> None:
        text = printed.text
        end = text[-MAX_OPENER:]
        prompt = _KnownPrompt(
            messages=printed.messages,
            tools=tools,
            characters=len(text),
            text_digest=_digest(text),
            opened=end[before_thinking(end) :],
            tokens=len(numbers),
            ids_digest=xxhash.xxh3_64_intdigest(numbers.tobytes()),
        )
        key = (len(numbers), int(self._sums(numbers)[-1]) if len(numbers) else 0)
        self._prompts[key] = prompt
        self._prompts.move_to_end(key)
        if len(self._prompts) > self._options["remembered"]:
            self._prompts.popitem(last=False)

    def _find(self, numbers: NDArray[np.int64]) -> _KnownPrompt:
        sums = self._sums(numbers).data
        for size in range(len(sums), 0, -1):
            key = size, sums[size - 1]
            prompt = self._prompts.get(key)
            if prompt and prompt.ids_digest == xxhash.xxh3_64_intdigest(numbers[:size].tobytes()):
                self._prompts.move_to_end(key)
                return prompt
        raise UsageError(
            "The ids do not begin with a prompt that this bridge returned."
            " Add one with remember(ids, messages)."
        )


def check_messages(name: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise UsageError((name,), f" must be messages, got {messages!r:.200}")
    return [dict(message) for message in messages]


def as_array(ids: Iterable[int]) -> NDArray[np.int64]:
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.ndim == 1:
        return np.ascontiguousarray(ids, np.int64)
    try:
        return np.frombuffer(array("q", ids), np.int64)  # twice as fast as numpy from a list
    except (TypeError, OverflowError) as error:
        raise UsageError(("ids",), f" must be a list of integers: {error}.") from error


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _closed(own: str, end_of_turn: str, following: str) -> bool:
    """Whether a sampled text ends with the end of turn, or with whitespace printed after it."""
    if not end_of_turn or end_of_turn.isspace():
        return bool(end_of_turn) and own.endswith(end_of_turn)
    core = own.rstrip()
    return core.endswith(end_of_turn) and following.startswith(own[len(core) :])


def _text_after(printed: _Printed, k: int) -> str | None:
    """Return the text printed after a sampled turn; None if its end is unknown."""
    try:
        return printed.text[printed.closing(k)[1] :]
    except BridgeError:
        return None


def _bridge_error(rewrite: Rewrite, by_text: bool) -> BridgeError:
    message = f"{rewrite}{HINT_BY_TEXT if by_text else ''}"
    return BridgeError(message, turn=rewrite.turn, before=rewrite.before, after=rewrite.after)


def _call(answer: Message, tools: list[Any] | None) -> dict[str, Any]:
    """Return a call that this message may answer."""
    name = answer.get("name")
    if not name and tools:
        function = tools[0].get("function", tools[0]) if isinstance(tools[0], dict) else {}
        name = function.get("name")
    number = answer.get("tool_call_id") or "call00000"
    function = {"name": name or "tool", "arguments": {}}
    return {"id": number, "type": "function", "function": function}
