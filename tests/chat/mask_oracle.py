"""Check a mask by the owners and turns of `loop_oracle` and `turn_oracle`.

Every character must be trained, must not be, or may be; a run of wrong ones is a `Violation`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from tests.chat.loop_oracle import NO_OWNER, SHARED, Owned
from tests.chat.turn_oracle import ENDING_WORD, TAG, Conversation, Turn

Span = tuple[int, int]

LABELS = (
    "?",
    "!no turn",
    "!two turns",
    "!another turn",
    "!header",
    "!thinking opener",
    "!after the end of turn",
    "+own part",
    "+thinking opener",
    "+generation block",
    "+end of turn",
)
"""Labels of characters: ``!`` must not be trained, ``+`` must be, ``?`` may be."""
CODES = {label: code for code, label in enumerate(LABELS)}
SIGNS = np.array([label[0] for label in LABELS])
MAY_BE_TRAINED = bytes(code for label, code in CODES.items() if label[0] != "!")


@dataclass(slots=True)
class Violation:
    kind: str
    start: int
    end: int
    owner: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.kind} [{self.start}:{self.end}] of {self.owner}: {self.excerpt}"


@dataclass(slots=True)
class Verdict:
    violations: list[Violation] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


def check_mask(
    talk: Conversation,
    text: str,
    spans: Sequence[Span],
    *,
    trained: Sequence[int] | None = None,
    turn_end: str = "stop",
    thinking_opener: str = "trained",
) -> Verdict:
    """Compare a mask with the owners of every character.

    ``trained`` are the messages to be trained, None for every assistant. The other options are
    those of the recipe.
    """
    verdict = Verdict()
    found = talk.found
    if found is None:
        verdict.unsure.append("the sentinels do not survive the template")
        return verdict
    if found.text != text:
        at = next((n for n, (a, b) in enumerate(zip(text, found.text, strict=False)) if a != b), -1)
        where = _excerpt(text, at, at + 1)
        verdict.violations.append(Violation("another text", at, at + 1, "the render", where))
        return verdict
    if list(spans) != sorted(spans) or any(a >= b for a, b in spans):
        verdict.violations.append(Violation("spans not sorted", 0, 0, "the mask", str(spans)))
        return verdict
    mask = bytearray(len(text))
    for start, end in spans:
        if 1 in mask[start:end] or end > len(text):
            verdict.violations.append(Violation("spans overlap", start, end, "the mask", ""))
        mask[start:end] = b"\x01" * (end - start)
    expected = [i for i, m in enumerate(talk.messages) if m.get("role") == "assistant"]
    if trained is not None:
        expected = list(trained)
    labels = _labels(talk, found, expected, turn_end, thinking_opener, verdict)
    signs, on = SIGNS[np.frombuffer(labels, np.uint8)], np.frombuffer(mask, np.bool_)
    wrong = [
        place
        for place in np.flatnonzero(np.where(on, signs == "!", signs == "+")).tolist()
        if mask[place] or not text[place].isspace()
    ]
    owners = found.owner if wrong else []
    # Places in a row of one label and owner differ from their rank by the same number.
    ranked = groupby(
        enumerate(wrong), lambda item: (item[1] - item[0], labels[item[1]], owners[item[1]])
    )
    for (_, code, who), run in ranked:
        places = [place for _, place in run]
        start, end = places[0], places[-1] + 1
        if mask[start] or not _opens(talk, text[start:end]):
            kind = f"{'trained' if mask[start] else 'untrained'}: {LABELS[code][1:]}"
            owner = "no message" if who < 0 else f"{who} ({talk.messages[who].get('role')})"
            verdict.violations.append(
                Violation(kind, start, end, owner, _excerpt(text, start, end))
            )
    return verdict


def _opens(talk: Conversation, words: str) -> bool:
    """Whether this is a turn header, which is never part of an answer."""
    return words.strip() in {prompt.strip() for prompt in talk.usual}


def _labels(
    talk: Conversation,
    found: Owned,
    expected: list[int],
    turn_end: str,
    thinking_opener: str,
    verdict: Verdict,
) -> bytearray:
    labels = bytearray(len(found.text))
    names = {NO_OWNER: "!no turn", SHARED: "!two turns"}
    for start, end, who in found.runs:
        _paint(labels, start, end, names.get(who, "!another turn"))
    if talk.template.has_generation_blocks:
        for start, end in found.generation:
            for run_start, run_end, who in found.runs:
                if who in expected or who == NO_OWNER:
                    label = "+generation block" if who in expected else "?"
                    _paint(labels, max(start, run_start), min(end, run_end), label)
        for index, turn in talk.turns.items():  # `prompt_oracle` checks headers in blocks
            for place in range(turn.start, turn.header or 0) if index in expected else ():
                if labels[place] == CODES["+generation block"]:
                    labels[place] = CODES["?"]
        return labels
    for index, turn in talk.turns.items():
        if index not in expected:
            continue
        if turn.header is None:
            verdict.unsure.append(f"where message {index} starts: its prompt explains nothing")
        parts = list(_parts(turn, turn_end, thinking_opener))
        for run_start, run_end, who in found.runs:
            for start, end, label in parts if who == index else ():
                _paint(labels, max(start, run_start), min(end, run_end), label)
    for turn in (turn for index, turn in talk.turns.items() if index in expected):
        if not turn.closed:
            _unclosed(talk, found, turn, labels)
        if turn_end == "turn":
            _ending(talk, found, turn, labels)
    return labels


def _paint(labels: bytearray, start: int, end: int, label: str) -> None:
    if start < end:
        labels[start:end] = bytes([CODES[label]]) * (end - start)


def to_train(talk: Conversation, trained: Sequence[int]) -> bool:
    found = talk.found
    if found is None:
        return True
    labels = _labels(talk, found, list(trained), "stop", "trained", Verdict())
    return any(
        found.text[run.start() : run.end()].strip()
        for run in re.finditer(b"[%s]+" % re.escape(MAY_BE_TRAINED), labels)
    )


def _parts(turn: Turn, turn_end: str, thinking_opener: str) -> Iterator[tuple[int, int, str]]:
    if turn.header is None:
        yield turn.start, turn.end, "?"
        return
    opener = turn.header if turn.opener is None else turn.opener
    yield turn.start, opener, "!header"
    sign = "+" if thinking_opener == "trained" else "!"
    yield opener, turn.header, f"{sign}thinking opener"
    yield max(turn.start, turn.header), turn.stop, "+own part"
    after = "!after the end of turn" if turn.closed and turn_end == "stop" else "?"
    yield max(turn.header, turn.stop), turn.end, after


def _unclosed(talk: Conversation, found: Owned, turn: Turn, labels: bytearray) -> None:
    """Text right after a turn without an end-of-turn token may be one.

    Outside of the loop (an eos token) or in the next message's step (``<|assistant_end|>``): that
    may be trained or not, as the turn has no other. An eos token that ends the render must be.
    """
    eos = str(talk.template.variables.get("eos_token") or "")
    tag = TAG.match(found.text, turn.end)
    barred = tag and LABELS[labels[tag.start()]][0] == "!"  # and no part of the next answer
    if tag and barred and (tag[0] == eos or ENDING_WORD.search(tag[0])):
        _paint(labels, tag.start(), tag.end(), "?")
    for start, end, who in found.runs:
        if start <= turn.end < end and who == NO_OWNER:
            _paint(labels, turn.end, end, "?")
    rest = found.text[turn.end :]
    if eos and rest.strip() == eos:
        at = turn.end + rest.index(eos)
        _paint(labels, at, at + len(eos), "+end of turn")


def _ending(talk: Conversation, found: Owned, turn: Turn, labels: bytearray) -> None:
    """Assign an ending of the conversation (phi-3: an eos) to the last turn under ``turn``."""
    ending = found.text[turn.end :]
    if ending and found.end() <= turn.end:
        prompts = [p for count in range(1, len(talk.messages)) for p in talk.prompts(count)]
        if not any(p.strip() in ending for p in prompts):
            _paint(labels, turn.end, len(labels), "?")


def _excerpt(text: str, start: int, end: int) -> str:
    before, after = text[max(0, start - 30) : start], text[end : end + 30]
    inside = text[start:end]
    if len(inside) > 90:
        inside = f"{inside[:45]}…{inside[-45:]}"
    return f"{before!r} ⟦{inside!r}⟧ {after!r}"
