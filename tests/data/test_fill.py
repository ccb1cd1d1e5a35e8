"""Filled arrays, cell by cell, against the contract written out plainly."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.data.fill import Piece, fill_packs, fill_rows

PAD = 99
FULL = (np.arange(8, dtype=np.int32), np.ones(8, np.uint8))


@st.composite
def pieces(draw: st.DrawFn, longest: int = 6) -> Piece:
    size = draw(st.integers(1, longest))
    ids = draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    mask = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return np.asarray(ids, np.int32), np.asarray(mask, np.uint8)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(pieces(), max_size=5),
    side=st.sampled_from(["right", "left"]),
    multiple=st.sampled_from([None, 1, 4]),
)
@example(rows=[], side="right", multiple=None)
def test_fill_rows_cell_by_cell(rows: list[Piece], side: str, multiple: int | None) -> None:
    batch = fill_rows(rows, PAD, side=side, multiple=multiple)
    longest = max((ids.size for ids, _ in rows), default=1)
    width = longest if multiple is None else -(-longest // multiple) * multiple
    shape = (max(len(rows), 1), width)
    types = {name: array.dtype for name, array in batch.items()}
    assert types == {
        "input_ids": np.int64, "attention_mask": np.uint8, "labels": np.int64, "loss_mask": np.uint8
    }  # fmt: skip
    for number in range(shape[0]):
        ids, mask = rows[number] if rows else (np.zeros(0, np.int32), np.zeros(0, np.uint8))
        padding = width - ids.size
        for column in range(width):
            place = column - (padding if side == "left" else 0)
            real = 0 <= place < ids.size
            trained = real and place > 0 and mask[place] == 1
            cell = {name: array[number, column] for name, array in batch.items()}
            assert cell == {
                "input_ids": ids[place] if real else PAD,
                "attention_mask": int(real),
                "labels": ids[place] if trained else -100,
                "loss_mask": int(trained),
            }


@settings(max_examples=150, deadline=None)
@given(packs=st.lists(st.lists(pieces(), max_size=3), max_size=4), spare=st.integers(0, 3))
@example(packs=[], spare=3)
@example(packs=[[FULL]], spare=0)  # a full pack has no tail
def test_fill_packs_cell_by_cell(packs: list[list[Piece]], spare: int) -> None:
    length = max([1] + [sum(ids.size for ids, _ in rows) for rows in packs]) + spare
    batch = fill_packs(packs, length, PAD)
    types = {n: a.dtype for n, a in batch.items() if n != "max_seqlen"}
    assert types == {
        "input_ids": np.int64, "labels": np.int64, "position_ids": np.int64,
        "loss_mask": np.uint8, "seq_idx": np.int32, "cu_seqlens": np.int32,
    }  # fmt: skip
    ends = [0]
    for number, rows in enumerate(packs or [[]]):
        cells = []
        for name, (ids, mask) in enumerate(rows):
            for place in range(ids.size):
                trained = place > 0 and mask[place]
                cells.append((ids[place], ids[place] if trained else -100, place, trained, name))
            ends.append(ends[-1] + ids.size)
        tail = length - len(cells)
        cells += [(PAD, -100, place, 0, -1) for place in range(tail)]
        if tail:
            ends.append(ends[-1] + tail)
        names = ("input_ids", "labels", "position_ids", "loss_mask", "seq_idx")
        for column, cell in enumerate(cells):
            assert tuple(batch[name][number, column] for name in names) == cell
    assert batch["cu_seqlens"].tolist() == ends
    assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(ends))
