r"""Find each message's part of a rendered text, and the part of it that is trained.

What a template prints while its loop is at a message is the message's turn. In an assistant's turn,
what follows the generation prompt is trained, up to and including the end-of-turn token::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n
    └──────── turn of user ────────┘└─ generation prompt ─┘└─────────── trained ─────────────┘
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import Any

from tokenmill.chat.calls import TOOL_ROLES, strings
from tokenmill.chat.pictures import Picture
from tokenmill.chat.program import MIXED, Run
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import REASONING, TAG, TEXT, before_thinking, cut
from tokenmill.errors import RowError

Span = tuple[int, int]
Messages = list[dict[str, Any]]

ATOM = re.compile(rf"{TAG.pattern}|\w+|\s|.", re.DOTALL)
MAX_PROMPT = 512  # characters at the end of a generation prompt that may open thinking


@dataclass(slots=True)
class Settled:
    """One render with its turns and what is trained of it."""

    text: str
    spans: list[Span] | None  # None: everything is trained
    roles: Sequence[str]  # of each message
    ends: list[int]  # of each message's turn
    closed: bool = True  # whether something closes each assistant turn
    dropped: str = ""  # what the template's own generation blocks leave out
    certain: bool = True  # whether words show from which field each was printed
    clipped: bool = False  # whether a generation block contained a generation prompt
    weights: Sequence[float] = ()  # of each turn in the loss; empty where each is 1
    pictures: Sequence[Picture] = ()  # of the conversation, in order


def is_plain(message: dict[str, Any]) -> bool:
    """Whether a message has a content and nothing else that a template may print."""
    return len(message) == 2 and "content" in message


def common_prefix(left: str, right: str) -> str:
    """Return the common prefix in whole units: a tag, a word, one other character."""
    if left.startswith(right):
        return right
    if right.startswith(left):
        return left
    length = 0
    for a, b in zip(ATOM.finditer(left), ATOM.finditer(right), strict=False):
        if a[0] != b[0]:
            break
        length += len(a[0])
    return left[:length]


def unproven(why: str) -> RowError:
    """Return the rejection of a row whose trained part cannot be proven."""
    return RowError(why, reason="mask_unproven")


# -- where a turn begins ----------------------------------------------------------------------


def _says(role: str, content: str = "Hello.", **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def _calls_a_tool(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return _says("assistant", "", tool_calls=[call])


_WHERE = {"type": "string", "description": "Where."}
_PARAMETERS = {"type": "object", "properties": {"where": _WHERE}, "required": ["where"]}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": _PARAMETERS},
}
_CALL = _calls_a_tool({"where": "here"})
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "Hello."}
_QUESTION = [_says("user"), _says("assistant")]
CONVERSATIONS: list[Messages] = [
    _QUESTION,
    [_says("system"), *_QUESTION, _says("user")],
    [_says("user"), _CALL, _RESULT, _says("assistant")],
    [
        _says("user"),
        _says("assistant", reasoning_content="Hm."),
        _says("user"),
        _says("assistant", "<think>\nHm.\n</think>\n\nHello."),
    ],
]
_AFTER: dict[str, list[Messages]] = {
    "tool": [
        [_says("user"), _CALL, _RESULT],
        [_says("user"), _calls_a_tool('{"where": "here"}'), _RESULT],
    ],
    "assistant": [_QUESTION],
    "system": [[_says("system")]],
    "user": [[_says("user")], [_says("system"), _says("user")], [*_QUESTION, _says("user")]],
}


@dataclass(slots=True)
class Opening:
    """The generation prompts that may begin an assistant's turn, the most likely first."""

    prompts: tuple[str, ...]
    skips: tuple[int, ...]  # untrained length of each: all, or all but the thinking that it opens
    silent: bool  # whether the template prints no prompt after such a message


