"""The judgement: a mask held against the owners and turns that the template's loop tells.

`judge` labels every character of a render: it must be trained, must not be, or may be. Trained
outside an assistant's own turn, in a header, in another turn's opener or closer, or after the
closer; not trained inside the own part or its closer: each run of such characters is a `Violation`
that shows its surroundings. Where the oracle does not know, it says so (`Verdict.unsure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tests.chat.loop_oracle import NOBODY, SHARED, Owned
from tests.chat.turn_oracle import ENDING_WORD, TAG, Conversation, Turn

Span = tuple[int, int]


@dataclass(slots=True)
class Violation:
    """A run of characters on which mask and oracle disagree."""

    kind: str
    start: int
    end: int
    owner: str
    excerpt: str

    def __str__(self) -> str:
        """One line for a report."""
        return f"{self.kind} [{self.start}:{self.end}] of {self.owner}: {self.excerpt}"


@dataclass(slots=True)
class Verdict:
    """What the oracle says of one mask."""

    violations: list[Violation] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


def judge(
    talk: Conversation,
    text: str,
    spans: Sequence[Span],
    *,
    trained: Sequence[int] | None = None,
    turn_end: str = "stop",
    thinking_opener: str = "trained",
) -> Verdict:
    """Hold a mask against the owners of every character.

    Args:
        talk: The conversation under its template.
        text: The product's render.
        spans: What it would train.
        trained: Messages that are to be trained; None: every assistant.
        turn_end: ``stop`` or ``turn``, as in the recipe.
        thinking_opener: Whether a thinking opener that the generation prompt already holds is to
            be ``trained`` or belongs to the ``prompt``.
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
        if any(mask[start:end]) or end > len(text):
            verdict.violations.append(Violation("spans overlap", start, end, "the mask", ""))
        mask[start:end] = b"\x01" * (end - start)
    wanted = [i for i, m in enumerate(talk.messages) if m.get("role") == "assistant"]
    if trained is not None:
        wanted = list(trained)
    labels = _labels(talk, found, wanted, turn_end, thinking_opener, verdict)
    wrong: list[str] = []
    for position, (label, on) in enumerate(zip(labels, mask, strict=True)):
        complaint = ""
        if on and label.startswith("!"):
            complaint = f"trained: {label[1:]}"
        elif not on and label.startswith("+") and not text[position].isspace():
            complaint = f"untrained: {label[1:]}"
        wrong.append(complaint)
    position = 0
    keyed = groupby(zip(wrong, found.owner, strict=True), key=lambda pair: pair)
    for (complaint, who), run in keyed:
        length = sum(1 for _ in run)
        if complaint.startswith("untrained") and _opens(talk, text[position : position + length]):
            complaint = ""
        if complaint:
            owner = "nobody" if who < 0 else f"{who} ({talk.messages[who].get('role')})"
            excerpt = _excerpt(text, position, position + length)
            verdict.violations.append(
                Violation(complaint, position, position + length, owner, excerpt)
            )
        position += length
    return verdict


def _opens(talk: Conversation, words: str) -> bool:
    """Whether this is what opens turns: no part of an answer, wherever it stands."""
    return words.strip() in {prompt.strip() for prompt in talk.usual}


def _labels(
    talk: Conversation,
    found: Owned,
    wanted: list[int],
    turn_end: str,
    thinking_opener: str,
    verdict: Verdict,
) -> list[str]:
    """For every character: ``!`` must not be trained, ``+`` must be, ``?`` may be."""
    names = {NOBODY: "!no turn", SHARED: "!two turns"}
    labels = [names.get(who, "!another turn") for who in found.owner]
    if talk.template.says_itself:
        for start, end in found.generation:
            for position in range(start, end):
                who = found.owner[position]
                if who in wanted:
                    labels[position] = "+generation block"
                elif who == NOBODY:
                    labels[position] = "?"
        return labels
    for index, turn in talk.turns.items():
        if index not in wanted:
            continue
        if turn.header is None:
            verdict.unsure.append(f"where message {index} starts: its prompt explains nothing")
        for position in range(turn.start, turn.end):
            if found.owner[position] == index:
                labels[position] = _label(turn, position, turn_end, thinking_opener)
        if not turn.closed:
            _unclosed(talk, found, turn, labels)
        if turn_end == "turn":
            _ending(talk, found, turn, labels)
    return labels


def to_train(talk: Conversation, trained: Sequence[int]) -> bool:
    """Whether the render holds anything but whitespace that must be trained."""
    found = talk.found
    if found is None:
        return True
    labels = _labels(talk, found, list(trained), "stop", "trained", Verdict())
    return any(
        label[0] in "+?" and not character.isspace()
        for label, character in zip(labels, found.text, strict=True)
    )


def _label(turn: Turn, position: int, turn_end: str, thinking_opener: str) -> str:
    if turn.header is None:
        return "?"
    if position < turn.header:
        if turn.opener is not None and position >= turn.opener:
            return "+thinking opener" if thinking_opener == "trained" else "!thinking opener"
        return "!header"
    if position < turn.stop:
        return "+own part"
    if not turn.closed:
        return "?"
    return "!after the closer" if turn_end == "stop" else "?"


def _unclosed(talk: Conversation, found: Owned, turn: Turn, labels: list[str]) -> None:
    """What stands right after a turn that prints no closer may be one.

    Outside of the loop (an eos token) or in the next message's step (``<|assistant_end|>``): that
    may be trained or not, the turn has no other closer. An eos token that ends the render must be.
    """
    eos = str(talk.template.variables.get("eos_token") or "")
    tag = TAG.match(found.text, turn.end)
    if tag and (tag[0] == eos or ENDING_WORD.search(tag[0])):
        labels[tag.start() : tag.end()] = ["?"] * len(tag[0])
    for position in range(turn.end, len(labels)):
        if found.owner[position] != NOBODY:
            break
        labels[position] = "?"
    rest = found.text[turn.end :]
    if eos and rest.strip() == eos:
        at = turn.end + rest.index(eos)
        labels[at : at + len(eos)] = ["+closer"] * len(eos)


def _ending(talk: Conversation, found: Owned, turn: Turn, labels: list[str]) -> None:
    """What only ends the conversation (phi-3: an eos) goes to the last turn under ``turn``."""
    ending = found.text[turn.end :]
    if set(found.owner[turn.end :]) == {NOBODY}:
        prompts = [p for count in range(1, len(talk.messages)) for p in talk.prompts(count)]
        if not any(p.strip() in ending for p in prompts):
            labels[turn.end :] = ["?"] * len(ending)


def _excerpt(text: str, start: int, end: int) -> str:
    before, after = text[max(0, start - 30) : start], text[end : end + 30]
    inside = text[start:end]
    if len(inside) > 90:
        inside = f"{inside[:45]}…{inside[-45:]}"
    return f"{before!r} ⟦{inside!r}⟧ {after!r}"
