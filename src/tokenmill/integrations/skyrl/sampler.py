"""Our order for SkyRL's ``sampler_class_path``.

SkyRL makes a custom sampler as ``ClassName(tokenized, **sampler_kwargs)``, adds ``lengths`` (rows
per source) where several datasets are trained on, and walks it inside torchdata's
`StatefulDataLoader`, one pass after the other. `Sampler` is a walk along one endless stream of
row numbers: epoch after epoch of our order, or, with ``weights``, an interleave of the sources in
those shares. A pass is ``num_samples`` positions of it, by default as many as there are rows; the
next pass goes on where the last one ended, so a resume is exact in this and in all later epochs.

The state is where the live pass stands, counting what was yielded. torchdata stores it with each
batch and may throw an iterator away that was already finished; therefore a finished pass tells
the sampler where the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
from torch.utils import data as torch_data

from tokenmill.errors import StateError, UsageError, check_positive
from tokenmill.loader import Cursor, StreamSpec
from tokenmill.sampling import (
    LARGEST,
    MixedOrder,
    Order,
    Schedule,
    check_seed,
    make_order,
    unroll,
)

_BLOCK = 1024  # positions computed at a time: the order is a vectorised function
_BEGUN = "begun"  # stream position at which the pass began
_LENGTH = "num_samples"


class Sampler(torch_data.Sampler[int]):  # type: ignore[misc]
    """Row numbers in our order.

    Args:
        data_source: What is sampled; only its length, and its ``key`` where it has one, matter.
        seed: Of the order.
        order: feistel or sequential.
        num_samples: Positions of one pass; None: as many as there are rows. The number of steps
            times the batch size makes the whole run one pass.
        lengths: Rows of every source, in order; SkyRL fills this in.
        weights: Shares of the sources in the stream; None shuffles all rows together.
    """

    def __init__(
        self,
        data_source: Sized,
        seed: int = 42,
        order: str = "feistel",
        num_samples: int | None = None,
        lengths: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        rows = len(data_source)
        if not rows:
            raise UsageError("there is nothing to sample: the data has no rows")
        if num_samples is not None:
            check_positive("num_samples", num_samples)
        sizes = [rows] if lengths is None else [int(length) for length in lengths]
        if sum(sizes) != rows:
            raise UsageError(f"lengths are {sizes}, together {sum(sizes)}; the data has {rows}")
        self.num_samples = rows if num_samples is None else num_samples
        self.order = _make_order(order, check_seed(seed), sizes, weights)
        shares = "" if weights is None else f"/{sizes}/{[str(weight) for weight in weights]}"
        self._spec = StreamSpec(
            dataset=str(getattr(data_source, "key", None) or f"{rows} rows"),
            seed=int(seed),
            order=order + shares,
            packing=None,
        )
        self._next = 0  # stream position at which the next pass begins
        self._loaded: SamplerPass | None = None  # a pass to be gone on with
        self._live: SamplerPass | None = None

    def __len__(self) -> int:
        """Positions of one pass."""
        return self.num_samples

    def __iter__(self) -> SamplerPass:
        if self._loaded is not None:
            live, self._loaded = self._loaded, None
        else:
            live = SamplerPass(self, self._next, self._next, self.num_samples)
        self._live = live
        return live

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the pass of this number."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise UsageError(f"epoch must be a whole number from 0, not {epoch!r}")
        self._next, self._live, self._loaded = epoch * self.num_samples, None, None

    def begin_next_pass_at(self, place: int) -> None:
        """Where the next pass begins: a pass that came to its end says so."""
        self._next = place

    def state_dict(self) -> dict[str, Any]:
        """Where the live pass stands; between passes, where the next begins."""
        live = self._live or self._loaded
        if live is not None and not live.ended:
            return live.state_dict()
        return self.stamp(self._next, self._next, self.num_samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved pass stood, with the next ``iter``."""
        begun, place, length = self.admit(state)
        self._live = None
        self._next = begun
        self._loaded = SamplerPass(self, begun, place, length)

    def stamp(self, begun: int, place: int, length: int) -> dict[str, Any]:
        """The state of a pass."""
        cursor = Cursor(*divmod(place, self.order.rows))
        state = self._spec.save(cursor, begun // self.order.rows)
        return {**state, _BEGUN: begun, _LENGTH: length}

    def admit(self, state: Any) -> tuple[int, int, int]:
        """Begin, place and length of a saved pass.

        Raises:
            StateError: The state is of other data, another seed, order or version.
        """
        cursor, _ = self._spec.load(state)
        place = cursor.epoch * self.order.rows + cursor.position
        numbers = [state.get(_BEGUN), state.get(_LENGTH)]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise StateError("not a state of this sampler: it does not say where it began")
            if max(number, place) > LARGEST:
                raise StateError(f"the state stands at {max(number, place)}: no run comes that far")
        begun, length = numbers
        if not begun <= place <= begun + length:
            raise StateError(f"the state's pass began at {begun}, but it stands at {place}")
        return begun, place, length


class SamplerPass(Iterator[int]):
    """One pass; stateful in torchdata's sense.

    Args:
        sampler: Whose pass it is.
        begun: Stream position at which the pass begins.
        place: Stream position of the next row.
        length: Positions of the pass.
    """

    def __init__(self, sampler: Sampler, begun: int, place: int, length: int) -> None:
        self._sampler = sampler
        self._go(begun, place, length)

    def _go(self, begun: int, place: int, length: int) -> None:
        self._begun, self._place, self._end = begun, place, begun + length
        self._block: list[int] = []
        self._inside = 0
        self.ended = False

    def __next__(self) -> int:
        if self._place >= self._end:
            if not self.ended:
                self.ended = True
                self._sampler.begin_next_pass_at(self._end)
            raise StopIteration
        if self._inside == len(self._block):
            self._block, self._inside = self._compute(), 0
        self._inside += 1
        self._place += 1
        return self._block[self._inside - 1]

    def _compute(self) -> list[int]:
        """The next few rows."""
        stop = min(self._place + _BLOCK, self._end)
        return [int(row) for row in unroll(self._sampler.order, np.arange(self._place, stop))]

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, counting what it yielded."""
        return self._sampler.stamp(self._begun, self._place, self._end - self._begun)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where a saved pass stood."""
        self._go(*self._sampler.admit(state))
        if self._place >= self._end:
            # torchdata drops an iterator that is finished: the sampler must know the way.
            self._sampler.begin_next_pass_at(self._end)


def _make_order(name: str, seed: int, sizes: list[int], weights: Sequence[float] | None) -> Order:
    if weights is None:
        return make_order(name, sum(sizes), seed)
    if len(weights) != len(sizes):
        raise UsageError(f"{len(weights)} weights for {len(sizes)} datasets")
    # As people write it: 0.7 is 7/10, not the nearest binary number.
    return MixedOrder.of(Schedule(sizes, list(weights), "repeat"), name, seed)