class Openings:
    """The generation prompts of one template, found with small conversations of our own.

    Where the prompt depends on the row (`depends_on_row`), `reached` renders the row's own.
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
        self._known: dict[str | None, Opening] = {}
        self._prompts: dict[str, str | None] = {}

    def _follow(self, messages: Messages, prompt: bool) -> Run:
        """Render without tools, or with one if the template refuses that."""
        try:
            return self._render(messages, None, prompt)
        except RowError:
            return self._render(messages, [TOOL], prompt)

    def of_row(
        self, messages: Messages, tools: list[Any] | None, *, prompt: bool = True
    ) -> Run | None:
        """Render messages of the row with the generation prompt; None if the template refuses."""
        try:
            return self._render(messages, tools, prompt)
        except RowError:
            return None

    def reached(
        self, text: str, begin: int, messages: Messages, tools: list[Any] | None
    ) -> int | None:
        """How far the row's own generation prompt reaches into the turn that begins at `begin`.

        The prompt is rendered for the row's messages before the turn. None if the template refuses
        them, or if the turn does not begin with it.
        """
        run = self.of_row(messages, tools)
        if run is None:
            return None
        place = len(run.text)
        if place <= begin or not text.startswith(run.text):
            prompt = tail(run)
            if not prompt.strip() or not text.startswith(prompt, begin):
                return None
            place = begin + len(prompt)
        return self.trained_from(text, place, begin)

    def trained_from(self, text: str, place: int, begin: int = 0) -> int:
        """Return where training starts in a text whose generation prompt ends at `place`."""
        first = max(begin, place - MAX_PROMPT)
        return first + self.untrained(text[first:place])

    def after(self, role: str | None) -> Opening:
        """Return what opens a turn after a message of this role."""
        known = self._known.get(role)
        if known is None:
            known = self._known[role] = self._find(role)
        return known

    def _find(self, role: str | None) -> Opening:
        kind = "user" if role is None else "tool" if role in TOOL_ROLES else role
        kind = kind if kind in _AFTER else "user"
        found = dict.fromkeys(self._prompt(name) for name in (kind, "user"))
        prompts = tuple(prompt for prompt in found if prompt)
        silent = bool(prompts) and self._prompt(kind) == ""
        return self._opening(prompts, silent)

    def _opening(self, prompts: Iterable[str], silent: bool) -> Opening:
        prompts = tuple(dict.fromkeys(prompts))
        return Opening(prompts, tuple(map(self.untrained, prompts)), silent)

    def named(self, opening: Opening, name: str) -> Opening:
        """Add the prompts with a name in place of the role."""
        prompts = [prompt.replace("assistant", name) for prompt in opening.prompts]
        return self._opening([*prompts, *opening.prompts], opening.silent)

    def _prompt(self, kind: str) -> str | None:
        if kind not in self._prompts:
            found = self._asked_and_unasked(kind)
            self._prompts[kind] = None if found is None else _difference(*found)
        return self._prompts[kind]

    def _asked_and_unasked(self, kind: str) -> tuple[Run, Run] | None:
        """Render the first conversation that the template takes, with and without the prompt."""
        for messages in _AFTER[kind]:
            try:
                return self._follow(messages, True), self._follow(messages, False)
            except RowError:
                continue
        return None

    @cached_property
    def standing(self) -> bool:
        """Whether the template always prints the generation prompt."""
        found = self._asked_and_unasked("user")
        if found is None:
            return False
        last, unasked = map(tail, found)
        return bool(last.strip()) and last == unasked

    @cached_property
    def closer(self) -> str:
        """What ends an assistant's turn outside its own part: at the end, or in the next turn."""
        if self.standing:
            return ""
        user, assistant = _says("user"), _says("assistant")
        try:
            if last := tail(self._follow([user, assistant], False)).rstrip():
                return last
            first = _turn(self._follow([user, assistant], False), 0)
            later = _turn(self._follow([user, assistant, user], False), 2)
        except RowError:
            return ""
        return later.removesuffix(first) if later.endswith(first) else ""

    @cached_property
    def next_closer(self) -> str:
        """The end-of-turn token of a template that never prints it in the turn itself."""
        try:
            run = self._follow([_says("user"), _says("assistant")], False)
        except RowError:
            return ""
        first, stop = pieces_of(run, [0, *accumulate(map(len, run.out))]).get(1, (-1, -1))
        last = max((place for place in run.own if first <= place < stop), default=stop)
        return "" if "".join(run.out[last + 1 : stop]).strip() else self.closer

    @cached_property
    def lead(self) -> str:
        """What assistant turns begin with in a template without a generation prompt."""
        leads = []
        for turn in (_says("assistant"), _CALL):
            try:
                run = self._follow([_says("user"), turn], False)
            except RowError:
                continue
            found = pieces_of(run, [0, *accumulate(map(len, run.out))]).get(1)
            if found is not None and found[0] >= 0:
                own = next((place for place in run.own if place >= found[0]), len(run.out))
                leads.append("".join(run.out[found[0] : own]))
        return reduce(common_prefix, leads) if leads else ""


