"""The judgement: an answer of a trainer held against the model's own ids and the planted words.

Pure: an `Answer` is token ids, a mask, and the bytes of each token; a `Question` is the case, the
model's own ids and the template's glue. `judge` gives a `Verdict`, of which every `Fault` names
its kind and shows its place.

Ids are the ``same``, differ only in a ``tail`` without words (an end-of-text token, a newline), are
``retokenized`` (the same text, cut elsewhere), or are ``other`` text. Masks are judged on the
trainer's own ids, so that other ids are not counted twice: by whose word a trained token holds,
whether the header is trained, and whether the token that ends an answer is.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.conversations import Case, Word
from conformance.reference import Glue

TAIL = 8
"""Tokens; what is longer at the end of a row is more than a closer."""
OPENERS = re.compile(rb"<think>|</think>")

FAULTS = {
    "other_role": "a word of another role is trained",
    "other_turn": "a word of an answer that was not to be trained is trained",
    "answer": "a word of an answer is not trained",
    "header": "text of the template before an answer or between turns is trained",
    "stop": "the token that ends an answer is not trained",
    "lost": "a word of the row is not in its ids",
    "lost_by_template": "the template drops a word, and the row is served",
    "added": "a word that the model's own render drops is in the ids",
    "doubled": "a word is in the ids twice",
}
NOTES = {
    "header_space": "white space of the header is trained",
    "behind_closer": "what stands behind the closer is trained",
}
MASK_FAULTS = ("other_role", "other_turn", "answer", "header", "stop")
CONTENT_FAULTS = ("lost", "lost_by_template", "added", "doubled")


@dataclass(frozen=True)
class Answer:
    """One row as a trainer prepared it."""

    ids: Sequence[int]
    mask: Sequence[int]
    pieces: Sequence[bytes]


@dataclass(frozen=True)
class Question:
    """One row as it was given, and what the model's own template makes of it."""

    case: Case
    ids: Sequence[int]
    pieces: Sequence[bytes]
    glue: Glue
    trains: str = "every"
    """``every`` answer is to be trained, or the ``last``."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and where."""

    kind: str
    excerpt: str


@dataclass
class Verdict:
    """What is to be said of one answer."""

    ids: str = "same"
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)

    def kinds(self, among: Sequence[str]) -> list[str]:
        """The kinds of faults among some, in their order, each once."""
        found = {fault.kind for fault in self.faults}
        return [kind for kind in among if kind in found]

    @property
    def clean(self) -> bool:
        """Nothing is wrong but a tail."""
        return self.ids in ("same", "tail") and not self.faults


class _Layout:
    """Tokens laid out on the bytes of their text."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.text = b"".join(answer.pieces)
        self.starts = [0, *itertools.accumulate(len(piece) for piece in answer.pieces)]

    def tokens(self, start: int, end: int) -> range:
        """Tokens that hold a byte of a span."""
        first = bisect.bisect_right(self.starts, start) - 1
        return range(first, bisect.bisect_left(self.starts, end))

    def excerpt(self, start: int, end: int) -> str:
        """The span in its surroundings; trained runs stand between ⟦ and ⟧."""
        shown, trained = [], False
        for token in self.tokens(max(0, start - 24), min(len(self.text), end + 24)):
            if bool(self.answer.mask[token]) != trained:
                trained = not trained
                shown.append("⟦" if trained else "⟧")
            shown.append(self.answer.pieces[token].decode(errors="replace"))
        return "".join(shown) + ("⟧" if trained else "")


def judge(question: Question, answer: Answer) -> Verdict:
    """Hold one prepared row against the model's own."""
    if len(answer.ids) != len(answer.mask):
        raise ValueError(f"{len(answer.ids)} ids and {len(answer.mask)} places of the mask")
    verdict = Verdict(ids=_compare_ids(question, answer))
    layout = _Layout(answer)
    _judge_content(question, layout, verdict)
    _judge_words(question, layout, verdict)
    _judge_glue(question, layout, verdict)
    return verdict


def _compare_ids(question: Question, answer: Answer) -> str:
    ours, theirs = list(question.ids), list(answer.ids)
    if ours == theirs:
        return "same"
    shorter = min(len(ours), len(theirs))
    rest = b"".join(question.pieces[shorter:]) + b"".join(answer.pieces[shorter:])
    if (
        ours[:shorter] == theirs[:shorter]
        and abs(len(ours) - len(theirs)) <= TAIL
        and not any(word.text.encode() in rest for word in question.case.words)
    ):
        return "tail"
    return "retokenized" if b"".join(question.pieces) == b"".join(answer.pieces) else "other"


def difference(question: Question, answer: Answer) -> str:
    """Where the texts of two rows part: the model's own, then the trainer's."""
    own, theirs = b"".join(question.pieces), b"".join(answer.pieces)
    shorter = min(len(own), len(theirs))
    at = next((n for n in range(shorter) if own[n] != theirs[n]), shorter)

    def around(text: bytes) -> str:
        return text[max(0, at - 30) : at + 40].decode(errors="replace")

    return f"{around(own)} ≠ {around(theirs)}"


