"""Continue rollouts in token ids, for any chat template.

A bridge appends what the template prints after a sampled turn in the whole conversation. It changes
no given id. It finds the conversation by the longest prompt that it returned before and that the
ids begin with. docs/bridge.md explains the rules.
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

from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.append import Rewrite, excerpt, first_difference, rewrite_between
from tokenmill.chat.calls import TOOL_ROLES
from tokenmill.chat.program import Run
from tokenmill.chat.shapes import Form, Message, conversation
from tokenmill.chat.thinking import CLOSING, TAG, before_thinking
from tokenmill.chat.turns import TurnJudge, common_prefix, tail
from tokenmill.errors import BridgeError, RowError, UsageError
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.tokenizer import Tokenizer

REMEMBERED = 65_536  # prompts; each holds references to its messages, not its text
LONGEST_OPENER = 256  # characters in which a generation prompt may open thinking
BY_TEXT = (
    " (the sampled turn is known by its text alone; sampled= takes the message that it was parsed"
    " to, with its tool_calls and reasoning_content)"
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
    """A turn sampled after a prompt, and the messages that answer it."""

    prompt: _KnownPrompt
    own: str  # its text
    stop: str  # the special token that it ends with, as text; may be empty
    answer: list[Message]
    by_text: bool  # whether there is no message, only the text

    @property
    def turn(self) -> int:
        return len(self.prompt.messages)

    def complete(self, form: Form) -> Form:
        """Return the conversation in which the turn has this form."""
        return form._replace(messages=[*self.prompt.messages, *form.messages, *self.answer])

    def is_in(self, text: str) -> bool:
        return self.prompt.begins(text) and text.startswith(self.own, self.prompt.characters)


@dataclass(frozen=True, slots=True)
class _Printed:
    """A rendered conversation."""

    messages: list[Message]
    text: str
    run: Run | None
    judge: TurnJudge
    render: Callable[[list[Message], bool], str]

    def closing(self, k: int) -> tuple[int, int]:
        """Return where the words of a sampled turn end, and where its end-of-turn token does."""
        if self.run is not None:
            try:
                words, close = self.judge.closing(self.run, k)
                if close is not None:
                    return words, close
            except RowError:
                pass  # the trace does not show the turn in one piece
        try:
            return self._closing_by_render(k)
        except RowError as error:
            raise BridgeError(error.message, turn=k) from error

    def _closing_by_render(self, k: int) -> tuple[int, int]:
        """As `closing`, by the renders before and after the turn alone."""
        before, alone = (
            self.render(self.messages[:k], True),
            self.render(self.messages[: k + 1], False),
        )
        if not self.text.startswith(before):
            raise BridgeError(f"where the turn {k} begins cannot be told", turn=k)
        close = len(common_prefix(alone, self.text).rstrip())
        turn, content = self.text[len(before) : close], self.messages[k].get("content")
        if isinstance(content, str) and content.strip() and not self.messages[k].get("tool_calls"):
            place = turn.rfind(content.strip())
            if place >= 0:
                return len(before) + place + len(content.strip()), close
        endings = [tag for tag in TAG.finditer(turn) if tag.end() == len(turn)]
        return close - len(endings[0][0] if endings else ""), close

    def ends(self) -> list[int]:
        if self.run is None:
            return []
        ends = self.judge.settle(self.run, self.messages, None).ends
        return [*ends[:-1], ends[-1] - len(tail(self.run))]


class Bridge:
    """Goes on with rollouts, ids in, ids out, for any chat template.

    Safe to share between threads. Sent to another process it remembers nothing there.

    Args:
        tokenizer: Directory, ``tokenizer.json``, hub id, ``tokenizers.Tokenizer`` or a
            transformers tokenizer.
        tools: Tool descriptions for conversations that name none of their own.
        chat_template: Jinja source, or a file that holds it; None: the tokenizer's own.
        template_kwargs: Further variables for the chat template.
        date: ``YYYY-MM-DD`` for templates that print the date; such a template is refused without.
        tokenizer_backend: ``auto``, ``transformers`` or ``file``.
        trust_remote_code: Allow a tokenizer to bring code of its own.
        renderer: ``auto``, or ``jinja2`` to compare every render with the reference.
        remembered: Most prompts whose conversation is known; the longest unused is forgotten.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: list[Any] | None = None,
        chat_template: Any = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        tokenizer_backend: str = "auto",
        trust_remote_code: bool = False,
        renderer: str = "auto",
        remembered: int = REMEMBERED,
    ) -> None:
        self.tokenizer: Tokenizer = load(
            tokenizer,
            backend=tokenizer_backend,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
        )
        self.tools = tools
        self._options: dict[str, Any] = {
            "template_kwargs": template_kwargs, "date": date, "renderer": renderer,
            "remembered": remembered,
        }  # fmt: skip
        if self.tokenizer.template is None:
            raise UsageError("the tokenizer has no chat template: give one with chat_template=")
        spec = ChatSpec(format="messages", template_kwargs=template_kwargs, date=date)
        self._renderer = Renderer(
            spec, self.tokenizer.template, self.tokenizer.special_tokens, renderer=renderer
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

        ``tools`` defaults to the bridge's, here and below. A conversation that the template refuses
        raises `RowError`.
        """
        with self._lock:
            if not messages:
                raise UsageError("a prompt needs at least one message")
            tools = self.tools if tools is None else tools
            printed = self._print_whole(messages, tools)
            ids = self._encode(printed.text)
            self._keep(_array(ids), printed, tools)
            return ids

    def extend(
        self,
        ids: Ids,
        messages: Sequence[Mapping[str, Any]],
        *,
        sampled: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the same ids, and what the template prints after the sampled turn.

        The end-of-turn token is added first if it was not sampled (a length limit). Any other token
        that stopped the engine is part of the turn.

        Args:
            ids: The ids of `prompt` or `extend`, and everything that was sampled after them.
            messages: The answer: tool results, a user, a system message.
            sampled: The sampled turn as a message, with its calls and its reasoning, as the host's
                parser understood it. None: its text, which is enough for most templates.

        Raises:
            BridgeError: The template would rewrite earlier text, or refuses the conversation.
            UsageError: The ids begin with no known prompt, or the message is needed.
        """
        if not messages:
            raise UsageError("messages is empty: give what answers the sampled turn")
        with self._lock:
            numbers = _array(ids)
            self._refuse_unknown(numbers)
            prompt = self._find(numbers)
            own = numbers[prompt.tokens :]
            try:
                new = conversation("messages", [dict(message) for message in messages]).messages
            except RowError as error:
                raise BridgeError(error.message) from error
            if any(message["role"] == "assistant" for message in new):
                raise UsageError(
                    "messages are what answers the sampled turn; the turn itself is sampled="
                )
            if not len(own) and sampled is None:
                raise UsageError(
                    "nothing was sampled after the prompt: give all messages at once, or"
                    " sampled={'role': 'assistant', 'content': ''} where an empty turn is meant"
                )
            try:
                printed, following = self._follow(prompt, numbers, new, sampled)
            except RowError as error:
                raise BridgeError(error.message, turn=len(prompt.messages)) from error
            added = self._encode_behind(numbers, following)
            whole = np.concatenate([numbers, _array(added)])
            self._keep(whole, printed, prompt.tools)
            return [*(ids if type(ids) is list else numbers.tolist()), *added]

    def is_append_only(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> bool:
        """Return whether a rollout of this conversation is never rewritten; see `rewrite`."""
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
            answered = bool(messages) and messages[-1].get("role") != "assistant"
            given = self._print_whole(messages, tools, prompt=answered).messages
            assistants = [k for k, m in enumerate(given) if m["role"] == "assistant" and k]
            nexts = [*assistants[1:], len(given)]
            for k, following in zip(assistants, nexts, strict=False):
                prompt = self._print(given[:k], tools, prompt=True)
                alone = self._print(given[: k + 1], tools, prompt=False)
                stands = alone.text[: alone.closing(k)[1]]
                if not stands.startswith(prompt.text):
                    return rewrite_between(prompt.text, stands, prompt.ends(), alone.ends())
                if len(given) == k + 1:
                    break  # nothing answers it
                later = self._print(given[:following], tools, prompt=True)
                if not later.text.startswith(stands):
                    ends = [*alone.ends()[:-1], len(stands)]
                    return rewrite_between(stands, later.text, ends, later.ends())
            return None

    def remember(
        self, ids: Ids, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> None:
        """Add a prompt that another process or library made.

        Raises:
            UsageError: Ids and conversation are different texts.
        """
        with self._lock:
            tools = self.tools if tools is None else tools
            numbers = _array(ids)
            self._refuse_unknown(numbers)
            printed = self._print_whole(messages, tools)
            found, text = self._text(numbers, 0), printed.text
            if found != text and numbers.tolist() != self._encode(text):
                place = first_difference(found, text)
                raise UsageError(
                    f"these ids are not the prompt of this conversation: they read"
                    f" {excerpt(found, place)}, the template prints {excerpt(text, place)}"
                )
            self._keep(numbers, printed, tools)

    def forget(self) -> None:
        """Forget every prompt."""
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
        forms = conversation("messages", [dict(message) for message in messages]).forms()
        return next(self._accepted(forms, tools, prompt=prompt))

    def _accepted(
        self, forms: Iterable[Form], tools: Any, hint: str = "", *, prompt: bool = True
    ) -> Iterator[_Printed]:
        """Yield every form of a conversation that the template accepts; raise if there is none."""
        refused: RowError | None = None
        is_accepted = False
        for form in forms:
            try:
                printed = self._print(form.messages, tools, prompt=prompt)
            except RowError as error:
                refused = refused or error
                continue
            is_accepted = True
            yield printed
        if not is_accepted:
            assert refused is not None
            raise RowError(f"{refused.message}{hint}", reason=refused.reason) from refused

    def _print(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> _Printed:
        def render(messages: list[Message], prompt: bool) -> str:
            return self._renderer.printed(messages, tools, prompt=prompt)[0]

        text, run = self._renderer.printed(messages, tools, prompt=prompt)
        return _Printed(messages, text, run, self._renderer.judge(tools), render)

    # What follows a sampled turn

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
        given = _Sampled(prompt, own, stop, new, sampled is None)
        forms = self._readings(given)
        if sampled is not None:
            forms = conversation("messages", [dict(sampled)]).forms()
        candidates: list[_Printed] = []
        hint = BY_TEXT if given.by_text else ""
        for printed in self._accepted(map(given.complete, forms), prompt.tools, hint):
            if given.is_in(printed.text):
                printed, following = self._exact(given, printed)
                break
            candidates.append(printed)
        else:
            printed = candidates[0]
            stop, following = self._worded_otherwise(given, printed)
        if given.by_text:
            self._refuse_what_depends_on_calls(given, printed, stop + following)
        return printed, following

    def _readings(self, given: _Sampled) -> Iterator[Form]:
        """Yield messages that a sampled text may be, the likeliest first.

        With its thinking as reasoning_content, then as it is. Where the template prints the sampled
        text for such a message at the end, no other is tried: if it prints something else when more
        follows, that is a rewrite.
        """
        prompt, own, words = given.prompt, given.own, given.own.removesuffix(given.stop)
        whole = prompt.opened + words
        parted = self._parted(whole, prompt.tools)
        contents = dict.fromkeys((words, whole, own, prompt.opened + own))
        plain = [{"role": "assistant", "content": content} for content in contents]
        for turn in plain if parted is None else [parted, *plain]:
            yield Form([turn])
            try:
                alone = self._print([*prompt.messages, turn], prompt.tools, prompt=False).text
            except RowError:
                continue
            if prompt.begins(alone) and alone.startswith(words, prompt.characters):
                return

    def _parted(self, text: str, tools: list[Any] | None) -> Message | None:
        """Return a text with thinking as content and reasoning_content; None if it has none."""
        tags = self._renderer.judge(tools).thinking
        found = list(tags.finditer(text)) if tags is not None else []
        closing = next((tag for tag in found if CLOSING.search(tag[0])), None)
        if closing is None:
            return None
        opening = next((tag for tag in found if tag.start() < closing.start()), None)
        start = 0 if opening is None else opening.end()
        return {
            "role": "assistant",
            "content": text[closing.end() :].lstrip("\n"),
            "reasoning_content": text[start : closing.start()].strip("\n"),
        }

    def _exact(self, given: _Sampled, printed: _Printed) -> tuple[_Printed, str]:
        """The template prints the turn as it was sampled."""
        place = given.prompt.characters + len(given.own)
        turn, stop = printed.messages[given.turn], given.stop
        if given.by_text and not (stop and not (turn.get("content") or "").endswith(stop)):
            printed = self._without_closer(given, printed)
        elif not given.by_text:
            words, _ = printed.closing(given.turn)
            if printed.text[place:words].strip():
                raise UsageError(
                    f"the message sampled= says more than was sampled:"
                    f" {excerpt(printed.text[place:words], 0)}"
                )
        return printed, printed.text[place:]

    def _without_closer(self, given: _Sampled, printed: _Printed) -> _Printed:
        """Print the turn without an end-of-turn text that was sampled as part of its content.

        Where it is no special token, only the render shows what ends a turn.
        """
        prompt, own = given.prompt, given.own
        words, close = printed.closing(given.turn)
        closer = printed.text[words:close]
        if prompt.characters + len(own) != words or not _closed(own, closer, printed.text[close:]):
            return printed
        turn = printed.messages[given.turn]
        core = turn["content"] if closer.isspace() else turn["content"].rstrip()
        form = given.complete(Form([{**turn, "content": core.removesuffix(closer)}]))
        closed = self._print(form.messages, prompt.tools, prompt=True)
        return closed if given.is_in(closed.text) else printed

    def _worded_otherwise(self, given: _Sampled, printed: _Printed) -> tuple[str, str]:
        """The template prints the turn in other words, or rewrites it, which is refused.

        Other words are fine if it prints the same with and without the answer: white space trimmed,
        JSON with other blanks. Returns the sampled end-of-turn text, and what follows it.
        """
        prompt, own, stop, k = given.prompt, given.own, given.stop, given.turn
        if not prompt.begins(printed.text):
            before = self._print(prompt.messages, prompt.tools, prompt=True)
            found = rewrite_between(before.text + own, printed.text, before.ends(), printed.ends())
            raise _refusal(found, given.by_text)
        words, close = printed.closing(k)
        last = self._print(printed.messages[: k + 1], prompt.tools, prompt=False)
        alone, (alone_words, alone_close) = last.text, last.closing(k)
        words = alone_words = min(words, alone_words)
        text, start = printed.text, prompt.characters
        closer, alone_closer = text[words:close], alone[alone_words:alone_close]
        if alone[:alone_words] != text[:words] or (
            stop and alone_closer.endswith(stop) and not closer.endswith(stop)
        ):
            raise _refusal(Rewrite(k, alone[start:alone_close], text[start:close]), given.by_text)
        if not (closer.endswith(stop) if stop else _closed(own, closer, text[close:])):
            return "", self._end_of_turn(closer) + text[close:]
        blank = "" if stop or closer.isspace() else own[len(own.rstrip()) :]
        return stop, text[close + len(blank) :]

    def _end_of_turn(self, closer: str) -> str:
        """Return what ends a turn, without other text before it."""
        ids = self._encode(closer)
        if ids and self.tokenizer.table.is_added[ids[-1]]:
            last = self._token(ids[-1])
            return last if closer.endswith(last) else closer
        return closer

    def _refuse_what_depends_on_calls(
        self, given: _Sampled, printed: _Printed, following: str
    ) -> None:
        """Raise if the same turn with tool calls, with or without ids, is followed by other text.

        A turn that tools answer has called them, and its text alone does not show it.
        """
        tools = given.prompt.tools
        answers = [message for message in given.answer if message["role"] in TOOL_ROLES]
        if not answers:
            return
        calls = [_call(message, tools) for message in answers]
        nameless = [{"type": "function", "function": call["function"]} for call in calls]
        behind = _behind(printed, given.turn)
        found = []
        for tool_calls in (calls, nameless):
            turn = {**printed.messages[given.turn], "tool_calls": tool_calls}
            forms = map(given.complete, conversation("messages", [turn]).forms())
            with contextlib.suppress(RowError):
                called = next(self._accepted(forms, tools))
                found.append(
                    called.text.endswith(following) and _behind(called, given.turn) == behind
                )
        if behind is None or not found or not all(found):
            raise UsageError(
                "this template prints the answer of a tool otherwise after a call than after a"
                " text, or it cannot be told: give the sampled turn as a message with its"
                " tool_calls (sampled=)"
            )

    # Ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.reference.encode(text, add_special_tokens=False).ids
        return ids

    def _token(self, number: int) -> str:
        return self.tokenizer.table.piece(int(number)).decode("utf-8", "replace")

    def _text(self, numbers: NDArray[np.int64], start: int) -> str:
        """Return the text of the ids from `start` on, as it follows the ids before."""
        first = max(start - 1, 0)
        table = self.tokenizer.table
        ids = numbers[first:].astype(np.int32)
        starts, joined = table.joined(table.twins(ids, np.array([0, len(ids)])))
        data: bytes = joined.to_pybytes()
        return data[int(starts[start - first]) :].decode("utf-8", "replace")

    def _encode_behind(self, numbers: NDArray[np.int64], text: str) -> list[int]:
        """Return the ids of a text that follows ids, as in the encoding of both.

        Text before an added token does not change the ids after it. A text that begins with none is
        encoded together with the text since the last added token, or, if that gives other ids than
        were sampled, after that token alone.
        """
        table = self.tokenizer.table
        if table.is_added[numbers[-1]]:
            ids = self._encode(self._token(numbers[-1]) + text)
            if ids[0] == numbers[-1]:
                return ids[1:]
        alone = self._encode(text)
        if not alone or (
            table.is_added[alone[0]] and alone[0] not in self.tokenizer.left_stripping
        ):
            return alone
        added = np.flatnonzero(table.is_added[numbers])
        place = int(added[-1]) if len(added) else 0
        standing = numbers[place:].tolist()
        ids = self._encode(self._text(numbers, place) + text)
        if ids[: len(standing)] == standing:
            return ids[len(standing) :]
        if len(added):
            ids = self._encode(self._token(numbers[place]) + text)
            if ids[0] == standing[0]:
                return ids[1:]
        return alone

    # Known prompts

    def _refuse_unknown(self, numbers: NDArray[np.int64]) -> None:
        size = len(self.tokenizer.table)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
            place = int(np.flatnonzero((numbers < 0) | (numbers >= size))[0])
            raise UsageError(
                f"id {int(numbers[place])} at place {place}: the tokenizer has {size} ids"
            )

    def _sums(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A hash of every beginning of the ids."""
        with np.errstate(over="ignore"):
            if len(self._powers) < len(numbers):
                size = max(2 * len(self._powers), len(numbers))
                self._powers = np.cumprod(np.full(size, _SPREAD), dtype=np.uint64)
            return np.cumsum((numbers.astype(np.uint64) + _ONE) * self._powers[: len(numbers)])

    def _keep(self, numbers: NDArray[np.int64], printed: _Printed, tools: list[Any] | None) -> None:
        text = printed.text
        end = text[-LONGEST_OPENER:]
        made = _KnownPrompt(
            messages=printed.messages,
            tools=tools,
            characters=len(text),
            text_digest=_digest(text),
            opened=end[before_thinking(end) :],
            tokens=len(numbers),
            ids_digest=xxhash.xxh3_64_intdigest(numbers.tobytes()),
        )
        key = (len(numbers), int(self._sums(numbers)[-1]) if len(numbers) else 0)
        self._prompts[key] = made
        self._prompts.move_to_end(key)
        if len(self._prompts) > self._options["remembered"]:
            self._prompts.popitem(last=False)

    def _find(self, numbers: NDArray[np.int64]) -> _KnownPrompt:
        sums = self._sums(numbers).data
        for size in range(len(sums), 0, -1):
            key = size, sums[size - 1]
            found = self._prompts.get(key)
            if found and found.ids_digest == xxhash.xxh3_64_intdigest(numbers[:size].tobytes()):
                self._prompts.move_to_end(key)
                return found
        raise UsageError(
            "these ids begin with no prompt that this bridge gave or was told of:"
            " remember(ids, messages) tells it of one"
        )


def _array(ids: Iterable[int]) -> NDArray[np.int64]:
    if isinstance(ids, np.ndarray):
        return np.ascontiguousarray(ids, np.int64)
    try:
        return np.frombuffer(array("q", ids), np.int64)  # twice as fast as numpy from a list
    except (TypeError, OverflowError) as error:
        raise UsageError(f"ids are a list of integers: {error}") from error


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _closed(own: str, closer: str, behind: str) -> bool:
    """Whether a sampled text ends with the end of turn, or with white space printed after it."""
    if not closer or closer.isspace():
        return bool(closer) and own.endswith(closer)
    core = own.rstrip()
    return core.endswith(closer) and behind.startswith(own[len(core) :])


def _behind(printed: _Printed, k: int) -> str | None:
    """Return what is printed after a sampled turn; None if its end is unknown."""
    try:
        return printed.text[printed.closing(k)[1] :]
    except BridgeError:
        return None


def _refusal(found: Rewrite, by_text: bool) -> BridgeError:
    message = f"{found}{BY_TEXT if by_text else ''}"
    return BridgeError(message, turn=found.turn, before=found.before, after=found.after)


def _call(answer: Message, tools: list[Any] | None) -> dict[str, Any]:
    """A call that this message may answer."""
    name = answer.get("name")
    if not name and tools:
        function = tools[0].get("function", tools[0]) if isinstance(tools[0], dict) else {}
        name = function.get("name")
    number = answer.get("tool_call_id") or "call00000"
    function = {"name": name or "tool", "arguments": {}}
    return {"id": number, "type": "function", "function": function}