def tail(run: Run) -> str:
    """Return what was printed after the last message."""
    return "".join(run.out[run.marks[-1][0] :]) if run.marks else ""


def _turn(run: Run, k: int) -> str:
    return "".join(
        "".join(run.out[first:stop])
        for (first, owner), (stop, _) in pairwise(run.marks)
        if owner == k
    )


def _difference(asked: Run, unasked: Run) -> str:
    """Return the generation prompt, printed after the last message or in its turn."""
    last = tail(asked)
    if last.strip():
        return last
    with_prompt, without = "".join(asked.out), "".join(unasked.out)
    return with_prompt[len(without) :] if with_prompt.startswith(without) else ""


# -- one render -------------------------------------------------------------------------------


@dataclass(slots=True)
class TurnJudge:
    """Finds and checks the trained spans in renders of one template."""

    openings: Openings
    turn_end: str  # "stop" or "turn"
    thinking: re.Pattern[str] | None  # matches the thinking tags of the template
    generation: bool  # whether the template has generation blocks

    def settle(
        self,
        run: Run,
        messages: Messages,
        trained: Sequence[int] | None,
        tools: list[Any] | None = None,
    ) -> Settled:
        """Find the turns and the trained spans of one render, and check the spans.

        Each assistant's turn must be in one piece and contain all that the assistant said and
        nothing that another message said. ``trained`` are indices of messages, None: everything.

        Raises:
            RowError: template_drops_content or mask_unproven.
        """
        position = list(accumulate(map(len, run.out), initial=0))
        roles = [message["role"] for message in messages]
        places, owners = zip(*run.marks, strict=True) if run.marks else ((), ())
        if not run.taken and owners == (*range(len(messages)), -1):
            # As most templates do it: one loop, every message once.
            pieces = dict(enumerate(pairwise(places)))
            ends = [*map(position.__getitem__, places[1:-1]), position[-1]]
        else:
            pieces = pieces_of(run, position)
            if run.taken:
                add_unlooped(run, position, pieces)
            ends = ends_of(messages, pieces, position)
        settled = Settled(run.text, None, roles, ends)
        if trained is None:
            return settled
        if self.generation:
            self._settle_generation(settled, run, messages, tools, position, trained)
        else:
            self._settle_turns(settled, run, messages, tools, position, pieces, trained)
        return settled

    def check(self, run: Run, messages: Messages) -> None:
        """Raise if a field of an assistant is not printed in its turn, or another message is."""
        position = list(accumulate(map(len, run.out), initial=0))
        pieces = pieces_of(run, position)
        if run.taken:
            add_unlooped(run, position, pieces)
        others = {place for part in run.inserted for place in range(*part)}
        assistants = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        for k in assistants:
            first, stop = pieces.get(k, (0, 0))
            if first < 0:
                raise unproven(f"the template prints the turn {k} in several places")
            own = run.own[bisect_left(run.own, first) : bisect_left(run.own, stop)]
            said = [run.out[place] for place in own if place not in others]
            turn = run.text[position[first] : position[stop]]
            check_printed(messages[k], k, said, run.text, k == assistants[-1], self.thinking, turn)
            _check_taken(run, first, stop, messages[k], k, others)

    def closing(self, run: Run, k: int) -> tuple[int, int | None]:
        """Return where an assistant's own words end in a render, and where its turn ends.

        The turn must be in one piece; a model may sample anything, so nothing else is checked. The
        second is None if the template prints other messages in the same turn.
        """
        position = list(accumulate(map(len, run.out), initial=0))
        pieces = pieces_of(run, position)
        if run.taken:
            add_unlooped(run, position, pieces)
        first, stop = pieces.get(k, (-1, -1))
        if first < 0:
            raise unproven(f"the template prints the turn {k} in several places, or nowhere")
        others = {place for place, owner in run.taken if owner != k}
        own = run.own[bisect_left(run.own, first) : bisect_left(run.own, stop)]
        last = max((place for place in own if place not in others), default=first - 1)
        words, end = position[last + 1], position[stop]
        if any(run.out[place] and last < place < stop for place in others):
            return words, None
        tail = run.text[words:end]
        if tail.strip():
            return words, words + len(tail.rstrip())
        closer = "" if tail else self.openings.closer
        return words, end + (len(closer) if run.text.startswith(closer, end) else 0)

    def _settle_turns(
        self,
        settled: Settled,
        run: Run,
        messages: Messages,
        tools: list[Any] | None,
        position: list[int],
        pieces: dict[int, Span],
        trained: Sequence[int],
    ) -> None:
        spans: list[Span] = []
        text, out, own_places = run.text, run.out, run.own
        assistants = [k for k, role in enumerate(settled.roles) if role == "assistant"]
        last = assistants[-1] if assistants else -1
        settled.certain = all(owner != MIXED for _, owner in run.taken)
        low = 0
        for k in assistants:
            message = messages[k]
            first, stop = pieces.get(k, (0, 0))
            if first < 0:
                raise unproven(f"the template prints the turn {k} in several places")
            begin, end = position[first], position[stop]
            if begin == end:
                check_printed(message, k, [], text, k == last, self.thinking)
                continue
            if run.inserted and any(first <= place < stop for place, _ in run.inserted):
                settled.certain = False
                found = self._around_inserted(run, messages, tools, position, (first, stop), k)
                spans += found if k in trained else ()
                continue
            low = bisect_left(own_places, first, low)
            high = bisect_left(own_places, stop, low)
            words = own_places[high - 1] if high > low else first - 1
            if high == low or len(message) > 2 or out[words] is not message.get("content"):
                said = [out[place] for place in own_places[low:high]]
                turn = text[begin:end]
                settled.certain &= check_printed(
                    message, k, said, text, k == last, self.thinking, turn
                )
            if run.taken:
                _check_taken(run, first, stop, message, k)
            lead_end = own_places[low] if high > low else stop
            start = self._start(run, messages, tools, position, (first, stop), lead_end, k)
            tail = out[stop - 1] if words == stop - 2 else "".join(out[words + 1 : stop])
            close = end - len(tail) + len(tail.rstrip())
            if close > start and tail.strip():
                following = self.openings.next_closer
                if following.strip() and text.startswith(following, end):
                    close = end + len(following)  # the next turn prints it
                    settled.ends[k] = max(settled.ends[k], close)
                if k in trained:
                    if self.turn_end == "turn" and (
                        k + 1 < len(messages) or not self.openings.standing
                    ):
                        close = max(close, settled.ends[k])
                    spans.append((start, close))
                continue
            own_words = out[words] if high > low else ""
            span_end = self._unclosed(settled, start, end, position[words + 1], own_words, k)
            if k in trained and text[start:span_end].strip():
                spans.append((start, span_end))
        settled.spans = spans

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
        """Return where the model's part of a turn begins; `lead_end`: its first own fragment."""
        text, (first, stop) = run.text, piece
        begin, end = position[first], position[stop]
        opening = self.openings.after(messages[k - 1]["role"] if k else None)
        if self.openings.depends_on_row:
            reached = self.openings.reached(text, begin, messages[:k], tools)
            if reached is not None:
                return reached
        if opening.prompts and text.startswith(opening.prompts[0], begin):
            return begin + opening.skips[0]
        lead = text[begin : position[lead_end]]
        start = self._start_after(opening, text[begin:end], lead, messages[k])
        if start is not None:
            return begin + start
        reached = self.openings.reached(text, begin, messages[:k], tools)
        if reached is None:
            raise unproven(
                f"the assistant turn {k} begins with {_short(lead)}, which is not how the template"
                " opens a turn"
            )
        return reached

    def _start_after(
        self, opening: Opening, turn: str, lead: str, message: dict[str, Any]
    ) -> int | None:
        """Return how far a prompt of the template reaches into a turn; None if there is none.

        ``lead`` is what the turn prints before the message's own words.
        """
        for prompt, skip in zip(opening.prompts, opening.skips, strict=True):
            if turn.startswith(prompt):
                return skip
        name = message.get("name")
        if isinstance(name, str) and name:  # some print it in place of the role
            opening = self.openings.named(opening, name)
        if not lead.strip():
            return 0
        starts = [
            reached
            for prompt in opening.prompts
            if (reached := _reached(prompt, turn, lead, self.openings.untrained)) is not None
        ]
        if starts:
            return max(starts)
        if opening.silent:
            return 0
        if not opening.prompts and turn.startswith(self.openings.lead):
            return len(self.openings.lead)
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

        The part before them must be the same without those messages. What follows them must begin
        with the assistant's own words; what is printed there without any is not the assistant's.
        """
        text, (first, stop) = run.text, piece
        inserted = [part for part in run.inserted if first <= part[0] < stop]
        others = {place for part in inserted for place in range(*part)}
        own = [place for place in run.own if first <= place < stop and place not in others]
        for place, owner in run.taken:
            if first <= place < stop and owner != k and place not in others:
                raise unproven(f"the template prints {_short(run.out[place])} in the turn {k}")
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        said, turn = [run.out[place] for place in own], text[position[first] : position[stop]]
        check_printed(messages[k], k, said, text, k == assistants[-1], self.thinking, turn)
        start = self._start(run, messages, tools, position, piece, own[0] if own else stop, k)
        spans: list[Span] = []
        edges = [first, *(edge for part in inserted for edge in part), stop]
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            words = [place for place in own if low <= place < high and run.out[place].strip()]
            if low == first:
                alone = self.openings.of_row(messages[: k + 1], tools, prompt=False)
                if alone is None or not alone.text.startswith(text[: position[high]]):
                    raise unproven(f"the turn {k} is printed otherwise without what follows it")
            elif not words:
                continue
            elif text[position[low] : position[words[0]]].strip():
                raise unproven(f"the turn {k} goes on with text of the template")
            else:
                start = position[words[0]]
            end = start + len(text[start : position[high]].rstrip())
            if end > start:
                spans.append((start, end))
        return spans

    def _unclosed(
        self, settled: Settled, start: int, end: int, words_end: int, words: str, k: int
    ) -> int:
        """Return where the trained part ends in a turn that prints no token after its words.

        Whitespace ends the turn (RWKV: a blank line), or what the template prints at the next turn
        or at the end of the conversation (Apertus), or nothing does.
        """
        text, following = settled.text, settled.ends[k]
        said = bool(text[start:end].strip())
        closed = end > words_end
        close = end
        if not closed and not words.strip():
            close = start + len(text[start:end].rstrip())
        closer = self.openings.closer if said and not closed else ""
        if closer.strip() and text.startswith(closer, end):
            close, closed = end + len(closer), True
            following = max(following, close)
            settled.ends[k] = following
        settled.closed &= closed
        if self.turn_end == "turn" and (following < len(text) or not self.openings.standing):
            return max(following, close)
        return close

    def _settle_generation(
        self,
        settled: Settled,
        run: Run,
        messages: Messages,
        tools: list[Any] | None,
        position: list[int],
        trained: Sequence[int],
    ) -> None:
        """Take the spans from the template's own generation blocks."""
        if len(run.generation) % 2:
            raise unproven("the template's generation blocks could not be followed")
        assistants = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        before: tuple[int, int] | None = None
        said: dict[int, list[str]] = {}
        for first, stop in zip(run.generation[::2], run.generation[1::2], strict=True):
            if position[first] == position[stop]:
                continue
            owner = _owner_at(run, first)
            if owner < 0 and before is not None and before[0] == position[first]:
                owner = before[1]  # a closer in a block of its own, after the loop
            before = (position[stop], owner)
            if owner < 0 and list(trained) != assistants:
                raise unproven("a generation block of the template could not be given to one turn")
            if owner >= 0 and owner not in assistants:
                role = messages[owner]["role"]
                raise unproven(f"the template trains the turn {owner} of {role}")
            if owner < 0 or owner in trained:
                start = position[first]
                if owner >= 0:
                    start = min(self._behind_header(run.text, start, messages, tools, owner),
                                position[stop])  # fmt: skip
                    settled.clipped |= start > position[first]
                spans.append((start, position[stop]))
            low = bisect_left(run.own, first)
            own = run.own[low : bisect_left(run.own, stop, low)]
            said.setdefault(owner, []).extend(run.out[place] for place in own)
            if owner >= 0 and run.taken:
                _check_taken(run, first, stop, messages[owner], owner)
        last = assistants[-1] if assistants else -1
        for k in assistants:
            try:
                words = [*said.get(k, ()), *said.get(-1, ())]
                check_printed(messages[k], k, words, "", k == last, self.thinking)
            except RowError as error:
                # The template's author decides what is trained, even of turns that are printed
                # only in part.
                settled.dropped = error.message
        settled.spans = spans

    def _behind_header(
        self, text: str, start: int, messages: Messages, tools: list[Any] | None, k: int
    ) -> int:
        """Return where a generation block goes on behind the generation prompt that it repeats.

        A block that begins inside the prompt is taken as it is: its author left the header out and
        the thinking that the prompt opens in.
        """
        run = self.openings.of_row(messages[:k], tools)
        if run is None or not text.startswith(run.text):
            return start
        bare = self.openings.of_row(messages[:k], tools, prompt=False)
        header = len(bare.text) if bare is not None else len(run.text)
        return len(run.text) if start <= header < len(run.text) else start


