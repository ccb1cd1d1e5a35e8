"""The proof of a row's mask: which characters of a render are the assistant's.

`Prover.prove` renders a conversation with the reference, finds every message's text in it (by
marks, or for a template with ``{% generation %}`` by what the template says itself), asks the
template where the assistant's turns start and end, and then checks itself: every assistant text
lies in its turn, no other message's text does, nothing an assistant said is printed nowhere. Only
then is there a `Proof`; otherwise a `RowError` says what could not be shown. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.chat.checks import (
    Proof,
    Span,
    Turn,
    check_inside,
    check_printed,
    ends_by_hits,
    ends_by_turns,
)
from tokenmill.chat.fast import LONGEST, FastTemplate
from tokenmill.chat.marks import Hit, Marker, any_of, compared_strings, literals, thinking_tags
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.turns import Boundaries, Question
from tokenmill.errors import RowError

# Two characters that generation blocks print around themselves; texts that hold them get others.
GENERATION_MARKS = ("\U0010fffc", "\U0010fffd")


class Prover:
    """Proves masks for one template.

    Args:
        template: The reference renderer.
        turn_end: ``stop`` or ``turn``.
        fast: An engine that may make the marked render, since that is compared character by
            character with the reference's plain one.
    """

    def __init__(
        self, template: ReferenceTemplate, turn_end: str, fast: FastTemplate | None = None
    ) -> None:
        self.template = template
        self.turn_end = turn_end
        self._fast = fast
        strings = literals(template.tree)
        self.tags = thinking_tags(strings)
        self.thinking = any_of(self.tags)
        self._compared = compared_strings(strings)
        self._boundaries = Boundaries(template)

    def prove(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, trained: Sequence[int]
    ) -> Proof:
        """Render one conversation and prove the spans of the trained messages.

        Args:
            messages: The conversation.
            tools: Tool descriptions.
            trained: Indices of the messages that are to be trained.

        Raises:
            RowError: template_error, limit, template_drops_content or mask_unproven.
        """
        text = self.template.render(messages, tools)
        marker, hits = self._mark(messages, tools, text)
        proof = Proof(text, hits, marker.pieces, {})
        if self.template.has_generation:
            try:
                check_printed(messages, proof)
            except RowError as error:
                # Its author has said what is trained, also of turns it prints only in part: that
                # is taken as said, and recorded.
                proof.dropped = error.message
            spans = self.generation_spans(messages, tools, text)
            proof.spans = self._choose(messages, proof, spans, trained)
            proof.ends = ends_by_hits(messages, proof)
        else:
            question = self._boundaries.question(marker, tools)
            self._find_turns(messages, proof, question)
            check_printed(messages, proof)
            proof.spans = self._marked_spans(proof, trained)
            proof.ends = ends_by_turns(messages, proof)
        check_inside(messages, proof, trained)
        return proof

    def follow(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Proof:
        """Render one conversation that is trained whole: nothing has to be shown."""
        text = self.template.render(messages, tools)
        try:
            marker, hits = self._mark(messages, tools, text)
        except RowError:
            return Proof(text, [], [], {}, ends=[("text", len(text))])
        proof = Proof(text, hits, marker.pieces, {})
        proof.ends = ends_by_hits(messages, proof)
        return proof

    def _mark(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> tuple[Marker, list[Hit]]:
        """The first way of marking that leaves the render as it is."""
        besides = (tools, self.template.variables, self.template.source)
        for compared, calls in ((None, True), (self._compared, True), (self._compared, False)):
            try:
                marker = Marker(messages, self.thinking, compared, calls, besides)
                if self._fast is not None and len(text) < LONGEST:
                    marked = self._fast.render(marker.messages, tools)
                    found = None if marked is None else marker.read(marked)
                    if found is not None and found[0] == text:
                        return marker, found[1]
                found = marker.read(self.template.render(marker.messages, tools))
            except (RowError, OverflowError):
                continue
            if found is not None and found[0] == text:
                return marker, found[1]
        raise RowError(
            "the messages' texts could not be followed through the template: it cuts or rewrites"
            " them",
            reason="mask_unproven",
        )

    def _find_turns(self, messages: list[dict[str, Any]], proof: Proof, question: Question) -> None:
        by_message: dict[int, list[Hit]] = {}
        for hit in proof.hits:
            by_message.setdefault(hit.message, []).append(hit)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                proof.turns[index] = self._turn(index, messages, proof, by_message, question)

    def _turn(
        self,
        index: int,
        messages: list[dict[str, Any]],
        proof: Proof,
        by_message: dict[int, list[Hit]],
        question: Question,
    ) -> Turn:
        own = by_message.get(index, [])
        text, hits = proof.text, proof.hits
        if own:
            before = [hit for hit in hits if hit.end <= own[0].start and hit is not own[0]]
            anchor = before[-1] if before else None
            limit = own[0].start
        else:
            earlier = [m for m in by_message if m < index]
            anchor = by_message[max(earlier)][-1] if earlier else None
            limit = _next_start(hits, anchor, index, len(text))
        base = anchor.end if anchor else 0
        roles = tuple(m["role"] for m in messages[(anchor.message if anchor else 0) : index + 1])
        start = question.start(index, anchor, text[base:limit], roles)
        last = own[-1] if own else anchor
        origin = last.end if last else 0
        following = _following(hits, origin, index)
        limit = following.start if following else len(text)
        after = messages[index + 1 :]
        roles = (*roles, *(m["role"] for m in after[:1]))
        end = question.end(
            index, last, text[origin:limit], following, roles, _trailing(messages[index])
        )
        return Turn(
            index,
            base + start.header,
            base + start.trained,
            max(origin + end.stop, base + start.trained),
            origin + end.turn,
            end.closed,
        )

    def _marked_spans(self, proof: Proof, trained: Sequence[int]) -> list[Span]:
        spans = []
        for index in trained:
            turn = proof.turns[index]
            spans.append((turn.start, turn.stop if self.turn_end == "stop" else turn.end))
        return sorted(span for span in spans if span[0] < span[1])

    def generation_spans(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> list[Span]:
        """The spans that the template's generation blocks say themselves."""
        first, second = GENERATION_MARKS
        code = ord(first)
        while first in text or second in text:  # someone's text holds our two characters
            code -= 2
            first, second = chr(code), chr(code + 1)
        marked = self.template.render(messages, tools, generation_marks=(first, second))
        spans: list[Span] = []
        position = 0
        pieces = []
        opened: int | None = None
        for part in marked.replace(second, first).split(first):
            pieces.append(part)
            position += len(part)
            if opened is None:
                opened = position
            else:
                spans.append((opened, position))
                opened = None
        if "".join(pieces) != text or marked.count(first) != marked.count(second):
            raise RowError(
                "the template's generation blocks could not be followed through its render",
                reason="mask_unproven",
            )
        return [span for span in spans if span[0] < span[1]]

    def _choose(
        self,
        messages: list[dict[str, Any]],
        proof: Proof,
        spans: list[Span],
        trained: Sequence[int],
    ) -> list[Span]:
        """The generation spans of the trained turns."""
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if list(trained) == assistants:
            return spans
        kept: list[Span] = []
        owners = _owners(assistants, proof, spans)
        for span, owner in zip(spans, owners, strict=True):
            if owner is None:
                raise RowError(
                    "a generation block of the template could not be given to one turn",
                    reason="mask_unproven",
                )
            if owner in trained:
                kept.append(span)
        return kept


def _trailing(message: dict[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        return ""
    return content[len(content.rstrip()) :]


def _following(hits: list[Hit], position: int, index: int) -> Hit | None:
    for hit in hits:
        if hit.start >= position and hit.message != index:
            return hit
    return None


def _next_start(hits: list[Hit], anchor: Hit | None, index: int, default: int) -> int:
    following = _following(hits, anchor.end if anchor else 0, index)
    return following.start if following else default


def _owners(assistants: list[int], proof: Proof, spans: list[Span]) -> list[int | None]:
    """Which assistant each generation span belongs to: by its texts, else by order."""
    owners: list[int | None] = []
    for start, end in spans:
        inside = {h.message for h in proof.hits if start <= h.start and h.end <= end}
        owners.append(inside.pop() if len(inside) == 1 else None)
    if None in owners and len(spans) == len(assistants):
        return list(assistants)
    for number, owner in enumerate(owners):
        if owner is None and number and (spans[number][0] == spans[number - 1][1]):
            owners[number] = owners[number - 1]  # a closer in a block of its own
    return owners
