r"""Find each message's characters in a rendered text, and the part of them that is trained.

The text that a template prints while its loop is at a message is the message's turn. In an
assistant's turn, the text after the generation prompt is trained, up to and including the
end-of-turn token::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n
    └──────── turn of user ────────┘└─ generation prompt ─┘└─────────── trained ─────────────┘
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

from tokenmill.chat.calls import TOOL_ROLES, strings
from tokenmill.chat.images import Image
from tokenmill.chat.program import MIXED, Run
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import TAG, TEXT, before_thinking, cut
from tokenmill.errors import RowError

Span = tuple[int, int]
Messages = list[dict[str, Any]]

ATOM = re.compile(rf"{TAG.pattern}|\w+|\s|.", re.DOTALL)
CALL_KEYS = "id type function name arguments parameters"
MAX_PROMPT = 512  # characters at the end of a generation prompt that are searched for thinking


@dataclass(slots=True)
class RenderedRow:
    """A rendered text with its turns and trained spans."""

    text: str
    spans: list[Span] | None  # None: everything is trained
    roles: Sequence[str]  # of each message
    ends: list[int]  # of each message's turn
    closed: bool = True  # whether each assistant turn has an end
    dropped: str = ""  # message about content outside the template's generation blocks
    certain: bool = True  # whether the words show which field each comes from
    clipped: bool = False  # whether a generation block contained a generation prompt
    weights: Sequence[float] = ()  # of each turn in the loss; empty where each is 1
    images: Sequence[Image] = ()  # of the conversation, in order
    coded: bool = False  # whether the text is an `IdText`


_ROLE, _FIRST = itemgetter("role"), itemgetter(0)


def is_plain(message: dict[str, Any]) -> bool:
    """Whether a message has only a role and content."""
    return len(message) == 2 and "content" in message


def common_prefix(left: str, right: str) -> str:
    """Return the common prefix in whole units: a tag, a word or one other character."""
    if left.startswith(right):
        return right
    if right.startswith(left):
        return left
    same, stop = 0, min(len(left), len(right))
    while same < stop:
        middle = (same + stop + 1) // 2
        equal = left[same:middle] == right[same:middle]
        same, stop = (middle, stop) if equal else (same, middle - 1)
    length = left.rfind("\n", 0, same) + 1  # a line break is a unit
    for a, b in zip(ATOM.finditer(left, length), ATOM.finditer(right, length), strict=False):
        if a[0] != b[0]:
            break
        length += len(a[0])
    return left[:length]


def unproven(why: str) -> RowError:
    """Return the rejection of a row whose trained part cannot be proven."""
    return RowError(why, reason="mask_unproven")


# -- turn headers -----------------------------------------------------------------------------


def _message(role: str, content: str = "Hello.", **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def _tool_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return _message("assistant", "", tool_calls=[call])


_WHERE = {"type": "string", "description": "Where."}
_PARAMETERS = {"type": "object", "properties": {"where": _WHERE}, "required": ["where"]}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": _PARAMETERS},
}
_CALL = _tool_call({"where": "here"})
_TOOL_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "Hello."}
_EXCHANGE = [_message("user"), _message("assistant")]
CONVERSATIONS: list[Messages] = [
    _EXCHANGE,
    [_message("system"), *_EXCHANGE, _message("user")],
    [_message("user"), _CALL, _TOOL_RESULT, _message("assistant")],
    [
        _message("user"),
        _message("assistant", reasoning_content="Hm."),
        _message("user"),
        _message("assistant", "<think>\nHm.\n</think>\n\nHello."),
    ],
]
_AFTER: dict[str, list[Messages]] = {
    "tool": [
        [_message("user"), _CALL, _TOOL_RESULT],
        [_message("user"), _tool_call('{"where": "here"}'), _TOOL_RESULT],
    ],
    "assistant": [_EXCHANGE],
    "system": [[_message("system")]],
    "user": [
        [_message("user")],
        [_message("system"), _message("user")],
        [*_EXCHANGE, _message("user")],
    ],
}


@dataclass(slots=True)
class TurnHeader:
    """The generation prompts that may begin an assistant's turn, the most likely first."""

    prompts: tuple[str, ...]
    skips: tuple[int, ...]  # untrained length of each: all, or without the thinking that it opens
    has_no_prompt: bool  # whether the template prints no prompt after such a message


