"""The language of filters: expressions over a row's columns.

    length < 4096 and trained / length > 0.1
    file == "math.jsonl" or source in ("a/x.jsonl", "b/x.jsonl")
    carried.lang == "en" and carried.meta.score >= 0.5 and carried["my key"] is not None
    reward > 0.5                        (what is attached per row, by its name)

A `Where` is such a text, parsed with Python's own grammar and restricted to names, members of
``carried``, constants, comparisons, ``and``/``or``/``not``, ``in`` and plain arithmetic. Its
canonical text is part of the view's key. It is evaluated on whole columns at a time. A missing
carried value is None; None is equal only to None and neither smaller nor larger than anything.
"""

from __future__ import annotations

import ast
import operator
import posixpath
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.store import CARRIED

NAMES = {
    "length": "length",  # tokens of the row
    "trained": "trained",  # trained tokens of the row
    "source": "source",  # path of its file, as origins name it
    "file": "source",  # the last part of that path
    "pictures": "pictures",  # pictures of the row
    "patches": "patches",  # what they cost a vision model
}
"""Names an expression may use, and the stored column each comes from."""

LONGEST = 10_000  # characters; a filter is written by a person

_Evaluate = Callable[[Mapping[str, Any]], Any]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _unknown(name: str) -> UsageError:
    known = ", ".join([*NAMES, "carried.<column>"])
    return UsageError(
        f"a filter knows no name {name!r}; there are {known}, and what is attached per row"
    )


