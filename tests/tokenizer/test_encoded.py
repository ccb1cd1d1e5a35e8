"""The length policy against a model in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import RowError, UsageError
from tokenmill.tokenizer import Encoded, apply_length

ROWS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), max_size=9),
        st.lists(st.integers(0, 9), max_size=3),
        st.booleans(),
    ),
    max_size=8,
)


def encoded_of(rows: list) -> Encoded:
    """Rows of (tokens with mask, turn ends, already rejected?)."""
    rows = [([], [], bad) if bad else (tokens, turns, bad) for tokens, turns, bad in rows]
    flat = [token for tokens, _, _ in rows for token in tokens]
    return Encoded(
        ids=np.array([token for token, _ in flat], dtype=np.int32),
        row_starts=np.cumsum([0, *(len(tokens) for tokens, _, _ in rows)]).astype(np.int64),
        mask=np.array([trained for _, trained in flat], dtype=np.uint8),
        turn_ends=np.array(
            [min(end, len(tokens)) for tokens, turns, _ in rows for end in sorted(turns)],
            dtype=np.int32,
        ),
        turn_starts=np.cumsum([0, *(len(turns) for _, turns, _ in rows)]).astype(np.int64),
        rejected=[
            (row, RowError("before", reason="mask_unproven"))
            for row, (_, _, bad) in enumerate(rows)
            if bad
        ],
        notes={"engine": "hf"},
    )


def model(rows: list, limit: int | None, overlong: str) -> list:
    """What each row becomes: a reason, or (ids, mask, turn ends)."""
    out: list = []
    for tokens, turns, bad in rows:
        ends = [min(end, len(tokens)) for end in sorted(turns)]
        if bad:
            out.append("mask_unproven")
        elif not any(trained for _, trained in tokens):
            out.append("no_trained_tokens")
        elif limit is not None and len(tokens) > limit and overlong == "drop":
            out.append("overlong")
        else:
            tokens = tokens if limit is None else tokens[:limit]
            if not any(trained for _, trained in tokens):
                out.append("no_trained_tokens")
            else:
                ids, mask = [t for t, _ in tokens], [m for _, m in tokens]
                out.append((ids, mask, [min(end, len(tokens)) for end in ends]))
    return out


@given(
    rows=ROWS,
    limit=st.none() | st.integers(1, 8),
    overlong=st.sampled_from(["drop", "truncate"]),
)
def test_length_policy_on_random_rows_equals_model(
    rows: list, limit: int | None, overlong: str
) -> None:
    before = encoded_of(rows)
    after = apply_length(before, limit, overlong)
    wanted = model(rows, limit, overlong)
    assert len(after) == len(rows)
    reasons = {row: error.reason for row, error in after.rejected}
    assert reasons == {row: what for row, what in enumerate(wanted) if isinstance(what, str)}
    assert after.kept.tolist() == [r for r, what in enumerate(wanted) if not isinstance(what, str)]
    for row, what in enumerate(wanted):
        ids, mask, ends = (part.tolist() for part in after.row(row))
        assert (ids, mask, ends) == (([], [], []) if isinstance(what, str) else what)
    assert after.ids.dtype == after.turn_ends.dtype == np.int32
    assert after.mask.dtype == np.uint8
    assert after.lengths.tolist() == [len(w[0]) if not isinstance(w, str) else 0 for w in wanted]
    assert after.trained.tolist() == [sum(w[1]) if not isinstance(w, str) else 0 for w in wanted]
    assert after.notes == {"engine": "hf"}


@pytest.mark.parametrize(("limit", "overlong"), [(0, "drop"), (-1, "truncate"), (5, "cut")])
def test_length_policy_with_wrong_arguments_is_refused(limit: int, overlong: str) -> None:
    with pytest.raises(UsageError):
        apply_length(encoded_of([]), limit, overlong)
