"""Join the turns of a rollout to one text that grows by sampled tokens and by the next prompt.

This works if the template prints a longer conversation as the shorter one plus more text. Many
templates do not: they drop the thinking of earlier turns, or end the last turn with another token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tokenmill.chat.turns import RenderedRow, unproven

EXCERPT_CHARS = 120  # of a turn in a message; the whole turn is in the attributes


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A turn that the template prints differently once more messages follow.

    `before` is the text of message number `turn`; the template would print `after` in its place.
    """

    turn: int
    before: str
    after: str

    def __str__(self) -> str:
        position = first_difference(self.before, self.after)
        before, after = excerpt(self.before, position), excerpt(self.after, position)
        return f"the template would rewrite turn {self.turn}: {before} becomes {after}"


def first_difference(one: str, other: str) -> int:
    """Return the first position at which two texts differ, or the end of the shorter."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))


def excerpt(text: str, position: int) -> str:
    """Return the part of a text around a position, for an error message."""
    first = max(0, min(position - EXCERPT_CHARS // 3, len(text) - EXCERPT_CHARS))
    shown = repr(text[first : first + EXCERPT_CHARS])
    return f"{'…' if first else ''}{shown}{'…' if first + EXCERPT_CHARS < len(text) else ''}"


def rewrite_between(
    before: str, after: str, before_ends: Sequence[int], after_ends: Sequence[int]
) -> Rewrite:
    """Return the turn in which a text differs from the one that should continue it.

    The ends of turns include a turn that has only begun.
    """
    position = first_difference(before, after)
    turn = min(bisect_right(after_ends, position), bisect_right(before_ends, position))
    first = after_ends[turn - 1] if turn else 0
    stop = before_ends[turn] if turn < len(before_ends) else len(before)
    last = after_ends[turn] if turn < len(after_ends) else len(after)
    return Rewrite(turn, before[first:stop], after[first:last])


def extended(
    text: str, ends: Sequence[int], later: str, later_ends: Sequence[int], seam: int
) -> tuple[str, list[int], int]:
    """Append the text of a later render after `seam`; return text, ends of turns and the shift."""
    shift = len(text) - seam
    last = len(ends) - 1  # the last turn extends to the start of the next one
    moved = [max(end + shift, 0) for end in later_ends[last:]]
    return text + later[seam:], [*ends[:last], *moved], shift


def sampled(rendered: RenderedRow, prompt: str, k: int) -> RenderedRow:
    """Cut a render that ends with the trained turn ``k`` after the model's part of it.

    Raises:
        RowError: The template prints the turn differently after its own generation prompt, so no
            rollout contains it.
    """
    assert rendered.spans
    close = rendered.spans[-1][1]
    text = rendered.text[:close]
    if not text.startswith(prompt):
        position = first_difference(text, prompt)
        raise unproven(
            f"the text before turn {k} is not a generation prompt: the prompt is"
            f" {excerpt(prompt, position)}, the text is {excerpt(text, position)}"
        )
    return replace(rendered, text=text, ends=[min(end, close) for end in rendered.ends])


def join(turns: Iterable[tuple[str, RenderedRow]]) -> list[tuple[list[int], RenderedRow]]:
    """Join turns, each a prompt and a result of `sampled`, to as few pieces as a rollout allows.

    A new piece begins where a prompt does not start with the text before it. Returns, for every
    piece, the numbers of its turns and their text.
    """
    pieces: list[tuple[list[int], RenderedRow]] = []
    for number, (prompt, turn) in enumerate(turns):
        if pieces and prompt.startswith(pieces[-1][1].text):
            numbers, before = pieces[-1]
            text, ends, _ = extended(
                before.text, before.ends, turn.text, turn.ends, len(before.text)
            )
            spans = [*(before.spans or ()), *(turn.spans or ())]
            closed = before.closed and turn.closed
            joined = replace(turn, text=text, ends=ends, spans=spans, closed=closed)
            pieces[-1] = [*numbers, number], joined
        else:
            pieces.append(([number], turn))
    return pieces
