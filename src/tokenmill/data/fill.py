"""Fill arrays: rows and packs of token ids as matrices for a trainer.

Labels are unshifted. They are -100 where a token is not trained, and at the first token of every
piece, which no token predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.packs import Int64Array
from tokenmill.errors import check_integer

IGNORE = -100  # torch and transformers exclude this label from the loss
MAX_MULTIPLE = 1 << 20  # tokens that a length is rounded up to

Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]  # views of stored ids and mask
Batch = dict[str, Any]


def check_multiple(value: object) -> int | None:
    return None if value is None else check_integer("pad_to_multiple_of", value, 1, MAX_MULTIPLE)


def padded_width(longest: int, multiple: int | None) -> int:
    longest = max(longest, 1)
    return longest if multiple is None else -(-longest // multiple) * multiple


def fill_rows(
    pieces: Sequence[Piece], pad_token_id: int, *, side: str = "right", multiple: int | None = None
) -> Batch:
    """Pad rows to (batch, longest); without pieces, return one row of padding."""
    lengths = np.fromiter((ids.size for ids, _ in pieces), dtype=np.int64, count=len(pieces))
    width = padded_width(int(lengths.max(initial=0)), multiple)
    height = max(len(pieces), 1)
    input_ids = np.full((height, width), pad_token_id, dtype=np.int64)
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


def fill_packs(packs: Sequence[Sequence[Piece]], length: int, pad_token_id: int) -> Batch:
    """Concatenate pieces to (batch, length); without packs, return one of padding.

    A pack of 8 tokens with rows  a b c  and  d e    (^ is -100)
        input_ids      a b c d e . . .
        labels         ^ b c ^ e ^ ^ ^
        position_ids   0 1 2 0 1 0 1 2     restart per row, and in the padding tail
        seq_idx        0 0 0 1 1 - - -     -1 in the tail
        cu_seqlens     0 3 5 8             the tail is its own segment
    """
    height = max(len(packs), 1)
    input_ids = np.full(height * length, pad_token_id, dtype=np.int64)
    loss_mask = np.zeros(height * length, dtype=np.uint8)
    sizes: list[int] = []  # of every segment, padding tails included
    numbers: list[int] = []  # of every segment within its pack, -1 for a tail
    for pack, pieces in enumerate(packs or [()]):
        start = pack * length
        for number, (ids, mask) in enumerate(pieces):
            stop = start + ids.size
            input_ids[start:stop] = ids
            loss_mask[start:stop] = mask
            loss_mask[start] = 0
            sizes.append(ids.size)
            numbers.append(number)
            start = stop
        tail = (pack + 1) * length - start
        if tail:
            sizes.append(tail)
            numbers.append(-1)
    segments = np.asarray(sizes, dtype=np.int64)
    cu_seqlens = np.concatenate(([0], np.cumsum(segments)))
    positions = np.arange(height * length, dtype=np.int64)
    shape = (height, length)
    return {
        "input_ids": input_ids.reshape(shape),
        "labels": _labels(input_ids, loss_mask).reshape(shape),
        "position_ids": (positions - np.repeat(cu_seqlens[:-1], segments)).reshape(shape),
        "loss_mask": loss_mask.reshape(shape),
        "seq_idx": np.repeat(np.asarray(numbers, dtype=np.int32), segments).reshape(shape),
        "cu_seqlens": cu_seqlens.astype(np.int32),
        "max_seqlen": int(segments.max(initial=0)),
    }


def _labels(input_ids: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.uint8]) -> Any:
    return np.where(loss_mask.view(np.bool_), input_ids, np.int64(IGNORE))


def labels_of(ids: npt.NDArray[Any], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the labels of one row, -100 at its first token."""
    labels: npt.NDArray[np.int64] = _labels(ids, mask)
    labels[:1] = IGNORE
    return labels


