"""Steps: the global batches of a run, and each rank's share of them.

A `Step` is one global batch as integers: the samples of all ranks, and which of them are this
rank's. A `Stepper` makes the step behind any cursor, and the cursor behind that step; it keeps
nothing in between, so the same cursor always gives the same step, in any process.

`BatchStepper` cuts the stream into global batches of ``batch_size × world_size`` samples, of
which rank r gets the r-th contiguous block. `BudgetStepper` cuts it greedily into micro-batches
of at most ``max_tokens`` (rows × longest, padded) and ``max_patches``, of which a step holds one
per rank. Where an
epoch ends, ``last`` decides: wrap takes on samples of the next, drop leaves the rest out, keep
makes a short step. A step belongs to the epoch in which it begins; the cursor behind the last step
of an epoch stands in the next, so that whole epochs, one after the other, are the whole stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.loader.cursor import Cursor
from tokenmill.loader.samples import Samples
from tokenmill.loader.units import Units
from tokenmill.packing import Packs, padded_width
from tokenmill.sampling import Order, Recent

LAST = ("wrap", "drop", "keep")


@dataclass(frozen=True)
class Geometry:
    """How a global batch is shared.

    Args:
        batch_size: Samples per rank.
        rank: This rank.
        world_size: How many ranks there are.
        last: What happens at an epoch's end: wrap, drop or keep.
    """

    batch_size: int
    rank: int
    world_size: int
    last: str

    def __post_init__(self) -> None:
        for name in ("batch_size", "world_size"):
            check_positive(name, getattr(self, name))
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise UsageError(f"rank must be a whole number, not {self.rank!r}")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size} ranks")
        check_one_of("last", self.last, LAST)

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size * self.world_size

    def share(self, samples: int) -> tuple[int, int]:
        """This rank's block of a step: equal blocks, as far as the samples go round."""
        each, extra = divmod(samples, self.world_size)
        first = self.rank * each + min(self.rank, extra)
        return first, first + each + (self.rank < extra)


@dataclass(frozen=True)
class Step:
    """One global batch as integers.

    Args:
        packs: The samples of all ranks.
        first: This rank's first sample.
        stop: One past its last.
    """

    packs: Packs
    first: int
    stop: int


class Stepper(Protocol):
    """Makes the step behind a cursor."""

    def step(self, cursor: Cursor, end: int | None) -> tuple[Step, Cursor] | None:
        """The next step and the cursor behind it; None where the run ends.

        Args:
            cursor: Where the run stands.
            end: The first epoch that is not part of the run; None when it goes on for ever.
        """

    def count(self, cursor: Cursor, first_epoch: int) -> int:
        """Steps that begin in the cursor's epoch, in a run that began with ``first_epoch``."""


