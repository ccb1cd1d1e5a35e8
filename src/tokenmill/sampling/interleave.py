"""Interleaving sources by weight, computed from the position.

An `Interleave` answers "which source is drawn at position p, and how often was it drawn before",
without having walked there. Sources are the leaves of a binary tree. At a node with left
share num/den, the first p draws hold exactly ⌊(p·num + den/2) / den⌋ of the left side (a Beatty
sequence): position p is a left draw when that count rises there, and the count before it is the
position within the left side. So a draw costs one step per level of the tree, in exact integers.

The shares are exact: with weights 0.7 and 0.3 every ten consecutive positions from a multiple of
ten hold seven and three. At any position a source is at most one draw per level of the tree away
from its share. `Fraction`s come from the decimal form of the weights, so 0.7 means 7/10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.sampling.permutation import Int64Array

LARGEST_DENOMINATOR = (1 << 31) - 1  # a remainder times a numerator then stays within 62 bits


def as_fraction(weight: float | int | Fraction) -> Fraction:
    """A weight as people write it: 0.7 is 7/10, not the nearest binary number."""
    try:
        return weight if isinstance(weight, Fraction) else Fraction(repr(weight))
    except (ValueError, TypeError) as error:
        raise UsageError(f"a weight must be a number, not {weight!r}") from error


@dataclass(frozen=True)
class _Node:
    """A side of the tree: a leaf when it holds one source."""

    first: int
    numerator: int = 0
    denominator: int = 1
    left: _Node | None = None
    right: _Node | None = None

    def left_before(self, position: int) -> int:
        return (position * self.numerator + self.denominator // 2) // self.denominator

    def left_before_many(self, positions: Int64Array) -> Int64Array:
        whole, rest = np.divmod(positions, self.denominator)
        part = (rest * self.numerator + self.denominator // 2) // self.denominator
        counts: Int64Array = whole * self.numerator + part
        return counts


class Interleave:
    """Draws from sources in exact proportion to their rates.

    Args:
        rates: Draws per source, relative to each other; all positive.
    """

    def __init__(self, rates: Sequence[Fraction | float | int]) -> None:
        fractions = [as_fraction(rate) for rate in rates]
        if not fractions or any(rate <= 0 for rate in fractions):
            raise UsageError(f"weights must be positive, not {[float(f) for f in fractions]}")
        self.sources = len(fractions)
        self._tree = _grow(fractions, 0, len(fractions))

    def draw(self, position: int) -> tuple[int, int]:
        """Source at a position, and how often it was drawn before: the scalar twin of `draws`."""
        node = self._tree
        while True:
            left, right = node.left, node.right
            if left is None or right is None:
                return node.first, position
            before = node.left_before(position)
            if node.left_before(position + 1) > before:
                node, position = left, before
            else:
                node, position = right, position - before

    def draws(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Sources at many positions, and how often each was drawn before."""
        positions = np.asarray(positions, dtype=np.int64)
        sources = np.empty(positions.shape, dtype=np.int64)
        before = np.empty(positions.shape, dtype=np.int64)
        waiting = [(self._tree, np.arange(positions.size), positions)]
        while waiting:
            node, places, within = waiting.pop()
            if node.left is None or node.right is None:
                sources[places] = node.first
                before[places] = within
                continue
            counts = node.left_before_many(within)
            is_left = node.left_before_many(within + 1) > counts
            is_right = ~is_left
            waiting.append((node.left, places[is_left], counts[is_left]))
            waiting.append((node.right, places[is_right], (within - counts)[is_right]))
        return sources, before

    def counts(self, position: int) -> list[int]:
        """How often each source is drawn in the first ``position`` draws."""
        counts = [0] * self.sources
        waiting = [(self._tree, position)]
        while waiting:
            node, within = waiting.pop()
            if node.left is None or node.right is None:
                counts[node.first] = within
                continue
            before = node.left_before(within)
            waiting.append((node.left, before))
            waiting.append((node.right, within - before))
        return counts


def _grow(rates: list[Fraction], first: int, stop: int) -> _Node:
    if stop - first == 1:
        return _Node(first)
    middle = (first + stop) // 2
    left, total = sum(rates[first:middle]), sum(rates[first:stop])
    share = Fraction(left, total).limit_denominator(LARGEST_DENOMINATOR)
    return _Node(
        first,
        share.numerator,
        share.denominator,
        _grow(rates, first, middle),
        _grow(rates, middle, stop),
    )
