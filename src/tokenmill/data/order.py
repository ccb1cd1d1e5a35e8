"""Orders: which index is at position p of epoch e, as pure functions of the seed.

No global random generator is read or written.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError

T = TypeVar("T")

Int64Array = npt.NDArray[np.int64]

ORDER_VERSION = 1  # of the function (seed, epoch, position) → index; part of every saved state
LARGEST = 1 << 62  # halves then stay within 31 bits, so that no product leaves 64 bits
ROUNDS = 8  # measured: 6 already pass the statistics of the tests for n ≥ 1,000
SMALL = 1 << 10  # below this, halves are so small that a round moves little:
SMALL_ROUNDS = 24  # then more rounds make every one of the n! orders about equally likely

# The first eight bytes of blake2b("tokenmill order 1: <name>"), made odd.
_MASK = (1 << 64) - 1
_MULTIPLY_1 = 0x6F53A8D048640915
_MULTIPLY_2 = 0x639626021F93BA7F
_ABSORB = 0x0FE2D9A1B076D8C3
_STEP = 0x3EE6675477E5BC01

_CHUNK = 1 << 14  # positions at a time: the working arrays stay in a core's own cache


def mix64(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 32)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 29)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 32)


def derive_key(*words: int) -> int:
    """Absorb whole numbers, one after the other, into a 64-bit key.

    Each word is mixed before the next comes, so (seed 42, epoch 1) and (seed 43, epoch 0) share
    nothing, unlike in ``seed + epoch``.
    """
    key = _ABSORB
    for word in words:
        key = mix64(((key + _STEP) & _MASK) ^ mix64(word ^ _ABSORB))
    return key


class Permutation:
    """The bijection of ``range(n)`` that belongs to a 64-bit key, without memory.

    It is a *generalised Feistel network* over Z_a × Z_b with a = ⌈√n⌉ and b = ⌈n/a⌉: a position is
    split into (left, right), and in turn each half is moved, modulo its own size, by a hash
    (multiply, xorshift, multiply) of the other half. Every round can be undone whatever the hash
    is, so the whole is a bijection of range(a·b); the fewer than a values beyond n are walked over
    (apply again until the value is below n: *cycle walking*). A network on bits would have a power
    of two as its domain, so up to half of all positions would walk; here fewer than one in √n do.
    It is a shuffle, not a cipher.
    """

    __slots__ = ("_left", "_right", "_round_keys", "_whole", "n")

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= LARGEST:
            raise UsageError(f"an order has between 0 and 2**62 indices, not {n}")
        self.n = n
        self._left = math.isqrt(n - 1) + 1 if n else 1
        self._right = -(-n // self._left) if n else 1
        rounds = ROUNDS if n >= SMALL else SMALL_ROUNDS
        self._round_keys = [derive_key(key, n, number) for number in range(rounds)]
        self._whole: Int64Array | None = None

    def indices(self, positions: npt.ArrayLike) -> Int64Array:
        given = np.asarray(positions, dtype=np.int64)
        flat = given.reshape(-1)
        if flat.size and not (int(flat.min()) >= 0 and int(flat.max()) < self.n):
            raise IndexError(f"positions {flat.min()}..{flat.max()} of an order of {self.n}")
        if self.n < SMALL:
            return self._looked_up(flat).reshape(given.shape)
        found = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, flat.size, _CHUNK):
            found[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK])
        return found.reshape(given.shape)

    def _looked_up(self, positions: Int64Array) -> Int64Array:
        """Of a small order all indices are computed at once: that takes no longer than for one."""
        if self._whole is None:
            moved = self._apply_many(np.arange(self._left * self._right, dtype=np.uint64))
            found = moved[: self.n]  # a view: values beyond it do not change
            while (beyond := found >= self.n).any():
                found[beyond] = moved[found[beyond]]
            self._whole = found.astype(np.int64)
        return self._whole[positions]

    def _walk(self, positions: Int64Array) -> Int64Array:
        found = self._apply_many(positions.astype(np.uint64))
        beyond = np.flatnonzero(found >= self.n)
        while beyond.size:
            found[beyond] = self._apply_many(found[beyond])
            beyond = beyond[found[beyond] >= self.n]
        return found.astype(np.int64)

    def _apply_many(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left_size, right_size = np.uint64(self._left), np.uint64(self._right)
        left = positions // right_size
        right = positions - left * right_size
        work = np.empty_like(left)
        carry = np.empty_like(left)
        for number, round_key in enumerate(self._round_keys):
            if number % 2 == 0:
                _move(left, right, round_key, left_size, work, carry)
            else:
                _move(right, left, round_key, right_size, work, carry)
        left *= right_size
        left += right
        return left


def _move(moved: Any, other: Any, round_key: int, size: Any, work: Any, carry: Any) -> None:
    """One round in place: ``moved = (moved + hash(other)) mod size``."""
    shift = np.uint64(32)
    np.bitwise_xor(other, np.uint64(round_key), out=work)
    np.multiply(work, np.uint64(_MULTIPLY_1), out=work)
    np.right_shift(work, shift, out=carry)
    np.bitwise_xor(work, carry, out=work)
    np.multiply(work, np.uint64(_MULTIPLY_2), out=work)
    np.right_shift(work, shift, out=work)
    np.multiply(work, size, out=work)
    np.right_shift(work, shift, out=work)
    np.add(moved, work, out=moved)
    # Both summands are below size: one conditional subtraction is the whole modulo.
    np.subtract(moved, size, out=work)
    np.minimum(moved, work, out=moved)  # unsigned: a negative difference wraps to a huge number


LARGEST_SEED = (1 << 64) - 1

# What a key is for, absorbed beside seed and epoch: no two uses share a shuffle.
PURPOSE_ROWS = 1
PURPOSE_GROUPS = 2
PURPOSE_PACKS = 3
PURPOSE_VIEW = 4
PURPOSE_MISMATCH = 5


class Order(abc.ABC):
    """A pure function (epoch, position) → index, over ``rows`` positions per epoch."""

    rows: int

    @abc.abstractmethod
    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        """The indices at many positions of one epoch."""


class Recent(Generic[T]):
    """Caches the last two values of a pure function: two epochs, or two windows, of a stream."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[tuple[int, ...], T] = {}

    def __call__(self, *key: int) -> T:
        found = self._values.get(key)
        if found is None:
            found = self._make(*key)
            # Another thread may do the same at the same time; both compute the same value.
            self._values = {**dict(list(self._values.items())[-1:]), key: found}
        return found


