"""Fill arrays: rows and packs of token ids as the matrices that a trainer takes.

Labels are unshifted, -100 where a token is not trained, and -100 at the first token of every piece:
nothing before it could predict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.packs import Int64Array

IGNORE = -100  # the label that cross entropy skips, as torch and transformers agree on

Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]  # ids and mask: views of stored tokens
Batch = dict[str, Any]


def padded_width(longest: int, multiple: int | None) -> int:
    longest = max(longest, 1)
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
    """Lay pieces side by side into (batch, length); no pack at all gives one of padding.

    A pack of 8 holding rows  a b c  and  d e        (^ not trained)
        input_ids      a b c d e . . .
        labels         ^ b c ^ e ^ ^ ^
        position_ids   0 1 2 0 1 0 1 2     restart per row, and in the padding tail
        seq_idx        0 0 0 1 1 - - -     -1 in the tail
        cu_seqlens     0 3 5 8             the tail is a segment of its own
    """
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
        "max_seqlen": int(segments.max(initial=0)),
    }


def _labels(input_ids: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.uint8]) -> Any:
    return np.where(loss_mask.view(np.bool_), input_ids, np.int64(IGNORE))


def labels_of(ids: npt.NDArray[Any], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Labels of one row: ids where they are trained, -100 elsewhere and at the first token."""
    labels: npt.NDArray[np.int64] = _labels(ids, mask)
    labels[:1] = IGNORE
    return labels


def fill_slabs(
    slabs: Sequence[Sequence[Piece]],
    pad_id: int,
    *,
    sequence: int = 1,
    slab: int = 1,
    length: int | None = None,
) -> Batch:
    """Lay pieces side by side into (slabs, tokens); no slab at all gives one of padding.

    Every piece is padded to a multiple of ``sequence``, a slab to ``length``, or without one (for a
    single slab) to a multiple of ``slab``. Padding belongs to the sequence before it: positions
    continue there. ``cu_seqlens`` counts the tokens of the sequences, ``cu_seqlens_padded`` is
    where they are, as Transformer Engine takes them (drawing in docs/batches.md).
    """
    filled = [list(pieces) for pieces in slabs] or [[]]
    sizes = [[-(-ids.size // sequence) * sequence for ids, _ in pieces] for pieces in filled]
    width = max(-(-max(map(sum, sizes)) // slab), 1) * slab if length is None else length
    total = len(filled) * width
    input_ids = np.full(total, pad_id, dtype=np.int64)
    loss_mask = np.zeros(total, dtype=np.uint8)
    seq_idx = np.full(total, -1, dtype=np.int32)
    lengths: list[int] = []
    starts: list[int] = []
    for number, (pieces, places) in enumerate(zip(filled, sizes, strict=True)):
        start = number * width
        for name, ((ids, mask), place) in enumerate(zip(pieces, places, strict=True)):
            stop = start + ids.size
            input_ids[start:stop] = ids
            loss_mask[start:stop] = mask
            loss_mask[start : start + 1] = 0
            seq_idx[start:stop] = name
            starts.append(start)
            lengths.append(ids.size)
            start += place
        if not pieces:  # padding alone is a sequence without tokens
            starts.append(start)
            lengths.append(0)
    padded = np.asarray([*starts, total], dtype=np.int64)
    room = np.diff(padded)
    shape = (len(filled), width)
    places_in = np.arange(total, dtype=np.int64) - np.repeat(padded[:-1], room)
    return {
        "input_ids": input_ids.reshape(shape),
        "labels": _labels(input_ids, loss_mask).reshape(shape),
        "position_ids": places_in.reshape(shape),
        "loss_mask": loss_mask.reshape(shape),
        "seq_idx": seq_idx.reshape(shape),
        "cu_seqlens": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        "cu_seqlens_padded": padded.astype(np.int32),
        "max_seqlen": int(room.max()),
    }


def shard(batch: Batch, rank: int, ranks: int, shards: str = "zigzag") -> Batch:
    """What one rank holds of a batch (padded rows or slabs) whose sequences several ranks share.

    ``cu_seqlens``, ``cu_seqlens_padded`` and ``max_seqlen`` stay those of the whole batch.
    ``shift_labels`` are the labels of the following tokens: a rank does not hold the token after
    the last of its range.
    """
    rows, width = batch["input_ids"].shape
    found = dict(batch)
    bounds = batch.get("cu_seqlens_padded")
    if bounds is None:
        bounds = np.arange(rows + 1, dtype=np.int64) * width
        found["position_ids"] = _positions(batch["attention_mask"])
    # The first label of every sequence is -100, and so is the one behind its last token; what it
    # weighs goes with it.
    for name in ("labels", "loss_weights"):
        values = batch.get(name)
        if values is not None and values.shape == (rows, width):
            found[f"shift_{name}"] = np.roll(values.reshape(-1), -1).reshape(rows, width)
    if shards == "contiguous" or ranks == 1:
        bounds = np.arange(rows + 1, dtype=np.int64) * width
        places = _stretches(bounds, ranks, (rank,))
    else:
        places = _stretches(bounds, 2 * ranks, (rank, 2 * ranks - 1 - rank))
    for name, value in found.items():
        if isinstance(value, np.ndarray) and value.shape == (rows, width):  # one value per token
            found[name] = value.reshape(-1)[places].reshape(rows, width // ranks)
    return found


def _stretches(bounds: npt.NDArray[Any], count: int, wanted: tuple[int, ...]) -> Int64Array:
    """Places of some of the equal stretches that every sequence is cut into."""
    sizes = np.diff(bounds).astype(np.int64) // count
    numbers = np.asarray(wanted, dtype=np.int64)
    firsts = (bounds[:-1, None] + sizes[:, None] * numbers[None, :]).reshape(-1)
    each = np.repeat(sizes, numbers.size)
    ends = np.cumsum(each)
    places: Int64Array = np.repeat(firsts - (ends - each), each)
    return places + np.arange(places.size, dtype=np.int64)


def _positions(attention_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """From 0 at the first token of a padded row, running on in padding behind it."""
    first = attention_mask.argmax(axis=1).astype(np.int64)
    places = np.arange(attention_mask.shape[1], dtype=np.int64)
    positions: npt.NDArray[np.int64] = np.maximum(places[None, :] - first[:, None], 0)
    return positions
