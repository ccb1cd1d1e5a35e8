r"""The texts that a recording of a conversation may contain, and their sampled parts.

A correct recording contains the *whole* render of the conversation, or the *appended* text: each
turn as it was sampled, followed by the new messages and the next generation prompt::

    at turn 1   <user>Hi<assistant>▏<think>hm</think>Hello<end>
    at turn 2   <user>Hi<assistant>Hello<end>\n<user>And?<assistant>▏Fine<end>
    appended    <user>Hi<assistant>▏<think>hm</think>Hello<end>▏\n<user>And?<assistant>▏Fine<end>
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.append import extended
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.chat.turns import Span
from tokenmill.errors import RowError
from tokenmill.rl.align import same_until
from tokenmill.rl.trajectory import Ids, Trajectory
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.pieces import PieceTable
from tokenmill.tokenizers.tokenizer import Tokenizer

_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_NEXT_TURN = {
    "role": "assistant",
    "content": ".",
}  # placeholder for the turn after the last message
_TRAINING_KEYS = ("weight", "train", "step_loss_mask")


@dataclass(frozen=True, slots=True)
class DecodedIds:
    """Token ids with their bytes."""

    ids: Ids
    starts: NDArray[np.int64]  # where the bytes of each id start, and the total
    data: bytes

    def token_at(self, offset: int) -> int:
        return int(np.searchsorted(self.starts, offset, side="right")) - 1

    def between(self, start: int, end: int) -> bytes:
        return self.data[int(self.starts[start]) : int(self.starts[end])]


def decode_ids(table: PieceTable, ids: Ids) -> DecodedIds:
    numbers = table.prefixless_ids(ids, np.array([0, len(ids)], np.int64))
    starts, data = table.joined(numbers)
    return DecodedIds(ids, starts.astype(np.int64), data.to_pybytes())


@dataclass(frozen=True, slots=True)
class Turn:
    """One message's part of an expected text."""

    role: str
    start: int  # in tokens
    end: int
    sampled: Span | None = None  # in tokens
    sampled_bytes: Span | None = None  # in bytes; a token at either end may extend beyond it
    rewritten: bool = False  # whether the model sampled another text


@dataclass(frozen=True)
class Expected:
    """One text that a recording may contain."""

    decoded: DecodedIds  # canonical ids
    turns: tuple[Turn, ...]  # one for each message
    open: bool  # whether it ends with a generation prompt

    @cached_property
    def required(self) -> int:
        """Number of tokens up to the end of the last sampled turn; the rest is optional."""
        return max((turn.sampled[1] for turn in self.turns if turn.sampled), default=0)

    @cached_property
    def ambiguous(self) -> list[Span]:
        """Spans of tokens that may have been sampled or not.

        Some samplers stop before and some after the whitespace that ends a turn, or the token that
        the template prints after the last turn.
        """
        spans = []
        for turn in self.turns:
            if turn.sampled is None:
                continue
            first, last = turn.sampled
            end = last
            while end > first and not self.decoded.between(end - 1, end).strip():
                end -= 1
            if end < last:
                spans.append((end, last))
        size = len(self.decoded.ids)
        if not self.open and self.decoded.between(self.required, size).strip():
            spans.append((self.required, size))
        return spans

    def turn_at(self, token: int) -> int:
        for number, turn in enumerate(self.turns):
            if token < turn.end:
                return number
        return len(self.turns) - 1


@dataclass(slots=True)
class _Text:
    text: str
    ends: list[int]  # of turns, in characters
    roles: Sequence[str]
    sampled: dict[int, Span]  # by turn
    rewritten: frozenset[int] = frozenset()


