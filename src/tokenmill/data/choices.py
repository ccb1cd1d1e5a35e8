"""Choose rows of a view: by expression, function, number or content (splits)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from tokenmill._core import fingerprint
from tokenmill.data.index import Index, Joined, Range, Selected, Shuffled, chunks_of, shuffle_of
from tokenmill.data.interleave import as_fraction
from tokenmill.data.order import Int64Array, check_seed
from tokenmill.data.view import View, as_view
from tokenmill.errors import UsageError, check_strings
from tokenmill.store import Store
from tokenmill.store.columns import require_iterable, row_numbers
from tokenmill.store.sidecars import column_of
from tokenmill.store.where import NAMES, NamedColumns, Where, names_in

SPLIT_VERSION = 1  # of `split_points`; part of every split's key

Predicate = Callable[[dict[str, Any]], npt.NDArray[np.bool_]]
"""Takes stored columns of many rows, returns a boolean per row."""

_MASK = (1 << 64) - 1
# blake2b("tokenmill split 1: <name>"), first eight bytes, made odd.
_MULTIPLY_1 = 0xF85049EB81CF5355
_MULTIPLY_2 = 0xCB3DB1425C951879


def rows_where(index: Index, columns: Sequence[str], predicate: Predicate) -> Iterator[Int64Array]:
    """Yield the rows of an index, in order, for which a predicate is true.

    Groups need it for all of their rows. Columns of every store are read once.
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
        mask = np.logical_and.reduceat(is_chosen[index.numbers(rows)], bounds[:-1])
        yield rows[np.repeat(mask, np.diff(bounds))]


def _evaluate(index: Index, columns: Sequence[str], predicate: Predicate) -> npt.NDArray[np.bool_]:
    """Return for every stored row whether it is in the index and the predicate is true."""
    result = np.zeros(sum(map(len, index.stores)), dtype=np.bool_)
    for rows in chunks_of(len(index)):
        result[index.numbers(rows)] = True
    begin = 0
    for store in index.stores:
        of_store = result[begin : begin + len(store)]
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
    return result


def rows_matching(data: Store | View, where: Where) -> npt.NDArray[np.bool_]:
    """Return for every row, without regard to groups, whether an expression is true."""
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
    """Yield the rows whose `split_points` are in an interval of [0, 2**64)."""

    def holds(columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        points = split_points(columns["digest"], seed)
        mask = points >= np.uint64(start)
        if stop <= _MASK:
            mask &= points < np.uint64(stop)
        return mask

    return rows_where(index, ["digest"], holds)


def _by_number(view: View, numbers: Int64Array) -> View:
    numbers = np.ascontiguousarray(numbers, dtype="<i8")
    by = {"rows": fingerprint.key_of_pieces([numbers.tobytes()])}
    return view.with_index(Selected(view.row_index, by, given=numbers))


def split_points(digests: npt.ArrayLike, seed: int) -> npt.NDArray[np.uint64]:
    """Return a number in [0, 2**64) per row, from its digest and the seed."""
    points = np.array(digests, dtype=np.uint64)
    points ^= np.uint64((seed * _MULTIPLY_2 + _MULTIPLY_1) & _MASK)
    for multiplier in (_MULTIPLY_1, _MULTIPLY_2):
        points ^= points >> np.uint64(32)
        points *= np.uint64(multiplier)
    points ^= points >> np.uint64(32)
    return points


def filter_rows(
    data: Store | View, where: str | Callable[..., Any], columns: Sequence[str] | None = None
) -> View:
    view = as_view(data)
    if callable(where):
        if columns is None:
            raise UsageError(
                "a filter function needs ", ("columns",), ", the names of its arguments"
            )
        columns = check_strings("columns", columns)
        named = NamedColumns(columns, _sidecar_columns(view, columns))
        chosen = rows_where(view.row_index, named.stored, partial(_call, where, named))
        return _by_number(view, np.concatenate([np.zeros(0, dtype=np.int64), *chosen]))
    if columns is not None:
        raise UsageError("columns is only for a filter function, not for an expression")
    sidecars = _sidecar_columns(view, names_in(where))
    parsed = Where(where, sidecars)
    by: dict[str, Any] = {"where": parsed.text}
    if parsed.uses_source:  # only then does the result depend on the names of files
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
        mask = np.asarray(function(*values))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the filter function failed on arrays over many rows ({error}); combine comparisons "
            "with & and |, not with and / or"
        ) from error
    if mask.shape != (rows,) or mask.dtype != np.bool_:
        raise UsageError(
            f"the filter function must return one boolean per row, got {mask.dtype} of shape "
            f"{mask.shape} for {rows} rows"
        )
    return mask


