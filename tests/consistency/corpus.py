"""Small stores whose rows are recognised by their content."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.store.making import make_columns, make_store
from tokenmill.store import Store, open_store
from tokenmill.store.columns import SliceColumns

SIZES = {"one": 67, "two": 23}
Sample = tuple[tuple[int, int, int], ...]
"""Pieces of one sample: (row, first token, tokens)."""


def lengths_of(name: str) -> list[int]:
    return [3 + (i * 7919 + len(name) * 13 + (i * i) % 11) % 37 for i in range(SIZES[name])]


def build(root: Path) -> None:
    for name in SIZES:
        make_store(root, slices_of(name), name="corpus-" + name)


def slices_of(name: str) -> list[SliceColumns]:
    """The columns of a store; no token occurs twice, so a token identifies its row and position."""
    lengths, found = lengths_of(name), []
    token = 20_000 * list(SIZES).index(name)
    for cut in (lengths[:20], lengths[20:41], lengths[41:]):
        if cut:
            ids = np.arange(token, token + sum(cut), dtype=np.int32)
            columns = make_columns(cut)
            mask = columns.mask.copy()
            for row, (first, stop) in enumerate(pairwise(columns.starts.tolist())):
                # Rows that train their first token, which no batch may, and wholly trained ones.
                mask[first] = row % 5 == 0
                if row % 7 == 0:
                    mask[first:stop] = 1
            found.append(dataclasses.replace(columns, ids=ids, mask=mask))
            token += sum(cut)
    return found


@dataclass(frozen=True)
class Corpus:
    root: Path

    @cached_property
    def stores(self) -> dict[str, Store]:
        found = [open_store(path) for path in sorted((self.root / "stores").iterdir())]
        by_rows = {len(store): store for store in found}
        return {name: by_rows[size] for name, size in SIZES.items()}

    @cached_property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        found = []
        for name in SIZES:
            for columns in slices_of(name):
                for a, b in zip(columns.starts, columns.starts[1:], strict=False):
                    found.append((columns.ids[a:b].tolist(), columns.mask[a:b].tolist()))
        return found

    @cached_property
    def _places(self) -> dict[tuple[int, ...], tuple[int, int, int]]:
        """Every stretch of every row by its ids: recognises rows and pieces of rows alike."""
        places: dict[tuple[int, ...], tuple[int, int, int]] = {}
        for row, (ids, _) in enumerate(self.rows):
            for first in range(len(ids)):
                for stop in range(first + 1, len(ids) + 1):
                    places[tuple(ids[first:stop])] = (row, first, stop - first)
        return places

    def samples(self, batch: dict[str, Any]) -> list[Sample]:
        ids, labels = np.asarray(batch["input_ids"]), np.asarray(batch["labels"])
        mask = np.asarray(batch["loss_mask"])
        assert np.array_equal(labels != -100, mask == 1)
        found: list[Sample] = []
        if "cu_seqlens" not in batch:
            for number, real in enumerate(np.asarray(batch["attention_mask"]) == 1):
                if real.any():
                    found.append((self._piece(ids[number][real], labels[number][real]),))
            return found
        names = np.asarray(batch["seq_idx"]).ravel()
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(ids.shape[0])]
        ends = np.asarray(batch["cu_seqlens"]).tolist()
        for first, stop in pairwise(ends):
            if names[first] >= 0:
                piece = self._piece(ids.ravel()[first:stop], labels.ravel()[first:stop])
                pieces[first // ids.shape[1]].append(piece)
        return [tuple(sample) for sample in pieces if sample]

    def _piece(self, ids: np.ndarray, labels: np.ndarray) -> tuple[int, int, int]:
        row, first, size = self._places[tuple(ids.tolist())]
        stored_ids, stored_mask = (column[first : first + size] for column in self.rows[row])
        expected = [
            token if place and stored_mask[place] else -100
            for place, token in enumerate(stored_ids)
        ]
        assert labels.tolist() == expected, f"labels of row {row}"
        return row, first, size