class GenerationPrompts:
    """The generation prompts of one template, found by rendering small sample conversations.

    If the prompt depends on the row (`depends_on_row`), `reached` renders the row itself.
    """

    def __init__(
        self,
        follow: Callable[[Messages, list[Any] | None, bool], Run],
        untrained: Callable[[str], int],
        depends_on_row: bool,
    ) -> None:
        self._render = follow
        self.untrained = untrained
        self.depends_on_row = depends_on_row
        self._headers: dict[str | None, TurnHeader] = {}
        self._prompts: dict[str, str | None] = {}

    def _follow(self, messages: Messages, prompt: bool) -> Run:
        """Render without tools, or with one if the template raises an error without."""
        try:
            return self._render(messages, None, prompt)
        except RowError:
            return self._render(messages, [TOOL], prompt)

    def of_row(
        self, messages: Messages, tools: list[Any] | None, *, prompt: bool = True
    ) -> Run | None:
        """Render messages of the row; None if the template raises an error."""
        try:
            return self._render(messages, tools, prompt)
        except RowError:
            return None

    def reached(
        self, text: str, begin: int, messages: Messages, tools: list[Any] | None
    ) -> int | None:
        """Return where the row's generation prompt ends in the turn that begins at `begin`.

        The prompt is rendered for the row's messages before the turn. None if the template raises
        an error on them, or if the turn does not begin with the prompt.
        """
        run = self.of_row(messages, tools)
        if run is None:
            return None
        end = len(run.text)
        if end <= begin or not text.startswith(run.text):
            prompt = tail(run)
            if not prompt.strip() or not text.startswith(prompt, begin):
                return None
            end = begin + len(prompt)
        return self.trained_from(text, end, begin)

    def trained_from(self, text: str, prompt_end: int, begin: int = 0) -> int:
        """Return where training starts in a text whose generation prompt ends at `prompt_end`."""
        first = max(begin, prompt_end - MAX_PROMPT)
        return first + self.untrained(text[first:prompt_end])

    def after(self, role: str | None) -> TurnHeader:
        """Return the header of a turn after a message of this role."""
        header = self._headers.get(role)
        if header is None:
            header = self._headers[role] = self._find(role)
        return header

    def _find(self, role: str | None) -> TurnHeader:
        kind = "user" if role is None else "tool" if role in TOOL_ROLES else role
        kind = kind if kind in _AFTER else "user"
        candidates = dict.fromkeys(self._prompt(name) for name in (kind, "user"))
        prompts = tuple(prompt for prompt in candidates if prompt)
        has_no_prompt = bool(prompts) and self._prompt(kind) == ""
        return self._header(prompts, has_no_prompt)

    def _header(self, prompts: Iterable[str], has_no_prompt: bool) -> TurnHeader:
        prompts = tuple(dict.fromkeys(prompts))
        return TurnHeader(prompts, tuple(map(self.untrained, prompts)), has_no_prompt)

    def named(self, header: TurnHeader, name: str) -> TurnHeader:
        """Return the header with prompts that have a name in place of the role added."""
        prompts = [prompt.replace("assistant", name) for prompt in header.prompts]
        return self._header([*prompts, *header.prompts], header.has_no_prompt)

    def _prompt(self, kind: str) -> str | None:
        if kind not in self._prompts:
            runs = self._with_and_without_prompt(kind)
            self._prompts[kind] = None if runs is None else _difference(*runs)
        return self._prompts[kind]

    def _with_and_without_prompt(self, kind: str) -> tuple[Run, Run] | None:
        """Render the first conversation that the template accepts, with and without the prompt."""
        for messages in _AFTER[kind]:
            try:
                return self._follow(messages, True), self._follow(messages, False)
            except RowError:
                continue
        return None

    @cached_property
    def always_prompts(self) -> bool:
        """Whether the template always prints the generation prompt."""
        runs = self._with_and_without_prompt("user")
        if runs is None:
            return False
        with_prompt, without = map(tail, runs)
        return bool(with_prompt.strip()) and with_prompt == without

    @cached_property
    def end_of_turn(self) -> str:
        """The text that ends an assistant's turn but is printed after the turn."""
        if self.always_prompts:
            return ""
        user, assistant = _message("user"), _message("assistant")
        try:
            if last := tail(self._follow([user, assistant], False)).rstrip():
                return last
            first = _turn(self._follow([user, assistant], False), 0)
            later = _turn(self._follow([user, assistant, user], False), 2)
        except RowError:
            return ""
        return later.removesuffix(first) if later.endswith(first) else ""

    @cached_property
    def next_end_of_turn(self) -> str:
        """The end-of-turn token of a template that prints it only after the turn."""
        try:
            run = self._follow([_message("user"), _message("assistant")], False)
        except RowError:
            return ""
        first, stop = pieces_of(run, [0, *accumulate(map(len, run.out))]).get(1, (-1, -1))
        last = max((index for index in run.own if first <= index < stop), default=stop)
        printed = "".join(run.out[last + 1 : stop]).strip()
        return self.end_of_turn if not printed and self.end_of_turn.strip() else ""

    @cached_property
    def lead(self) -> str:
        """The start of assistant turns in a template without a generation prompt."""
        leads = []
        for turn in (_message("assistant"), _CALL):
            try:
                run = self._follow([_message("user"), turn], False)
            except RowError:
                continue
            piece = pieces_of(run, [0, *accumulate(map(len, run.out))]).get(1)
            if piece is not None and piece[0] >= 0:
                own = next((index for index in run.own if index >= piece[0]), len(run.out))
                leads.append("".join(run.out[piece[0] : own]))
        return reduce(common_prefix, leads) if leads else ""


