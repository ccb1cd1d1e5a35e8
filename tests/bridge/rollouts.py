"""Rollouts by the plain way, to judge the bridge by: render all of it, encode all of it.

The oracle shares nothing with the product: the render is jinja2's, set up as transformers sets it
up, the end of a turn is what `turn_oracle` finds, the ids are those of `tokenizers`, and where a
token lies is said by its offsets. A rollout of a conversation samples each assistant's turn in the
tokens that the whole render has for it. `steps` says of every turn what stands then, what the
template prints next, and whether that goes on from it; `play` lets a bridge do the same and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

import tokenmill
from tests.chat.conversations import DATE, SPECIAL, VARIABLES
from tests.chat.judge import oracle
from tests.chat.loop_oracle import OracleTemplate, Refused
from tests.chat.turn_oracle import Conversation
from tokenmill.bridge import Bridge
from tokenmill.chat import ChatSpec
from tokenmill.chat.shapes import Plain, read
from tokenmill.chat.thinking import TAG
from tokenmill.errors import BridgeError, RowError, UsageError
from tokenmill.tokenizer import Tokenizer

Message = dict[str, Any]
TOKENIZER = Path(tokenmill.__file__).parent / "examples" / "tokenizer" / "tokenizer.json"


@dataclass(slots=True)
class Step:
    """One assistant's turn of a rollout, and what answers it."""

    turn: int
    answer: list[Message]
    prompt: str
    stands: str
    """The prompt and the turn up to its end, as the template prints it when it is the last."""
    following: str | None
    """The next prompt; None where nothing answers."""

    @property
    def opens(self) -> bool:
        """Whether the turn goes on from its prompt."""
        return self.stands.startswith(self.prompt)

    @property
    def continues(self) -> bool:
        """Whether the template leaves everything that stands as it is."""
        return self.opens and self.following is not None and self.following.startswith(self.stands)


def steps(template: OracleTemplate, messages: list[Message], tools: Any) -> Iterator[Step]:
    """Every assistant's turn after the first message.

    Raises:
        Refused: The template refuses a part of the conversation, or a turn cannot be seen.
    """
    turns = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
    for k, end in zip(turns, [*turns[1:], len(messages)], strict=False):
        prompt = template.plain(messages[:k], tools, add_generation_prompt=True)
        talk = Conversation(template, messages[: k + 1], tools)
        if talk.found is None or k not in talk.turns:
            raise Refused(f"the turn {k} cannot be seen")
        turn = talk.turns[k]
        stands = talk.found.text[: turn.stop if turn.closed else turn.end]
        following = None
        if end > k + 1 or end < len(messages):
            following = template.plain(messages[:end], tools, add_generation_prompt=True)
        yield Step(k, messages[k + 1 : end], prompt, stands, following)


@lru_cache(maxsize=256)
def tokenizer_of(template: str) -> Tokenizer:
    """The bundled tokenizer with every tag of a template as a special token, as real ones have."""
    made = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    tags = sorted({tag for tag in TAG.findall(template) if "think" not in tag.lower()})
    made.add_special_tokens(tags)
    return Tokenizer(made.to_str().encode(), template=template, special_tokens=SPECIAL)


def talk_of(row: dict[str, Any]) -> tuple[list[Message], Any] | None:
    """The conversation of a row; None where it has none, or not in one form alone."""
    try:
        found = read(row, ChatSpec())
    except RowError:
        return None
    if isinstance(found, Plain) or found.nulls or found.hollow:
        return None
    return found.messages, found.tools


def bridge_of(name: str, source: str, **options: Any) -> Bridge:
    """A bridge under one of the stored templates."""
    variables = VARIABLES.get(name)
    return Bridge(tokenizer_of(source), date=DATE, template_kwargs=variables, **options)


class Play:
    """Rollouts under one template, and what came of their steps.

    Args:
        name: Of the template.
        source: Its text.
    """

    def __init__(self, name: str, source: str) -> None:
        self.template = oracle(name, source)
        self.bridge = bridge_of(name, source)
        self.tokenizer = self.bridge.tokenizer.reference
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.name = name

    def encode(self, text: str) -> list[int]:
        """As the reference encodes it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def boundary(self, text: str, place: int) -> int | None:
        """How many tokens of a text lie before a place; None where one lies across it."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        count = sum(start < place for start, _ in offsets)
        return count if all(end <= place for _, end in offsets[:count]) else None

    def rows(self, rows: dict[str, Any]) -> None:
        """Play every row, the sampled turn known by its message and by its text."""
        for case, row in rows.items():
            found = talk_of(row)
            if found is not None:
                self.conversation(case, *found)

    def conversation(self, case: str, messages: list[Message], tools: Any) -> None:
        """Play one conversation as far as the template renders it, each turn on what stands."""
        where = f"{self.name} × {case}"
        for by_text in (False, True):
            self.bridge.forget()  # without a generation prompt, two rollouts may share ids
            ids: list[int] | None = None
            try:
                for step in steps(self.template, messages, tools):
                    ids = self._step(where, step, ids, messages, tools, by_text)
            except Refused:
                self.counts["refused by the template"] += 1

    def _step(
        self,
        where: str,
        step: Step,
        ids: list[int] | None,
        messages: list[Message],
        tools: Any,
        by_text: bool,
    ) -> list[int] | None:
        """One turn; the ids that stand after it, None where a new prompt must be asked for."""
        how = "text" if by_text else "message"
        where = f"{where}: turn {step.turn} by {how}"
        if ids is None:
            ids = self.bridge.prompt(messages[: step.turn], tools)
        if ids != self.encode(step.prompt):
            self.wrong.append(f"{where}: another prompt")
            return None
        if not step.answer or step.following is None:
            return None
        own = None if by_text else messages[step.turn]
        if not step.continues:
            if by_text and not step.opens:
                return None  # nobody would have sampled that
            sampled = self.encode(step.stands[len(step.prompt) :] if step.opens else "x")
            try:
                self.bridge.extend(ids + sampled, step.answer, sampled=own)
                if step.opens or not step.following.startswith(step.prompt):
                    self.wrong.append(f"{where}: is not refused")
            except (BridgeError, UsageError, RowError):
                self.counts[f"{how} refused"] += 1
            return None
        whole = self.encode(step.following)
        place = self.boundary(step.following, len(step.stands))
        if place is None or whole[: len(ids)] != ids:
            self.counts["a token across the seam"] += 1
            return None
        if place == len(ids) and by_text:
            return None  # nothing was sampled
        try:
            found = self.bridge.extend(whole[:place], step.answer, sampled=own)
        except (BridgeError, UsageError, RowError) as error:
            if not by_text or "sampled=" not in str(error):
                self.wrong.append(f"{where}: is refused: {error}")
            self.counts[f"{how} asked for"] += 1
            return None
        self.counts[f"{how} equal"] += 1
        if found != whole:
            theirs, ours = (
                self.tokenizer.decode(x[place:], skip_special_tokens=False) for x in (whole, found)
            )
            self.wrong.append(f"{where}: {ours!r} for {theirs!r}")
        return found
