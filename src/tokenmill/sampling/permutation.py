"""A keyed bijection of ``range(n)`` that needs no memory.

A `Permutation` answers "which index stands at position p" for one key. It is a *generalised
Feistel network* over Z_a × Z_b with a = ⌈√n⌉ and b = ⌈n/a⌉: a position is split into (left,
right), and in turn each half is moved, modulo its own size, by a hash of the other half. Every
round can be undone whatever the hash is, so the whole is a bijection of range(a·b); the fewer
than a values beyond n are walked over (apply again until the value is below n: *cycle walking*).
A small order (below `SMALL`) is computed whole when it is first asked for, and kept: 8 KB at most.

Why not the usual network on bits: its domain is a power of two, so up to half of all positions
(three quarters with equal halves) must walk; here fewer than one in √n do, for any n.

The hash is a multiply–xorshift–multiply of the half and a round key, with constants of our own
(the first eight bytes of ``blake2b("tokenmill order 1: <name>")``, made odd). Scalar Python
integers and numpy's uint64 compute the same thing; golden vectors hold both to it. It is a
shuffle, not a cipher.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError

Int64Array = npt.NDArray[np.int64]

ORDER_VERSION = 1
"""Version of the function (seed, epoch, position) → index; part of every saved state."""

LARGEST = 1 << 62  # halves then stay within 31 bits, so that no product leaves 64 bits
ROUNDS = 8  # measured: 6 already pass the statistics of the tests for n ≥ 1,000
SMALL = 1 << 10  # below this, halves are so small that a round moves little:
SMALL_ROUNDS = 24  # then more rounds make every one of the n! orders about equally likely

_MASK = (1 << 64) - 1
_MULTIPLY_1 = 0x6F53A8D048640915
_MULTIPLY_2 = 0x639626021F93BA7F
_ABSORB = 0x0FE2D9A1B076D8C3
_STEP = 0x3EE6675477E5BC01

_CHUNK = 1 << 14  # positions at a time: the working arrays stay in a core's own cache


def mix64(value: int) -> int:
    """A bijective finaliser of 64 bits: every input bit moves every output bit."""
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
    """The bijection of ``range(n)`` that belongs to a key.

    Args:
        n: How many indices there are, up to 2**62.
        key: 64 bits, usually from `derive_key`.
    """

    __slots__ = ("_left", "_right", "_round_keys", "_whole", "key", "n")

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= LARGEST:
            raise UsageError(f"an order has between 0 and 2**62 indices, not {n}")
        self.n = n
        self.key = key
        self._left = math.isqrt(n - 1) + 1 if n else 1
        self._right = -(-n // self._left) if n else 1
        rounds = ROUNDS if n >= SMALL else SMALL_ROUNDS
        self._round_keys = [derive_key(key, n, number) for number in range(rounds)]
        self._whole: Int64Array | None = None

    def index(self, position: int) -> int:
        """The index at one position: the scalar twin of `indices`."""
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of an order of {self.n}")
        while True:
            position = self._apply(position)
            if position < self.n:
                return position

    def _apply(self, position: int) -> int:
        left, right = divmod(position, self._right)
        for number, round_key in enumerate(self._round_keys):
            if number % 2 == 0:
                left = (left + _spread(right, round_key, self._left)) % self._left
            else:
                right = (right + _spread(left, round_key, self._right)) % self._right
        return left * self._right + right

    def indices(self, positions: npt.ArrayLike) -> Int64Array:
        """The indices at many positions: the vectorised twin of `index`."""
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
            found = moved[: self.n]  # a view: what stands beyond it stays as it is
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


def _spread(half: int, round_key: int, size: int) -> int:
    """Hash one half into ``range(size)``."""
    value = ((half ^ round_key) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 32)) * _MULTIPLY_2) & _MASK
    return ((value >> 32) * size) >> 32


def _move(moved: Any, other: Any, round_key: int, size: Any, work: Any, carry: Any) -> None:
    """One round in place: ``moved = (moved + spread(other)) mod size``."""
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