def tail(run: Run) -> str:
    """Return the text printed after the last message."""
    return "".join(run.out[run.marks[-1][0] :]) if run.marks else ""


def _turn(run: Run, k: int) -> str:
    return "".join(
        "".join(run.out[first:stop])
        for (first, owner), (stop, _) in pairwise(run.marks)
        if owner == k
    )


def _difference(prompted: Run, plain: Run) -> str:
    """Return the generation prompt, printed after the last message or in its turn."""
    last = tail(prompted)
    if last.strip():
        return last
    with_prompt, without = "".join(prompted.out), "".join(plain.out)
    return with_prompt[len(without) :] if with_prompt.startswith(without) else ""


# -- spans ------------------------------------------------------------------------------------


@dataclass(slots=True)
class SpanResolver:
    """Finds and checks the trained spans in renders of one template."""

    generation_prompts: GenerationPrompts
    turn_end: str  # "stop" or "turn"
    thinking: re.Pattern[str] | None  # matches the thinking tags of the template
    generation: bool  # whether the template has generation blocks
    checked: set[bytes] = field(default_factory=set)  # conversations of unique words that passed
    _edges: dict[tuple[str, str, str | None], tuple[int, ...]] = field(default_factory=dict)

    def resolve_spans(
        self,
        run: Run,
        messages: Messages,
        trained: Sequence[int] | None,
        tools: list[Any] | None = None,
    ) -> RenderedRow:
        """Find the turns and the trained spans of one render, and check the spans.

        Each assistant's turn must be in one piece, contain the whole message and nothing of
        another message. ``trained`` are indices of messages; None trains everything.

        Raises:
            RowError: template_drops_content or mask_unproven.
        """
        position = list(accumulate(map(len, run.out), initial=0))
        roles = list(map(_ROLE, messages))
        in_order = run.in_order and len(run.marks) == len(messages) + 1
        taken = run.taken
        if in_order and taken and roles[0] != "assistant":
            before, last, stop = (run.marks[number][0] for number in (0, -2, -1))
            outside = all(owner == 0 and index < before for index, owner in taken)
            if outside and position[last] < position[stop]:
                taken = []  # the first message was printed before the loop; no turn contains it
        if in_order and not taken:
            # Most templates: one loop, every message once.
            starts = list(map(_FIRST, run.marks))
            pieces = list(pairwise(starts))
            ends = list(map(position.__getitem__, starts))[1:]
            ends[-1] = position[-1]
        else:
            by_message = with_unlooped(run, position)
            ends = ends_of(messages, by_message, position)
            pieces = [by_message.get(k, (0, 0)) for k in range(len(messages))]
        rendered = RenderedRow(run.text, None, roles, ends)
        if trained is None:
            return rendered
        if self.generation:
            self._resolve_generation(rendered, run, messages, tools, position, trained)
        else:
            self._resolve_turns(rendered, run, messages, tools, position, pieces, trained, taken)
        return rendered

    def check(self, run: Run, messages: Messages) -> None:
        """Raise if a turn misses a field of its message or contains another message."""
        position = list(accumulate(map(len, run.out), initial=0))
        pieces = with_unlooped(run, position)
        others = {index for part in run.inserted for index in range(*part)}
        assistants = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        for k in assistants:
            first, stop = pieces.get(k, (0, 0))
            if first < 0:
                raise unproven(f"the template prints turn {k} in several places")
            own = run.own[bisect_left(run.own, first) : bisect_left(run.own, stop)]
            printed = [run.out[index] for index in own if index not in others]
            turn = run.text[position[first] : position[stop]]
            check_printed(
                messages[k], k, printed, run.text, k == assistants[-1], self.thinking, turn
            )
            _check_taken(run, first, stop, messages[k], k, others)

    def closing(self, run: Run, k: int) -> tuple[int, int | None]:
        """Return where an assistant's own words end in a render, and where its turn ends.

        The turn must be in one piece. Nothing else is checked, because a model may sample anything.
        The second is None if the template prints other messages in the same turn.
        """
        position = list(accumulate(map(len, run.out), initial=0))
        pieces = with_unlooped(run, position)
        first, stop = pieces.get(k, (-1, -1))
        if first < 0:
            raise unproven(f"the template prints turn {k} in several places, or nowhere")
        others = {index for index, owner in run.taken if owner != k}
        own = run.own[bisect_left(run.own, first) : bisect_left(run.own, stop)]
        last = max((index for index in own if index not in others), default=first - 1)
        words, end = position[last + 1], position[stop]
        if any(run.out[index] and last < index < stop for index in others):
            return words, None
        tail = run.text[words:end]
        if tail.strip():
            return words, words + len(tail.rstrip())
        end_of_turn = "" if tail else self.generation_prompts.end_of_turn
        return words, end + (len(end_of_turn) if run.text.startswith(end_of_turn, end) else 0)

    def _resolve_turns(
        self,
        rendered: RenderedRow,
        run: Run,
        messages: Messages,
        tools: list[Any] | None,
        position: list[int],
        pieces: list[Span],
        trained: Sequence[int],
        taken: list[tuple[int, int]],
    ) -> None:
        spans: list[Span] = []
        text, out, own_indices = run.text, run.out, run.own
        roles = rendered.roles
        if taken:
            rendered.certain = all(owner != MIXED for _, owner in taken)
        low = 0
        for k, message in enumerate(messages):
            if roles[k] != "assistant":
                continue
            first, stop = pieces[k]
            if first < 0:
                raise unproven(f"the template prints turn {k} in several places")
            begin, end = position[first], position[stop]
            if begin == end:
                check_printed(message, k, [], text, _is_last(k, roles), self.thinking)
                continue
            if run.inserted and any(first <= index < stop for index, _ in run.inserted):
                rendered.certain = False
                parts = self._around_inserted(run, messages, tools, position, (first, stop), k)
                spans += parts if k in trained else ()
                continue
            low = bisect_left(own_indices, first, low)
            high = bisect_left(own_indices, stop, low)
            words = own_indices[high - 1] if high > low else first - 1
            is_content = high > low and len(message) == 2 and out[words] is message.get("content")
            if is_content and stop - first == 3 and words == first + 1 and not taken:
                # Most turns: text of the template, the content, text of the template.
                key = out[first], out[stop - 1], roles[k - 1] if k else None
                edges = self._edges.get(key)
                if edges is None:
                    edges = self._edges[key] = self._untrained_edges(*key)
                if edges:
                    if k in trained:
                        close = self._until_next(rendered, end - edges[1], k, len(messages))
                        spans.append((begin + edges[0], close))
                    continue
            if not is_content:
                printed = [out[index] for index in own_indices[low:high]]
                turn = text[begin:end]
                rendered.certain &= check_printed(
                    message, k, printed, text, _is_last(k, roles), self.thinking, turn
                )
            if taken:
                _check_taken(run, first, stop, message, k)
            lead_end = own_indices[low] if high > low else stop
            start = self._start(run, messages, tools, position, (first, stop), lead_end, k)
            if taken and k and pieces[k - 1] == (0, 0) and _owner_at(run, first) < 0:
                # Text outside the loop may begin with the message before, which has no words.
                reached = self.generation_prompts.reached(text, begin, messages[:k], tools)
                if reached is None:
                    raise unproven(f"assistant turn {k} does not begin with its generation prompt")
                start = max(start, reached)
            tail = out[stop - 1] if words == stop - 2 else "".join(out[words + 1 : stop])
            stripped = tail.rstrip()
            close = end - len(tail) + len(stripped)
            if close > start and stripped:
                following = self.generation_prompts.next_end_of_turn
                if following and text.startswith(following, end):
                    close = end + len(following)  # the next turn prints it
                    rendered.ends[k] = max(rendered.ends[k], close)
                if k in trained:
                    spans.append((start, self._until_next(rendered, close, k, len(messages))))
                continue
            own_words = out[words] if high > low else ""
            span_end = self._unclosed(rendered, start, end, position[words + 1], own_words, k)
            if k in trained and text[start:span_end].strip():
                spans.append((start, span_end))
        rendered.spans = spans

    def _untrained_edges(self, before: str, after: str, previous: str | None) -> tuple[int, ...]:
        """Return the untrained length at both ends of a turn.

        Empty if the text of the template before and after the content does not determine them.
        """
        prompts = self.generation_prompts
        header, kept = prompts.after(previous), after.rstrip()
        if prompts.depends_on_row or prompts.next_end_of_turn or not kept or not header.prompts:
            return ()
        if not before.startswith(header.prompts[0]):
            return ()
        return header.skips[0], len(after) - len(kept)

    def _until_next(self, rendered: RenderedRow, close: int, k: int, count: int) -> int:
        """Return the end of a span: after its end-of-turn token, or at the next turn."""
        if self.turn_end == "stop" or (k + 1 == count and self.generation_prompts.always_prompts):
            return close
        return max(close, rendered.ends[k])

    def _start(
        self,
        run: Run,
        messages: Messages,
        tools: list[Any] | None,
        position: list[int],
        piece: Span,
        lead_end: int,
        k: int,
    ) -> int:
        """Return where the model's part of a turn begins; `lead_end` is its first own fragment."""
        text, (first, stop) = run.text, piece
        begin, end = position[first], position[stop]
        generation_prompts = self.generation_prompts
        if generation_prompts.depends_on_row:
            reached = generation_prompts.reached(text, begin, messages[:k], tools)
            if reached is not None:
                return reached
        header = generation_prompts.after(messages[k - 1]["role"] if k else None)
        if header.prompts and text.startswith(header.prompts[0], begin):
            return begin + header.skips[0]
        lead = text[begin : position[lead_end]]
        start = self._start_after(header, text[begin:end], lead, messages[k])
        if start is not None:
            return begin + start
        reached = self.generation_prompts.reached(text, begin, messages[:k], tools)
        if reached is None:
            raise unproven(
                f"assistant turn {k} begins with {_short(lead)}, which is not the template's"
                " generation prompt"
            )
        return reached

    def _start_after(
        self, header: TurnHeader, turn: str, lead: str, message: dict[str, Any]
    ) -> int | None:
        """Return the length of the prompt at the start of a turn; None if there is none.

        ``lead`` is the text of the turn before the message's own words.
        """
        for prompt, skip in zip(header.prompts, header.skips, strict=True):
            if turn.startswith(prompt):
                return skip
        name = message.get("name")
        if isinstance(name, str) and name:  # some templates print it in place of the role
            header = self.generation_prompts.named(header, name)
        if not lead.strip():
            return 0
        starts = [
            reached
            for prompt in header.prompts
            if (reached := _reached(prompt, turn, lead, self.generation_prompts.untrained))
            is not None
        ]
        if starts:
            return max(starts)
        if header.has_no_prompt:
            return 0
        if not header.prompts and turn.startswith(self.generation_prompts.lead):
            return len(self.generation_prompts.lead)
        return None

    def _around_inserted(
        self,
        run: Run,
        messages: Messages,
        tools: list[Any] | None,
        position: list[int],
        piece: Span,
        k: int,
    ) -> list[Span]:
        """Return the assistant's parts of a turn in which a loop prints other messages.

        The part before those messages must be the same without them. A part after them must begin
        with the assistant's own words; a part without such words is not the assistant's.
        """
        text, (first, stop) = run.text, piece
        inserted = [part for part in run.inserted if first <= part[0] < stop]
        others = {index for part in inserted for index in range(*part)}
        own = [index for index in run.own if first <= index < stop and index not in others]
        for index, owner in run.taken:
            if first <= index < stop and owner != k and index not in others:
                raise unproven(f"the template prints {_short(run.out[index])} in turn {k}")
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        printed, turn = [run.out[index] for index in own], text[position[first] : position[stop]]
        check_printed(messages[k], k, printed, text, k == assistants[-1], self.thinking, turn)
        start = self._start(run, messages, tools, position, piece, own[0] if own else stop, k)
        spans: list[Span] = []
        edges = [first, *(edge for part in inserted for edge in part), stop]
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            words = [index for index in own if low <= index < high and run.out[index].strip()]
            if low == first:
                alone = self.generation_prompts.of_row(messages[: k + 1], tools, prompt=False)
                if alone is None or not alone.text.startswith(text[: position[high]]):
                    raise unproven(f"turn {k} is printed differently without the messages after it")
            elif not words:
                continue
            elif text[position[low] : position[words[0]]].strip():
                raise unproven(f"turn {k} continues with text of the template")
            else:
                start = position[words[0]]
            end = start + len(text[start : position[high]].rstrip())
            if end > start:
                spans.append((start, end))
        return spans

    def _unclosed(
        self, rendered: RenderedRow, start: int, end: int, words_end: int, words: str, k: int
    ) -> int:
        """Return where the trained part ends in a turn that prints no token after its words.

        Whitespace ends the turn (RWKV: a blank line), or text that the template prints in the next
        turn or at the end of the conversation (Apertus), or nothing.
        """
        text, following = rendered.text, rendered.ends[k]
        has_text = bool(text[start:end].strip())
        closed = end > words_end
        close = end
        if not closed and not words.strip():
            close = start + len(text[start:end].rstrip())
        end_of_turn = self.generation_prompts.end_of_turn if has_text and not closed else ""
        if end_of_turn.strip() and text.startswith(end_of_turn, end):
            close, closed = end + len(end_of_turn), True
            following = max(following, close)
            rendered.ends[k] = following
        rendered.closed &= closed
        if self.turn_end == "turn" and (
            following < len(text) or not self.generation_prompts.always_prompts
        ):
            return max(following, close)
        return close

    def _resolve_generation(
        self,
        rendered: RenderedRow,
        run: Run,
        messages: Messages,
        tools: list[Any] | None,
        position: list[int],
        trained: Sequence[int],
    ) -> None:
        """Take the spans from the template's own generation blocks."""
        if len(run.generation) % 2:
            raise unproven("the template's generation blocks are not balanced")
        assistants = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        before: tuple[int, int] | None = None
        printed: dict[int, list[str]] = {}
        for first, stop in zip(run.generation[::2], run.generation[1::2], strict=True):
            if position[first] == position[stop]:
                continue
            owner = _owner_at(run, first)
            if owner < 0 and before is not None and before[0] == position[first]:
                owner = before[1]  # an end-of-turn token in its own block, after the loop
            if owner < 0 and (sources := {k for at, k in run.taken if first <= at < stop}):
                owner = sources.pop()
                if sources or owner < 0:
                    raise unproven("a generation block contains text of several messages")
            before = (position[stop], owner)
            if owner < 0 and list(trained) != assistants:
                raise unproven("a generation block of the template does not belong to one turn")
            if owner >= 0 and owner not in assistants:
                role = messages[owner]["role"]
                raise unproven(f"a generation block contains turn {owner}, which is of role {role}")
            if owner < 0 or owner in trained:
                start = position[first]
                if owner >= 0:
                    start = min(self._behind_header(run.text, start, messages, tools, owner),
                                position[stop])  # fmt: skip
                    rendered.clipped |= start > position[first]
                spans.append((start, position[stop]))
            low = bisect_left(run.own, first)
            own = run.own[low : bisect_left(run.own, stop, low)]
            printed.setdefault(owner, []).extend(run.out[index] for index in own)
            if owner >= 0 and run.taken:
                _check_taken(run, first, stop, messages[owner], owner)
        last = assistants[-1] if assistants else -1
        for k in assistants:
            try:
                words = [*printed.get(k, ()), *printed.get(-1, ())]
                check_printed(messages[k], k, words, "", k == last, self.thinking)
            except RowError as error:
                # The template's author decides which parts are trained.
                rendered.dropped = error.message
        rendered.spans = spans

    def _behind_header(
        self, text: str, start: int, messages: Messages, tools: list[Any] | None, k: int
    ) -> int:
        """Return the start of a generation block without the generation prompt that it repeats.

        A block that begins inside the prompt stays as it is: its author excluded the header and
        included the thinking that the prompt opens.
        """
        run = self.generation_prompts.of_row(messages[:k], tools)
        if run is None or not text.startswith(run.text):
            return start
        bare = self.generation_prompts.of_row(messages[:k], tools, prompt=False)
        header = len(bare.text) if bare is not None else len(run.text)
        return len(run.text) if start <= header < len(run.text) else start


