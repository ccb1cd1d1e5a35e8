"""Encoded batches: flat ids and masks, from the encoder or from rows that contain ids.

docs/guides/tokenized-rows.md describes the columns of ``format="tokens"``. Rows with columns of
different lengths, invalid values or contradictions are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core.options import MAX_WEIGHT, MIN_WEIGHT
from tokenmill.errors import RowError

IGNORE = -100
MEDIA = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw",
    "images", "image", "images_bytes", "videos", "video", "audios", "audio", "input_features",
    "media", "multi_modal_data", "multi_modal_inputs",
)  # fmt: skip

Mask = list[int | bool | float]
Bits = NDArray[np.uint8]


def starts_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the starts of consecutive pieces and the total, as int64."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of rows as tokens: row *i* is ``ids[row_starts[i]:row_starts[i + 1]]``.

    A rejected row is empty, so that row *i* is always text *i*.
    """

    ids: np.ndarray  # int32, all rows concatenated
    row_starts: np.ndarray  # int64, one more than rows
    mask: np.ndarray  # uint8 per token, 1 if trained
    turn_ends: np.ndarray  # int32, per turn the number of tokens of its row up to its end
    turn_starts: np.ndarray  # int64, one more than rows, into `turn_ends`
    rejected: list[tuple[int, RowError]] = field(default_factory=list)  # by row
    weights: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # of tokens, by row
    notes: dict[str, Any] = field(default_factory=dict)  # for the proof: engine, audited, …

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.row_starts).astype(np.int32)

    @property
    def trained(self) -> np.ndarray:
        counts = np.zeros(len(self), dtype=np.int32)
        filled = np.flatnonzero(np.diff(self.row_starts))
        if len(filled):
            starts = self.row_starts[filled]
            counts[filled] = np.add.reduceat(self.mask, starts, dtype=np.int32)
        return counts

    @property
    def kept(self) -> np.ndarray:
        """Numbers of the rows that are not rejected."""
        alive = np.ones(len(self), dtype=bool)
        alive[[row for row, _ in self.rejected]] = False
        return np.flatnonzero(alive)

    def with_rejected(self, rejected: Mapping[int, RowError]) -> Encoded:
        """Return the batch with exactly these rows rejected (no tokens, no turns)."""
        if not rejected:
            return replace(self, rejected=[])
        keep = np.ones(len(self), dtype=bool)
        keep[list(rejected)] = False
        lengths, turns = np.diff(self.row_starts), np.diff(self.turn_starts)
        tokens = np.repeat(keep, lengths)
        return replace(
            self,
            ids=self.ids[tokens],
            mask=self.mask[tokens],
            row_starts=starts_of(np.where(keep, lengths, 0)),
            turn_ends=self.turn_ends[np.repeat(keep, turns)],
            turn_starts=starts_of(np.where(keep, turns, 0)),
            rejected=sorted(rejected.items()),
        )

    def repeated(self, counts: np.ndarray) -> Encoded:
        """Return the batch with token *i* repeated ``counts[i]`` times, at least once."""
        starts = starts_of(counts)
        row_starts = np.repeat(self.row_starts[:-1], np.diff(self.turn_starts))
        turn_ends = starts[row_starts + self.turn_ends] - starts[row_starts]
        return replace(
            self,
            ids=np.repeat(self.ids, counts),
            mask=np.repeat(self.mask, counts),
            row_starts=starts[self.row_starts],
            turn_ends=turn_ends.astype(np.int32),
        )

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = slice(self.row_starts[number], self.row_starts[number + 1])
        turns = slice(self.turn_starts[number], self.turn_starts[number + 1])
        return self.ids[tokens], self.mask[tokens], self.turn_ends[turns]


# Rows that contain ids