def _sidecar_columns(view: View, names: Iterable[str]) -> dict[str, str]:
    """Return the names that are sidecars of the view, and their stored columns."""
    unknown = [name for name in names if name not in NAMES and not name.startswith("extra")]
    if not unknown:
        return {}
    attached = {sidecar.name for store in view.stores for sidecar in store.sidecars}
    columns = {}
    for name in sorted(attached.intersection(unknown)):
        sidecar = view.sidecar(name)
        if sidecar.per != "row":
            raise UsageError(
                f"sidecar {name!r} has values per token, a filter needs one per row; attach "
                "a value per row, such as the mean"
            )
        columns[name] = column_of(name, sidecar.producer)
    return columns


def select(data: Store | View, rows: Iterable[SupportsIndex]) -> View:
    view, chosen = as_view(data), list(require_iterable(rows))
    if any(isinstance(row, bool | np.bool_) for row in chosen):
        raise UsageError("select() takes row numbers, got booleans; use filter()")
    numbers = row_numbers(chosen, len(view))
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
        "select() would split a group or change its order; use data.groups.select([...])"
    )


def sliced(data: Store | View, span: range) -> View:
    view = as_view(data)
    if view.has_groups and len(span) and not view.is_by_source:
        ends = np.asarray([span.start, span[-1] + 1], dtype=np.int64)
        starts = view.group_starts(view.groups_of(ends))
        is_end = ends == len(view)
        if span.step != 1 or not (is_end | (starts == ends)).all():
            raise UsageError(
                f"the slice {span.start}:{span.stop}:{span.step} would split a group; use "
                "data.groups[a:b].rows"
            )
    if view.group_size is None:
        return _by_number(view, np.arange(span.start, span.stop, span.step, dtype=np.int64))
    return view.with_index(Range(view.row_index, span))


def shuffle(data: Store | View, seed: int = 0) -> View:
    view = as_view(data)
    if view.group_size is not None:
        return view.with_index(Shuffled(view.row_index, seed))
    # With groups of several sizes, the position of a row depends on all groups before it.
    order = shuffle_of(view.row_index, seed)
    groups = order.indices(np.arange(view.group_count, dtype=np.int64))
    return _by_number(view, view.row_index.rows_of_groups(groups)[0])


def split(data: Store | View, shares: Mapping[str, float], seed: int = 0) -> dict[str, View]:
    view = as_view(data)
    if not isinstance(shares, Mapping) or not shares:
        raise UsageError(
            f"shares must be a mapping such as {{'train': 0.98, 'val': 0.02}}, got {shares!r}"
        )
    seed = check_seed(seed)
    fractions: list[Fraction] = []
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            raise UsageError(f"the share of {name!r} must be between 0 and 1, got {share!r}")
        fractions.append(as_fraction(share))
    if not math.isclose(float(sum(fractions)), 1.0, abs_tol=1e-9):
        raise UsageError(f"shares must add up to 1, got {float(sum(fractions))}")
    edges = [int(sum(fractions[:number]) * (1 << 64)) for number in range(len(fractions))]
    edges.append(1 << 64)  # not the sum, which may be rounded
    views = {}
    for name, (start, stop) in zip(shares, pairwise(edges), strict=True):
        # As strings, because some JSON readers do not support 64-bit integers.
        by = {"split": SPLIT_VERSION, "seed": seed, "points": [str(start), str(stop)]}
        index = Selected(view.row_index, by, partial(_by_point, seed, start, stop))
        views[name] = view.with_index(index)
    return views
