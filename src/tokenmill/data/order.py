"""Orders: the index at position p of epoch e, as pure functions of the seed.

They do not use global random generators.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError, check_integer

T = TypeVar("T")

Int64Array = npt.NDArray[np.int64]

ORDER_VERSION = 1  # of the function (seed, epoch, position) → index; part of every saved state
LARGEST = 1 << 62  # halves then stay within 31 bits, so that no product leaves 64 bits
ROUNDS = 8  # measured: 6 pass the statistical tests for n ≥ 1,000
SMALL = 1 << 10  # below this, halves are so small that a round changes little
SMALL_ROUNDS = 24  # for small n: makes all n! orders about equally likely

# The first eight bytes of blake2b("tokenmill order 1: <name>"), made odd.
_MASK = (1 << 64) - 1
_MULTIPLY_1 = 0x6F53A8D048640915
_MULTIPLY_2 = 0x639626021F93BA7F
_ABSORB = 0x0FE2D9A1B076D8C3
_STEP = 0x3EE6675477E5BC01

_CHUNK = 1 << 14  # positions at a time, so that the working arrays fit into the L2 cache


def mix64(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 32)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 29)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 32)


def derive_key(*words: int) -> int:
    """Hash integers, one after the other, into a 64-bit key.

    Unlike ``seed + epoch``, (seed 42, epoch 1) and (seed 43, epoch 0) have unrelated keys.
    """
    key = _ABSORB
    for word in words:
        key = mix64(((key + _STEP) & _MASK) ^ mix64(word ^ _ABSORB))
    return key


class Permutation:
    """A bijection of ``range(n)`` that a 64-bit key selects, in O(1) memory.

    It is a *generalised Feistel network* over Z_a × Z_b with a = ⌈√n⌉ and b = ⌈n/a⌉: a position is
    split into (left, right), and the halves alternate in adding, modulo their size, a hash
    (multiply, xorshift, multiply) of the other half. Every round is invertible for any hash, so the
    network is a bijection of range(a·b). It is applied again to results ≥ n (*cycle walking*). A
    network on bits has a power of two as its domain, where up to half of all positions repeat;
    here fewer than one in √n do. It is a shuffle, not a cipher.
    """

    __slots__ = ("_left", "_right", "_round_keys", "_table", "n")

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= LARGEST:
            raise UsageError(f"an order must have 0 to 2**62 indices, got {n}")
        self.n = n
        self._left = math.isqrt(n - 1) + 1 if n else 1
        self._right = -(-n // self._left) if n else 1
        rounds = ROUNDS if n >= SMALL else SMALL_ROUNDS
        self._round_keys = [derive_key(key, n, number) for number in range(rounds)]
        self._table: Int64Array | None = None

    def indices(self, positions: npt.ArrayLike) -> Int64Array:
        array = np.asarray(positions, dtype=np.int64)
        flat = array.reshape(-1)
        if flat.size and not (int(flat.min()) >= 0 and int(flat.max()) < self.n):
            raise IndexError(f"positions {flat.min()}..{flat.max()} are out of range({self.n})")
        if self.n < SMALL:
            return self._looked_up(flat).reshape(array.shape)
        indices = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, flat.size, _CHUNK):
            indices[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK])
        return indices.reshape(array.shape)

    def _looked_up(self, positions: Int64Array) -> Int64Array:
        # Computing all indices of a small order takes no longer than computing one.
        if self._table is None:
            moved = self._apply_many(np.arange(self._left * self._right, dtype=np.uint64))
            indices = moved[: self.n]  # a view; later values do not change
            while (beyond := indices >= self.n).any():
                indices[beyond] = moved[indices[beyond]]
            self._table = indices.astype(np.int64)
        return self._table[positions]

    def _walk(self, positions: Int64Array) -> Int64Array:
        indices = self._apply_many(positions.astype(np.uint64))
        beyond = np.flatnonzero(indices >= self.n)
        while beyond.size:
            indices[beyond] = self._apply_many(indices[beyond])
            beyond = beyond[indices[beyond] >= self.n]
        return indices.astype(np.int64)

    def _apply_many(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left_size, right_size = np.uint64(self._left), np.uint64(self._right)
        left = positions // right_size
        right = positions - left * right_size
        work = np.empty_like(left)
        shifted = np.empty_like(left)
        for number, round_key in enumerate(self._round_keys):
            if number % 2 == 0:
                _move(left, right, round_key, left_size, work, shifted)
            else:
                _move(right, left, round_key, right_size, work, shifted)
        left *= right_size
        left += right
        return left


def _move(moved: Any, other: Any, round_key: int, size: Any, work: Any, shifted: Any) -> None:
    """One round in place: ``moved = (moved + hash(other)) mod size``."""
    shift = np.uint64(32)
    np.bitwise_xor(other, np.uint64(round_key), out=work)
    np.multiply(work, np.uint64(_MULTIPLY_1), out=work)
    np.right_shift(work, shift, out=shifted)
    np.bitwise_xor(work, shifted, out=work)
    np.multiply(work, np.uint64(_MULTIPLY_2), out=work)
    np.right_shift(work, shift, out=work)
    np.multiply(work, size, out=work)
    np.right_shift(work, shift, out=work)
    np.add(moved, work, out=moved)
    # Both summands are below size, so one conditional subtraction computes the modulo.
    np.subtract(moved, size, out=work)
    np.minimum(moved, work, out=moved)  # unsigned: a negative difference wraps to a huge number


LARGEST_SEED = (1 << 64) - 1

# Purpose of a key, hashed with seed and epoch, so that no two uses share a shuffle.
PURPOSE_ROWS = 1
PURPOSE_GROUPS = 2
PURPOSE_PACKS = 3
PURPOSE_VIEW = 4
PURPOSE_MISMATCH = 5
PURPOSE_REPLACEMENT = 6


class Order(abc.ABC):
    """A pure function (epoch, position) → index, over ``rows`` positions per epoch."""

    rows: int

    @abc.abstractmethod
    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Return the indices at positions of one epoch."""


