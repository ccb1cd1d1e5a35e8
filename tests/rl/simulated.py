"""Rollouts as a sampler would record them, made by the reference alone.

`World.sample` plays an agent loop: it renders the conversation before each assistant turn with the
generation prompt, encodes that, "samples" the ids of what the template prints for the turn up to
the token that ends it, and appends. It uses nothing of `tokenmill.rl`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.build.making import TOKENIZER
from tests.chat.conversations import DATE, SPECIAL, VARIABLES, zoo
from tokenmill.chat import ChatSpec
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.errors import RowError
from tokenmill.rl.verdict import RolloutChecker
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.tokenizer import Tokenizer

Row = dict[str, Any]
# Only ever appends, thoughts and calls included.
APPENDING = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools|tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function|tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.reference.encode(text, add_special_tokens=False).ids
    return ids


def split(tokenizer: Tokenizer, ids: list[int], rng: random.Random, share: float) -> list[int]:
    """Split some tokens into two with the same bytes."""
    known, table = _pieces(tokenizer), tokenizer.table
    found: list[int] = []
    for number in ids:
        piece = table.piece(number)
        cuts = [
            n
            for n in range(1, len(piece))
            if piece[:n] in known and piece[n:] in known and not table.is_added[number]
        ]
        if cuts and rng.random() < share:
            cut = rng.choice(cuts)
            found += [known[piece[:cut]], known[piece[cut:]]]
        else:
            found.append(number)
    return found


@functools.lru_cache(maxsize=4)
def _pieces(tokenizer: Tokenizer) -> dict[bytes, int]:
    table = tokenizer.table
    return {
        table.piece(n): n for n in range(len(table)) if not table.is_added[n] and table.piece(n)
    }


def pieces_of(
    template: ReferenceTemplate, messages: list[Row], tools: list[Any] | None
) -> list[tuple[str, bool]] | None:
    """(text, sampled) one after the other; None where the template does not only append."""
    found: list[tuple[str, bool]] = []
    before = ""
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            prompt = template.render(messages[:k], tools, add_generation_prompt=True)
            whole = template.render(messages[: k + 1], tools)
        except RowError:
            return None
        if not prompt.startswith(before) or not whole.startswith(prompt):
            return None
        sampled = whole[len(prompt) :].rstrip()
        if not sampled:
            return None
        found += [(prompt[len(before) :], False), (sampled, True)]
        before = prompt + sampled
    return found or None


@dataclass(frozen=True)
class World:
    tokenizer: Tokenizer
    template: ReferenceTemplate

    def sample(
        self, messages: list[Row], tools: list[Any] | None = None, share: float = 0
    ) -> Row | None:
        """Return a clean rollout; a share of the sampled ids is split."""
        pieces = pieces_of(self.template, messages, tools)
        if pieces is None:
            return None
        rng = random.Random(0)
        ids: list[int] = []
        mask: list[int] = []
        for text, sampled in pieces:
            part = encode(self.tokenizer, text)
            if sampled and share:
                part = split(self.tokenizer, part, rng, share)
            ids += part
            mask += [int(sampled)] * len(part)
        row: Row = {"messages": messages, "token_ids": ids, "loss_mask": mask}
        row["logprobs"] = [-rng.random() - 0.01 if bit else 0.0 for bit in mask]
        row["reward"] = round(rng.random(), 3)
        if tools:
            row["tools"] = tools
        return row


@functools.cache
def bundled() -> Tokenizer:
    return load(str(TOKENIZER), backend="file")


def world_of(template: str, name: str = "") -> tuple[World, RolloutChecker]:
    """Return a sampler and a checker for one template."""
    base, more = bundled(), VARIABLES.get(name) or {}
    tokenizer = Tokenizer(base.data, template=template, special_tokens=SPECIAL, path=base.path)
    reference = ReferenceTemplate(template, {**SPECIAL, **more}, DATE)
    spec = ChatSpec(format="messages", date=DATE, chat_template_kwargs=more)
    return World(tokenizer, reference), RolloutChecker(tokenizer, spec)


@functools.cache
def appending() -> tuple[World, RolloutChecker]:
    return world_of(APPENDING)


def released(shared: Path) -> Iterator[tuple[str, str]]:
    """Released templates by name; those for training print the same as others."""
    for name, template in zoo(shared).items():
        if not name.endswith("_training"):
            yield name, template
