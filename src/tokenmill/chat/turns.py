r"""Where turns start and end: learned from the template itself, never from a list of markers.

Glue is what the template prints between the messages' texts. For an assistant turn two questions
are put to the template, with marked renders of the conversation cut off at that turn:

* *Where does the turn start?* The conversation before it, rendered with the generation prompt,
  ends with what a model is given before it writes. What the whole render has in common with that,
  after the previous message's text, is not the model's; the rest is. A thinking opener that the
  prompt already holds is the model's all the same.
* *Where does it end?* The conversation up to it, rendered with the generation prompt and without,
  ends with its closer; the generation prompt taken off, that is what a closed turn prints.

::

    …user text⟩<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟨text⟩<|im_end|>\n<|im…
               └turn before┘└─ generation prompt ─┘└─────────── trained ──────────┘

Answers are remembered per glue, so a thousand turns of one kind cost two questions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenmill.chat.marks import CLOSING, TAG, THINKING, Hit, Marker
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.errors import RowError

ATOM = re.compile(rf"{TAG.pattern}|\w+|\s|.", re.DOTALL)
REMEMBERED = 4096  # boundaries kept per template: far more kinds of glue than templates print


@dataclass(slots=True, frozen=True)
class Start:
    """Offsets into a glue: where the turn's header begins, and where what is trained begins."""

    header: int
    trained: int


@dataclass(slots=True, frozen=True)
class End:
    """Offsets after a text: end of the closer, start of the next turn; is there a closer?"""

    stop: int
    turn: int
    closed: bool


def atoms(text: str) -> list[str]:
    """A glue in units that belong together: a tag, a word, one other character."""
    return [found[0] for found in ATOM.finditer(text)]


def common_prefix(left: str, right: str) -> str:
    """What two glues start with, in whole units."""
    if left.startswith(right):
        return right
    if right.startswith(left):
        return left
    length = 0
    for a, b in zip(atoms(left), atoms(right), strict=False):
        if a != b:
            break
        length += len(a)
    return left[:length]


def common_suffix(left: str, right: str) -> str:
    """What two glues end with, in whole units."""
    length = 0
    for a, b in zip(reversed(atoms(left)), reversed(atoms(right)), strict=False):
        if a != b:
            break
        length += len(a)
    return left[len(left) - length :]


# An opener in several units: <|open|>think<|sep|>, <|channel|>analysis<|message|>.
SPREAD = re.compile(
    rf"({TAG.pattern})\s*(?:think|thinking|thought|analysis|reasoning)\s*(?:{TAG.pattern})?\s*$"
)


def before_thinking(prompt: str) -> int:
    """Length of a generation prompt without the thinking that it opens at its end."""
    spread = SPREAD.search(prompt)
    if spread is not None and not CLOSING.search(spread[1]):
        return spread.start()
    cut = len(prompt)
    for tag in reversed(list(TAG.finditer(prompt))):
        rest = prompt[tag.end() : cut]
        if not THINKING.search(tag[0]) or rest.strip():
            break
        if not CLOSING.search(tag[0]):
            return tag.start()
        cut = tag.start()
    return len(prompt)


def _unproven(index: int, what: str, why: str) -> RowError:
    return RowError(
        f"where the assistant turn {index} {what} could not be learned from the template: {why}",
        reason="mask_unproven",
    )


class Boundaries:
    """The turn boundaries of one template, learned as they are needed."""

    def __init__(self, template: ReferenceTemplate) -> None:
        self._template = template
        self._starts: dict[Any, Start] = {}
        self._ends: dict[Any, End] = {}

    def question(self, marker: Marker, tools: list[Any] | None) -> Question:
        """Prepare to ask about one marked conversation."""
        return Question(self._template, self._starts, self._ends, marker, tools)


