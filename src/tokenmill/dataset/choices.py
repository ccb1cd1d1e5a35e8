"""The ways to choose rows: by expression or function, by number, by content into sides.

`filtered` keeps the rows for which a `Where` or a function over columns holds, `select` those that
are named by number, `shuffle` all of them in another order. `split` cuts a view into sides by the
digest of each row's own bytes: every row has a fixed point in [0, 1) that depends on its bytes
and the seed alone, and a side is an interval. So a row stays on its side when others come or go,
equal rows never lie on two sides (no leak from train into validation), and all turns of one
conversation (``expand="turns"``) lie together.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.dataset.selection import KeptView
from tokenmill.dataset.view import ShuffledView, View, as_view
from tokenmill.dataset.where import NAMES, NamedColumns, Where, names_in
from tokenmill.errors import CacheError, UsageError
from tokenmill.sampling import PURPOSE_VIEW, Int64Array, Permutation, check_seed, derive_key
from tokenmill.store import Store
from tokenmill.store.sidecars import column_of

SPLIT_VERSION = 1
"""Version of the function (digest, seed) → point; part of every split's key."""

_MASK = (1 << 64) - 1
# blake2b("tokenmill split 1: <name>"), first eight bytes, made odd.
_MULTIPLY_1 = 0xF85049EB81CF5355
_MULTIPLY_2 = 0xCB3DB1425C951879


