"""What can be seen of answers that belong together: sides that are swapped, or repeat the prompt.

Comes in: a row as the chat room reads it. `sides_of` gives its conversations, one where the row has
one; `comparisons` yields sightings about a group. What makes answers incomparable (an empty one, no
difference, other prompts) is no matter of taste: such rows are rejected as ``bad_group``.

`balance` counts the groups of a block, and `one_sided` says of all counts together whether labels
or lengths give the answer away: a model may learn those instead of what is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenmill.chat import Rendering
from tokenmill.chat.shapes import AnswerGroup, Conversation, Plain
from tokenmill.report.lint.findings import excerpt
from tokenmill.tokenizer import Encoded

Side = Conversation | Plain
LEAST_GROUPS = 50  # of fewer nothing is said: chance alone makes them one-sided
RARE_LABEL = 0.1  # share of the rarer label, below which labels are out of balance
ONE_LENGTH = 0.75  # share of pairs from which on the longer answer, or the shorter, is the rule
LEAST_REPEATED = 8  # characters of a prompt; a shorter one may well begin an answer


def sides_of(parsed: Side | AnswerGroup) -> list[Side]:
    """The conversations of a row."""
    return parsed.sides if isinstance(parsed, AnswerGroup) else [parsed]


def side_of(sides: Sequence[Side], part: int) -> Side:
    """The conversation of one of a row's texts; all turns of an expanded one are of the same."""
    return sides[part] if part < len(sides) else sides[0]


def comparisons(parsed: Side | AnswerGroup) -> Iterator[tuple[str, str, str]]:
    """Rule, what is wrong, excerpt, for the answers of a group."""
    if not isinstance(parsed, AnswerGroup):
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


def balance(rendering: Rendering, encoded: Encoded) -> dict[str, int]:
    """Answers by label, and pairs by which side has more trained tokens."""
    counts: Counter[str] = Counter()
    trained = encoded.trained
    gone = {place for place, _ in encoded.rejected}
    for first, facts in rendering.groups.items():
        if first in gone:
            continue
        if len(facts.labels) == 1:
            counts["wanted" if facts.labels[0] else "unwanted"] += 1
        elif facts.labels == (1, 0) and first + 1 not in gone:
            difference = int(trained[first]) - int(trained[first + 1])
            counts["longer" if difference > 0 else "shorter" if difference else "equal"] += 1
    return dict(counts)


def one_sided(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Rule and what is the case, over all rows that were looked at."""
    labels = {name: counts.get(name, 0) for name in ("wanted", "unwanted")}
    answers = sum(labels.values())
    rare = min(labels, key=lambda name: labels[name])
    if answers >= LEAST_GROUPS and labels[rare] < RARE_LABEL * answers:
        yield "label_imbalance", f"{labels[rare]:,} of {answers:,} answers are {rare}"
    lengths = {name: counts.get(name, 0) for name in ("longer", "shorter")}
    pairs = sum(lengths.values()) + counts.get("equal", 0)
    usual = max(lengths, key=lambda name: lengths[name])
    if pairs >= LEAST_GROUPS and lengths[usual] >= ONE_LENGTH * pairs:
        yield "length_bias", f"chosen is {usual} than rejected in {lengths[usual]:,} of {pairs:,}"
