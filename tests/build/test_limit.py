"""The length limit against a model in plain Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.store.making import make_columns
from tokenmill.build.limit import limit_columns
from tokenmill.build.plan import Limit
from tokenmill.store.columns import GroupColumns, SliceColumns

Row = tuple[list[tuple[int, int]], list[int]]

# Tokens with their weight, of which one at least is trained, and turn ends.
ROW = st.tuples(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), min_size=1, max_size=9).filter(
        lambda tokens: any(weight for _, weight in tokens)
    ),
    st.lists(st.integers(0, 9), max_size=3),
)
GROUPS = st.lists(st.lists(ROW, min_size=1, max_size=3), max_size=5)


def columns_of(groups: list[list[Row]], *, grouped: bool) -> SliceColumns:
    rows = [row for group in groups for row in group]
    flat = [token for tokens, _ in rows for token in tokens]
    count = len(rows)
    weights = np.array([weight for _, weight in flat], np.float32)
    ends = [min(end, len(tokens)) for tokens, turns in rows for end in sorted(turns)]
    facts = np.ones(count, np.int8), np.zeros(count), np.zeros(count), np.zeros(count, np.int32)
    numbers = {"n": [str(n) for n in range(count)]}
    return replace(
        make_columns([len(tokens) for tokens, _ in rows], extra=numbers),
        ids=np.array([token for token, _ in flat], np.int32),
        mask=(weights > 0).astype(np.uint8),
        part=np.array([n if grouped else 0 for g in groups for n in range(len(g))], np.int32),
        turn_ends=np.array(ends, np.int32),
        turn_roles=np.zeros(len(ends), np.int8),
        turn_starts=np.cumsum([0, *(len(turns) for _, turns in rows)]).astype(np.int64),
        rows_in=len(groups) if grouped else count,
        groups=GroupColumns(*facts) if grouped else None,
        weights=weights if (weights > 1).any() else None,
    )


def model(groups: list[list[Row]], limit: Limit, *, grouped: bool) -> tuple[list[Any], list[Any]]:
    """Kept rows (number, tokens with weights, turn ends), and (number, reason) of the others."""
    kept, lost, number = [], [], 0
    for group in groups:
        found, reasons = [], []
        for tokens, turns in group:
            ends = [min(end, len(tokens), limit.max_length) for end in sorted(turns)]
            cut = tokens[: limit.max_length]
            if len(tokens) > limit.max_length and limit.overlong == "drop":
                reasons.append((number, "overlong"))
            elif not any(weight for _, weight in cut):
                reasons.append((number, "no_trained_tokens"))
            else:
                found.append((number, cut, ends))
            number += 1
        if grouped and reasons:
            lost.append((number - len(group), reasons[0][1]))
        else:
            kept += found
            lost += reasons
    return kept, lost


@given(
    groups=GROUPS,
    limit=st.builds(Limit, st.integers(1, 8), st.sampled_from(["drop", "truncate"])),
    grouped=st.booleans(),
)
def test_limited_columns_equal_the_model(
    groups: list[list[Row]], limit: Limit, grouped: bool
) -> None:
    columns = columns_of(groups, grouped=grouped)
    limited = limit_columns(columns, limit)
    kept, lost = model(groups, limit, grouped=grouped)
    assert [(row.row, row.reason) for row in limited.rejected] == lost
    assert limited.row.tolist() == [number for number, _, _ in kept]
    assert limited.extra["n"] == [str(number) for number, _, _ in kept]
    weights = limited.mask.astype(np.float32) if limited.weights is None else limited.weights
    for place, (_, tokens, ends) in enumerate(kept):
        own = slice(*limited.starts[place : place + 2].tolist())
        turns = slice(*limited.turn_starts[place : place + 2].tolist())
        assert limited.ids[own].tolist() == [token for token, _ in tokens]
        assert weights[own].tolist() == [weight for _, weight in tokens]
        assert limited.turn_ends[turns].tolist() == ends
    assert limited.longest <= limit.max_length
    assert (limited.ids.dtype, limited.turn_ends.dtype) == (np.int32, np.int32)
    assert limited.rows_in == columns.rows_in
