"""Prove trained spans by generation prompts, without knowing how the template prints.

For an assistant turn *k*, `before` is the render of the messages before it with the generation
prompt, and `after` the render up to and including it. Where the whole text begins with `before`, a
model would have been given exactly that, so the turn starts at its end. It ends where `after` and
the whole text part. Its text, calls and last reasoning must lie between the two, in the row and in
the same row with unique words (`planted`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenmill.chat.planted import plant
from tokenmill.chat.turns import Settled, Span, TurnJudge, check_printed, common_prefix, unproven
from tokenmill.errors import RowError

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
TAIL = 512  # characters that may open thinking at the end of a generation prompt
SHOWN = 40  # characters around a difference in a message


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
        ends.append(_end(render, messages, k, text, ends[-1] if ends else 0))
        if k not in trained:
            continue
        before = render(messages[:k], True)
        start = _reached(before, text)
        if start is None or (spans and start < spans[-1][1]):
            raise _differs(k, before, text)
        end = ends[k]
        segment = text[start:end]
        check_printed(message, k, [segment], text, k == last, judge.thinking)
        if len(message) > 2:
            [twin] = plant([message], judge.thinking)
            printed = render([*messages[:k], twin], False)[start:]
            check_printed(twin, k, [printed], printed, k == last, judge.thinking)
        begin = max(start - TAIL, 0)
        start = begin + judge.openings.untrained(text[begin:start])
        stop = start + len(text[start:end].rstrip())
        closer = judge.openings.closer
        if closer and not text[start:stop].endswith(closer.strip()):
            if text.startswith(closer, end):
                stop = end + len(closer)
            else:
                closed = False
        if judge.turn_end == "turn":
            stop = max(stop, end)
        if stop > start:
            spans.append((start, stop))
    return Settled(text, spans, [message["role"] for message in messages], ends, closed=closed)


def _end(render: Render, messages: list[Message], k: int, text: str, previous: int) -> int:
    """Where message k ends in the text: the render up to it and the whole text are equal so far."""
    if k + 1 == len(messages):
        return len(text)
    try:
        return max(len(common_prefix(render(messages[: k + 1], False), text)), previous)
    except RowError:
        return previous  # the template refuses a conversation that ends here


def _reached(before: str, text: str) -> int | None:
    """How far a generation prompt reaches into the text; whitespace at its end may be missing."""
    if text.startswith(before):
        return len(before)
    core = before.rstrip()
    return len(common_prefix(before, text)) if text.startswith(core) else None


def _differs(k: int, before: str, text: str) -> RowError:
    place = len(common_prefix(before, text))
    first = max(place - SHOWN // 2, 0)
    return unproven(
        f"the text does not begin with the generation prompt of turn {k}: at character {place} the"
        f" prompt has {before[first : place + SHOWN]!r}, the text {text[first : place + SHOWN]!r}"
    )