def _reached(prompt: str, turn: str, lead: str, untrained: Callable[[str], int]) -> int | None:
    """Return how far a generation prompt reaches into a turn that does not begin with all of it.

    The turn may print something before it (a default system message), other whitespace around it,
    other thinking than the prompt opens, or only its first part.
    """
    place = turn.rfind(prompt[: before_thinking(prompt)].strip(), 0, len(lead))
    if place >= 0:
        return place + untrained(common_prefix(prompt.lstrip(), turn[place:]))
    if not prompt.strip().startswith(lead.strip()):
        return None
    blank = len(turn) - len(turn.lstrip())
    return max(len(lead), blank + untrained(common_prefix(prompt.lstrip(), turn[blank:])))


def pieces_of(run: Run, position: list[int]) -> dict[int, Span]:
    """Return where each message was printed: its first fragment and the one after its last.

    The first is -1 for a message that was printed in several places.
    """
    pieces: dict[int, Span] = {}
    stop, end = len(run.out), position[-1]
    for first, owner in reversed(run.marks):
        if owner >= 0 and position[first] != end:
            found = pieces.get(owner)
            if found is None:
                pieces[owner] = (first, stop)
            elif position[found[0]] == end:
                pieces[owner] = (first, found[1])
            else:
                pieces[owner] = (-1, stop)
        stop, end = first, position[first]
    return pieces