def _reached(prompt: str, turn: str, lead: str, untrained: Callable[[str], int]) -> int | None:
    """Return where a generation prompt ends in a turn that does not begin with all of it.

    The turn may have text before the prompt (a default system message), other whitespace around it,
    other thinking than the prompt opens, or only the first part of the prompt.
    """
    start = turn.rfind(prompt[: before_thinking(prompt)].strip(), 0, len(lead))
    if start >= 0:
        return start + untrained(common_prefix(prompt.lstrip(), turn[start:]))
    if not prompt.strip().startswith(lead.strip()):
        return None
    blank = len(turn) - len(turn.lstrip())
    return max(len(lead), blank + untrained(common_prefix(prompt.lstrip(), turn[blank:])))


def pieces_of(run: Run, position: list[int]) -> dict[int, Span]:
    """Return the first fragment of each message and the one after its last.

    The first is -1 for a message that was printed in several places.
    """
    pieces: dict[int, Span] = {}
    stop, end = len(run.out), position[-1]
    for first, owner in reversed(run.marks):
        if owner >= 0 and position[first] != end:
            piece = pieces.get(owner)
            if piece is None:
                pieces[owner] = (first, stop)
            elif position[piece[0]] == end:
                pieces[owner] = (first, piece[1])
            else:
                pieces[owner] = (-1, stop)
        stop, end = first, position[first]
    return pieces