class _ByColumns(abc.ABC):
    """A choice that looks at columns, row by row."""

    ascending = True

    @property
    @abc.abstractmethod
    def columns(self) -> list[str]:
        """The columns it looks at."""

    @abc.abstractmethod
    def holds(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        """Which rows are chosen."""

    def numbers(self, parent: View) -> Iterator[Int64Array]:
        """The rows for which it holds, in the view's order; of groups, where it holds for all."""
        if parent.has_groups:
            found = self._whole_groups(parent)
        else:
            chunks = parent.columns(self.columns)
            found = (numbers[self.holds(columns)] for numbers, columns in chunks)
        return found if parent.in_order else iter([np.sort(_joined(found))])

    def _whole_groups(self, parent: View) -> Iterator[Int64Array]:
        for numbers, columns in parent.columns([*self.columns, "part"]):
            # A stretch of a store's rows has whole groups; in the view's order each is in one
            # piece, from its part 0 on, also where it is there twice.
            order = np.argsort(numbers, kind="stable")
            part = columns.pop("part")[order]
            firsts = np.flatnonzero(part == 0)
            held = np.logical_and.reduceat(self.holds(columns)[order], firsts)
            yield numbers[order][np.repeat(held, np.diff(np.append(firsts, part.size)))]


class _Filter(_ByColumns):
    """Rows for which an expression holds."""

    def __init__(self, text: str, sidecars: Mapping[str, str]) -> None:
        self._where = Where(text, sidecars)
        self._sidecars = dict(sidecars)

    def __reduce__(self) -> Any:
        return _Filter, (self._where.text, self._sidecars)

    @property
    def columns(self) -> list[str]:
        return self._where.columns

    def document(self, parent: View) -> Any:
        document: dict[str, Any] = {"where": self._where.text}
        if self._where.uses_source:
            # Only then does the answer depend on what the files are called.
            document["sources"] = [list(store.sources) for store in parent.stores]
        if self._sidecars:
            document["sidecars"] = sorted(self._sidecars.values())
        return document

    def holds(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        return self._where(columns)


class _Side(_ByColumns):
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

    def holds(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        points = split_points(columns["digest"], self._seed)
        kept = points >= np.uint64(self._start)
        if self._stop <= _MASK:
            kept &= points < np.uint64(self._stop)
        return kept


class _Function(_ByColumns):
    """Rows for which somebody's function holds; it has no name, so `_ByNumber` take its answer."""

    def __init__(
        self, function: Callable[..., Any], columns: Sequence[str], sidecars: Mapping[str, str]
    ) -> None:
        self._function = function
        self._named = NamedColumns(columns, sidecars)

    @property
    def columns(self) -> list[str]:
        return self._named.stored

    def holds(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        rows = len(next(iter(columns.values())))
        values = self._named.values(columns)
        try:
            held = np.asarray(self._function(*values))
        except ValueError as error:
            raise UsageError(
                f"the function of a filter gets arrays over many rows ({error}): combine "
                "comparisons with & and |, not with and / or"
            ) from error
        if held.shape != (rows,) or held.dtype != np.bool_:
            raise UsageError(
                f"the function of a filter gave {held.dtype} of shape {held.shape} for {rows} "
                "rows: it must give one truth value per row"
            )
        return held


class _ByNumber:
    """Rows by number. The numbers are in the published index; here is what names them."""

    def __init__(self, digest: str, ascending: bool, given: Int64Array | None = None) -> None:
        self._digest = digest
        self.ascending = ascending
        self.given = given

    def __reduce__(self) -> Any:
        return _ByNumber, (self._digest, self.ascending)

    def document(self, parent: View) -> Any:
        return {"rows": self._digest}

    def numbers(self, parent: View) -> Iterator[Int64Array]:
        if self.given is None:
            raise CacheError("the index of selected rows is gone: select them again")
        return iter([self.given])


def rows_of_groups(view: View, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The rows of groups by number, one group after the other, and where each one's begin."""
    starts, stops = view.group_starts(groups), view.group_starts(groups + 1)
    bounds = np.concatenate(([0], np.cumsum(stops - starts))).astype(np.int64)
    rows = np.arange(bounds[-1], dtype=np.int64) + np.repeat(starts - bounds[:-1], stops - starts)
    return rows, bounds


def _joined(parts: Iterable[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _by_number(view: View, numbers: Int64Array) -> View:
    numbers = np.ascontiguousarray(numbers, dtype="<i8")
    ascending = bool((np.diff(numbers) > 0).all())
    choice = _ByNumber(fingerprint.key_of_pieces([numbers.tobytes()]), ascending, numbers)
    kept = KeptView(view, choice)
    choice.given = None  # published: nobody needs to hold them
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


def filtered(
    data: Store | View, where: str | Callable[..., Any], columns: Sequence[str] | None = None
) -> View:
    """The rows for which an expression or a function over columns holds, without copying them.

    Args:
        data: A store or a view.
        where: For example ``"length < 4096 and carried.lang == 'en'"``; what is attached per row
            stands there by its name (``"reward > 0.5"``). Or a function that is given ``columns``,
            each as an array, and gives one truth value per row.
        columns: What a function is given.
    """
    view = as_view(data)
    if callable(where):
        if columns is None:
            raise UsageError("say the columns that the function of a filter is given")
        function = _Function(where, columns, _sidecar_columns(view, columns))
        return _by_number(view, _joined(function.numbers(view)))
    if columns is not None:
        raise UsageError("an expression names its columns itself: columns are for a function")
    return KeptView(view, _Filter(where, _sidecar_columns(view, names_in(where))))


def _sidecar_columns(view: View, names: Iterable[str]) -> dict[str, str]:
    """Which of the names are sidecars of the view, and the stored column that each is."""
    strange = [name for name in names if name not in NAMES and not name.startswith("carried")]
    if not strange:
        return {}
    attached = {sidecar.name for store in view.stores for sidecar in store.sidecars}
    found = {}
    for name in sorted(attached.intersection(strange)):
        sidecar = view.sidecar(name)
        if sidecar.per != "row":
            raise UsageError(
                f"sidecar {name!r} has a value per token, and a filter wants one per row: attach "
                "what it shall ask for (a mean, a minimum) per row"
            )
        found[name] = column_of(name, sidecar.made_by)
    return found


def select(data: Store | View, rows: Iterable[SupportsIndex]) -> View:
    """Rows by number, in the given order, as often as they are named."""
    view = as_view(data)
    numbers = view.normalised(rows)
    if view.has_groups:
        _require_whole_groups(view, numbers)
    return _by_number(view, numbers)


def _require_whole_groups(view: View, numbers: Int64Array) -> None:
    """Refuse numbers that part a group, or turn one around."""
    groups = view.groups_of(numbers)
    within = numbers - view.group_starts(groups)
    sizes = view.group_starts(groups + 1) - view.group_starts(groups)
    firsts = np.flatnonzero(within == 0)
    whole = np.repeat(firsts, sizes[firsts])
    if whole.size == numbers.size:
        expected = numbers[whole] + np.arange(numbers.size) - whole
        if np.array_equal(expected, numbers):
            return
    raise UsageError(
        "rows of a group stay together, in their order: choose groups, data.groups.select([...])"
    )


def shuffle(data: Store | View, seed: int = 0) -> View:
    """All rows, in an order that depends on the seed and their number alone; groups stay whole."""
    view = as_view(data)
    if view.group_size is not None:
        return ShuffledView(view, seed)
    # Where groups have several sizes, where a row stands depends on all before it: an index.
    order = Permutation(view.group_count, derive_key(PURPOSE_VIEW, check_seed(seed), 0, 0))
    groups = order.indices(np.arange(view.group_count, dtype=np.int64))
    return _by_number(view, rows_of_groups(view, groups)[0])


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