def add_unlooped(run: Run, position: list[int], pieces: dict[int, Span]) -> None:
    """Assign what was printed outside the loop to the one message that it was taken from.

    Some templates print a system message before the loop, or the last turn after it.
    """
    marks = [(0, -1), *run.marks, (len(run.out), -1)]
    for (first, owner), (stop, _) in pairwise(marks):
        if owner >= 0 or position[first] == position[stop]:
            continue
        owners = {
            taken for place, taken in run.taken if first <= place < stop and run.out[place].strip()
        }
        only = owners.pop() if len(owners) == 1 else -1
        if only >= 0 and only not in pieces:
            pieces[only] = (first, stop)


def _owner_at(run: Run, place: int) -> int:
    return next((owner for first, owner in reversed(run.marks) if first <= place), -1)


def ends_of(messages: Messages, pieces: dict[int, Span], position: Sequence[int]) -> list[int]:
    """Return the end of every turn: where the next message that is printed begins."""
    ends: list[int] = []
    following = position[-1]
    for k in range(len(messages) - 1, -1, -1):
        ends.append(following)
        found = pieces.get(k)
        if found is not None and found[0] >= 0 and position[found[0]] < following:
            following = position[found[0]]
    ends.reverse()
    return ends


# -- what must hold ---------------------------------------------------------------------------


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "…")