class Question:
    """Asks the template about the turns of one marked conversation."""

    def __init__(
        self,
        template: ReferenceTemplate,
        starts: dict[Any, Start],
        ends: dict[Any, End],
        marker: Marker,
        tools: list[Any] | None,
    ) -> None:
        self._template = template
        self._starts = starts
        self._ends = ends
        self._marker = marker
        self._tools = tools
        self._standing: dict[int, str] = {}
        self._seen: dict[tuple[int, bool], tuple[str, list[Hit]] | None] = {}

    def _cut_off(self, count: int, prompt: bool) -> tuple[str, list[Hit]] | None:
        """The first messages alone, rendered; None where the template refuses that."""
        key = (count, prompt)
        if key not in self._seen:
            try:
                if not count:
                    raise RowError("no messages")
                marked = self._template.render(
                    self._marker.messages[:count], self._tools, add_generation_prompt=prompt
                )
                self._seen[key] = self._marker.read(marked)
            except RowError:
                self._seen[key] = None
        return self._seen[key]

    def _tail(self, count: int, prompt: bool, anchor: Hit | None) -> str | None:
        """What the cut-off render prints after the anchor's text."""
        rendered = self._cut_off(count, prompt)
        if rendered is None:
            return None
        text, hits = rendered
        if anchor is None:
            return text if not hits else None
        ends = [hit.end for hit in hits if hit.piece == anchor.piece]
        return text[ends[-1] :] if ends else None

    def start(self, index: int, anchor: Hit | None, glue: str, roles: tuple[str, ...]) -> Start:
        """Where a turn starts in the glue after the anchor (the text printed before it).

        Args:
            index: Message whose turn it is.
            anchor: The last text printed before the turn, None at the very beginning.
            glue: What the whole render prints after the anchor, up to the turn's own text.
            roles: Roles from the anchor's message to this one: part of what is remembered.

        Raises:
            RowError: The template's answers do not fit together (mask_unproven).
        """
        key = (roles, anchor is None, glue)
        known = self._starts.get(key)
        if known is None:
            known = self._ask_start(index, anchor, glue)
            if len(self._starts) < REMEMBERED:
                self._starts[key] = known
        return known

    def _ask_start(self, index: int, anchor: Hit | None, glue: str) -> Start:
        given = self._tail(index, True, anchor)
        closed = self._tail(index, False, anchor)
        if given is None or closed is None:
            return self._align_start(index, glue)
        header = len(common_prefix(given, closed))
        if given == closed:
            header -= len(self._standing_prompt(index))
        shared = common_prefix(given, glue)
        if len(shared) < header:
            return self._align_start(index, glue)
        return Start(header, header + before_thinking(shared[header:]))

    def _align_start(self, index: int, glue: str) -> Start:
        """Find the generation prompt in a glue whose first part no shorter conversation prints."""
        prompt = self._prompt(index)
        found: list[tuple[int, int]] = []
        if prompt:
            units = atoms(glue)
            position = 0
            for number, unit in enumerate(units):
                shared = common_prefix(prompt, "".join(units[number:]))
                found.append((len(shared), position))
                position += len(unit)
        best = max(found, default=(0, 0))
        if not best[0] or sum(length == best[0] for length, _ in found) > 1:
            raise _unproven(index, "starts", "its generation prompt does not fit what it prints")
        return Start(best[1], best[1] + before_thinking(prompt[: best[0]]))

    def _prompt(self, index: int) -> str:
        """The generation prompt after some shorter part of this conversation."""
        order = sorted(range(1, len(self._marker.messages)), key=lambda n: (abs(n - index), n))
        for count in order[:8]:
            if self._marker.messages[count - 1]["role"] == "assistant":
                continue
            given, closed = self._cut_off(count, True), self._cut_off(count, False)
            if given and closed and given[0] != closed[0] and given[0].startswith(closed[0]):
                return given[0][len(closed[0]) :]
        return ""

    def _standing_prompt(self, index: int) -> str:
        """The generation prompt of a template that prints it whether it is asked to or not.

        Such a template ends every render with it. What a closed turn and a followed turn have in
        common is the closer, and perhaps the first mark of any turn, which then also opens the
        conversation: that tells where the closer ends and the prompt begins.
        """
        if index not in self._standing:
            self._standing[index] = self._find_standing_prompt(index)
        return self._standing[index]

    def _find_standing_prompt(self, index: int) -> str:
        rendered = self._cut_off(index + 1, False)
        own = [hit for hit in rendered[1] if hit.message == index] if rendered else []
        if rendered is None or not own:
            return ""
        ending = rendered[0][own[-1].end :]
        followed = self._followed(index, own[-1])
        if followed is None:
            raise _unproven(index, "ends", "no conversation goes on after it")
        if followed.startswith(ending):
            return ""
        common = common_prefix(ending, followed)
        beginnings = ["", *(v for v in self._template.variables.values() if isinstance(v, str))]
        units = atoms(common)
        for count in range(len(units), 0, -1):
            opener = "".join(units[-count:])
            if any(rendered[0].startswith(lead + opener) for lead in beginnings):
                return ending[len(common) - len(opener) :]
        raise _unproven(index, "ends", "the template prints something after the last turn")

    def _followed(self, index: int, own: Hit) -> str | None:
        """What stands between a turn's text and a user's text after it."""
        messages = self._marker.messages
        users = [m for m in messages if m["role"] == "user" and m.get("content")]
        for message in [*messages[index + 1 : index + 2], *users[:2]]:
            read = self._render([*messages[: index + 1], message])
            for text, hits in [read] if read else []:
                ends = [hit.end for hit in hits if hit.piece == own.piece]
                after = [h.start for h in hits if ends and h.start >= ends[-1]]
                if after:
                    return text[ends[-1] : after[0]]
        return None

    def _render(self, messages: list[dict[str, Any]]) -> tuple[str, list[Hit]] | None:
        try:
            return self._marker.read(self._template.render(messages, self._tools))
        except RowError:
            return None

    def end(
        self,
        index: int,
        anchor: Hit | None,
        glue: str,
        following: Hit | None,
        roles: tuple[str, ...],
        own: str,
    ) -> End:
        """Where a turn ends in the glue after its own last text.

        Args:
            index: Message whose turn it is.
            anchor: The turn's own last text (or the last one before it, where it prints none).
            glue: What the whole render prints after the anchor, up to the next message's text.
            following: The next message's text, None at the end.
            roles: Roles from the anchor's message to the next: part of what is remembered.
            own: Whitespace with which the message's own content ends.

        Raises:
            RowError: The template's answers do not fit together (mask_unproven).
        """
        key = (roles, following is None, own, glue)
        known = self._ends.get(key)
        if known is None:
            known = self._ask_end(index, anchor, glue, following, own)
            if len(self._ends) < REMEMBERED:
                self._ends[key] = known
        return known

    def _ask_end(
        self, index: int, anchor: Hit | None, glue: str, following: Hit | None, own: str
    ) -> End:
        closers = self._closers(index, anchor)
        fitting = [closer for closer in closers if closer.strip() and glue.startswith(closer)]
        if following is None:
            # What only the end of a conversation prints (phi-3: an eos) is not part of the turn,
            # unless nothing else closes it.
            closer = fitting[0] if fitting else glue
            turn = len(closer) if self._standing.get(index) else len(glue)
            return self._ended(closer, turn, own)
        if fitting:
            return self._ended(fitting[0], len(fitting[0]), own)
        header = self._header(following, glue)
        closer = glue[: len(glue) - len(header)]
        if closer.strip() and header:
            return self._ended(closer, len(closer), own)
        if closer.strip() or any(c.strip() for c in closers) or len(TAG.findall(glue)) > 1:
            raise _unproven(index, "ends", "it closes the turn differently when nothing follows")
        return self._ended(closer, len(closer), own)

    def _ended(self, closer: str, turn: int, own: str) -> End:
        """The end of a turn from what closes it.

        Whitespace after a closer is not part of it; where the template prints nothing else (RWKV: a
        blank line), it is the closer. The content's own last whitespace closes nothing.
        """
        if closer.strip():
            return End(len(closer.rstrip()), turn, True)
        return End(len(closer), turn, not own.startswith(closer))

    def _closers(self, index: int, anchor: Hit | None) -> list[str]:
        """What may close this turn: as history (before a generation prompt), then as the last."""
        given = self._tail(index + 1, True, anchor)
        closed = self._tail(index + 1, False, anchor)
        if given is not None and given == closed:
            standing = self._standing_prompt(index)
            return [closed[: len(closed) - len(standing)]]
        prompt = self._prompt(index)
        found: list[str] = []
        if given is not None:
            if prompt and given.endswith(prompt):
                found.append(given[: len(given) - len(prompt)])
            elif closed is not None:
                found.append(common_prefix(given, closed))
        if closed is not None:
            found.append(closed)
        return found

    def _header(self, following: Hit, glue: str) -> str:
        """What opens the following message's turn: what precedes its text wherever it stands.

        The glue is compared with what the template prints before that text in other places: alone,
        and after itself. A closer that those places share with the glue is taken off again.
        """
        marked = self._marker.messages[following.message]
        header = glue
        places = 0
        for messages in ([marked], [marked, marked]):
            read = self._render(messages)
            hits = [h for h in read[1] if h.piece == following.piece] if read else []
            if read is not None and len(hits) == len(messages):
                before = hits[-2].end if len(hits) > 1 else 0
                header = common_suffix(header, read[0][before : hits[-1].start])
                places += 1
        closer = self._tail(following.message + 1, False, following)
        if not places or closer is None:
            return ""
        if closer.strip() and header.startswith(closer):
            return header[len(closer) :]
        return header
