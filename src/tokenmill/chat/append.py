"""Append the turns of a rollout: one text that grows by what was sampled and by the next prompt.

That works where the template prints a longer conversation as the shorter one and more text. Many
templates do not: they drop the thinking of earlier turns, or end the last turn by another token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tokenmill.chat.turns import Settled, unproven

SHOWN = 120  # characters of a turn in a message; the whole is in the attributes


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A turn that the template prints differently once more messages follow.

    `before` is the text of message number `turn`; the template would print `after` in its place.
    """

    turn: int
    before: str
    after: str

    def __str__(self) -> str:
        place = first_difference(self.before, self.after)
        before, after = excerpt(self.before, place), excerpt(self.after, place)
        return f"the template would rewrite turn {self.turn}: {before} stands, and becomes {after}"


def first_difference(one: str, other: str) -> int:
    """Return the first position at which two texts differ, or the end of the shorter."""
    places = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in places if a != b), min(len(one), len(other)))


def excerpt(text: str, place: int) -> str:
    """Return a text around the position where it begins to differ from another, for an error."""
    first = max(0, min(place - SHOWN // 3, len(text) - SHOWN))
    shown = repr(text[first : first + SHOWN])
    return f"{'…' if first else ''}{shown}{'…' if first + SHOWN < len(text) else ''}"


def rewrite_between(
    before: str, after: str, before_ends: Sequence[int], after_ends: Sequence[int]
) -> Rewrite:
    """Return the turn in which a text differs from the one that should continue it.

    The ends of turns include one that was only begun.
    """
    place = first_difference(before, after)
    turn = min(bisect_right(after_ends, place), bisect_right(before_ends, place))
    first = after_ends[turn - 1] if turn else 0
    stop = before_ends[turn] if turn < len(before_ends) else len(before)
    last = after_ends[turn] if turn < len(after_ends) else len(after)
    return Rewrite(turn, before[first:stop], after[first:last])


def extended(
    text: str, ends: Sequence[int], later: str, later_ends: Sequence[int], seam: int
) -> tuple[str, list[int], int]:
    """Append what a later render has after `seam`; return text, ends of turns and the shift."""
    shift = len(text) - seam
    last = len(ends) - 1  # the last turn goes on to where the next one begins
    moved = [max(end + shift, 0) for end in later_ends[last:]]
    return text + later[seam:], [*ends[:last], *moved], shift


def sampled(settled: Settled, prompt: str, k: int) -> Settled:
    """Cut a render that ends with the trained turn ``k`` to its prompt and what a model wrote.

    Raises:
        RowError: The template prints the turn differently after its own generation prompt, so no
            rollout contains it.
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
    return replace(settled, text=text, ends=[min(end, close) for end in settled.ends])


def join(turns: Iterable[tuple[str, Settled]]) -> list[tuple[list[int], Settled]]:
    """Append turns, each a prompt and what `sampled` returned, as far as a rollout could hold them.

    A new piece begins where a prompt does not start with the text before it. Returns, for every
    piece, the numbers of its turns and their text.
    """
    pieces: list[tuple[list[int], Settled]] = []
    for number, (prompt, turn) in enumerate(turns):
        if pieces and prompt.startswith(pieces[-1][1].text):
            numbers, before = pieces[-1]
            text, ends, _ = extended(
                before.text, before.ends, turn.text, turn.ends, len(before.text)
            )
            spans = [*(before.spans or ()), *(turn.spans or ())]
            closed = before.closed and turn.closed
            made = replace(turn, text=text, ends=ends, spans=spans, closed=closed)
            pieces[-1] = [*numbers, number], made
        else:
            pieces.append(([number], turn))
    return pieces