def _check_taken(
    run: Run, first: int, stop: int, message: dict[str, Any], k: int, others: Set[int] = frozenset()
) -> None:
    """Refuse a turn in which the template prints another message.

    Words of which the trace does not know the message must be the assistant's own.
    """
    for place, owner in run.taken:
        if owner == k or not first <= place < stop or place in others:
            continue
        words = run.out[place].strip()
        if owner >= 0 or (words and not any(words in own for own in strings(message))):
            raise unproven(f"the template prints {_short(words)} in the assistant turn {k}")


def check_printed(
    message: dict[str, Any],
    k: int,
    said: list[str],
    text: str,
    last: bool,
    thinking: re.Pattern[str] | None,
    turn: str = "",
) -> bool:
    """Raise if the template does not print what the assistant said in message `k`.

    ``said`` is what the template took from the message and printed in its turn. The reasoning of
    the ``last`` assistant turn must be printed, too. Numbers and booleans may be printed in the
    template's own form anywhere in ``turn``, the text of the turn.

    Returns:
        Whether every field is printed as often as the fields that contain its words require. If
        not, only unique words can show which field was printed.
    """
    content = message.get("content")
    if isinstance(content, str):
        if content not in said and content:
            _check_text(content, k, said, text, last, thinking)
    elif isinstance(content, list):
        for part in content:
            words = part.get("text") if isinstance(part, dict) else None
            if isinstance(words, str):
                _check_text(words, k, said, text, last, thinking)
    if is_plain(message):
        return True
    thought = ""
    for key in REASONING_KEYS if last else ():
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip():
            thought = reasoning.strip()
            if not _found(thought, said):
                raise _lost(f"the reasoning of the last turn ({k})", thought, text)
            break
    words_said = "\0".join(said)
    calls = _calls(message)
    words = [word for call in calls for word in _words(call.get("arguments"))]
    arguments = "\0".join(map(str, words))
    answer = content.strip() if isinstance(content, str) else ""
    texts = answer + "\0" + thought
    names = Counter(name for call in calls if isinstance(name := call.get("name"), str) and name)
    is_certain = not answer or said.count(str(content)) < 2
    for name, times in names.items():
        found = words_said.count(name)
        if found < times + arguments.count(name):
            raise _lost(f"the call of {_short(name)} in turn {k}", "\0", text)
        is_certain &= found >= times + arguments.count(name) + texts.count(name)
    for word in words:
        if isinstance(word, str):
            found, others = words_said.count(word), texts.count(word)
            if found <= others:  # it may be printed inside JSON
                found += sum(words_said.count(form) for form in {*_quoted(word)} - {word})
            is_certain &= found > others
        else:
            found = any(form in turn or form in words_said for form in _forms(word))
            is_certain &= not any(form in texts for form in _forms(word))
        if not found:
            raise _lost(f"the argument {_short(str(word))} of a call in turn {k}", "\0", text)
    for own, other in ((answer, thought), (thought, answer)):
        if own:
            is_certain &= words_said.count(own) > other.count(own) + arguments.count(own)
    return is_certain