def with_unlooped(run: Run, position: list[int]) -> dict[int, Span]:
    """Return `pieces_of`, with text outside the loop for the one message it was taken from.

    Some templates print a system message before the loop, or the last turn after it.
    """
    pieces = pieces_of(run, position)
    marks = [(0, -1), *run.marks, (len(run.out), -1)] if run.taken else []
    for (first, message), (stop, _) in pairwise(marks):
        if message >= 0 or position[first] == position[stop]:
            continue
        owners = {
            source
            for index, source in run.taken
            if first <= index < stop and run.out[index].strip()
        }
        owner = owners.pop() if len(owners) == 1 else -1
        if owner >= 0 and owner not in pieces:
            pieces[owner] = (first, stop)
    return pieces


def _is_last(k: int, roles: Sequence[str]) -> bool:
    """Whether no later message is the assistant's."""
    return "assistant" not in roles[k + 1 :]


def _owner_at(run: Run, index: int) -> int:
    return next((owner for first, owner in reversed(run.marks) if first <= index), -1)


def ends_of(messages: Messages, pieces: dict[int, Span], position: Sequence[int]) -> list[int]:
    """Return the end of every turn, which is the start of the next printed message."""
    ends: list[int] = []
    following = position[-1]
    for k in range(len(messages) - 1, -1, -1):
        ends.append(following)
        piece = pieces.get(k)
        if piece is not None and piece[0] >= 0 and position[piece[0]] < following:
            following = position[piece[0]]
    ends.reverse()
    return ends


