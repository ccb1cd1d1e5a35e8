"""Rollouts by the plain way, to judge the bridge by: render all of it, encode all of it.

The oracle shares nothing with the product: the render is jinja2's, set up as transformers sets it
up, the end of a turn is what `turn_oracle` finds, the ids are those of `tokenizers`, and where a
token lies is said by its offsets. A rollout of a conversation samples each assistant's turn in the
tokens that the whole render has for it. `steps` says of every turn what stands then, what the
template prints next, and whether that goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from tests.chat.loop_oracle import OracleTemplate, Refused
from tests.chat.turn_oracle import Conversation
from tokenmill.chat.thinking import TAG

Message = dict[str, Any]


@dataclass(slots=True)
class Step:
    """One assistant's turn of a rollout, and what answers it."""

    turn: int
    answer: list[Message]
    prompt: str
    stands: str
    """The prompt and the turn up to its end, as the template prints it when it is the last."""
    following: str
    """The next prompt."""

    @property
    def continues(self) -> bool:
        """Whether the template leaves everything that stands as it is."""
        return self.stands.startswith(self.prompt) and self.following.startswith(self.stands)

    @property
    def judged(self) -> bool:
        """Whether it is beyond doubt that the bridge must refuse, where it does not continue."""
        return self.stands.startswith(self.prompt) or not self.following.startswith(self.prompt)


def steps(template: OracleTemplate, messages: list[Message], tools: Any) -> Iterator[Step]:
    """Every turn that something answers.

    Raises:
        Refused: The template refuses a part of the conversation.
    """
    turns = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
    for k, following in zip(turns, [*turns[1:], len(messages)], strict=False):
        if following == k + 1:
            continue
        prompt = template.plain(messages[:k], tools, add_generation_prompt=True)
        alone = template.plain(messages[: k + 1], tools)
        talk = Conversation(template, messages[: k + 1], tools)
        if talk.found is None or k not in talk.turns:
            raise Refused(f"the turn {k} cannot be seen")
        later = template.plain(messages[:following], tools, add_generation_prompt=True)
        turn = talk.turns[k]
        stop = turn.stop if turn.closed else turn.end
        yield Step(k, messages[k + 1 : following], prompt, alone[:stop], later)


def boundary(tokenizer: tokenizers.Tokenizer, text: str, place: int) -> int | None:
    """How many tokens of a text lie before a place; None where one lies across it."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    count = sum(start < place for start, _ in offsets)
    return count if all(end <= place for _, end in offsets[:count]) else None


def with_tags(tokenizer_json: str, template: str) -> str:
    """A tokenizer that knows every tag of a template as a special token, as real ones do."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tags = sorted(set(TAG.findall(template)) - {"<|im_start|>", "<|im_end|>"})
    tokenizer.add_special_tokens([tag for tag in tags if "think" not in tag.lower()])
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return json.dumps(made)
