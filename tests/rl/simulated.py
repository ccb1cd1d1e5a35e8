"""Rollouts as a sampler would record them, made by the reference alone.

`sample` plays an agent loop on a conversation: it renders what stands before each assistant turn
with the generation prompt, encodes that, "samples" the ids of what the template prints for the turn
up to the token that ends it, and appends. Nothing of `tokenmill.rl` has a part in it. A
conversation on which the template does not only append gives None. `split` writes sampled text with
other ids than the tokenizer would.
"""

from __future__ import annotations

import random
from typing import Any

from tokenmill.chat.template import ReferenceTemplate
from tokenmill.errors import RowError
from tokenmill.tokenizers.tokenizer import Tokenizer

Row = dict[str, Any]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.reference.encode(text, add_special_tokens=False).ids
    return ids


def split(tokenizer: Tokenizer, ids: list[int], rng: random.Random, share: float) -> list[int]:
    """Some tokens as two that stand for the same bytes."""
    known = _pieces(tokenizer)
    table = tokenizer.table
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


_KNOWN: dict[str, dict[bytes, int]] = {}


def _pieces(tokenizer: Tokenizer) -> dict[bytes, int]:
    if tokenizer.checksum not in _KNOWN:
        table = tokenizer.table
        _KNOWN[tokenizer.checksum] = {
            table.piece(n): n for n in range(len(table)) if not table.is_added[n] and table.piece(n)
        }
    return _KNOWN[tokenizer.checksum]


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


def sample(
    tokenizer: Tokenizer,
    template: ReferenceTemplate,
    messages: list[Row],
    tools: list[Any] | None = None,
    *,
    rng: random.Random | None = None,
    share: float = 0.0,
) -> Row | None:
    """One clean rollout in our own form; sampled ids are split at random in a share of places."""
    pieces = pieces_of(template, messages, tools)
    if pieces is None:
        return None
    rng = rng or random.Random(0)
    ids: list[int] = []
    mask: list[int] = []
    for text, sampled in pieces:
        part = encode(tokenizer, text)
        if sampled and share:
            part = split(tokenizer, part, rng, share)
        ids += part
        mask += [int(sampled)] * len(part)
    row: Row = {"messages": messages, "token_ids": ids, "loss_mask": mask}
    row["logprobs"] = [-rng.random() - 0.01 if bit else 0.0 for bit in mask]
    row["reward"] = round(rng.random(), 3)
    if tools:
        row["tools"] = tools
    return row