class NamedColumns:
    """Columns by their names in filters: `NAMES`, ``carried.<name>``, or names of sidecars."""

    def __init__(self, names: Iterable[str], sidecars: Mapping[str, str]) -> None:
        self.names = list(names)
        self._stored = {**NAMES, **sidecars}
        for name in self.names:
            if name not in self._stored and not name.startswith(CARRIED):
                raise _unknown(name)
        # At least one, because rows must be counted.
        self.stored = sorted({self._stored.get(name, name) for name in self.names}) or ["length"]

    def values(self, columns: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """One array per name: numbers, paths, or what carried JSON texts say."""
        found = []
        for name in self.names:
            values = columns[self._stored.get(name, name)]
            if name == "file":
                values = _objects([posixpath.basename(path) for path in values])
            elif name.startswith(CARRIED):
                values = _objects([msgspec.json.decode(text) for text in values])
            found.append(values)
        return found


class Where:
    """A parsed filter expression; ``sidecars`` are names it may use, and their stored columns."""

    def __init__(self, text: str, sidecars: Mapping[str, str] | None = None) -> None:
        tree = parse_filter(text)
        self._known = {*NAMES, *(sidecars or {})}
        self._uses: set[str] = set()
        self._evaluate = self._compile(tree.body)
        self._named = NamedColumns(self._uses, sidecars or {})
        self.text = ast.unparse(tree)
        self.columns = self._named.stored  # that the expression needs
        self.uses_source = bool(self._uses & {"source", "file"})

    def __call__(self, columns: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        """Which of many rows are kept."""
        rows = len(next(iter(columns.values())))
        prepared = dict(zip(self._named.names, self._named.values(columns), strict=True))
        value = self._evaluate(prepared)
        is_array = isinstance(value, np.ndarray) and value.ndim
        return (value if is_array else np.full(rows, value)).astype(np.bool_)

    def _compile(self, node: ast.expr) -> _Evaluate:
        """A function of columns for an allowed expression; numpy where both sides are numbers."""
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return lambda columns: node.value
            case ast.Name(id=name):
                if name not in self._known:
                    raise _unknown(name)
                self._uses.add(name)
                return lambda columns: columns[name]
            case ast.Attribute() | ast.Subscript() if path := _carried_path(node):
                first, *rest = path
                self._uses.add(CARRIED + first)
                return lambda columns: _members(columns[CARRIED + first], rest)
            case ast.BoolOp(op=op, values=values):
                parts = [self._compile(value) for value in values]
                combine = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return lambda columns: reduce(combine, (_truth(part(columns)) for part in parts))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._compile(operand)
                return lambda columns: np.logical_not(_truth(inner(columns)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._compile(operand)
                return lambda columns: _apply(operator.sub, 0, inner(columns), node, missing=None)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                function, one, other = _ARITHMETIC[type(op)], *map(self._compile, (left, right))
                return lambda columns: _apply(
                    function, one(columns), other(columns), node, missing=None
                )
            case ast.List(elts=members) | ast.Tuple(elts=members) | ast.Set(elts=members):
                return partial(_constants, node, [self._compile(member) for member in members])
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [self._compile(side) for side in (left, *comparators)]
                return partial(_compare, node, [type(op) for op in ops], sides)
        raise UsageError(f"a filter may not contain {ast.unparse(node)!r}")


def _constants(node: ast.expr, members: list[_Evaluate], columns: Mapping[str, Any]) -> Any:
    values = [member(columns) for member in members]
    if any(isinstance(value, np.ndarray) for value in values):
        raise UsageError(f"members of {ast.unparse(node)!r} must be constants")
    return values


def _compare(
    node: ast.expr,
    kinds: list[type[ast.cmpop]],
    sides: list[_Evaluate],
    columns: Mapping[str, Any],
) -> Any:
    values = [side(columns) for side in sides]
    held: Any = True
    for kind, (left, right) in zip(kinds, pairwise(values), strict=True):
        skip_none = kind in _ORDERING
        one = _apply(_COMPARE[kind], left, right, node, missing=False, skip_none=skip_none)
        held = np.logical_and(held, one)
    return held


def parse_filter(text: str) -> ast.Expression:
    if not isinstance(text, str):
        raise UsageError(f"a filter is an expression as text, not {type(text).__name__}")
    if len(text) > LONGEST:
        raise UsageError(f"a filter has at most {LONGEST} characters, this one {len(text)}")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"not a filter expression: {text!r}") from error


def names_in(text: str) -> set[str]:
    """Every name that an expression uses, known or not."""
    return {node.id for node in ast.walk(parse_filter(text)) if isinstance(node, ast.Name)}


def _carried_path(node: ast.expr) -> list[str]:
    """``carried.a["b"].c`` → [a, b, c]; empty when it is something else."""
    path: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            path.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            path.append(node.slice.value)
        else:
            return []
        node = node.value
    return path[::-1] if isinstance(node, ast.Name) and node.id == "carried" else []


def _members(values: Any, path: list[str]) -> Any:
    """The values of a carried column, or what they have at a path."""
    if not path:
        return values
    found = []
    for value in values:
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        found.append(value)
    return _objects(found)


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # one by one: numpy would unpack lists of equal length
        array[place] = value
    return array


def _truth(value: Any) -> Any:
    is_objects = isinstance(value, np.ndarray) and value.dtype == object
    return value.astype(np.bool_) if is_objects else value


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return isinstance(value, bool | int | float | np.bool_)


def _apply(
    function: Callable[[Any, Any], Any],
    left: Any,
    right: Any,
    node: ast.expr,
    *,
    missing: Any,
    skip_none: bool = True,
) -> Any:
    """Apply a function to two columns or constants, value by value where one is no number."""
    if _is_number(left) and _is_number(right):
        with np.errstate(divide="ignore", invalid="ignore"):
            return function(left, right)

    def one(a: Any, b: Any) -> Any:
        if skip_none and (a is None or b is None):
            return missing
        try:
            return function(a, b)
        except (TypeError, ZeroDivisionError) as error:
            raise UsageError(f"{ast.unparse(node)!r} cannot be answered: {error}") from error

    arrays = [side for side in (left, right) if isinstance(side, np.ndarray)]
    if not arrays:
        return one(left, right)
    rows = arrays[0].size
    lefts = left.tolist() if isinstance(left, np.ndarray) else [left] * rows
    rights = right.tolist() if isinstance(right, np.ndarray) else [right] * rows
    return _objects([one(a, b) for a, b in zip(lefts, rights, strict=True)])