# -- checks -----------------------------------------------------------------------------------


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "…")


def _check_taken(
    run: Run, first: int, stop: int, message: dict[str, Any], k: int, others: Set[int] = frozenset()
) -> None:
    """Raise if the template prints another message in a turn.

    Words from an unknown message must occur in the assistant's own.
    """
    for index, owner in run.taken:
        if owner == k or not first <= index < stop or index in others:
            continue
        words = run.out[index].strip()
        if owner >= 0 or (words and not any(words in own for own in strings(message))):
            raise unproven(f"the template prints {_short(words)} in assistant turn {k}")


def check_printed(
    message: dict[str, Any],
    k: int,
    printed: list[str],
    text: str,
    last: bool,
    thinking: re.Pattern[str] | None,
    turn: str = "",
) -> bool:
    """Raise if the template does not print all content of assistant message `k`.

    ``printed`` are the fragments of the message that the template printed in its turn. The
    reasoning of the ``last`` assistant turn must be printed, too. Numbers and booleans may appear
    in any form anywhere in ``turn``, the text of the turn.

    Returns:
        Whether every field is printed as often as the fields that contain its words require. If
        not, only unique words can show which field was printed.
    """
    content = message.get("content")
    is_certain, texts = True, []
    if isinstance(content, str):
        if content not in printed and content:
            is_certain = _check_text(content, k, printed, text, last, thinking)
        texts.append(content.strip())
    elif isinstance(content, list):
        for part in content:
            words = part.get("text") if isinstance(part, dict) else None
            if isinstance(words, str):
                is_certain &= _check_text(words, k, printed, text, last, thinking)
                texts.append(words.strip())
    if is_plain(message):
        return is_certain
    for key in REASONING_KEYS:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and (thought := reasoning.strip()):
            if _is_printed(thought, printed):
                texts.append(thought)
            elif last:
                raise _missing(f"the reasoning of the last turn ({k})", thought, text)
            break
    printed_text = "\0".join(printed)
    calls = _calls(message)
    words = [word for call in calls for word in _words(call.get("arguments"))]
    arguments = "\0".join(map(str, words))
    names = [name for call in calls if isinstance(name := call.get("name"), str) and name]
    listed = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    ids = [number for call in listed if (number := str(call.get("id"))) in printed_text]
    # All that the template should print, with the keys of calls that it may print with them.
    every = "\0".join([*texts, *names, arguments, *ids, *[CALL_KEYS] * len(calls)])
    for own in filter(None, texts):
        is_certain &= every.count(own) <= printed_text.count(own) and printed.count(own) < 2
    for name in dict.fromkeys(names):
        count = printed_text.count(name)
        if count < names.count(name) + arguments.count(name):
            raise _missing(f"the call of {_short(name)} in turn {k}", "\0", text)
        is_certain &= count >= every.count(name)
    for word in words:
        if isinstance(word, str):
            count, expected = printed_text.count(word), every.count(word)
            if count < expected:  # it may be escaped inside JSON
                count += sum(printed_text.count(form) for form in {*_quoted(word)} - {word})
            is_certain &= count >= expected
        else:
            count = any(form in turn or form in printed_text for form in _forms(word))
            is_certain &= not any(form in own for form in _forms(word) for own in texts)
        if not count:
            raise _missing(f"the argument {_short(str(word))} of a call in turn {k}", "\0", text)
    return is_certain


