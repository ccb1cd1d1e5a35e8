"""Micro-batches: what a step is cut into so that it fits, and how their sequences are aligned.

`MicroBatches` is the user's wish: a token budget, what to balance, and the shape. `Align` says to
which multiples sequences and slabs are padded. `MicroBatches.plan` answers for one step, from
lengths alone, with the micro-batch of every sample; `tokenmill.packing.balance` does the
arithmetic, and the loader asks it.

A *slab* is the rows of one micro-batch side by side. A sample is never divided: a row, a pack, or
rows that belong together go into one micro-batch whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.packing.balance import cut, level
from tokenmill.packing.fit import Int64Array
from tokenmill.packing.packs import Packs, share_of

BALANCE = ("tokens", "work", "trained")
LAYOUTS = ("slab", "padded")
SHARDS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Align:
    """To which multiples batches are padded.

    Args:
        sequence: Tokens of every sequence: 2 × context-parallel ranks, say. Padded rows: the width.
        slab: Tokens of every slab: what tensor parallelism with sequence parallelism, expert
            parallelism or the blocks of FP8 (16) and MXFP8 (32) want. Padded rows: the width, too.
    """

    sequence: int = 1
    slab: int = 1

    def __post_init__(self) -> None:
        _check_positive(self, "sequence", "slab")


@dataclass(frozen=True)
class MicroBatches:
    """How a step is cut into micro-batches.

    Args:
        max_tokens: Tokens that a rank holds in one micro-batch, padding included, at most. Where
            ranks share a slab (``context_parallel``), the slab has as many times more.
        balance: What is made equal over ranks and micro-batches: tokens; work, tokens and the
            square of every sequence's length in the proportion of a transformer; or trained
            tokens.
        align: Multiples for sequences and slabs.
        context_parallel: So many consecutive ranks share every slab, each with its shard.
        shards: zigzag: of every sequence the r-th and the r-th last of twice as many stretches as
            ranks; contiguous: the r-th stretch of the slab. Padded rows are cut row by row.
        layout: slab lays rows side by side; padded gives every row its own line. With a `Pack` the
            samples are packs, one per line.
        hidden_size: Of the model, for ``balance="work"``: a token's matrices take as much work as
            attention to 6 × hidden_size others.
    """

    max_tokens: int
    balance: str = "work"
    align: Align = field(default_factory=Align)
    context_parallel: int = 1
    shards: str = "zigzag"
    layout: str = "slab"
    hidden_size: int = 4096

    def __post_init__(self) -> None:
        _check_positive(self, "max_tokens", "context_parallel", "hidden_size")
        if not isinstance(self.align, Align):
            raise UsageError(f"MicroBatches.align must be a tm.Align, not {self.align!r}")
        for name, known in (("balance", BALANCE), ("shards", SHARDS), ("layout", LAYOUTS)):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"MicroBatches.{name} must be one of {', '.join(known)}, "
                    f"not {getattr(self, name)!r}"
                )
        if self.budget < self.slab:
            raise UsageError(
                f"a slab is a multiple of {self.slab} tokens, and max_tokens={self.max_tokens} "
                f"allows {self.max_tokens * self.context_parallel}"
            )

    @property
    def sequence(self) -> int:
        """What every sequence's place is a multiple of."""
        halves = 2 * self.context_parallel if self.shards == "zigzag" else 1
        shared = halves if self.context_parallel > 1 else 1
        if self.layout == "padded":
            return lcm(self.align.sequence, self.align.slab, shared, self.context_parallel)
        return lcm(self.align.sequence, shared)

    @property
    def slab(self) -> int:
        """What every slab is a multiple of."""
        return lcm(self.align.slab, self.sequence, self.context_parallel)

    @property
    def budget(self) -> int:
        """Tokens of a slab, at most; the ranks that share it hold them together."""
        return self.max_tokens * self.context_parallel // self.slab * self.slab

    def places(self, lengths: Int64Array) -> Int64Array:
        """Tokens that sequences of these lengths take, padding included."""
        return -(-lengths // self.sequence) * self.sequence

    def plan(
        self,
        packs: Packs,
        trained: Int64Array,
        ranks: int,
        length: int | None = None,
        patches: tuple[Int64Array, int] | None = None,
    ) -> tuple[Int64Array, int]:
        """Micro-batch of every sample of a step, and how many each rank has.

        Micro-batch ``rank × each + k`` is the k-th of that rank.

        Args:
            packs: The samples of all ranks.
            trained: Trained tokens of every piece.
            ranks: That have different samples.
            length: Tokens of every sample, where samples are packs.
            patches: Of every piece, and how many a micro-batch may have, where that is bounded.
        """
        loads = None if patches is None else (packs.per_pack(patches[0]), patches[1])
        places = self.places(packs.lengths)
        by_trained = self.balance == "trained"
        if length is None and self.layout == "padded":
            widths, lines = packs.longest(places), np.diff(packs.bounds)
            cost = packs.per_pack(trained) if by_trained else self._cost(widths)
            return cut(widths, lines, cost, ranks, self.budget, adds_up=by_trained, loads=loads)
        tokens = packs.per_pack(places)
        if length is not None:
            tokens = np.full(len(packs), length, dtype=np.int64)
        taken = tokens
        if loads is not None:
            taken = np.maximum(tokens, share_of(*loads, self.budget))
        if self.balance == "tokens":
            return level(taken, tokens, ranks, self.budget)
        cost = packs.per_pack(trained if by_trained else self._cost(places))
        return level(taken, cost, ranks, self.budget)

    def _cost(self, places: Int64Array) -> Int64Array:
        if self.balance == "tokens":
            return places
        return 6 * self.hidden_size * places + places * places


def _check_positive(wish: object, *names: str) -> None:
    for name in names:
        value = getattr(wish, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{type(wish).__name__}.{name} must be a positive whole number, not {value!r}"
            )