class _Columns(msgspec.Struct):
    input_ids: list[int]
    attention_mask: Mask | None = None
    labels: list[int] | None = None
    loss_mask: Mask | None = None
    completion_mask: Mask | None = None
    assistant_masks: Mask | None = None
    loss_weights: list[float] | None = None
    num_actions: int | None = None
    position_ids: list[int] | None = None
    seq_lengths: list[int] | None = None
    cu_seqlens: list[int] | None = None


def read_tokenized(
    rows: Sequence[dict[str, Any]], vocabulary: int, *, everything: bool = False
) -> Encoded:
    """Read ids and masks; reject rows with ids of ``vocabulary`` or more, or invalid masks.

    With ``everything`` every token is trained and the masks are ignored.
    """
    ids, masks, rejected = [], [], []
    weights: dict[int, NDArray[np.float32]] = {}
    for number, row in enumerate(rows):
        try:
            tokens, mask, of_tokens = _read(row, vocabulary, everything)
            if of_tokens is not None:
                weights[number] = of_tokens
        except RowError as error:
            rejected.append((number, error))
            tokens, mask = np.zeros(0, np.int32), np.zeros(0, np.uint8)
        ids.append(tokens)
        masks.append(mask)
    return Encoded(
        ids=np.concatenate([*ids, np.zeros(0, np.int32)]),
        row_starts=starts_of([len(tokens) for tokens in ids]),
        mask=np.concatenate([*masks, np.zeros(0, np.uint8)]),
        turn_ends=np.zeros(0, np.int32),
        turn_starts=np.zeros(len(rows) + 1, np.int64),
        rejected=rejected,
        weights=weights,
    )


def _read(
    row: dict[str, Any], vocabulary: int, everything: bool
) -> tuple[NDArray[np.int32], Bits, NDArray[np.float32] | None]:
    if row.get("input_ids") is None:
        names = ", ".join(sorted(map(str, row))[:8]) or "none"
        raise RowError(f"the row has no column 'input_ids'; its columns are {names}")
    kinds = row.get("mm_token_type_ids")  # 0 for tokens of text
    has_media = isinstance(kinds, list) and any(kinds)
    for name in MEDIA + ("mm_token_type_ids",) * has_media:
        if row.get(name):
            raise RowError(
                f"the row has {name!r}; rows of ids must not have images, video or audio"
            )
    try:
        columns = msgspec.convert(row, _Columns)
        ids = np.array(columns.input_ids, np.int64)
    except msgspec.ValidationError as error:
        raise RowError(str(error).replace("$.", "")) from error
    except OverflowError as error:
        raise RowError("input_ids has a number that does not fit into 64 bits") from error
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        at = int(outside[0])
        raise RowError(f"input_ids[{at}] is {ids[at]}; the tokenizer's ids are below {vocabulary}")
    real = _without_padding(columns, len(ids))
    _require_one_sequence(columns, real)
    mask = np.ones(len(ids), np.uint8) if everything else _trained(columns, ids)
    if not everything and (mask[: real.start].any() or mask[real.stop :].any()):
        raise _contradiction("a token is trained, but attention_mask marks it as padding")
    weights = None
    if columns.loss_weights is not None:
        if everything and not _weighted(columns.loss_weights, len(ids))[real].all():
            raise _contradiction("loss_weights has a 0, but every token of the row is trained")
        weights = np.array(columns.loss_weights, np.float32)[real]
    return ids[real].astype(np.int32), mask[real], weights


def _without_padding(columns: _Columns, length: int) -> slice:
    if columns.attention_mask is None:
        return slice(0, length)
    attended = np.flatnonzero(_bits("attention_mask", columns.attention_mask, length))
    if not len(attended):
        raise RowError("attention_mask marks every token as padding")
    first, last = int(attended[0]), int(attended[-1])
    if last - first + 1 != len(attended):
        raise RowError("attention_mask has zeros between ones; padding must be at the ends")
    return slice(first, last + 1)