def check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UsageError(f"seed must be a whole number, not {seed!r}")
    if not 0 <= int(seed) <= LARGEST_SEED:
        raise UsageError(f"seed must be between 0 and 2**64 - 1, not {seed}")
    return int(seed)


class SequentialOrder(Order):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return np.asarray(positions, dtype=np.int64)


class FeistelOrder(Order):
    """The default: a keyed bijection per epoch, O(1) in memory.

    ``stream`` separates the sources of a mixture: two of one size are not shuffled alike.
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


ORDERS = ("feistel", "sequential")  # for which a name and a seed are enough


def make_order(name: str, rows: int, seed: int, stream: int = 0) -> Order:
    if name == "feistel":
        return FeistelOrder(rows, seed, stream)
    if name == "sequential":
        check_seed(seed)
        return SequentialOrder(rows)
    raise UsageError(f"order must be one of {', '.join(ORDERS)}, not {name!r}")


def unroll(order: Order, positions: Int64Array) -> Int64Array:
    """The indices at positions that count on through the epochs."""
    epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), order.rows)
    found = np.empty(epochs.shape, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        found[here] = order.indices(epoch, within[here])
    return found


class GroupedOrder(Order):
    """Another order, sorted by length within windows.

    Each window of ``window`` positions is sorted by length and cut into groups of ``group`` rows,
    and the groups are shuffled: neighbours are alike, steps are not. Both numbers are fixed
    rather than taken from the batch size, so that the order stays the same function of the
    position when the batch size or the number of ranks changes.
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