class Expectations:
    """Renders and encodes the expected texts; engine and renderer do not change the result."""

    def __init__(self, tokenizer: Tokenizer, spec: ChatSpec, engine: str, renderer: str) -> None:
        self.tokenizer = tokenizer
        spec = ChatSpec(
            format="messages",
            chat_template_kwargs=spec.chat_template_kwargs,
            date=spec.date,
            thinking_opener=spec.thinking_opener,
        )
        template = _without_generation(tokenizer.template)
        self.renderer = Renderer(
            spec,
            template,
            tokenizer.special_tokens,
            renderer=renderer,
            tokenizer=tokenizer,
            as_text=True,
        )
        self.encoder = Encoder(tokenizer, engine)

    def of(self, trajectories: Sequence[Trajectory]) -> list[list[Expected] | RowError]:
        """Return the texts of each trajectory, the appended one first, or its error."""
        prefixes = [_prefixes(trajectory) for trajectory in trajectories]
        rendered = iter(self._render([row for rows in prefixes for row in rows]))
        texts = [
            _texts(trajectory, rows, list(itertools.islice(rendered, len(rows))))
            for trajectory, rows in zip(trajectories, prefixes, strict=True)
        ]
        return self._encoded(trajectories, texts)

    def render_by_reference(self, trajectory: Trajectory) -> Expected | None:
        """Return the appended text by the reference; None if the template rewrites history.

        Slow, so it is used only to confirm a finding.
        """
        messages = trajectory.messages or []
        try:
            text = _prompted_text(
                self.renderer.reference(trajectory.tools), messages, trajectory.tools
            )
        except (RowError, TypeError, ValueError):
            return None
        if text is None:
            return None
        expected = self._encoded([trajectory], [[text]])[0]
        return None if isinstance(expected, RowError) else expected[0]

    def _render(self, rows: list[dict[str, Any]]) -> list[_Text | RowError]:
        rendering = self.renderer.render(rows)
        results: list[_Text | RowError] = [RowError("not rendered")] * len(rows)
        for number, _, error in rendering.rejected:
            results[number] = error
        texts = zip(
            rendering.source, rendering.texts, rendering.ends, rendering.roles, rendering.spans,
            strict=True,
        )  # fmt: skip
        for number, text, ends, roles, spans in texts:
            sampled = _by_turn(spans or [], ends, roles)
            results[number] = _Text(text, ends, roles, sampled)
        return results

    def _encoded(
        self, trajectories: Sequence[Trajectory], texts_by_row: list[list[_Text] | RowError]
    ) -> list[list[Expected] | RowError]:
        flat = [text for texts in texts_by_row if not isinstance(texts, RowError) for text in texts]
        encoded = self.encoder.encode(
            [text.text for text in flat],
            [[text.sampled[turn] for turn in sorted(text.sampled)] for text in flat],
            [text.ends for text in flat],
        )
        rejected = dict(encoded.rejected)
        table = self.tokenizer.table
        results: list[list[Expected] | RowError] = []
        number = 0
        for trajectory, texts in zip(trajectories, texts_by_row, strict=True):
            if isinstance(texts, RowError):
                results.append(texts)
                continue
            expected: list[Expected] = []
            result: list[Expected] | RowError = expected
            for text in texts:
                if number in rejected:
                    result = rejected[number]
                else:
                    ids, mask, ends = encoded.row(number)
                    decoded = decode_ids(table, ids)
                    turns = _turns(text, decoded, mask, ends.tolist())
                    messages = trajectory.messages or []
                    ends_open = bool(messages) and messages[-1]["role"] != "assistant"
                    expected.append(Expected(decoded, turns, ends_open))
                number += 1
            results.append(result)
        return results


def _prompted_text(
    reference: ReferenceTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
) -> _Text | None:
    """Join prompts and assistant turns; None if one does not continue the text before it."""
    before = text = ""
    ends: list[int] = []
    sampled: dict[int, Span] = {}
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if len(messages) - 1 not in turns:
        turns.append(len(messages))
    for k in turns:
        prompt = reference.render(messages[:k], tools, add_generation_prompt=True)
        if not prompt.startswith(before):
            return None
        for m in range(len(ends), k):
            try:
                printed = reference.render(messages[: m + 1], tools)
            except RowError:  # a template may raise an error if the conversation ends here
                printed = before
            ends.append(max(same_until(prompt, 0, printed, 0), len(before)))
        if k == len(messages):
            text = prompt
            break
        text = reference.render(messages[: k + 1], tools)
        sampled_bytes = text[len(prompt) :].rstrip()
        if not text.startswith(prompt) or not sampled_bytes:
            return None
        before = prompt + sampled_bytes
        sampled[k] = (len(prompt), len(before))
        ends.append(len(before))
    ends[-1] = len(text)
    return _Text(text, ends, [message["role"] for message in messages], sampled)