class Recent(Generic[T]):
    """Cache the last two values of a pure function, such as two windows of a stream."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[tuple[int, ...], T] = {}

    def __call__(self, *key: int) -> T:
        value = self._values.get(key)
        if value is None:
            value = self._make(*key)
            # Another thread may compute the same value at the same time.
            self._values = {**dict(list(self._values.items())[-1:]), key: value}
        return value


def check_seed(seed: int) -> int:
    return check_integer("seed", seed, 0, LARGEST_SEED)


class SequentialOrder(Order):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return np.asarray(positions, dtype=np.int64)


class FeistelOrder(Order):
    """The default order: a keyed bijection per epoch, in O(1) memory.

    ``stream`` gives two sources of a mixture different orders, also if their sizes are equal.
    """

    def __init__(self, rows: int, seed: int, stream: int = 0) -> None:
        self.rows = rows
        self._seed = check_seed(seed)
        self._stream = stream
        self._permutation = Recent(self._make)

    def _make(self, epoch: int) -> Permutation:
        return Permutation(self.rows, derive_key(PURPOSE_ROWS, self._seed, epoch, self._stream))

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return self._permutation(epoch).indices(positions)


ORDERS = ("feistel", "sequential")


def make_order(name: str, rows: int, seed: int, stream: int = 0) -> Order:
    if name == "feistel":
        return FeistelOrder(rows, seed, stream)
    if name == "sequential":
        check_seed(seed)
        return SequentialOrder(rows)
    raise UsageError(f"order must be one of {', '.join(ORDERS)}, got {name!r}")


def unroll(order: Order, positions: Int64Array) -> Int64Array:
    """Return the indices at positions that are counted over all epochs."""
    epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), order.rows)
    indices = np.empty(epochs.shape, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        indices[here] = order.indices(epoch, within[here])
    return indices


class GroupedOrder(Order):
    """Another order, sorted by length within windows.

    Each window of ``window`` positions is sorted by length and divided into groups of ``group``
    rows, which are shuffled. So lengths are similar inside a group, and vary between groups. Both
    numbers do not depend on batch size or ranks, so neither does the order.
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
            raise UsageError(f"window and group must be positive, got {window} and {group}")
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
        indices = self.base.indices(epoch, positions)
        indices = indices[np.argsort(self._lengths_at(indices), kind="stable")]
        groups = -(-indices.size // self.group)
        key = derive_key(PURPOSE_GROUPS, self.seed, epoch, number)
        shuffled = Permutation(groups, key).indices(np.arange(groups))
        # Indices into the sorted window; the last group may be short.
        sources = (shuffled[:, None] * self.group + np.arange(self.group)).reshape(-1)
        grouped: Int64Array = indices[sources[sources < indices.size]]
        return grouped

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        positions = np.asarray(positions, dtype=np.int64)
        indices = np.empty(positions.shape, dtype=np.int64)
        numbers = positions // self.window
        for number in np.unique(numbers).tolist():
            here = numbers == number
            indices[here] = self._sorted(epoch, number)[positions[here] - number * self.window]
        return indices
