"""Filled arrays: rows and packs of token ids as the matrices a trainer wants.

A *piece* here is a pair (ids int32, mask uint8) of views onto stored tokens. `fill_rows` pads
pieces into one matrix; `fill_packs` lays them side by side. In both, labels are unshifted, -100
where a token is not trained, and -100 at the first token of every piece: nothing before it in its
own row could predict it.

    pack of 8 holding rows  a b c  and  d e        (^ not trained)
        input_ids      a b c d e . . .
        labels         ^ b c ^ e ^ ^ ^
        position_ids   0 1 2 0 1 0 1 2     restart per row, and in the padding tail
        seq_idx        0 0 0 1 1 - - -     -1 in the tail
        cu_seqlens     0 3 5 8             the tail is a segment of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORE = -100  # the label that cross entropy skips, as torch and transformers agree on

Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
Batch = dict[str, Any]


def padded_width(longest: int, multiple: int | None) -> int:
    """Width of a padded matrix: the longest row, rounded up to the multiple."""
    longest = max(longest, 1)
    return longest if multiple is None else -(-longest // multiple) * multiple


def padded_widths(longest: npt.NDArray[np.int64], multiple: int | None) -> npt.NDArray[np.int64]:
    """The same for many."""
    longest = np.maximum(longest, 1)
    return longest if multiple is None else -(-longest // multiple) * multiple


def fill_rows(
    pieces: Sequence[Piece], pad_id: int, *, side: str = "right", multiple: int | None = None
) -> Batch:
    """Pad rows into (batch, longest); no piece at all gives one row of padding."""
    lengths = np.fromiter((ids.size for ids, _ in pieces), dtype=np.int64, count=len(pieces))
    width = padded_width(int(lengths.max(initial=0)), multiple)
    height = max(len(pieces), 1)
    input_ids = np.full((height, width), pad_id, dtype=np.int64)
    loss_mask = np.zeros((height, width), dtype=np.uint8)
    attention_mask = np.zeros((height, width), dtype=np.uint8)
    for number, (ids, mask) in enumerate(pieces):
        size = ids.size
        first = 0 if side == "right" else width - size
        input_ids[number, first : first + size] = ids
        loss_mask[number, first : first + size] = mask
        attention_mask[number, first : first + size] = 1
        if size:
            loss_mask[number, first] = 0
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": _labels(input_ids, loss_mask),
        "loss_mask": loss_mask,
    }


def fill_packs(packs: Sequence[Sequence[Piece]], length: int, pad_id: int) -> Batch:
    """Lay pieces side by side into (batch, length); no pack at all gives one of padding."""
    height = max(len(packs), 1)
    input_ids = np.full(height * length, pad_id, dtype=np.int64)
    loss_mask = np.zeros(height * length, dtype=np.uint8)
    sizes: list[int] = []  # of every segment, padding tails included
    names: list[int] = []  # its number within the pack, -1 for a tail
    for number, pieces in enumerate(packs or [()]):
        place = number * length
        for name, (ids, mask) in enumerate(pieces):
            stop = place + ids.size
            input_ids[place:stop] = ids
            loss_mask[place:stop] = mask
            loss_mask[place] = 0
            sizes.append(ids.size)
            names.append(name)
            place = stop
        tail = (number + 1) * length - place
        if tail:
            sizes.append(tail)
            names.append(-1)
    segments = np.asarray(sizes, dtype=np.int64)
    cu_seqlens = np.concatenate(([0], np.cumsum(segments)))
    places = np.arange(height * length, dtype=np.int64)
    shape = (height, length)
    return {
        "input_ids": input_ids.reshape(shape),
        "labels": _labels(input_ids, loss_mask).reshape(shape),
        "position_ids": (places - np.repeat(cu_seqlens[:-1], segments)).reshape(shape),
        "loss_mask": loss_mask.reshape(shape),
        "seq_idx": np.repeat(np.asarray(names, dtype=np.int32), segments).reshape(shape),
        "cu_seqlens": cu_seqlens.astype(np.int32),
        "max_seqlen": int(segments.max()),
    }


def _labels(input_ids: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.uint8]) -> Any:
    return np.where(loss_mask.view(np.bool_), input_ids, np.int64(IGNORE))
