"""The eager reference: what each stream must serve, as plain Python lists.

An epoch is a list of samples, a global batch a slice of it, a cursor (epoch, place in the list). It
shares with the product only the packing of one window, which has plain oracles in tests/data.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tests.consistency.cases import CASES, LENGTH_GROUP, LENGTH_WINDOW, WEIGHTS
from tests.consistency.corpus import SIZES, Corpus, Sample
from tests.data.scalar import drawn, permuted
from tokenmill.data.order import derive_key
from tokenmill.data.packs import Pack, pack_window

SEED = 11


class Model:
    def __init__(self, corpus: Corpus, name: str, ranks: int = 1) -> None:
        self.corpus = corpus
        self.case = CASES[name]
        self.last = self.case.get("last", "wrap")
        self.ranks = ranks
        self.lengths = [len(ids) for ids, _ in corpus.rows]
        self.trained = [sum(mask) for _, mask in corpus.rows]
        self.samples = lru_cache(maxsize=None)(self._samples)

    # Orders: lists of row numbers.

    def own_order(self, rows: int, epoch: int, stream: int) -> list[int]:
        if not self.case.get("shuffle", True):
            return list(range(rows))
        key = derive_key(1, SEED, epoch, stream)
        return [permuted(rows, key, position) for position in range(rows)]

    @cached_property
    def _mixed_stream(self) -> tuple[list[tuple[int, int]], int]:
        """(source, draws of it before) of a long stretch, and the length of an epoch."""
        sizes = list(SIZES.values())
        rates = self._rates()
        if self.case["mix"]["exhausted"] == "drop":
            left, served, alive = sizes[:], [0, 0], [0, 1]
            stream: list[tuple[int, int]] = []
            while alive:
                own, place = [rates[s] for s in alive], 0
                while all(left[s] for s in alive):
                    source = alive[drawn(own, place)[0]]
                    stream.append((source, served[source]))
                    served[source] += 1
                    left[source] -= 1
                    place += 1
                alive = [s for s in alive if left[s]]
            return stream, len(stream)
        stream = [drawn(rates, place) for place in range(3000)]
        for epoch_rows in range(1, 3000):
            counts = [sum(s == source for s, _ in stream[:epoch_rows]) for source in (0, 1)]
            out = [count >= size for count, size in zip(counts, sizes, strict=True)]
            if all(out) if self.case["mix"]["exhausted"] == "repeat" else any(out):
                return stream, epoch_rows
        raise AssertionError("the stretch is too short")

    def _rates(self) -> list[Fraction]:
        rates, first = [], 0
        for name, size in SIZES.items():
            counts = {"rows": [1] * len(self.lengths), "tokens": self.lengths,
                      "trained_tokens": self.trained}[self.case["mix"]["by"]]  # fmt: skip
            total = sum(counts[first : first + size])
            rates.append(Fraction(repr(WEIGHTS[name])) * size / total)
            first += size
        return rates

    def order(self, epoch: int) -> list[int]:
        if "mix" not in self.case:
            rows = self.own_order(SIZES["one"], epoch, 0)
        else:
            stream, size = self._mixed_stream
            begins, sizes = [0, SIZES["one"]], list(SIZES.values())
            rows = []
            for place in range(size):
                if self.case["mix"]["exhausted"] == "drop":
                    source, draw = stream[place]
                    own_epoch, position = epoch, draw
                else:
                    source, draw = stream[epoch * size + place]
                    own_epoch, position = divmod(draw, sizes[source])
                own = self._own(sizes[source], own_epoch, source + 1)
                rows.append(begins[source] + own[position])
        if "group_by_length" in self.case:
            rows = self._grouped(rows, epoch)
        return rows

    @cached_property
    def _own(self) -> Any:
        return lru_cache(maxsize=None)(self.own_order)

    def _grouped(self, rows: list[int], epoch: int) -> list[int]:
        window, group = LENGTH_WINDOW, LENGTH_GROUP
        found = []
        for number, start in enumerate(range(0, len(rows), window)):
            ordered = sorted(rows[start : start + window], key=lambda row: self.lengths[row])
            groups = [ordered[at : at + group] for at in range(0, len(ordered), group)]
            key = derive_key(2, SEED, epoch, number)
            for place in range(len(groups)):
                found += groups[permuted(len(groups), key, place)]
        return found

    # Samples: rows, or packs of pieces.

    def _samples(self, epoch: int) -> list[Sample]:
        rows = self.order(epoch)
        if "pack" not in self.case:
            return [((row, 0, self.lengths[row]),) for row in rows]
        pack = Pack(**self.case["pack"])
        found: list[Sample] = []
        for number, start in enumerate(range(0, len(rows), pack.window)):
            window = rows[start : start + pack.window]
            packs = pack_window(
                np.asarray(window), np.asarray([self.lengths[r] for r in window]), pack, self.ranks
            )
            pieces = list(
                zip(packs.rows.tolist(), packs.starts.tolist(), packs.lengths.tolist(), strict=True)
            )
            ends = packs.bounds.tolist()
            formed = [tuple(pieces[a:b]) for a, b in itertools.pairwise(ends)]
            key = derive_key(3, SEED, epoch, number)
            found += [formed[permuted(len(formed), key, place)] for place in range(len(formed))]
        return found

    # The run: global batches behind a cursor.

    def step(
        self, cursor: tuple[int, int], size: int, end: int | None
    ) -> tuple[list[Sample], tuple[int, int]] | None:
        epoch, place = cursor
        batch: list[Sample] = []
        while len(batch) < size:
            if end is not None and epoch >= end and not batch:
                return None
            samples = self.samples(epoch)
            taken = samples[place : place + size - len(batch)]
            batch += taken
            place += len(taken)
            if place == len(samples):
                epoch, place = epoch + 1, 0
                if len(batch) < size and self.last == "drop":
                    batch = []
                if batch and self.last == "keep":
                    break
        if self.last == "drop" and place and len(self.samples(epoch)) - place < size:
            epoch, place = epoch + 1, 0  # the rest is left out
        return batch, (epoch, place)

    def run(self, size: int, epochs: int) -> list[list[Sample]]:
        steps, cursor = [], (0, 0)
        while (found := self.step(cursor, size, epochs)) is not None:
            batch, cursor = found
            steps.append(batch)
        return steps
