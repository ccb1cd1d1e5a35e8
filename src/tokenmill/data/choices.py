"""Choose rows of a view: by expression or function, by number, or by content into splits.

`split` assigns rows by the digest of their own bytes: every row has a fixed point in [0, 1) that
depends on its bytes and the seed only, and a split is an interval. So a row stays in its split when
others come or go, equal rows are never in two splits, and all turns of one conversation
(``expand="turns"``) are in the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from tokenmill._core import fingerprint
from tokenmill.data.index import CHUNK, Index, Joined, Range, Selected, Shuffled, shuffle_of
from tokenmill.data.order import Int64Array, check_seed
from tokenmill.data.view import View, as_view
from tokenmill.errors import CacheError, UsageError
from tokenmill.store import Store
from tokenmill.store.sidecars import column_of
from tokenmill.store.where import NAMES, NamedColumns, Where, names_in

SPLIT_VERSION = 1
"""Version of the function (digest, seed) → point; part of every split's key."""

Predicate = Callable[[dict[str, Any]], npt.NDArray[np.bool_]]
"""Stored columns of many rows → which of the rows are chosen."""

_MASK = (1 << 64) - 1
# blake2b("tokenmill split 1: <name>"), first eight bytes, made odd.
_MULTIPLY_1 = 0xF85049EB81CF5355
_MULTIPLY_2 = 0xCB3DB1425C951879


def rows_where(index: Index, columns: Sequence[str], predicate: Predicate) -> Iterator[Int64Array]:
    """The rows of an index for which a predicate holds, in order; of groups, if it holds for all.

    Reads the columns of every store once, in stored order. Needs one byte per row of the largest
    store.
    """
    if isinstance(index, Joined):
        begin = 0
        for part in index.parts:
            for numbers in rows_where(part, columns, predicate):
                yield numbers + begin
            begin += len(part)
        return
    is_chosen = _evaluate(index, columns, predicate)
    if index.group_size == 1:
        for rows in index.chunks():
            yield rows[is_chosen[index.numbers(rows)]]
        return
    for first in range(0, index.group_count, CHUNK):
        groups = np.arange(first, min(first + CHUNK, index.group_count), dtype=np.int64)
        rows, bounds = _rows_of_groups(index, groups)
        held = np.logical_and.reduceat(is_chosen[index.numbers(rows)], bounds[:-1])
        yield rows[np.repeat(held, np.diff(bounds))]


def _evaluate(index: Index, columns: Sequence[str], predicate: Predicate) -> npt.NDArray[np.bool_]:
    """For every stored row: whether it is in the index and the predicate holds."""
    found = np.zeros(sum(map(len, index.stores)), dtype=np.bool_)
    for rows in index.chunks():
        found[index.numbers(rows)] = True
    begin = 0
    for store in index.stores:
        of_store = found[begin : begin + len(store)]
        begin += len(store)
        if not of_store.any():
            continue
        paths = np.asarray([path or "" for path in store.sources] or [""], dtype=object)
        for first, values in store.columns(list(columns)):
            count = len(next(iter(values.values())))
            here = np.flatnonzero(of_store[first : first + count])
            if not here.size:
                continue
            if "source" in values:
                values["source"] = paths[values["source"]]
            if here.size < count:
                values = {name: _pick(column, here) for name, column in values.items()}
            of_store[first + here] = predicate(values)
    return found


def rows_holding(data: Store | View, where: Where) -> npt.NDArray[np.bool_]:
    """For every row of a store or view, by itself: whether an expression holds."""
    index = as_view(data).row_index
    return _evaluate(index, where.columns, where)[index.numbers(np.arange(len(index)))]


def _pick(column: Any, rows: Int64Array) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    return [column[row] for row in rows.tolist()]


@dataclass(frozen=True)
class _ByExpression:
    """Rows for which an expression holds."""

    text: str
    sidecars: Mapping[str, str]

    def document(self, index: Index) -> Any:
        where = Where(self.text, self.sidecars)
        document: dict[str, Any] = {"where": where.text}
        if where.uses_source:
            # Only then does the answer depend on what the files are called.
            stores = {store.key: store for store in index.stores}.values()
            document["sources"] = [list(store.sources) for store in stores]
        if self.sidecars:
            document["sidecars"] = sorted(self.sidecars.values())
        return document

    def chosen(self, index: Index) -> Iterator[Int64Array]:
        where = Where(self.text, self.sidecars)
        return rows_where(index, where.columns, where)


