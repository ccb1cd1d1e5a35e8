"""Choose rows of a view: by expression or function, by number, or by content into splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from tokenmill._core import fingerprint
from tokenmill.data.index import Index, Joined, Range, Selected, Shuffled, chunks_of, shuffle_of
from tokenmill.data.order import Int64Array, check_seed
from tokenmill.data.view import View, as_view
from tokenmill.errors import UsageError
from tokenmill.store import Store
from tokenmill.store.columns import row_numbers
from tokenmill.store.sidecars import column_of
from tokenmill.store.where import NAMES, NamedColumns, Where, names_in

SPLIT_VERSION = 1  # of `split_points`; part of every split's key

Predicate = Callable[[dict[str, Any]], npt.NDArray[np.bool_]]
"""Stored columns of many rows → which of the rows are chosen."""

_MASK = (1 << 64) - 1
# blake2b("tokenmill split 1: <name>"), first eight bytes, made odd.
_MULTIPLY_1 = 0xF85049EB81CF5355
_MULTIPLY_2 = 0xCB3DB1425C951879


def rows_where(index: Index, columns: Sequence[str], predicate: Predicate) -> Iterator[Int64Array]:
    """The rows of an index for which a predicate holds, in order; of groups, if it holds for all.

    Reads the columns of every store once, in stored order.
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
        for rows in chunks_of(len(index)):
            yield rows[is_chosen[index.numbers(rows)]]
        return
    for groups in chunks_of(index.group_count):
        rows, bounds = index.rows_of_groups(groups)
        held = np.logical_and.reduceat(is_chosen[index.numbers(rows)], bounds[:-1])
        yield rows[np.repeat(held, np.diff(bounds))]


def _evaluate(index: Index, columns: Sequence[str], predicate: Predicate) -> npt.NDArray[np.bool_]:
    """For every stored row: whether it is in the index and the predicate holds."""
    found = np.zeros(sum(map(len, index.stores)), dtype=np.bool_)
    for rows in chunks_of(len(index)):
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


def _by_expression(text: str, sidecars: Mapping[str, str], index: Index) -> Iterator[Int64Array]:
    where = Where(text, sidecars)
    return rows_where(index, where.columns, where)


def _by_point(seed: int, start: int, stop: int, index: Index) -> Iterator[Int64Array]:
    """Rows whose point is in an interval of [0, 2**64)."""

    def holds(columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        points = split_points(columns["digest"], seed)
        held = points >= np.uint64(start)
        if stop <= _MASK:
            held &= points < np.uint64(stop)
        return held

    return rows_where(index, ["digest"], holds)


def _by_number(view: View, numbers: Int64Array) -> View:
    numbers = np.ascontiguousarray(numbers, dtype="<i8")
    by = {"rows": fingerprint.key_of_pieces([numbers.tobytes()])}
    return view.with_index(Selected(view.row_index, by, given=numbers))


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
    parsed = Where(where, sidecars)
    by: dict[str, Any] = {"where": parsed.text}
    if parsed.uses_source:  # only then does the answer depend on what the files are called
        by["sources"] = [list(store.sources) for store in view.stores]
    if sidecars:
        by["sidecars"] = sorted(sidecars.values())
    choose = partial(_by_expression, where, sidecars)
    return view.with_index(Selected(view.row_index, by, choose))


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
    view, given = as_view(data), list(rows)
    if any(isinstance(row, bool | np.bool_) for row in given):
        raise UsageError("rows are chosen by number, not by truth values: use filter")
    numbers = row_numbers(given, len(view))
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
    """A range of rows; UsageError if it would split a group."""
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
    return _by_number(view, view.row_index.rows_of_groups(groups)[0])


def split(data: Store | View, parts: Mapping[str, float], *, seed: int = 0) -> tuple[View, ...]:
    """Split rows by content.

    Every row has a fixed point in [0, 1) that depends on its bytes and the seed only; a split is an
    interval. So a row stays in its split when others come or go, equal rows are never in two
    splits, and all turns of one conversation (``expand="turns"``) are in the same.

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
    found = []
    for start, stop in pairwise(edges):
        # Strings: not every reader of JSON keeps 64 bits.
        by = {"split": SPLIT_VERSION, "seed": seed, "points": [str(start), str(stop)]}
        index = Selected(view.row_index, by, partial(_by_point, seed, start, stop))
        found.append(view.with_index(index))
    return tuple(found)