def fill_padded_packs(
    packs: Sequence[Sequence[Piece]],
    pad_token_id: int,
    *,
    sequence: int = 1,
    multiple: int = 1,
    length: int | None = None,
) -> Batch:
    """Concatenate pieces to (packs, tokens); without packs, return one of padding.

    Every piece is padded to a multiple of ``sequence``, a pack to ``length`` or, if that is None,
    to a multiple of ``multiple``. Padding belongs to the piece before it, and positions continue
    there. ``cu_seqlens`` counts tokens without padding, ``cu_seqlens_padded`` with it, as for
    Transformer Engine (drawing in docs/guides/micro-batches.md).
    """
    filled = [list(pieces) for pieces in packs] or [[]]
    sizes = [[-(-ids.size // sequence) * sequence for ids, _ in pieces] for pieces in filled]
    width = length
    if width is None:
        width = max(-(-max(map(sum, sizes)) // multiple), 1) * multiple
    total = len(filled) * width
    input_ids = np.full(total, pad_token_id, dtype=np.int64)
    loss_mask = np.zeros(total, dtype=np.uint8)
    seq_idx = np.full(total, -1, dtype=np.int32)
    lengths: list[int] = []
    starts: list[int] = []
    for pack, (pieces, padded_sizes) in enumerate(zip(filled, sizes, strict=True)):
        start = pack * width
        for number, ((ids, mask), size) in enumerate(zip(pieces, padded_sizes, strict=True)):
            stop = start + ids.size
            input_ids[start:stop] = ids
            loss_mask[start:stop] = mask
            loss_mask[start : start + 1] = 0
            seq_idx[start:stop] = number
            starts.append(start)
            lengths.append(ids.size)
            start += size
        if not pieces:  # a pack of padding is one sequence without tokens
            starts.append(start)
            lengths.append(0)
    padded = np.asarray([*starts, total], dtype=np.int64)
    padded_lengths = np.diff(padded)
    shape = (len(filled), width)
    positions = np.arange(total, dtype=np.int64) - np.repeat(padded[:-1], padded_lengths)
    return {
        "input_ids": input_ids.reshape(shape),
        "labels": _labels(input_ids, loss_mask).reshape(shape),
        "position_ids": positions.reshape(shape),
        "loss_mask": loss_mask.reshape(shape),
        "seq_idx": seq_idx.reshape(shape),
        "cu_seqlens": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        "cu_seqlens_padded": padded.astype(np.int32),
        "max_seqlen": int(padded_lengths.max()),
    }


def shard(batch: Batch, rank: int, ranks: int, shards: str = "zigzag") -> Batch:
    """Return the shard of one rank of a batch that several ranks share.

    ``cu_seqlens``, ``cu_seqlens_padded`` and ``max_seqlen`` stay those of the whole batch.
    ``shift_labels`` are the labels of the next tokens, because a rank does not have the token after
    its last one.
    """
    rows, width = batch["input_ids"].shape
    sharded = dict(batch)
    bounds = batch.get("cu_seqlens_padded")
    if bounds is None:
        bounds = np.arange(rows + 1, dtype=np.int64) * width
        sharded["position_ids"] = _positions(batch["attention_mask"])
    # Rolling moves the first label of every sequence, which is -100, to the end of the previous
    # one. Weights move with their labels.
    for name in ("labels", "loss_weights"):
        values = batch.get(name)
        if values is not None and values.shape == (rows, width):
            sharded[f"shift_{name}"] = np.roll(values.reshape(-1), -1).reshape(rows, width)
    if shards == "contiguous" or ranks == 1:
        bounds = np.arange(rows + 1, dtype=np.int64) * width
        tokens = _tokens_of_parts(bounds, ranks, (rank,))
    else:
        tokens = _tokens_of_parts(bounds, 2 * ranks, (rank, 2 * ranks - 1 - rank))
    for name, value in sharded.items():
        if isinstance(value, np.ndarray) and value.shape == (rows, width):  # one value per token
            sharded[name] = value.reshape(-1)[tokens].reshape(rows, width // ranks)
    return sharded


def _tokens_of_parts(bounds: npt.NDArray[Any], count: int, parts: tuple[int, ...]) -> Int64Array:
    """Return the tokens of some parts of every sequence, divided into ``count`` equal parts."""
    sizes = np.diff(bounds).astype(np.int64) // count
    numbers = np.asarray(parts, dtype=np.int64)
    firsts = (bounds[:-1, None] + sizes[:, None] * numbers[None, :]).reshape(-1)
    each = np.repeat(sizes, numbers.size)
    ends = np.cumsum(each)
    shifts: Int64Array = np.repeat(firsts - (ends - each), each)
    return shifts + np.arange(shifts.size, dtype=np.int64)


def _positions(attention_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return positions that start from 0 at the first token of a padded row."""
    first = attention_mask.argmax(axis=1).astype(np.int64)
    columns = np.arange(attention_mask.shape[1], dtype=np.int64)
    positions: npt.NDArray[np.int64] = np.maximum(columns[None, :] - first[:, None], 0)
    return positions