def _judge_content(question: Question, layout: _Layout, verdict: Verdict) -> None:
    own = b"".join(question.pieces)
    last = len(question.case.row["messages"]) - 1
    for word in question.case.words:
        printed, served = own.count(word.text.encode()), layout.text.count(word.text.encode())
        kind = None
        if printed and not served:
            kind = "lost"
        elif not printed and served:
            kind = "added"
        elif served > printed:
            kind = "doubled"
        elif not printed and not (word.part == "thinking" and word.message < last):
            kind = "lost_by_template"  # thinking of the history is dropped on purpose
        if kind:
            verdict.faults.append(Fault(kind, f"{word.text}, {word.role}'s {word.part}"))


def _to_train(question: Question) -> set[int]:
    roles = [message["role"] for message in question.case.row["messages"]]
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    return set(answers if question.trains == "every" else answers[-1:])


def _judge_words(question: Question, layout: _Layout, verdict: Verdict) -> None:
    wanted = _to_train(question)
    mask = layout.answer.mask
    for word in question.case.words:
        for match in re.finditer(re.escape(word.text.encode()), layout.text):
            trained = [bool(mask[token]) for token in layout.tokens(*match.span())]
            kind = None
            if word.message in wanted:
                kind = None if all(trained) else "answer"
            elif any(trained):
                kind = "other_turn" if word.role == "assistant" else "other_role"
            if kind:
                verdict.faults.append(Fault(kind, layout.excerpt(*match.span())))


def _spans(words: Sequence[Word], text: bytes) -> dict[int, tuple[int, int]]:
    """Message → from its first word to the end of its last, of those that stand there once."""
    spans: dict[int, tuple[int, int]] = {}
    for word in words:
        at = text.find(word.text.encode())
        if at >= 0:
            end = at + len(word.text)
            start, stop = spans.get(word.message, (at, end))
            spans[word.message] = (min(start, at), max(stop, end))
    return spans


def _judge_glue(question: Question, layout: _Layout, verdict: Verdict) -> None:
    """What stands between the words of two messages: closer of the one, header of the other."""
    wanted = _to_train(question)
    spans = sorted(_spans(question.case.words, layout.text).items(), key=lambda item: item[1])
    if any(a[1][1] > b[1][0] for a, b in itertools.pairwise(spans)):
        return  # messages stand inside each other: the words have said so
    for at, (message, (start, end)) in enumerate(spans):
        if message not in wanted:
            continue
        before = spans[at - 1][1][1] if at else 0
        after = spans[at + 1][1][0] if at + 1 < len(spans) else len(layout.text)
        if not at or spans[at - 1][0] not in wanted:
            _judge_header(question, layout, verdict, before, start)
        _judge_closer(question, layout, verdict, end, after)


def _judge_header(
    question: Question, layout: _Layout, verdict: Verdict, before: int, start: int
) -> None:
    header = question.glue.header
    at = layout.text.find(header, before, start) if header else -1
    if at < 0:
        return
    end = at + len(header)
    _find_trained(layout, verdict, before, end, "header")
    space = len(layout.text[end:start]) - len(layout.text[end:start].lstrip())
    for token in layout.tokens(end, end + space):
        if layout.answer.mask[token] and not layout.answer.pieces[token].strip():
            verdict.notes.append(Fault("header_space", layout.excerpt(before, start)))
            break


def _judge_closer(
    question: Question, layout: _Layout, verdict: Verdict, end: int, after: int
) -> None:
    tokens = layout.tokens(end, after) if end < after else range(0)
    ids, mask = layout.answer.ids, layout.answer.mask
    closer = next((token for token in tokens if ids[token] in question.glue.closers), None)
    if closer is None:
        return
    if not mask[closer]:
        place = (layout.starts[closer], layout.starts[closer + 1])
        verdict.faults.append(Fault("stop", layout.excerpt(*place)))
    behind = layout.starts[closer + 1]
    if behind < after:
        _find_trained(layout, verdict, behind, after, "header", "behind_closer")


def _find_trained(
    layout: _Layout, verdict: Verdict, start: int, end: int, kind: str, space: str | None = None
) -> None:
    """A fault for the first trained token with more than white space; a note for white space."""
    noted = False
    for token in layout.tokens(start, end):
        if layout.starts[token] < start or not layout.answer.mask[token]:
            continue
        if OPENERS.sub(b"", layout.answer.pieces[token]).strip():
            # An end-of-text token behind the closer is no header.
            if kind == "header" and space and layout.starts[token + 1] >= len(layout.text):
                verdict.notes.append(Fault(space, layout.excerpt(start, end)))
                return
            verdict.faults.append(Fault(kind, layout.excerpt(start, end)))
            return
        if space and not noted:
            noted = True
            verdict.notes.append(Fault(space, layout.excerpt(start, end)))