def _check_text(
    content: str,
    k: int,
    printed: list[str],
    text: str,
    last: bool,
    thinking: re.Pattern[str] | None,
) -> bool:
    """Raise if a text is not printed. Return whether each part of it is printed for itself."""
    stripped = content.strip()
    if not stripped or any(fragment.strip() == stripped for fragment in printed):
        return True
    if _consists_of(content, printed, thinking):
        return True
    runs = cut(content, thinking)
    for kind, words in runs:
        if (kind == TEXT or last) and not _is_printed(words, printed):
            what = "text" if kind == TEXT else "reasoning"
            raise _missing(f"the {what} {_short(words)} of turn {k}", words, text)
    printed_text = "\0".join(printed)
    every = "\0".join(words for _, words in runs if words in printed_text)
    return all(printed_text.count(words) >= every.count(words) for _, words in runs)


def _consists_of(content: str, printed: list[str], thinking: re.Pattern[str] | None) -> bool:
    """Whether a text consists of the printed fragments, in this order, and of thinking tags."""
    rest: list[str] = []
    position = 0
    for fragment in printed:
        at = content.find(fragment[:32], position)
        if at < 0 or not content.startswith(fragment, at):
            return False
        rest.append(content[position:at].strip())
        position = at + len(fragment)
    rest.append(content[position:].strip())
    return all(not part or (thinking is not None and thinking.fullmatch(part)) for part in rest)