def _check_text(
    content: str,
    k: int,
    said: list[str],
    text: str,
    last: bool,
    thinking: re.Pattern[str] | None,
) -> None:
    stripped = content.strip()
    if not stripped or any(fragment.strip() == stripped for fragment in said):
        return
    if _is_all_there(content, said, thinking):
        return
    runs = cut(content, thinking)
    for kind, words in runs:
        if kind == TEXT and not _found(words, said):
            raise _lost(f"the text {_short(words)} of turn {k}", words, text)
    thoughts = [words for kind, words in runs if kind == REASONING]
    if last and thoughts and not any(_found(words, said) for words in thoughts):
        raise _lost(f"the reasoning of the last turn ({k})", thoughts[0], text)


def _is_all_there(content: str, said: list[str], thinking: re.Pattern[str] | None) -> bool:
    """Whether a text consists of what was said, in this order, and of thinking tags."""
    rest: list[str] = []
    place = 0
    for fragment in said:
        at = content.find(fragment[:32], place)
        if at < 0 or not content.startswith(fragment, at):
            return False
        rest.append(content[place:at].strip())
        place = at + len(fragment)
    rest.append(content[place:].strip())
    return all(not part or (thinking is not None and thinking.fullmatch(part)) for part in rest)


def _found(words: str, said: list[str]) -> bool:
    return any(words in fragment for fragment in said)


def _lost(what: str, words: str, text: str) -> RowError:
    if words in text:
        return unproven(f"the template prints {what} outside its turn, or rewritten")
    return RowError(
        f"the template prints {what} nowhere, so a model would learn an answer without it",
        reason="template_drops_content",
    )


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    found = [*calls] if isinstance(calls, list) else [calls]
    if message.get("function_call"):
        found.append(message["function_call"])
    objects = [call for call in found if isinstance(call, dict)]
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
    """Yield how a template may print a value that is not a text."""
    yield str(word)
    if isinstance(word, bool):
        yield json.dumps(word)
    elif isinstance(word, float) and word.is_integer():
        yield str(int(word))
