"""Groups between the encoder and the slice: kept whole, and told where their answers part.

`whole_groups` is the length policy's other half: a group of which one text is rejected loses all of
them, and is rejected once, for one reason. `group_columns` finds, on tokens, where the answers of a
group part: their *prompt tokens* are those that all of them begin with and none trains. Both speak
of texts by number, as `Rendering` and `Encoded` do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tokenmill.chat import Rendering
from tokenmill.chat.render import GroupFacts
from tokenmill.errors import RowError
from tokenmill.store.columns import GroupColumns
from tokenmill.tokenizer import Encoded

NOTHING = -1
"""For whole numbers, what NaN is for others."""


def whole_groups(encoded: Encoded, groups: Mapping[int, GroupFacts]) -> Encoded:
    """Reject the other texts of every group that lost one.

    The group's reason is the first that is not its length: so another limit, for which groups are
    only left out and not made again, gives the same reason.
    """
    refused = dict(encoded.rejected)
    if not refused or not groups:
        return encoded
    for first, facts in groups.items():
        members = range(first, first + len(facts.labels))
        errors = [refused[number] for number in members if number in refused]
        if errors:
            reason = min(errors, key=lambda error: error.reason == "overlong")
            refused.update(dict.fromkeys(members, reason))
    return encoded.rejecting(refused)


def rejections(rendering: Rendering, encoded: Encoded) -> list[tuple[int, int, RowError]]:
    """(row, part, why) of the texts that are rejected; a group once, under its first text."""
    others = {
        number
        for first, facts in rendering.groups.items()
        for number in range(first + 1, first + len(facts.labels))
    }
    return [
        (rendering.source[number], rendering.part[number], error)
        for number, error in encoded.rejected
        if number not in others
    ]


def group_columns(encoded: Encoded, groups: Mapping[int, GroupFacts]) -> GroupColumns:
    """The columns of the kept texts; one that belongs to no group is a group of its own."""
    count = len(encoded)
    label = np.full(count, NOTHING, np.int8)
    score = np.full(count, np.nan)
    margin = np.full(count, np.nan)
    prompt_tokens = np.full(count, NOTHING, np.int32)
    gone = {number for number, _ in encoded.rejected}
    for first, facts in groups.items():
        if first in gone:
            continue
        members = slice(first, first + len(facts.labels))
        label[members] = facts.labels
        if facts.scores is not None:
            score[members] = facts.scores
        if facts.margin is not None:
            margin[members] = facts.margin
        if facts.one_prompt:
            prompt_tokens[members] = _parting(encoded, members.start, members.stop)
    return GroupColumns(label, score, margin, prompt_tokens).take(encoded.kept)


def _parting(encoded: Encoded, first: int, stop: int) -> int:
    """How many tokens all these texts begin with and none trains."""
    base, mask, _ = encoded.row(first)
    shared = int(mask.argmax())
    for number in range(first + 1, stop):
        ids, mask, _ = encoded.row(number)
        shared = min(shared, int(mask.argmax()))
        differs = base[:shared] != ids[:shared]
        if differs.any():
            shared = int(differs.argmax())
    return shared