def _is_printed(words: str, printed: list[str]) -> bool:
    return any(words in fragment for fragment in printed)


def _missing(what: str, words: str, text: str) -> RowError:
    if words in text:
        return unproven(f"the template prints {what} outside its turn, or changed")
    return RowError(
        f"the template does not print {what}, so a model would learn an answer without it",
        reason="template_drops_content",
    )


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    listed = [*calls] if isinstance(calls, list) else [calls]
    if message.get("function_call"):
        listed.append(message["function_call"])
    objects = [call for call in listed if isinstance(call, dict)]
    return [c["function"] if isinstance(c.get("function"), dict) else c for c in objects]


def _words(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if type(item) is str:  # nearly always
                if item := item.strip():
                    yield item
            else:
                yield from _words(item)
    elif isinstance(value, list):
        for item in value:
            yield from _words(item)
    elif isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif value is not None:
        yield value


def _quoted(word: str) -> Iterator[str]:
    yield json.dumps(word, ensure_ascii=False)[1:-1]
    yield json.dumps(word)[1:-1]


def _forms(word: Any) -> Iterator[str]:
    """Yield the ways in which a template may print a number or boolean."""
    yield str(word)
    if isinstance(word, bool):
        yield json.dumps(word)
    elif isinstance(word, float) and word.is_integer():
        yield str(int(word))
