"""The two ways to choose rows: by an expression, and by content into sides.

`filtered` keeps the rows for which a `Where` holds. `split` cuts a view into named sides by the
digest of each row's own bytes: every row has a fixed point in [0, 1) that depends on its bytes
and the seed alone, and a side is an interval. So a row stays on its side when others come or go,
equal rows never lie on two sides (no leak from train into validation), and all turns of one
conversation (``expand="turns"``) lie together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.selection import KeptView
from tokenmill.dataset.view import View, as_view
from tokenmill.dataset.where import Where
from tokenmill.errors import UsageError
from tokenmill.store import Store

SPLIT_VERSION = 1
"""Version of the function (digest, seed) → point; part of every split's key."""

_MASK = (1 << 64) - 1
# blake2b("tokenmill split 1: <name>"), first eight bytes, made odd.
_MULTIPLY_1 = 0xF85049EB81CF5355
_MULTIPLY_2 = 0xCB3DB1425C951879


class _Filter:
    """Rows for which an expression holds."""

    def __init__(self, text: str) -> None:
        self._where = Where(text)

    def __reduce__(self) -> Any:
        return _Filter, (self._where.text,)

    @property
    def columns(self) -> list[str]:
        return self._where.columns

    def document(self, parent: View) -> Any:
        document: dict[str, Any] = {"where": self._where.text}
        if self._where.uses_source:
            # Only then does the answer depend on what the files are called.
            document["sources"] = [list(store.sources) for store in parent.stores]
        return document

    def __call__(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        return self._where(columns)


class _Side:
    """Rows whose point lies in an interval of [0, 2**64)."""

    def __init__(self, seed: int, start: int, stop: int) -> None:
        self._seed, self._start, self._stop = seed, start, stop

    @property
    def columns(self) -> list[str]:
        return ["digest"]

    def document(self, parent: View) -> Any:
        # Strings: not every reader of JSON keeps 64 bits.
        interval = [str(self._start), str(self._stop)]
        return {"split": SPLIT_VERSION, "seed": self._seed, "points": interval}

    def __call__(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        points = split_points(columns["digest"], self._seed)
        kept = points >= np.uint64(self._start)
        if self._stop <= _MASK:
            kept &= points < np.uint64(self._stop)
        return kept


def split_points(digests: npt.ArrayLike, seed: int) -> npt.NDArray[np.uint64]:
    """The fixed point of every row in [0, 2**64)."""
    points = np.array(digests, dtype=np.uint64)
    points ^= np.uint64((seed * _MULTIPLY_2 + _MULTIPLY_1) & _MASK)
    for multiplier in (_MULTIPLY_1, _MULTIPLY_2):
        points ^= points >> np.uint64(32)
        points *= np.uint64(multiplier)
    points ^= points >> np.uint64(32)
    return points


def filtered(data: Store | View, where: str) -> View:
    """The rows for which an expression holds, without copying them.

    Args:
        data: A store or a view.
        where: For example ``"length < 4096 and carried.lang == 'en'"``.
    """
    return KeptView(as_view(data), _Filter(where))


def split(data: Store | View, parts: Mapping[str, float], *, seed: int = 0) -> tuple[View, ...]:
    """Cut rows into sides by content.

    Args:
        data: A store or a view.
        parts: Share of every side, in order; together 1.
        seed: Another seed, another cut.

    Returns:
        One view per side, in the mapping's order.
    """
    view = as_view(data)
    if not isinstance(parts, Mapping) or not parts:
        raise UsageError("split wants shares by name, such as {'train': 0.98, 'val': 0.02}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MASK:
        raise UsageError(f"seed must be a whole number between 0 and 2**64 - 1, not {seed!r}")
    shares = []
    for name, share in parts.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise UsageError(f"the share of {name!r} must lie between 0 and 1, not {share!r}")
        shares.append(Fraction(repr(share)))
    if not math.isclose(float(sum(shares)), 1.0, abs_tol=1e-9):
        raise UsageError(f"the shares add up to {float(sum(shares))}, not to 1")
    edges = [int(sum(shares[:number]) * (1 << 64)) for number in range(len(shares))]
    edges.append(1 << 64)  # whatever rounding the shares carry
    return tuple(KeptView(view, _Side(seed, start, stop)) for start, stop in pairwise(edges))