class BatchStepper:
    """Global batches of a fixed number of samples."""

    def __init__(self, samples: Samples, geometry: Geometry) -> None:
        self._samples = samples
        self._geometry = geometry

    def step(self, cursor: Cursor, end: int | None) -> tuple[Step, Cursor] | None:
        """Gather one global batch, over the end of an epoch where ``last`` says so."""
        wanted = self._geometry.global_batch
        parts: list[Packs] = []
        found = 0
        while found < wanted:
            # With "wrap" a batch that was begun in the last epoch is completed from the next one.
            if end is not None and cursor.epoch >= end and not found:
                return None
            whole_epoch = cursor == Cursor(cursor.epoch)
            got, behind = self._samples.take(cursor, wanted - found)
            ended = behind.epoch > cursor.epoch
            if whole_epoch and ended:
                self._refuse_empty(len(got), wanted)
            cursor = behind
            found += len(got)
            parts.append(got)
            if ended and found < wanted:
                if self._geometry.last == "keep" and found:
                    break
                if self._geometry.last == "drop":
                    parts, found = [], 0
        drops = self._geometry.last == "drop" and cursor.position
        if drops and not self._samples.has(cursor, wanted):
            cursor = cursor.next_epoch()
        return Step(Packs.join(parts), *self._geometry.share(found)), cursor

    def _refuse_empty(self, samples: int, wanted: int) -> None:
        """An epoch that can give no batch would be searched for ever."""
        if not samples:
            raise UsageError("there is nothing to serve: an epoch has no samples")
        if self._geometry.last == "drop" and samples < wanted:
            raise UsageError(
                f"an epoch has {samples} samples, a global batch {wanted}: last='drop' would "
                "serve nothing; take a smaller batch, or last='wrap' or 'keep'"
            )

    def count(self, cursor: Cursor, first_epoch: int) -> int:
        """What lies behind the cursor and what is left, in global batches, as ``last`` rounds."""
        wanted = self._geometry.global_batch
        left = self._samples.count(cursor.epoch) - cursor.position
        # An epoch that lent samples to the one before begins behind them: they are the remainder.
        behind = cursor.position // wanted
        return behind + (left // wanted if self._geometry.last == "drop" else -(-left // wanted))


class BudgetStepper:
    """Micro-batches by token budget, one per rank and step.

    They are cut greedily, so that a cut depends on the place of the one before only: a state saved
    at any step goes on with the same micro-batches under any number of ranks.

    Args:
        order: Position → row, or group.
        units: Rows or groups.
        geometry: How micro-batches are shared; its batch size plays no part.
        max_tokens: Rows × longest, padded, per rank.
        multiple: What the longest is rounded up to.
        max_patches: Of the pictures of a micro-batch; None sets no bound.
    """

    _BLOCK = 1024  # positions looked up at a time
    _EPOCHS_BACK = (
        64  # whose cuts are followed, at most, to find where an epoch's first step begins
    )

    def __init__(
        self,
        order: Order,
        units: Units,
        geometry: Geometry,
        max_tokens: int,
        multiple: int | None,
        max_patches: int | None = None,
    ) -> None:
        self._order = order
        self._units = units
        self._geometry = geometry
        self._max_tokens = max_tokens
        self._multiple = multiple
        self._max_patches = max_patches
        self._block = Recent(self._look_up, keep=4)
        self._cuts = Recent(self._cut_step)
        self._counts = Recent(self._count)
        self._start = (0, Cursor())

    def _look_up(self, epoch: int, number: int) -> list[tuple[int, int, int, int]]:
        """Units, with their rows, the tokens of the longest, and patches where they count."""
        start = number * self._BLOCK
        stop = min(start + self._BLOCK, self._order.rows)
        units = self._order.indices(epoch, np.arange(start, stop, dtype=np.int64))
        rows, longest = self._units.shapes_at(units)
        counted = self._max_patches is not None
        patches = self._units.patches_at(units) if counted else np.zeros_like(units)
        columns = (units.tolist(), rows.tolist(), longest.tolist(), patches.tolist())
        return list(zip(*columns, strict=True))

    def step(self, cursor: Cursor, end: int | None) -> tuple[Step, Cursor] | None:
        """Cut one micro-batch per rank."""
        ranks, rank = self._geometry.world_size, self._geometry.rank
        while end is None or cursor.epoch < end:
            packs, bounds, behind = self._cuts(cursor.epoch, cursor.position)
            if self._is_served(bounds):
                if behind.position and self._geometry.last == "drop":
                    _, following, _ = self._cuts(behind.epoch, behind.position)
                    if not self._is_served(following):
                        behind = behind.next_epoch()
                bounds = bounds + bounds[-1:] * (ranks + 1 - len(bounds))
                return Step(packs, bounds[rank], bounds[rank + 1]), behind
            if not cursor.position:
                raise UsageError(
                    f"an epoch has {len(bounds) - 1} micro-batches for {ranks} ranks: last='drop' "
                    "would serve nothing; take a smaller max_tokens, or last='wrap' or 'keep'"
                )
            cursor = cursor.next_epoch()
        return None

    def _is_served(self, bounds: list[int]) -> bool:
        """Whether there is a micro-batch for every rank, or it need not be."""
        return len(bounds) > self._geometry.world_size or self._geometry.last != "drop"

    def _cut_step(self, epoch: int, position: int) -> tuple[Packs, list[int], Cursor]:
        """The rows of the next step, where each micro-batch of it ends, and the cursor behind."""
        cursor = Cursor(epoch, position)
        units: list[int] = []
        bounds = [0]
        while len(bounds) <= self._geometry.world_size and (
            cursor.epoch == epoch or self._geometry.last == "wrap"
        ):
            cursor = self._cut(cursor, units)
            bounds.append(len(units))
        packs = self._units.as_packs(np.asarray(units, dtype=np.int64))
        return packs, bounds, cursor

    def _cut(self, cursor: Cursor, units: list[int]) -> Cursor:
        """Append the rows, or groups, of one micro-batch; the cursor behind it."""
        epoch, position = cursor.epoch, cursor.position
        held = longest = seen = 0
        most_patches = self._max_patches or 0
        while True:
            number, place = divmod(position, self._BLOCK)
            unit, rows, length, patches = self._block(epoch, number)[place]
            width = padded_width(max(longest, length), self._multiple)
            over = (held + rows) * width > self._max_tokens or seen + patches > most_patches
            if held and over:
                return Cursor(epoch, position)
            units.append(unit)
            held += rows
            seen += patches
            longest = max(longest, length)
            position += 1
            if position == self._order.rows:
                epoch, position = epoch + 1, 0
                if self._geometry.last != "wrap":
                    return Cursor(epoch)

    def count(self, cursor: Cursor, first_epoch: int) -> int:
        """Cuts the epoch once; with wrap also the earlier ones, for they say where it begins."""
        epoch = cursor.epoch
        if self._geometry.last != "wrap":
            return self._counts(epoch, epoch)
        return self._counts(epoch, max(min(first_epoch, epoch), epoch - self._EPOCHS_BACK))

    def _count(self, epoch: int, first_epoch: int) -> int:
        known_first, cursor = self._start
        if known_first != first_epoch or cursor.epoch > epoch:
            cursor = Cursor(first_epoch)
        while cursor.epoch < epoch:
            _, _, cursor = self._cut_step(cursor.epoch, cursor.position)
        self._start = (first_epoch, cursor)
        if cursor.epoch > epoch:  # no step of such a run begins in this epoch
            cursor = Cursor(epoch)
        steps = 0
        while cursor.epoch == epoch:
            _, bounds, cursor = self._cut_step(cursor.epoch, cursor.position)
            steps += self._is_served(bounds)
        return steps
