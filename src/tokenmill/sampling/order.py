"""Orders: which index stands at position p of epoch e.

An `Order` is a pure function (epoch, position) → index over ``rows`` indices per epoch; it keeps
no position, so any process can be asked for any part. `FeistelOrder` is the default: our own
keyed bijection, without memory. `SequentialOrder` is the identity. `MilesOrder` copies the eager
dataset of miles exactly, with its weaknesses (a whole permutation in memory, and seed + epoch as
the key, so that seed 42 in epoch 1 is seed 43 in epoch 0). `GroupedOrder` sorts any order by
length within windows, so that rows of one batch are about equally long and little is padded.

No global random generator is read or written here, and nothing depends on the version of one,
`miles` excepted: it is defined by Python's own ``random.shuffle``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.sampling.permutation import Int64Array, Permutation, derive_key

T = TypeVar("T")

LARGEST_SEED = (1 << 64) - 1

# What a key is for, absorbed beside seed and epoch: no two uses share a shuffle.
PURPOSE_ROWS = 1
PURPOSE_GROUPS = 2
PURPOSE_PACKS = 3
PURPOSE_VIEW = 4
PURPOSE_MISMATCH = 5


class Order(Protocol):
    """A pure function (epoch, position) → index."""

    @property
    def rows(self) -> int:
        """Positions per epoch."""

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        """The indices at many positions of one epoch."""

    def index(self, epoch: int, position: int) -> int:
        """The index at one position: the scalar twin."""


class Recent(Generic[T]):
    """Remembers the values of the last few keys: an epoch's key, a window's sorting.

    Two are enough for a stream (the end of one epoch beside the start of the next); it is a memo of
    pure functions, so forgetting is always right.
    """

    def __init__(self, make: Callable[..., T], keep: int = 2) -> None:
        self._make = make
        self._keep = keep
        self._values: dict[tuple[int, ...], T] = {}

    def __call__(self, *key: int) -> T:
        """The value of a key, remembered or made."""
        found = self._values.get(key)
        if found is None:
            found = self._make(*key)
            # Another thread may do the same at the same time; both compute the same value.
            kept = list(self._values.items())[-(self._keep - 1) :] if self._keep > 1 else []
            self._values = {**dict(kept), key: found}
        return found


def check_seed(seed: int) -> int:
    """Return a seed as a plain integer, refusing what could not be told apart later."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UsageError(f"seed must be a whole number, not {seed!r}")
    if not 0 <= int(seed) <= LARGEST_SEED:
        raise UsageError(f"seed must be between 0 and 2**64 - 1, not {seed}")
    return int(seed)


class SequentialOrder:
    """Every epoch in the order of the data."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return np.asarray(positions, dtype=np.int64)

    def index(self, epoch: int, position: int) -> int:
        return position


class FeistelOrder:
    """The default: a keyed bijection per epoch, O(1) in memory.

    Args:
        rows: Indices per epoch.
        seed: Of the run.
        stream: Tells sources of a mixture apart, so that two of one size are not shuffled alike.
    """

    def __init__(self, rows: int, seed: int, stream: int = 0) -> None:
        self.rows = rows
        self.seed = check_seed(seed)
        self.stream = stream
        self._permutation = Recent(self._make)

    def _make(self, epoch: int) -> Permutation:
        return Permutation(self.rows, derive_key(PURPOSE_ROWS, self.seed, epoch, self.stream))

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return self._permutation(epoch).indices(positions)

    def index(self, epoch: int, position: int) -> int:
        return self._permutation(epoch).index(position)


class MilesOrder:
    """The order of miles' eager dataset: ``random.seed(seed + epoch)``, then one shuffle.

    Args:
        rows: Indices per epoch; the whole permutation is held in memory (8 bytes per row).
        seed: Of the run.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.seed = check_seed(seed)
        self._permutation = Recent(self._make)

    def _make(self, epoch: int) -> Int64Array:
        permutation = list(range(self.rows))
        # A generator of our own gives the same sequence and leaves the global one alone.
        random.Random(self.seed + epoch).shuffle(permutation)
        return np.asarray(permutation, dtype=np.int64)

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return self._permutation(epoch)[np.asarray(positions, dtype=np.int64)]

    def index(self, epoch: int, position: int) -> int:
        return int(self._permutation(epoch)[position])


ORDERS = ("feistel", "miles", "sequential")
"""Orders that a name and a seed are enough for."""


def make_order(name: str, rows: int, seed: int, stream: int = 0) -> Order:
    """The order of a name; ``stream`` is for feistel, as in `FeistelOrder`."""
    if name == "feistel":
        return FeistelOrder(rows, seed, stream)
    if name == "miles":
        return MilesOrder(rows, seed)
    if name == "sequential":
        check_seed(seed)
        return SequentialOrder(rows)
    raise UsageError(f"order must be one of {', '.join(ORDERS)}, not {name!r}")


def unroll(order: Order, positions: Int64Array) -> Int64Array:
    """The indices at positions that count on through the epochs, one behind the other."""
    epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), order.rows)
    found = np.empty(epochs.shape, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        found[here] = order.indices(epoch, within[here])
    return found


class GroupedOrder:
    """Another order, sorted by length within windows.

    Each window of ``window`` positions is sorted by length and cut into groups of ``group`` rows,
    and the groups are shuffled: neighbours are alike, steps are not. Both numbers are fixed
    rather than taken from the batch size, so that the order stays the same function of the
    position when the batch size or the number of ranks changes.

    Args:
        base: The order to regroup.
        seed: Of the run, for the shuffle of groups.
        lengths_at: Token lengths of given indices.
        window: Positions that are sorted together.
        group: Rows that stay together; best a multiple of the global batch.
    """

    def __init__(
        self,
        base: Order,
        seed: int,
        lengths_at: Callable[[Int64Array], Int64Array],
        window: int = 8192,
        group: int = 64,
    ) -> None:
        if window < 1 or group < 1:
            raise UsageError(f"window and group must be positive, not {window} and {group}")
        self.base = base
        self.rows = base.rows
        self.seed = check_seed(seed)
        self.window = window
        self.group = group
        self._lengths_at = lengths_at
        self._sorted = Recent(self._make)

    def _make(self, epoch: int, number: int) -> Int64Array:
        start = number * self.window
        positions = np.arange(start, min(start + self.window, self.rows), dtype=np.int64)
        found = self.base.indices(epoch, positions)
        found = found[np.argsort(self._lengths_at(found), kind="stable")]
        groups = -(-found.size // self.group)
        key = derive_key(PURPOSE_GROUPS, self.seed, epoch, number)
        shuffled = Permutation(groups, key).indices(np.arange(groups))
        # Position → place in the sorted window: whole groups move, the short one keeps its size.
        places = (shuffled[:, None] * self.group + np.arange(self.group)).reshape(-1)
        grouped: Int64Array = found[places[places < found.size]]
        return grouped

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        positions = np.asarray(positions, dtype=np.int64)
        found = np.empty(positions.shape, dtype=np.int64)
        numbers = positions // self.window
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found[here] = self._sorted(epoch, number)[positions[here] - number * self.window]
        return found

    def index(self, epoch: int, position: int) -> int:
        number, place = divmod(position, self.window)
        return int(self._sorted(epoch, number)[place])