def _require_one_sequence(columns: _Columns, real: slice) -> None:
    length = real.stop - real.start
    positions = columns.position_ids
    if positions is not None and positions[real] != list(range(length)):
        raise RowError("position_ids must count from 0; if the row is packed, unpack it")
    if columns.seq_lengths is not None and columns.seq_lengths != [length]:
        count = len(columns.seq_lengths)
        raise RowError(f"the row has {count} sequences (seq_lengths); unpack it")
    if columns.cu_seqlens is not None and columns.cu_seqlens != [0, length]:
        raise RowError("the row has several sequences (cu_seqlens); unpack it")


def _trained(columns: _Columns, ids: NDArray[np.int64]) -> Bits:
    masks: dict[str, Bits] = {}
    if columns.labels is not None:
        masks["labels"] = _labelled(columns.labels, ids)
    if columns.loss_mask is not None:
        masks["loss_mask"] = _loss_mask(columns, len(ids))
    halves = {
        name: _bits(name, values, len(ids))
        for name in ("completion_mask", "assistant_masks")
        if (values := getattr(columns, name)) is not None
    }
    if columns.loss_weights is not None:
        masks["loss_weights"] = _weighted(columns.loss_weights, len(ids))
    if halves:
        masks[" and ".join(halves)] = np.bitwise_and.reduce(list(halves.values()))
    if not masks:
        raise RowError(
            "the row has no labels, loss_mask, loss_weights, completion_mask or assistant_masks"
        )
    (first, mask), *others = masks.items()
    for name, other in others:
        # The first token is never predicted, so some libraries always leave it untrained.
        differs = np.flatnonzero(mask[1:] != other[1:])
        if len(differs):
            raise _contradiction(f"{first} and {name} differ at token {differs[0] + 1}")
        mask = mask & other
    return mask


def _labelled(values: list[int], ids: NDArray[np.int64]) -> Bits:
    _require_length("labels", len(values), len(ids))
    try:
        labels = np.array(values, np.int64)
    except OverflowError as error:
        raise RowError("labels has a number that does not fit into 64 bits") from error
    trained = labels != IGNORE
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        raise _contradiction(
            f"labels[{at}] must be -100 or the token's id {ids[at]}, got {labels[at]}; "
            "labels must not be shifted"
        )
    return np.asarray(trained, np.uint8)


def _weighted(values: list[float], length: int) -> Bits:
    _require_length("loss_weights", len(values), length)
    weights = np.array(values, np.float64)
    valid = (weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))
    if not valid.all():
        at = int(valid.argmin())
        raise RowError(
            f"loss_weights[{at}] must be 0 or a number from {MIN_WEIGHT:.1g} to {MAX_WEIGHT:.1g},"
            f" got {values[at]}"
        )
    return np.asarray(weights > 0, np.uint8)


def _loss_mask(columns: _Columns, length: int) -> Bits:
    values, last = columns.loss_mask, columns.num_actions
    assert values is not None
    if last is None:
        return _bits("loss_mask", values, length)
    if not 0 <= last <= length or len(values) not in (last, length):
        raise RowError(
            f"loss_mask has {len(values)} values, num_actions is {last}, input_ids has {length}"
        )
    before = np.zeros(length - len(values), np.uint8)
    return np.concatenate([before, _bits("loss_mask", values, len(values))])


def _bits(name: str, values: Sequence[float], length: int) -> Bits:
    _require_length(name, len(values), length)
    numbers = np.array(values, np.float64)
    bits = numbers != 0
    wrong = np.flatnonzero(bits & (numbers != 1))
    if len(wrong):
        raise RowError(f"{name}[{wrong[0]}] must be 0 or 1, got {values[int(wrong[0])]}")
    return np.asarray(bits, np.uint8)


def _require_length(name: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise RowError(f"{name} has {actual} values, input_ids has {expected}")


def _contradiction(message: str) -> RowError:
    return RowError(message, reason="mask_unproven")
