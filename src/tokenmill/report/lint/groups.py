"""What can be seen of answers that belong together: sides that are swapped, or repeat the prompt.

Comes in: a row as the chat room reads it. `sides_of` gives its conversations, one where the row has
one; `comparisons` yields sightings about a group. What makes answers incomparable (an empty one, no
difference, other prompts) is no matter of taste: such rows are rejected as ``bad_group``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenmill.chat.groups import Group
from tokenmill.chat.shapes import Conversation, Plain
from tokenmill.report.lint.findings import excerpt

Side = Conversation | Plain
LEAST_REPEATED = 8  # characters of a prompt; a shorter one may well begin an answer


def sides_of(parsed: Side | Group) -> list[Side]:
    """The conversations of a row."""
    return parsed.sides if isinstance(parsed, Group) else [parsed]


def side_of(sides: Sequence[Side], part: int) -> Side:
    """The conversation of one of a row's texts; all turns of an expanded one are of the same."""
    return sides[part] if part < len(sides) else sides[0]


def comparisons(parsed: Side | Group) -> Iterator[tuple[str, str, str]]:
    """Rule, what is wrong, excerpt, for the answers of a group."""
    if not isinstance(parsed, Group):
        return
    scores = parsed.scores
    if parsed.shape == "preference" and scores is not None and scores[0] < scores[1]:
        detail = f"chosen has the score {scores[0]:g}, rejected {scores[1]:g}"
        yield "swapped_sides", detail, excerpt(_asked_and_answered(parsed.sides[0])[1])
    elif parsed.margin is not None and parsed.margin < 0:
        detail = f"the margin is {parsed.margin:g}: rejected is better than chosen"
        yield "swapped_sides", detail, excerpt(_asked_and_answered(parsed.sides[0])[1])
    for number, side in enumerate(parsed.sides):
        asked, answered = _asked_and_answered(side)
        if len(asked) >= LEAST_REPEATED and answered.startswith(asked):
            detail = f"{parsed.name(number)} begins with the prompt"
            yield "answer_repeats_prompt", detail, excerpt(answered)


def _asked_and_answered(side: Side) -> tuple[str, str]:
    """The last thing asked and the first thing answered, without blanks around them."""
    if isinstance(side, Plain):
        return side.prompt.strip(), side.text.strip()
    asked = [m.get("content") for m in side.messages[: side.completion] if m["role"] == "user"]
    answered = side.messages[side.completion].get("content")
    return _text(asked[-1] if asked else ""), _text(answered)


def _text(content: Any) -> str:
    return content.strip() if isinstance(content, str) else ""
