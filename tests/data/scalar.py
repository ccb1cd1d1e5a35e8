"""The order and the interleave, one position at a time in Python's integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tokenmill.data import order


def permuted(n: int, key: int, position: int) -> int:
    """The index of `Permutation(n, key)` at a position."""
    sizes = [math.isqrt(n - 1) + 1, 0]
    sizes[1] = -(-n // sizes[0])
    while True:
        halves = list(divmod(position, sizes[1]))
        for number in range(order.ROUNDS if n >= order.SMALL else order.SMALL_ROUNDS):
            moved, other = number % 2, 1 - number % 2
            value = halves[other] ^ order.derive_key(key, n, number)
            value = (value * order._MULTIPLY_1) & order._MASK
            value = ((value ^ (value >> 32)) * order._MULTIPLY_2) & order._MASK
            halves[moved] = (halves[moved] + ((value >> 32) * sizes[moved] >> 32)) % sizes[moved]
        position = halves[0] * sizes[1] + halves[1]
        if position < n:
            return position


def drawn(rates: Sequence[float | Fraction], position: int) -> tuple[int, int]:
    """Source at a position of an `Interleave`, and how often it was drawn before."""
    exact = [Fraction(repr(rate)) if isinstance(rate, float) else Fraction(rate) for rate in rates]
    first, stop = 0, len(exact)
    while stop - first > 1:
        middle = (first + stop) // 2
        share = Fraction(sum(exact[first:middle]), sum(exact[first:stop]))
        share = share.limit_denominator(2**31 - 1)
        half = share.denominator // 2
        before, after = (
            (p * share.numerator + half) // share.denominator for p in (position, position + 1)
        )
        if after > before:
            stop, position = middle, before
        else:
            first, position = middle, position - before
    return first, position
