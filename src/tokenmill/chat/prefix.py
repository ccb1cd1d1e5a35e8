"""Prove trained spans by generation prompts, without knowing how the template prints.

For an assistant turn *k*, `before` is the render of the messages before it with the generation
prompt, and `after` the render up to and including it. Where the whole text begins with `before`, a
model would have been given exactly that, so the turn starts at its end. It ends where `after` and
the whole text part. Its text, calls and last reasoning must lie between the two, in the row and in
the same row with unique words (`planted`).

Some templates print earlier messages differently once more follow: they move the tools to the last
user, or drop thinking. Then the end of `before`, from the content of the message before the turn
on, must occur exactly once in the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenmill.chat.append import excerpt, first_difference
from tokenmill.chat.planted import WORD, plant
from tokenmill.chat.turns import (
    Settled,
    Span,
    TurnJudge,
    check_printed,
    common_prefix,
    unproven,
)
from tokenmill.errors import RowError

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]


def prove_by_prompts(
    render: Render, messages: list[Message], trained: Sequence[int], judge: TurnJudge
) -> Settled:
    """Find the trained spans of a conversation by its own generation prompts.

    Args:
        render: Renders messages, with the generation prompt or without.
        messages: The conversation.
        trained: Indices of the messages that are trained.
        judge: Conventions of the template: thinking tags, end of a turn.

    Raises:
        RowError: A trained turn is not proven; the message shows the first difference.
    """
    text = render(messages, False)
    last = max(k for k, message in enumerate(messages) if message["role"] == "assistant")
    spans: list[Span] = []
    ends: list[int] = []
    closed = True
    for k, message in enumerate(messages):
        previous = ends[-1] if ends else 0
        if k not in trained:
            ends.append(_end(render, messages, k, text, previous))
            continue
        try:
            before = render(messages[:k], True)
            after = render(messages[: k + 1], False)
        except RowError as error:
            raise unproven(f"the template refuses the messages up to turn {k}") from error
        anchor = _anchor(before, text, messages[k - 1] if k else {})
        if anchor is None or (spans and text.find(anchor) + len(anchor) < spans[-1][1]):
            place = first_difference(before, text)
            raise unproven(
                f"the text does not go on from the generation prompt of turn {k}: the prompt has"
                f" {excerpt(before, place)}, the text {excerpt(text, place)}"
            )
        start = text.find(anchor) + len(anchor)
        sampled = after[after.find(anchor) + len(anchor) :] if anchor in after else ""
        end = start + len(common_prefix(sampled, text[start:]))
        ends.append(max(end, previous))
        check_printed(message, k, [text[start:end]], text, k == last, judge.thinking)
        _check_planted(render, plant(messages[: k + 1], judge.thinking), judge, k == last)
        start = judge.openings.trained_from(text, start)
        stop = start + len(text[start:end].rstrip())
        closer = judge.openings.next_closer
        if closer and not text[start:stop].endswith(closer.strip()):
            if text.startswith(closer, end):
                stop = end + len(closer)
            else:
                closed = False
        if judge.turn_end == "turn":
            stop = max(stop, end)
        if stop > start:
            spans.append((start, stop))
    ends[-1] = len(text)
    return Settled(text, spans, [message["role"] for message in messages], ends, closed=closed)


def _check_planted(render: Render, planted: list[Message], judge: TurnJudge, last: bool) -> None:
    """Check that the last turn of a conversation of unique words has its own, and no others."""
    k = len(planted) - 1
    try:
        before, after = render(planted[:k], True), render(planted, False)
    except RowError as error:
        raise unproven("the template refuses the row with unique words") from error
    if not after.startswith(before.rstrip()):
        raise unproven(f"with unique words turn {k} does not begin with its generation prompt")
    turn = after[len(before.rstrip()) :]
    check_printed(planted[k], k, [turn], turn, last, judge.thinking)
    if set(WORD.findall(turn)) - set(WORD.findall(str(planted[k]))):
        raise unproven(f"the template prints another message in turn {k}")


def _anchor(before: str, text: str, previous: Message) -> str | None:
    """Return the end of a generation prompt that the text contains, all of it if possible.

    Whitespace at its end may be missing from the text.
    """
    content = previous.get("content")
    place = before.rfind(content.strip()) if isinstance(content, str) and content.strip() else -1
    for prompt in (before, before.rstrip()):
        if text.startswith(prompt):
            return common_prefix(before, text) if prompt != before else prompt
        if place >= 0 and text.count(prompt[place:]) == 1:
            return prompt[place:]
    return None


def _end(render: Render, messages: list[Message], k: int, text: str, previous: int) -> int:
    """Return where message k ends: the render up to it and the whole text are equal so far."""
    try:
        return max(len(common_prefix(render(messages[: k + 1], False), text)), previous)
    except RowError:
        return previous  # the template refuses a conversation that ends here
