"""Add columns of groups to batches of their rows (docs/guides/preference.md).

Batches of KTO rows also have ``kl_*`` arrays: each row's prompt with the answer of the row that is
``shift`` rows later, modulo the number of rows. The shift is a function of the seed, so it does not
depend on batches, ranks or epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.data.fill import Batch, Piece, fill_rows, padded_width
from tokenmill.data.filler import WEIGHT_SUM, Filler
from tokenmill.data.order import PURPOSE_MISMATCH, Int64Array, derive_key
from tokenmill.data.samples import Step
from tokenmill.data.view import View
from tokenmill.store import Row

LAYOUTS = ("sides", "interleaved")
SIDES = ("chosen", "rejected")
KINDS = ("preference", "kto", "ranked", "single")


@dataclass(frozen=True)
class GroupFiller:
    filler: Filler  # of rows
    kind: str  # of all groups, or "" if there are several
    sides: bool  # whether pairs are served as ``chosen_*`` and ``rejected_*``
    margins: bool
    scores: bool
    shift: int  # from a row to the row whose answer is its mismatched answer

    @classmethod
    def of(cls, filler: Filler, layout: str, seed: int) -> GroupFiller:
        counts, kind = group_counts(filler.view), group_kind(filler.view)
        return cls(
            filler,
            kind,
            sides=layout == "sides" and kind == "preference" and filler.pack_length is None,
            margins=counts["margins"] > 0,
            scores=counts["scores"] > 0,
            shift=cls.shift_of(filler.view, seed),
        )

    @staticmethod
    def shift_of(view: View, seed: int) -> int:
        return 1 + derive_key(PURPOSE_MISMATCH, seed, 0, 0) % max(len(view) - 1, 1)

    def fill(self, step: Step) -> Batch:
        packs = step.packs
        numbers = packs.rows[int(packs.bounds[step.first]) : int(packs.bounds[step.stop])]
        rows = self.filler.view.rows(numbers)
        return self.arrange(self.filler.fill(step, rows), numbers, rows, self.filler.multiple)

    def arrange(
        self, batch: Batch, numbers: Int64Array, rows: list[Row], multiple: int | None
    ) -> Batch:
        """Add the columns of groups to a padded or packed batch of whole groups."""
        view = self.filler.view
        firsts = view.group_starts(view.groups_of(numbers)) == numbers
        groups = rows if firsts.all() else [rows[n] for n in np.flatnonzero(firsts).tolist()]
        batch["prompt_tokens"] = np.asarray(
            [-1 if row.prompt_tokens is None else row.prompt_tokens for row in groups] or [-1]
        )
        if self.margins:
            batch["margin"] = np.asarray([row.margin or 0.0 for row in groups] or [0], np.float32)
        if self.kind == "kto":
            batch |= self._mismatched(numbers, rows, multiple)
        if self.sides:
            return self._by_sides(batch, rows, multiple)
        return batch | self._of_rows(batch, rows, firsts)

    def _of_rows(self, batch: Batch, rows: list[Row], firsts: NDArray[np.bool_]) -> Batch:
        packed = "cu_seqlens" in batch
        segments = segments_of_rows(batch)[: len(rows)] if packed else np.arange(len(rows))
        height = len(batch["cu_seqlens"]) - 1 if packed else batch["input_ids"].shape[0]
        group_idx = np.full(height, -1, np.int64)
        label = np.full(height, -1, np.int8)
        group_idx[segments] = np.cumsum(firsts) - 1
        label[segments] = [-1 if row.label is None else row.label for row in rows]
        result: Batch = {"group_idx": group_idx, "label": label}
        if self.scores:
            result["score"] = np.full(height, np.nan, np.float32)
            result["score"][segments] = [np.nan if row.score is None else row.score for row in rows]
        if packed and self.kind == "preference":
            result["pair_index"] = segments.reshape(-1, 2)
        return result

    def _by_sides(self, batch: Batch, rows: list[Row], multiple: int | None) -> Batch:
        """Split arrays over rows: even rows are chosen, odd ones rejected."""
        filler, height = self.filler, batch["input_ids"].shape[0]
        if self.scores:
            scores = [np.nan if row.score is None else row.score for row in rows]
            batch["score"] = np.asarray(scores or [np.nan], np.float32)
        whole = {"prompt_tokens", "margin", "num_trained_tokens", WEIGHT_SUM, "indices"}
        result = {name: value for name, value in batch.items() if name in whole}
        for first, side in enumerate(SIDES):
            chosen = slice(first, None, 2) if rows else slice(None)  # or the padding
            longest = max((len(row) for row in rows[first::2]), default=1)
            width = padded_width(longest, multiple)
            columns = slice(-width, None) if filler.padding_side == "left" else slice(width)
            for name, value in batch.items():
                if name in whole:
                    continue
                if not isinstance(value, np.ndarray) or len(value) != height:
                    raise AssertionError(f"{name!r} is not an array over rows")
                part = value[chosen] if value.ndim == 1 else value[chosen, columns]
                result[f"{side}_{name}"] = np.ascontiguousarray(part)
        return result

    def _mismatched(self, numbers: Int64Array, rows: list[Row], multiple: int | None) -> Batch:
        filler = self.filler
        pieces = mismatched(filler.view, numbers, rows, self.shift)
        batch = fill_rows(pieces, filler.pad_token_id, side=filler.padding_side, multiple=multiple)
        return {f"kl_{name}": value for name, value in batch.items()}


def mismatched(view: View, numbers: Int64Array, rows: list[Row], shift: int) -> list[Piece]:
    """Return every row's prompt with the answer of the row ``shift`` rows later."""
    pieces: list[Piece] = []
    for row, other in zip(rows, view.rows((numbers + shift) % len(view)), strict=True):
        prompt, other_prompt = row.prompt_tokens or 0, other.prompt_tokens or 0
        mask = np.concatenate((np.zeros(prompt, np.uint8), other.loss_mask[other_prompt:]))
        ids = np.concatenate((row.input_ids[:prompt], other.input_ids[other_prompt:]))
        pieces.append((ids, mask))
    return pieces


def group_kind(view: View) -> str:
    """Return the kind of all groups, or "" if there are several."""
    counts = group_counts(view)
    kinds = [kind for kind in KINDS if counts[kind]]
    return kinds[0] if len(kinds) == 1 else ""


def group_counts(view: View) -> dict[str, int]:
    """Count groups of each kind, and groups with scores and margins, over all stores."""
    counts = dict.fromkeys((*KINDS, "scores", "margins"), 0)
    for store in view.stores:
        totals = store.manifest["totals"]
        for name, count in totals.get("groups", {"single": totals["rows"]}).items():
            counts[name] += count
    return counts


def segments_of_rows(batch: Batch) -> Int64Array:
    """Return the segments of a packed batch that contain rows."""
    bounds = batch["cu_seqlens_padded" if "cu_seqlens_padded" in batch else "cu_seqlens"]
    firsts = bounds[:-1][np.diff(bounds) > 0]
    return np.flatnonzero(batch["seq_idx"].reshape(-1)[firsts] >= 0)
