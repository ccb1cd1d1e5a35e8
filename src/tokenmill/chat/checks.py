"""What a proof says, and the checks it must pass before anyone believes it.

A `Proof` is one render with the place of every text (`Hit`), the assistant's turns (`Turn`) and the
spans that would be trained. The checks refuse it when an assistant's words are printed nowhere or
twice, lie outside the spans, or when anyone else's words lie inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.chat.marks import CALL, REASONING, TAG, TEXT, Hit, Piece
from tokenmill.errors import RowError

Span = tuple[int, int]


@dataclass(slots=True)
class Turn:
    """An assistant turn in a render: header, what is trained, closer, start of the next."""

    message: int
    header: int
    start: int
    stop: int
    end: int
    closed: bool = True


@dataclass(slots=True)
class Proof:
    """What was shown about one render."""

    text: str
    hits: list[Hit]
    pieces: list[Piece]
    turns: dict[int, Turn]
    dropped: str = ""
    spans: list[Span] = field(default_factory=list)
    ends: list[tuple[str, int]] = field(default_factory=list)


def check_printed(messages: list[dict[str, Any]], proof: Proof) -> None:
    """Refuse what an assistant said and the template prints nowhere, or twice."""
    assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not assistants:
        return
    printed: dict[int, int] = {}
    for hit in proof.hits:
        printed[hit.piece] = printed.get(hit.piece, 0) + 1
    reasoned: dict[int, bool] = {}
    for number, piece in enumerate(proof.pieces):
        if messages[piece.message]["role"] != "assistant":
            continue
        count = printed.get(number, 0)
        if piece.kind == REASONING:
            reasoned[piece.message] = reasoned.get(piece.message, False) or bool(count)
        elif not count:
            what = "text" if piece.kind == TEXT else "tool call"
            raise _dropped(f"the {what} {_short(piece.text)} of turn {piece.message}")
        if count > 1:
            raise RowError(
                f"the template prints {_short(piece.text)} of turn {piece.message} twice",
                reason="mask_unproven",
            )
    last = assistants[-1]
    if reasoned.get(last) is False:
        raise _dropped(f"the reasoning of the last turn ({last})")
    for index in assistants:
        _check_calls(messages[index], index, proof)


def _dropped(what: str) -> RowError:
    return RowError(
        f"the template prints {what} nowhere, so a model would learn an answer without it",
        reason="template_drops_content",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "…")


def _check_calls(message: dict[str, Any], index: int, proof: Proof) -> None:
    """Names, and arguments that carry no marks, must at least be found in the turn."""
    calls = _calls(message)
    if not calls:
        return
    turn = proof.turns.get(index)
    text = proof.text if turn is None else proof.text[turn.start : turn.stop]
    marked = any(piece.message == index and piece.kind == CALL for piece in proof.pieces)
    for call in calls:
        name = call.get("name")
        if isinstance(name, str) and name not in text:
            raise _dropped(f"the call of {_short(name)} in turn {index}")
        for word in () if marked else _strings(call.get("arguments")):
            forms = (word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])
            if not any(form in text for form in forms):
                raise _dropped(f"the argument {_short(word)} of a call in turn {index}")


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions a message calls, under either of the two names for it."""
    calls = message.get("tool_calls") or []
    found = [*calls] if isinstance(calls, list) else [calls]
    if message.get("function_call"):
        found.append(message["function_call"])
    objects = [call for call in found if isinstance(call, dict)]
    return [c["function"] if isinstance(c.get("function"), dict) else c for c in objects]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def check_inside(messages: list[dict[str, Any]], proof: Proof, trained: Sequence[int]) -> None:
    """Every trained text lies in a span, no other text touches one, spans do not overlap."""
    last = 0
    for start, end in proof.spans:
        if start < last or end > len(proof.text):
            raise RowError("two assistant turns overlap in the render", reason="mask_unproven")
        last = end
    wanted = set(trained)
    for hit in proof.hits:
        if hit.start == hit.end:
            continue
        inside = any(s <= hit.start and hit.end <= e for s, e in proof.spans)
        touched = inside or any(s < hit.end and hit.start < e for s, e in proof.spans)
        if hit.message in wanted and not inside:
            raise RowError(
                f"a text of the assistant turn {hit.message} lies outside what would be trained",
                reason="mask_unproven",
            )
        if hit.message not in wanted and touched:
            role = messages[hit.message]["role"]
            raise RowError(
                f"a text of turn {hit.message} ({role}) lies inside what would be trained",
                reason="mask_unproven",
            )


def ends_by_turns(messages: list[dict[str, Any]], proof: Proof) -> list[tuple[str, int]]:
    """Role and end of every turn: an assistant's by proof, others up to the next header."""
    last_hit: dict[int, int] = {hit.message: hit.end for hit in proof.hits}
    ends: list[tuple[str, int]] = []
    position = 0
    for index, message in enumerate(messages):
        following = proof.turns.get(index + 1)
        turn = proof.turns.get(index)
        if turn is not None:
            position = max(position, turn.end)
        elif following is not None:
            position = max(position, following.header)
        else:
            position = max(position, _next_header(proof, index, last_hit.get(index, position)))
        ends.append((message["role"], position))
    if ends:
        ends[-1] = (ends[-1][0], len(proof.text))
    return ends


def ends_by_hits(messages: list[dict[str, Any]], proof: Proof) -> list[tuple[str, int]]:
    """Role and end of every turn where the template itself says the spans."""
    last_hit: dict[int, int] = {hit.message: hit.end for hit in proof.hits}
    ends: list[tuple[str, int]] = []
    position = 0
    for index, message in enumerate(messages):
        reached = last_hit.get(index, position)
        if message["role"] != "assistant":
            reached = _next_header(proof, index, reached)
        for start, end in proof.spans:
            if message["role"] == "assistant" and start <= reached <= end:
                reached = end
        position = max(position, reached)
        ends.append((message["role"], position))
    if ends:
        ends[-1] = (ends[-1][0], len(proof.text))
    return ends


def _next_header(proof: Proof, message: int, position: int) -> int:
    """Where the turn after a message that nobody trains begins, seen from the end of its text.

    The tag that opens the conversation's first turn opens the next one, too; where the template
    prints none of those between the two texts, the next turn begins at once.
    """
    following = [hit.start for hit in proof.hits if hit.message > message and hit.start >= position]
    if not following:
        return position
    glue = proof.text[position : min(following)]
    first = min(hit.start for hit in proof.hits)
    for tag in TAG.finditer(proof.text, 0, first):
        place = glue.find(tag[0])
        if place >= 0:
            return position + place
    return position
