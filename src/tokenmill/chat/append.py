r"""Conversations that only grow: what stands when a template prints more messages.

A rollout is a *prompt* (the messages so far with the generation prompt), what a model *sampled*
after it, what the template prints for the messages that answer it, the next generation prompt, and
so on::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n  Hello<|im_end|>  \n<|im_start|>tool\n…
    └─────────────────────── prompt ─────────────────────┘└─ sampled ─┘└─── the next prompt ────
                                                                         goes on here

That works where the template prints the longer conversation as the shorter one and something
behind it. Many do not: they drop the thinking of earlier turns, or close the last turn by another
token than the ones before it. Whether a template does so is a question about a conversation, and it
is answered by comparing what is printed for that very conversation: a `Rewrite` says which turn
would change and what it would become.

`sampled` is an assistant's turn as a rollout holds it, `join` puts turns together as far as each
goes on where the one before it ended: ``expand="append"``. `tokenmill.bridge` does the same with
ids, as a rollout goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tokenmill.chat.turns import Settled, unproven

SHOWN = 120  # characters of a turn in a message; the whole is in the attributes


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A turn that the template prints otherwise once more messages follow.

    Attributes:
        turn: Number of the message.
        before: What stands.
        after: What the template would print in its place.
    """

    turn: int
    before: str
    after: str

    def __str__(self) -> str:
        place = first_difference(self.before, self.after)
        before, after = excerpt(self.before, place), excerpt(self.after, place)
        return f"the template would rewrite turn {self.turn}: {before} stands, and becomes {after}"


def first_difference(one: str, other: str) -> int:
    """Where two texts begin to differ, or where the shorter ends."""
    places = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((place for place, (a, b) in places if a != b), shorter)


def excerpt(text: str, place: int) -> str:
    """A text around the place where it begins to differ from another, for a message."""
    first = max(0, min(place - SHOWN // 3, len(text) - SHOWN))
    shown = repr(text[first : first + SHOWN])
    return f"{'…' if first else ''}{shown}{'…' if first + SHOWN < len(text) else ''}"


def rewrite_between(
    before: str, after: str, before_ends: Sequence[int], after_ends: Sequence[int]
) -> Rewrite:
    """What differs between a text and the one that should have gone on from it.

    Args:
        before: The shorter conversation.
        after: The longer one, which does not begin with the shorter.
        before_ends: Where the turns of the shorter end, also of one that was only begun.
        after_ends: Where those of the longer end.
    """
    place = first_difference(before, after)
    turn = min(bisect_right(after_ends, place), bisect_right(before_ends, place))
    first = after_ends[turn - 1] if turn else 0
    stop = before_ends[turn] if turn < len(before_ends) else len(before)
    last = after_ends[turn] if turn < len(after_ends) else len(after)
    return Rewrite(turn, before[first:stop], after[first:last])


def sampled(settled: Settled, prompt: str, k: int) -> Settled:
    """An assistant's turn as a rollout holds it: the prompt, what a model wrote, nothing behind.

    Args:
        settled: The render that ends with the turn, which is trained.
        prompt: What a model is given to write it: the messages before it, with the generation
            prompt.
        k: Its number, for the message.

    Raises:
        RowError: The template prints the turn otherwise than after its own generation prompt, so
            no rollout would hold it.
    """
    assert settled.spans
    close = settled.spans[-1][1]
    text = settled.text[:close]
    if not text.startswith(prompt):
        place = first_difference(text, prompt)
        raise unproven(
            f"no model would be given what stands before turn {k}: the prompt is"
            f" {excerpt(prompt, place)}, the turn is printed as {excerpt(text, place)}"
        )
    ends = [min(end, close) for end in settled.ends]
    return replace(settled, text=text, ends=ends)


@dataclass(slots=True)
class Stretch:
    """Turns of which each goes on where the one before it ended, as one text."""

    turns: list[int]
    """Which of the given turns these are."""
    settled: Settled


def join(turns: Iterable[tuple[str, Settled]]) -> list[Stretch]:
    """Put turns together as far as a rollout could hold them in one piece.

    Each turn is trained once, in the stretch that holds it; a new stretch begins where the
    prompt is not what stands and something behind it.

    Args:
        turns: Of every turn, in order, its prompt and what `sampled` made of it.
    """
    stretches: list[Stretch] = []
    for number, (prompt, settled) in enumerate(turns):
        if stretches and prompt.startswith(stretches[-1].settled.text):
            last = stretches[-1]
            last.turns.append(number)
            spans = [*(last.settled.spans or ()), *(settled.spans or ())]
            closed = last.settled.closed and settled.closed
            last.settled = replace(settled, spans=spans, closed=closed)
        else:
            stretches.append(Stretch([number], settled))
    return stretches
