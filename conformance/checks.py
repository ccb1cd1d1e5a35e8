"""Compare a row of a trainer with the model's own ids and the inserted words.

Ids are the ``same``, differ only in a ``tail`` without words (an end-of-text token, a newline), are
``retokenized`` (the same text in other tokens), or are ``other`` text. Masks are checked on the
trainer's own ids, so that wrong ids are not counted twice.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.conversations import Case, Word
from conformance.reference import TurnMarkers

TAIL = 8
"""Maximum tokens of a tail."""
OPENERS = re.compile(rb"<think>|</think>")

FAULTS = {
    "other_role": "a word of another role is trained",
    "other_turn": "a word of an answer that should not be trained is trained",
    "answer": "a word of an answer is not trained",
    "header": "text of the template before an answer or between turns is trained",
    "stop": "the end-of-turn token of an answer is not trained",
    "lost": "a word of the row is not in its ids",
    "lost_by_template": "the template drops a word, and the row is served",
    "added": "a word that the model's own render drops is in the ids",
    "doubled": "a word is in the ids twice",
}
NOTES = {
    "header_space": "white space of the header is trained",
    "after_end_of_turn": "text after the end-of-turn token is trained",
}
MASK_FAULTS = ("other_role", "other_turn", "answer", "header", "stop")
CONTENT_FAULTS = ("lost", "lost_by_template", "added", "doubled")


@dataclass(frozen=True)
class Actual:
    """One row as a trainer prepared it."""

    ids: Sequence[int]
    mask: Sequence[int]
    pieces: Sequence[bytes]


@dataclass(frozen=True)
class Expected:
    """A row, and what the model's own template makes of it."""

    case: Case
    ids: Sequence[int]
    pieces: Sequence[bytes]
    markers: TurnMarkers
    trains: str = "every"
    """Whether ``every`` answer should be trained, or the ``last``."""


@dataclass(frozen=True)
class Fault:
    kind: str
    excerpt: str


@dataclass
class RowResult:
    ids: str = "same"
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)

    def kinds(self, among: Sequence[str]) -> list[str]:
        """Return those kinds that this row has, in their order."""
        found = {fault.kind for fault in self.faults}
        return [kind for kind in among if kind in found]

    @property
    def is_correct(self) -> bool:
        return self.ids in ("same", "tail") and not self.faults


class _Layout:
    """Positions of tokens in the bytes of their text."""

    def __init__(self, actual: Actual) -> None:
        self.actual = actual
        self.text = b"".join(actual.pieces)
        self.starts = [0, *itertools.accumulate(len(piece) for piece in actual.pieces)]

    def tokens(self, start: int, end: int) -> range:
        first = bisect.bisect_right(self.starts, start) - 1
        return range(first, bisect.bisect_left(self.starts, end))

    def excerpt(self, start: int, end: int) -> str:
        """Return the span with context; trained parts are enclosed in ⟦ and ⟧."""
        shown, trained = [], False
        for token in self.tokens(max(0, start - 24), min(len(self.text), end + 24)):
            if bool(self.actual.mask[token]) != trained:
                trained = not trained
                shown.append("⟦" if trained else "⟧")
            shown.append(self.actual.pieces[token].decode(errors="replace"))
        return "".join(shown) + ("⟧" if trained else "")


def check_row(expected: Expected, actual: Actual) -> RowResult:
    if len(actual.ids) != len(actual.mask):
        raise ValueError(f"{len(actual.ids)} ids, but {len(actual.mask)} mask values")
    result = RowResult(ids=_compare_ids(expected, actual))
    layout = _Layout(actual)
    _check_content(expected, layout, result)
    _check_words(expected, layout, result)
    _check_markers(expected, layout, result)
    return result


def _compare_ids(expected: Expected, actual: Actual) -> str:
    ours, theirs = list(expected.ids), list(actual.ids)
    if ours == theirs:
        return "same"
    shorter = min(len(ours), len(theirs))
    rest = b"".join(expected.pieces[shorter:]) + b"".join(actual.pieces[shorter:])
    if (
        ours[:shorter] == theirs[:shorter]
        and abs(len(ours) - len(theirs)) <= TAIL
        and not any(word.text.encode() in rest for word in expected.case.words)
    ):
        return "tail"
    return "retokenized" if b"".join(expected.pieces) == b"".join(actual.pieces) else "other"


def difference(expected: Expected, actual: Actual) -> str:
    """Return the first difference of the texts: the model's own, then the trainer's."""
    own, theirs = b"".join(expected.pieces), b"".join(actual.pieces)
    shorter = min(len(own), len(theirs))
    at = next((n for n in range(shorter) if own[n] != theirs[n]), shorter)

    def around(text: bytes) -> str:
        return text[max(0, at - 30) : at + 40].decode(errors="replace")

    return f"{around(own)} ≠ {around(theirs)}"