@dataclass(frozen=True)
class _ByPoint:
    """Rows whose point is in an interval of [0, 2**64)."""

    seed: int
    start: int
    stop: int

    def document(self, index: Index) -> Any:
        # Strings: not every reader of JSON keeps 64 bits.
        interval = [str(self.start), str(self.stop)]
        return {"split": SPLIT_VERSION, "seed": self.seed, "points": interval}

    def chosen(self, index: Index) -> Iterator[Int64Array]:
        return rows_where(index, ["digest"], self._holds)

    def _holds(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        points = split_points(columns["digest"], self.seed)
        held = points >= np.uint64(self.start)
        if self.stop <= _MASK:
            held &= points < np.uint64(self.stop)
        return held


class _ByNumber:
    """Given rows. They are in the published index; only their digest is pickled."""

    def __init__(self, digest: str, given: Int64Array | None = None) -> None:
        self._digest = digest
        self.given = given

    def __reduce__(self) -> Any:
        return _ByNumber, (self._digest,)

    def document(self, index: Index) -> Any:
        return {"rows": self._digest}

    def chosen(self, index: Index) -> Iterator[Int64Array]:
        if self.given is None:
            raise CacheError("the index of selected rows is gone: select them again")
        return iter([self.given])


def _by_number(view: View, numbers: Int64Array) -> View:
    numbers = np.ascontiguousarray(numbers, dtype="<i8")
    choice = _ByNumber(fingerprint.key_of_pieces([numbers.tobytes()]), numbers)
    index = Selected(view.row_index, choice)
    choice.given = None  # published
    return view.with_index(index)


def rows_of_groups(view: View, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The rows of groups by number, one group after the other, and where each group's begin."""
    return _rows_of_groups(view.row_index, groups)


def _rows_of_groups(index: Index, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
    starts, stops = index.group_starts(groups), index.group_starts(groups + 1)
    bounds = np.concatenate(([0], np.cumsum(stops - starts))).astype(np.int64)
    rows = np.arange(bounds[-1], dtype=np.int64) + np.repeat(starts - bounds[:-1], stops - starts)
    return rows, bounds


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
    """The rows for which an expression, or a function over columns, holds.

    See `tokenmill.store.ViewMethods.filter`.
    """
    view = as_view(data)
    if callable(where):
        if columns is None:
            raise UsageError("say the columns that the function of a filter is given")
        named = NamedColumns(columns, _sidecar_columns(view, columns))
        chosen = rows_where(view.row_index, named.stored, partial(_call, where, named))
        return _by_number(view, np.concatenate([np.zeros(0, dtype=np.int64), *chosen]))
    if columns is not None:
        raise UsageError("an expression names its columns itself: columns are for a function")
    sidecars = _sidecar_columns(view, names_in(where))
    return view.with_index(Selected(view.row_index, _ByExpression(where, sidecars)))


def _call(
    function: Callable[..., Any], named: NamedColumns, columns: dict[str, Any]
) -> npt.NDArray[np.bool_]:
    rows = len(next(iter(columns.values())))
    values = named.values(columns)
    try:
        held = np.asarray(function(*values))
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


def _sidecar_columns(view: View, names: Iterable[str]) -> dict[str, str]:
    """The names that are sidecars of the view, and the stored column of each."""
    unknown = [name for name in names if name not in NAMES and not name.startswith("carried")]
    if not unknown:
        return {}
    attached = {sidecar.name for store in view.stores for sidecar in store.sidecars}
    found = {}
    for name in sorted(attached.intersection(unknown)):
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


def sliced(data: Store | View, span: range) -> View:
    """A range of rows, as a slice makes it.

    Raises:
        UsageError: It would split a group.
    """
    view = as_view(data)
    if view.has_groups and len(span):
        ends = np.asarray([span.start, span[-1] + 1], dtype=np.int64)
        starts = view.group_starts(view.groups_of(ends))
        is_end = ends == len(view)
        if span.step != 1 or not (is_end | (starts == ends)).all():
            raise UsageError(
                f"rows {span.start}:{span.stop}:{span.step} would part a group: take whole "
                "groups, data.groups[a:b].rows"
            )
    if view.group_size is None:
        return _by_number(view, np.arange(span.start, span.stop, span.step, dtype=np.int64))
    return view.with_index(Range(view.row_index, span))


def shuffle(data: Store | View, seed: int = 0) -> View:
    """All rows, in an order that depends on the seed and their number only; groups stay whole."""
    view = as_view(data)
    if view.group_size is not None:
        return view.with_index(Shuffled(view.row_index, seed))
    # With groups of several sizes the position of a row depends on all before it: list the rows.
    order = shuffle_of(view.row_index, seed)
    groups = order.indices(np.arange(view.group_count, dtype=np.int64))
    return _by_number(view, rows_of_groups(view, groups)[0])


def split(data: Store | View, parts: Mapping[str, float], *, seed: int = 0) -> tuple[View, ...]:
    """Split rows by content.

    Args:
        data: A store or a view.
        parts: Share of every split, in order; together 1.
        seed: Another seed, another split.

    Returns:
        One view per share, in the mapping's order.
    """
    view = as_view(data)
    if not isinstance(parts, Mapping) or not parts:
        raise UsageError("split wants shares by name, such as {'train': 0.98, 'val': 0.02}")
    seed = check_seed(seed)
    shares = []
    for name, share in parts.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise UsageError(f"the share of {name!r} must lie between 0 and 1, not {share!r}")
        shares.append(Fraction(repr(share)))
    if not math.isclose(float(sum(shares)), 1.0, abs_tol=1e-9):
        raise UsageError(f"the shares add up to {float(sum(shares))}, not to 1")
    edges = [int(sum(shares[:number]) * (1 << 64)) for number in range(len(shares))]
    edges.append(1 << 64)  # whatever rounding the shares carry
    choices = (_ByPoint(seed, start, stop) for start, stop in pairwise(edges))
    return tuple(view.with_index(Selected(view.row_index, choice)) for choice in choices)
