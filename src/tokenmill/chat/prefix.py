"""Prove trained spans by generation prompts, without a trace of the template.

For an assistant turn *k*, `before` is the render of the messages before it with the generation
prompt, and `after` the render up to and including it. If the whole text begins with `before`, that
is the model's prompt, so the turn starts at its end. It ends where `after` and the whole text
differ. Its text, calls and last reasoning must lie in between, in the row and in the same row with
unique words (`unique_words`).

Some templates print earlier messages differently once more follow: they move the tools to the last
user message, or drop thinking. Then the part of `before` from the content of the message before the
turn on must occur exactly once in the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from tokenmill._core.id_text import IdText
from tokenmill.chat.append import excerpt, first_difference
from tokenmill.chat.encoders import EncoderTemplate
from tokenmill.chat.turns import (
    RenderedRow,
    Span,
    SpanResolver,
    check_printed,
    common_prefix,
    unproven,
)
from tokenmill.chat.unique_words import WORD, with_unique_words
from tokenmill.errors import RowError

MAX_CHECKED = 1 << 16  # forms of conversations that are known to pass

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]


def prove_by_prompts(
    render: Render,
    messages: list[Message],
    trained: Sequence[int],
    resolver: SpanResolver,
    known: dict[tuple[int, bool], str],
    encoder: EncoderTemplate | None = None,
    tools: Any = None,
) -> RenderedRow:
    """Find the trained spans of a conversation by its own generation prompts.

    Args:
        render: Renders messages, with the generation prompt or without.
        messages: The conversation.
        trained: Indices of the messages that are trained.
        resolver: Conventions of the template: thinking tags, end of a turn.
        known: Renders of the first messages, by their number and with the prompt or without.
        encoder: What `render` calls, if it is no template. Its text must begin with each prompt:
            nothing is known about how it prints earlier messages.
        tools: The tools that `render` prints.

    Raises:
        RowError: A trained turn is not proven; the message shows the first difference.
    """

    def prefix(length: int, prompt: bool) -> str:
        if (length, prompt) not in known:
            known[length, prompt] = render(messages[:length], prompt)
        return known[length, prompt]

    text = prefix(len(messages), False)
    coded = isinstance(text, IdText)
    show: Callable[[str], str] = encoder.decode if coded and encoder is not None else str
    last = max(k for k, message in enumerate(messages) if message["role"] == "assistant")
    unique = with_unique_words(messages[: max(trained) + 1], resolver.thinking)
    # Rows of the same form become the same conversation, which is checked once.
    form = blake2b(repr((unique, trained, last, tools, coded)).encode("utf-8", "replace")).digest()
    spans: list[Span] = []
    ends: list[int] = []
    closed = True
    for k, message in enumerate(messages):
        previous = ends[-1] if ends else 0
        if k not in trained:
            header = encoder.header if encoder is not None and k + 1 in trained else None
            ends.append(_end(prefix, k, text, previous, header))
            continue
        try:
            before = prefix(k, True)
            after = prefix(k + 1, False)
        except RowError as error:
            detail = f": {error.message}" if encoder is not None else ""
            raise unproven(
                f"the template raises an error on the messages up to turn {k}{detail}"
            ) from error
        if encoder is not None:
            anchor = before if text.startswith(before) and before else None
        else:
            anchor = _anchor(before, text, messages[k - 1] if k else {})
        if anchor is None or (spans and text.find(anchor) + len(anchor) < spans[-1][1]):
            before, whole = show(before), show(text)
            position = first_difference(before, whole)
            raise unproven(
                f"the text does not continue the generation prompt of turn {k}: the prompt has"
                f" {excerpt(before, position)}, the text {excerpt(whole, position)}"
            )
        start = text.find(anchor) + len(anchor)
        sampled = after[after.find(anchor) + len(anchor) :] if anchor in after else ""
        end = start + len(_common(sampled, text[start:], coded))
        ends.append(max(end, previous))
        printed = show(text[start:end])
        check_printed(message, k, [printed], show(text), k == last, resolver.thinking)
        if form not in resolver.checked:
            _check_unique_words(render, unique[: k + 1], resolver, k == last, show)
        if not coded:
            start = resolver.generation_prompts.trained_from(text, start)
        stop, has_end = _stop(text, start, end, resolver, show)
        closed &= has_end
        if stop > start:
            spans.append((start, stop))
    if len(resolver.checked) >= MAX_CHECKED:
        resolver.checked.clear()
    resolver.checked.add(form)
    ends[-1] = len(text)
    roles = [message["role"] for message in messages]
    return RenderedRow(text, spans, roles, ends, closed=closed, coded=coded)


def _common(left: str, right: str, coded: bool) -> str:
    """Return the common prefix: of ids, or of text in whole units."""
    return left[: first_difference(left, right)] if coded else common_prefix(left, right)


def _stop(
    text: str, start: int, end: int, resolver: SpanResolver, show: Callable[[str], str]
) -> tuple[int, bool]:
    """Return the end of a trained span, and whether the turn has its end-of-turn token."""
    stop, has_end = _last_word(text, start, end, show), True
    end_of_turn = resolver.generation_prompts.next_end_of_turn
    if end_of_turn and not text[start:stop].endswith(end_of_turn.strip()):
        has_end = text.startswith(end_of_turn, end)
        if has_end:
            stop = end + len(end_of_turn)
    return (max(stop, end) if resolver.turn_end == "turn" else stop), has_end


def _last_word(text: str, start: int, end: int, show: Callable[[str], str]) -> int:
    """Return the end of a span without white space at its end."""
    if show is str:
        return start + len(text[start:end].rstrip())
    while end > start and not show(text[end - 1]).strip():
        end -= 1
    return end


def _check_unique_words(
    render: Render,
    messages: list[Message],
    resolver: SpanResolver,
    last: bool,
    show: Callable[[str], str] = str,
) -> None:
    """Check that the last turn of a conversation with unique words has its own words only."""
    k = len(messages) - 1
    try:
        before, after = render(messages[:k], True), render(messages, False)
    except RowError as error:
        raise unproven("the template raises an error on the row with unique words") from error
    before = before if show is not str else before.rstrip()
    if not after.startswith(before):
        raise unproven(f"with unique words turn {k} does not begin with its generation prompt")
    turn = show(after[len(before) :])
    check_printed(messages[k], k, [turn], turn, last, resolver.thinking)
    if set(WORD.findall(turn)) - set(WORD.findall(str(messages[k]))):
        raise unproven(f"the template prints another message in turn {k}")


def _anchor(before: str, text: str, previous: Message) -> str | None:
    """Return the longest part of a generation prompt that the text must contain, or None.

    Whitespace at its end may be missing from the text.
    """
    content = previous.get("content")
    position = before.rfind(content.strip()) if isinstance(content, str) and content.strip() else -1
    for prompt in (before, before.rstrip()):
        if text.startswith(prompt):
            return common_prefix(before, text) if prompt != before else prompt
        if position >= 0 and text.count(prompt[position:]) == 1:
            return prompt[position:]
    return None


def _end(
    prefix: Callable[[int, bool], str], k: int, text: str, previous: int, header: str | None
) -> int:
    """Return where message k ends: as far as the render up to it equals the whole text.

    A generation prompt that ends with the encoder's ``header`` is this render and the header.
    """
    try:
        if header is not None:
            before = prefix(k + 1, True)
            if text.startswith(before) and before.endswith(header):
                return max(len(before) - len(header), previous)
        printed = prefix(k + 1, False)
    except RowError:
        return previous  # the template raises an error on a conversation that ends here
    return max(len(_common(printed, text, isinstance(text, IdText))), previous)
