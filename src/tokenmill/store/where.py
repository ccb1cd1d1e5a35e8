"""Filter expressions over the columns of a row.

    length < 4096 and trained / length > 0.1
    file == "math.jsonl" or source in ("a/x.jsonl", "b/x.jsonl")
    extra.lang == "en" and extra.meta.score >= 0.5 and extra["my key"] is not None
    reward > 0.5                        (a sidecar with one value per row)

A `Where` is parsed with Python's grammar, restricted to names, fields of ``extra``, constants,
comparisons, ``and``/``or``/``not``, ``in`` and arithmetic, and evaluated on whole columns. Its
canonical text is part of the view's key. A missing extra value is None; None is equal only to None
and neither smaller nor larger than any value.
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
from tokenmill.store.record import EXTRA

NAMES = {
    "length": "length",  # tokens of the row
    "trained": "trained",  # trained tokens of the row
    "source": "source",  # path of its file, as in its origin
    "file": "source",  # the last part of that path
    "images": "images",  # images of the row
    "patches": "patches",  # of those images, in the vision model
}
"""Names in expressions, and the stored column of each."""

MAX_FILTER = 10_000  # characters; longer filters are not hand-written
MAX_NESTING = 100  # levels; functions that visit a filter recurse

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
    known = ", ".join([*NAMES, "extra.<column>"])
    return UsageError(
        f"unknown name {name!r} in a filter; choose from {known} and sidecars per row"
    )


class NamedColumns:
    """Columns by their names in filters: `NAMES`, ``extra.<name>``, or names of sidecars."""

    def __init__(self, names: Iterable[str], sidecars: Mapping[str, str]) -> None:
        self.names = list(names)
        self._stored = {**NAMES, **sidecars}
        for name in self.names:
            if name not in self._stored and not name.startswith(EXTRA):
                raise _unknown(name)
        # At least one column, to count the rows.
        self.stored = sorted({self._stored.get(name, name) for name in self.names}) or ["length"]

    def values(self, columns: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Return one array per name; extra columns are decoded."""
        found = []
        for name in self.names:
            values = columns[self._stored.get(name, name)]
            if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
                values = values.astype(np.int64)  # stored as 32 bits, which products exceed
            if name == "file":
                values = _objects([posixpath.basename(path) for path in values])
            elif name.startswith(EXTRA):
                values = _objects([msgspec.json.decode(text) for text in values])
            found.append(values)
        return found


class Where:
    """A parsed filter expression; ``sidecars`` maps sidecar names to stored columns."""

    def __init__(self, text: str, sidecars: Mapping[str, str] | None = None) -> None:
        tree = parse_filter(text)
        self._known = {*NAMES, *(sidecars or {})}
        self._uses: set[str] = set()
        self._evaluate = self._compile(tree.body)
        self.text = ast.unparse(tree)
        self._named = NamedColumns(self._uses, sidecars or {})
        self.columns = self._named.stored  # that the expression needs
        self.uses_source = bool(self._uses & {"source", "file"})

    def __call__(self, columns: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        """Return a boolean per row."""
        rows = len(next(iter(columns.values())))
        prepared = dict(zip(self._named.names, self._named.values(columns), strict=True))
        value = _truth(self._evaluate(prepared))
        return value if isinstance(value, np.ndarray) else np.full(rows, value)

    def _compile(self, node: ast.expr) -> _Evaluate:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return lambda columns: node.value
            case ast.Name(id=name):
                if name not in self._known:
                    raise _unknown(name)
                self._uses.add(name)
                return lambda columns: columns[name]
            case ast.Attribute() | ast.Subscript() if path := _extra_path(node):
                first, *rest = path
                self._uses.add(EXTRA + first)
                return lambda columns: _members(columns[EXTRA + first], rest)
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
        raise UsageError(f"{ast.unparse(node)!r} is not supported in a filter")


# Evaluated value by value, because numpy would compare a whole column.
_BY_VALUE = {_COMPARE[kind] for kind in (ast.In, ast.NotIn, ast.Is, ast.IsNot)}
_OF_NUMBERS = {operator.mul, operator.mod}


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
    result: Any = True
    for kind, (left, right) in zip(kinds, pairwise(values), strict=True):
        skip_none = kind in _ORDERING
        one = _apply(_COMPARE[kind], left, right, node, missing=False, skip_none=skip_none)
        result = np.logical_and(result, one)
    return result


def parse_filter(text: str) -> ast.Expression:
    if not isinstance(text, str):
        raise UsageError(f"a filter must be a text or a function, got {type(text).__name__}")
    if len(text) > MAX_FILTER:
        raise UsageError(f"a filter may have {MAX_FILTER} characters, got {len(text)}")
    shown = repr(text) if len(text) <= 200 else f"{text[:40]!r}…"
    try:
        tree = ast.parse(text.strip(), mode="eval")
        ast.unparse(tree)  # impossible for integers of thousands of digits
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"not a filter expression: {shown}") from error
    level: list[ast.AST] = [tree]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise UsageError(f"the filter {shown} is nested too deeply; simplify it")
    return tree