def _without_generation(template: Any) -> Any:
    """Remove ``generation`` tags, which mark trained text, not sampled text."""
    if isinstance(template, Mapping):
        return {name: _without_generation(source) for name, source in template.items()}
    if not isinstance(template, str):
        return template
    return _GENERATION.sub(lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", template)


def _prefixes(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the conversation up to each assistant turn, and all of it if it ends with another."""
    messages = trajectory.messages
    if messages is None:
        return []
    messages = [
        {key: value for key, value in message.items() if key not in _TRAINING_KEYS}
        for message in messages
    ]
    if messages[-1]["role"] != "assistant":
        messages.append(_NEXT_TURN)
    return [
        {"messages": messages[: k + 1], "tools": trajectory.tools}
        for k, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _by_turn(spans: Sequence[Span], ends: Sequence[int], roles: Sequence[str]) -> dict[int, Span]:
    sampled: dict[int, Span] = {}
    turn = 0
    for start, end in spans:
        while turn < len(ends) - 1 and (ends[turn] <= start or roles[turn] != "assistant"):
            turn += 1
        earlier = sampled.get(turn)
        sampled[turn] = (earlier[0] if earlier else start, end)
    return sampled


def _texts(
    trajectory: Trajectory,
    rows: Sequence[dict[str, Any]],
    rendered: Sequence[_Text | RowError],
) -> list[_Text] | RowError:
    """Return the appended text and the whole one, or one if they are equal."""
    if not rows:
        return []
    last = rendered[-1]
    if isinstance(last, RowError):
        return last
    whole: _Text | None = last
    messages = rows[-1]["messages"]
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    is_open = trajectory.messages is not None and len(messages) > len(trajectory.messages)
    appended = _append(turns, rendered)
    if is_open:
        whole = _cut_open(last, turns[-1])
        appended = None if appended is None else _cut_open(appended, turns[-1])
    if whole is None:
        return RowError("the text after the last message is unknown", reason="mask_unproven")
    if appended is None:
        return [whole]
    if appended.text == whole.text and appended.sampled == whole.sampled:
        return [whole]
    own = {k: appended.text[slice(*span)] for k, span in appended.sampled.items()}
    rewritten = frozenset(
        k for k, span in whole.sampled.items() if own.get(k) != whole.text[slice(*span)]
    )
    rewritten |= {k for k in own if k not in whole.sampled}
    return [appended, replace(whole, rewritten=rewritten)]


def _append(turns: Sequence[int], rendered: Sequence[_Text | RowError]) -> _Text | None:
    """Append every turn as it was sampled; None if a turn is unknown."""
    text, ends, tail = "", [0], ""
    roles: Sequence[str] = ()
    sampled: dict[int, Span] = {}
    for k, sampled_text in zip(turns, rendered, strict=True):
        if isinstance(sampled_text, RowError) or k not in sampled_text.sampled:
            return None
        seam = 0
        if sampled:
            before = max(sampled)
            if before not in sampled_text.sampled:
                return None
            seam = sampled_text.sampled[before][1]
        start, end = sampled_text.sampled[k]
        cut_ends = [*sampled_text.ends[:k], end]
        text, ends, shift = extended(text, ends, sampled_text.text[:end], cut_ends, seam)
        sampled[k] = (start + shift, end + shift)
        roles, tail = sampled_text.roles, sampled_text.text[end:]
    ends[-1] += len(tail)
    return _Text(text + tail, ends, roles, sampled)


def _cut_open(text: _Text, turn: int) -> _Text | None:
    """Cut a text where the model would continue it."""
    if turn not in text.sampled:
        return None
    start, _ = text.sampled[turn]
    sampled = {k: span for k, span in text.sampled.items() if k != turn}
    return _Text(text.text[:start], [*text.ends[:turn], start], text.roles, sampled)


def _turns(
    text: _Text, decoded: DecodedIds, mask: NDArray[np.uint8], ends: Sequence[int]
) -> tuple[Turn, ...]:
    exact = len(decoded.data) == len(text.text) or decoded.data == text.text.encode()
    plain = len(decoded.data) == len(text.text)
    turns = []
    start = 0
    for k, end in enumerate(ends):
        sampled: Span | None = None
        sampled_bytes: Span | None = None
        own = np.flatnonzero(mask[start:end] if k in text.sampled else mask[:0])
        if len(own):
            sampled = (start + int(own[0]), start + int(own[-1]) + 1)
            sampled_bytes = (int(decoded.starts[sampled[0]]), int(decoded.starts[sampled[1]]))
        if sampled is not None and exact:
            sampled_bytes = text.sampled[k]
            if not plain:
                first, last = sampled_bytes
                sampled_bytes = (len(text.text[:first].encode()), len(text.text[:last].encode()))
        turns.append(Turn(text.roles[k], start, end, sampled, sampled_bytes, k in text.rewritten))
        start = end
    return tuple(turns)