def _check_content(expected: Expected, layout: _Layout, result: RowResult) -> None:
    own = b"".join(expected.pieces)
    last = len(expected.case.row["messages"]) - 1
    for word in expected.case.words:
        printed, served = own.count(word.text.encode()), layout.text.count(word.text.encode())
        kind = None
        if printed and not served:
            kind = "lost"
        elif not printed and served:
            kind = "added"
        elif served > printed:
            kind = "doubled"
        elif not printed and not (word.part == "thinking" and word.message < last):
            kind = "lost_by_template"  # templates drop earlier thinking on purpose
        if kind:
            result.faults.append(Fault(kind, f"{word.text}, {word.role}'s {word.part}"))


def _to_train(expected: Expected) -> set[int]:
    roles = [message["role"] for message in expected.case.row["messages"]]
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    return set(answers if expected.trains == "every" else answers[-1:])


def _check_words(expected: Expected, layout: _Layout, result: RowResult) -> None:
    trained_messages = _to_train(expected)
    mask = layout.actual.mask
    for word in expected.case.words:
        for match in re.finditer(re.escape(word.text.encode()), layout.text):
            trained = [bool(mask[token]) for token in layout.tokens(*match.span())]
            kind = None
            if word.message in trained_messages:
                kind = None if all(trained) else "answer"
            elif any(trained):
                kind = "other_turn" if word.role == "assistant" else "other_role"
            if kind:
                result.faults.append(Fault(kind, layout.excerpt(*match.span())))


def _spans(words: Sequence[Word], text: bytes) -> dict[int, tuple[int, int]]:
    """Return each message's span, from its first word to the end of its last."""
    spans: dict[int, tuple[int, int]] = {}
    for word in words:
        at = text.find(word.text.encode())
        if at >= 0:
            end = at + len(word.text)
            start, stop = spans.get(word.message, (at, end))
            spans[word.message] = (min(start, at), max(stop, end))
    return spans


def _check_markers(expected: Expected, layout: _Layout, result: RowResult) -> None:
    """Check what is between two messages: the end-of-turn token and the next header."""
    trained_messages = _to_train(expected)
    spans = sorted(_spans(expected.case.words, layout.text).items(), key=lambda item: item[1])
    if any(a[1][1] > b[1][0] for a, b in itertools.pairwise(spans)):
        return  # messages overlap, which `_check_content` has reported
    for at, (message, (start, end)) in enumerate(spans):
        if message not in trained_messages:
            continue
        before = spans[at - 1][1][1] if at else 0
        after = spans[at + 1][1][0] if at + 1 < len(spans) else len(layout.text)
        if not at or spans[at - 1][0] not in trained_messages:
            _check_header(expected, layout, result, before, start)
        _check_end_of_turn(expected, layout, result, end, after)


def _check_header(
    expected: Expected, layout: _Layout, result: RowResult, before: int, start: int
) -> None:
    header = expected.markers.header
    at = layout.text.find(header, before, start) if header else -1
    if at < 0:
        return
    end = at + len(header)
    _find_trained(layout, result, before, end, "header")
    space = len(layout.text[end:start]) - len(layout.text[end:start].lstrip())
    for token in layout.tokens(end, end + space):
        if layout.actual.mask[token] and not layout.actual.pieces[token].strip():
            result.notes.append(Fault("header_space", layout.excerpt(before, start)))
            break


def _check_end_of_turn(
    expected: Expected, layout: _Layout, result: RowResult, end: int, after: int
) -> None:
    tokens = layout.tokens(end, after) if end < after else range(0)
    ids, mask = layout.actual.ids, layout.actual.mask
    end_of_turn = next(
        (token for token in tokens if ids[token] in expected.markers.end_of_turn_ids), None
    )
    if end_of_turn is None:
        return
    if not mask[end_of_turn]:
        span = (layout.starts[end_of_turn], layout.starts[end_of_turn + 1])
        result.faults.append(Fault("stop", layout.excerpt(*span)))
    behind = layout.starts[end_of_turn + 1]
    if behind < after:
        _find_trained(layout, result, behind, after, "header", "after_end_of_turn")


def _find_trained(
    layout: _Layout, result: RowResult, start: int, end: int, kind: str, space: str | None = None
) -> None:
    """Add a fault for the first trained token that is not white space, a note for white space."""
    has_note = False
    for token in layout.tokens(start, end):
        if layout.starts[token] < start or not layout.actual.mask[token]:
            continue
        if OPENERS.sub(b"", layout.actual.pieces[token]).strip():
            # An end-of-text token after the end-of-turn token is not a header.
            if kind == "header" and space and layout.starts[token + 1] >= len(layout.text):
                result.notes.append(Fault(space, layout.excerpt(start, end)))
                return
            result.faults.append(Fault(kind, layout.excerpt(start, end)))
            return
        if space and not has_note:
            has_note = True
            result.notes.append(Fault(space, layout.excerpt(start, end)))