def names_in(text: str) -> set[str]:
    """Return all names in an expression, known or not."""
    return {node.id for node in ast.walk(parse_filter(text)) if isinstance(node, ast.Name)}


def _extra_path(node: ast.expr) -> list[str]:
    """Return [a, b, c] for ``extra.a["b"].c``, and [] for other expressions."""
    path: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            path.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            path.append(node.slice.value)
        else:
            return []
        node = node.value
    return path[::-1] if isinstance(node, ast.Name) and node.id == "extra" else []


def _members(values: Any, path: list[str]) -> Any:
    """Return the values of an extra column, or their fields at a path."""
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
    for number, value in enumerate(values):  # `array[:] = values` would unpack lists
        array[number] = value
    return array


def _truth(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.bool_)
    if not (value is None or _is_number(value)):
        raise UsageError(f"{value!r} in a filter is not a condition; compare it with a value")
    return bool(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return isinstance(value, bool | int | float | np.bool_)


@np.errstate(all="ignore")
def _calculate(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply a function to numbers; integers are 64 bits wide, and an overflow raises."""
    if function not in _ARITHMETIC.values():
        return function(left, right)
    # `+ 0` makes integers of booleans, which numpy would add with a logical or.
    result = function(left + 0, right + 0)
    if result.dtype.kind not in "iO":  # numpy 1 makes objects of large integers
        return result
    as_float = function(*(np.asarray(side, np.float64) for side in (left, right)))
    if not np.isfinite(as_float).all():  # divided by 0
        return as_float
    if (np.abs(as_float) >= 1 << 62).any():
        raise OverflowError("a value exceeds 64 bits; use a float, such as 1.0")
    return result


def _apply(
    function: Callable[[Any, Any], Any],
    left: Any,
    right: Any,
    node: ast.expr,
    *,
    missing: Any,
    skip_none: bool = True,
) -> Any:
    """Apply a function to two columns or constants, value by value unless both are numbers."""

    def one(a: Any, b: Any) -> Any:
        if skip_none and (a is None or b is None):
            return missing
        if function in _OF_NUMBERS and not (_is_number(a) and _is_number(b)):
            raise TypeError("its operands must be numbers")  # a text could be repeated endlessly
        return function(a, b)

    arrays = [side for side in (left, right) if isinstance(side, np.ndarray)]
    try:
        if not arrays:
            return one(left, right)
        if _is_number(left) and _is_number(right) and function not in _BY_VALUE:
            return _calculate(function, left, right)
        rows = arrays[0].size
        lefts = left.tolist() if isinstance(left, np.ndarray) else [left] * rows
        rights = right.tolist() if isinstance(right, np.ndarray) else [right] * rows
        return _objects([one(a, b) for a, b in zip(lefts, rights, strict=True)])
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{ast.unparse(node)!r} cannot be evaluated: {error}") from error
