"""Our order for SkyRL's ``sampler_class_path``.

SkyRL makes a custom sampler as ``ClassName(tokenized, **sampler_kwargs)``, adds ``lengths`` (rows
per source) where several datasets are trained on, and iterates over it inside torchdata's
`StatefulDataLoader`, one pass after the other. `Sampler` yields one endless stream of row numbers:
epoch after epoch of our order, or, with ``weights``, an interleave of the sources in those shares.
A pass is ``num_samples`` positions of it, by default as many as there are rows; the next pass
continues where the last one ended, so a resume is exact in this and in all later epochs.

The state counts what the current pass yielded. torchdata stores it with each batch and may drop an
iterator that was already finished; therefore a finished pass moves the sampler to the next one.
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
        self._loaded: SamplerPass | None = None  # a pass that the next iterator continues
        self._current: SamplerPass | None = None

    def __len__(self) -> int:
        """Positions of one pass."""
        return self.num_samples

    def __iter__(self) -> SamplerPass:
        new = SamplerPass(self, self._next, self._next, self.num_samples)
        self._current, self._loaded = self._loaded or new, None
        return self._current

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the pass of this number."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise UsageError(f"epoch must be a non-negative integer, got {epoch!r}")
        self._next, self._current, self._loaded = epoch * self.num_samples, None, None

    def begin_next_pass_at(self, position: int) -> None:
        self._next = position

    def state_dict(self) -> dict[str, Any]:
        """The position of the current pass; between passes, the start of the next."""
        current = self._current or self._loaded
        if current is not None and not current.ended:
            return current.state_dict()
        return self.save(self._next, self._next, self.num_samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved pass with the next ``iter``."""
        begun, position, length = self.load(state)
        self._next, self._current = begun, None
        self._loaded = SamplerPass(self, begun, position, length)

    def save(self, begun: int, position: int, length: int) -> dict[str, Any]:
        """The state of a pass."""
        cursor = Cursor(*divmod(position, self.order.rows))
        state = self._spec.save(cursor, begun // self.order.rows)
        return {**state, _BEGUN: begun, _LENGTH: length}

    def load(self, state: Any) -> tuple[int, int, int]:
        """Start, position and length of a saved pass.

        Raises:
            StateError: The state belongs to other data, another seed, order or version.
        """
        cursor, _ = self._spec.load(state)
        position = cursor.epoch * self.order.rows + cursor.position
        numbers = [state.get(_BEGUN), state.get(_LENGTH)]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise StateError("not a state of this sampler: it does not say where it began")
            if max(number, position) > LARGEST:
                raise StateError(f"the state's position is {max(number, position)}: too large")
        begun, length = numbers
        if not begun <= position <= begun + length:
            raise StateError(f"the state's pass began at {begun}, but its position is {position}")
        return begun, position, length


class SamplerPass(Iterator[int]):
    """One pass from ``begun``, at ``position``; stateful in torchdata's sense."""

    def __init__(self, sampler: Sampler, begun: int, position: int, length: int) -> None:
        self._sampler = sampler
        self._go(begun, position, length)

    def _go(self, begun: int, position: int, length: int) -> None:
        self._begun, self._position, self._end = begun, position, begun + length
        self._block: list[int] = []
        self._inside = 0
        self.ended = False

    def __next__(self) -> int:
        if self._position >= self._end:
            if not self.ended:
                self.ended = True
                self._sampler.begin_next_pass_at(self._end)
            raise StopIteration
        if self._inside == len(self._block):
            positions = np.arange(self._position, min(self._position + _BLOCK, self._end))
            self._block, self._inside = unroll(self._sampler.order, positions).tolist(), 0
        self._inside += 1
        self._position += 1
        return self._block[self._inside - 1]

    def state_dict(self) -> dict[str, Any]:
        """The position of this pass, counting what it yielded."""
        return self._sampler.save(self._begun, self._position, self._end - self._begun)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self._go(*self._sampler.load(state))
        if self._position >= self._end:
            self._sampler.begin_next_pass_at(self._end)  # torchdata drops a finished iterator


def _make_order(name: str, seed: int, sizes: list[int], weights: Sequence[float] | None) -> Order:
    if weights is None:
        return make_order(name, sum(sizes), seed)
    if len(weights) != len(sizes):
        raise UsageError(f"{len(weights)} weights for {len(sizes)} datasets")
    return MixedOrder.of(Schedule(sizes, list(weights), "repeat"), name, seed)
