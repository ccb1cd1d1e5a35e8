"""The language of filters: expressions over a row's columns.

    length < 4096 and trained / length > 0.1
    file == "math.jsonl" or source in ("a/x.jsonl", "b/x.jsonl")
    carried.lang == "en" and carried.meta.score >= 0.5 and carried["my key"] is not None
    reward > 0.5                        (what is attached per row, by its name)

A `Where` is such a text, parsed with Python's own grammar and cut down to a whitelist of forms:
names, members of ``carried``, constants, comparisons, ``and``/``or``/``not``, ``in``, and plain
arithmetic. It is data: it has one canonical form that is part of the view's key, it travels to
any process, and it can do nothing but compare. It is evaluated on whole columns at a time. A
missing carried value is None; None is equal only to None and neither smaller nor larger than
anything.
"""

from __future__ import annotations

import ast
import operator
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Columns by the names that filters know them by.

    Args:
        names: Of `NAMES`, ``carried.<name>``, or of sidecars.
        sidecars: Names of sidecars, and the stored column that each is.
    """

    def __init__(self, names: Iterable[str], sidecars: Mapping[str, str]) -> None:
        self.names = list(names)
        self._stored = {**NAMES, **sidecars}
        for name in self.names:
            if name not in self._stored and not name.startswith(CARRIED):
                raise _unknown(name)

    @property
    def stored(self) -> list[str]:
        """The stored columns they come from (never none: rows must be counted)."""
        return sorted({self._stored.get(name, name) for name in self.names}) or ["length"]

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
    """A parsed filter expression.

    Args:
        text: See the module's examples.
        sidecars: Names of sidecars that it may use, and the stored column that each is.
    """

    def __init__(self, text: str, sidecars: Mapping[str, str] | None = None) -> None:
        tree = parse_filter(text)
        self._sidecars = sidecars or {}
        self._uses: set[str] = set()
        self._carried: set[str] = set()
        self._check(tree.body)
        names = [*self._uses, *(CARRIED + name for name in self._carried)]
        self._named = NamedColumns(names, self._sidecars)
        self._body = tree.body
        self.text = ast.unparse(tree)

    @property
    def columns(self) -> list[str]:
        """Stored columns the expression needs (never none: rows must be counted)."""
        return self._named.stored

    @property
    def uses_source(self) -> bool:
        """Whether the answer depends on the names of files."""
        return bool(self._uses & {"source", "file"})

    def __call__(self, columns: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        """Which rows of a stretch are kept."""
        rows = len(next(iter(columns.values())))
        prepared = dict(zip(self._named.names, self._named.values(columns), strict=True))
        return _broadcast(self._value(self._body, prepared), rows).astype(np.bool_)

    # The whitelist.

    def _check(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant):
            if node.value is None or isinstance(node.value, bool | int | float | str):
                return None
        elif isinstance(node, ast.Name):
            if node.id in NAMES or node.id in self._sidecars:
                self._uses.add(node.id)
                return None
            raise _unknown(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript):
            path = _carried_path(node)
            if path:
                self._carried.add(path[0])
                return None
        elif isinstance(node, ast.BoolOp):
            return self._check_all(node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            return self._check(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._check_all([node.left, node.right])
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._check_all(node.elts)
        elif isinstance(node, ast.Compare):
            return self._check_all([node.left, *node.comparators])
        raise UsageError(f"a filter may not contain {ast.unparse(node)!r}")

    def _check_all(self, nodes: Sequence[ast.expr]) -> None:
        for node in nodes:
            self._check(node)

    # Evaluation on columns: numpy where both sides are numbers, value by value elsewhere.

    def _value(self, node: ast.expr, columns: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return columns[node.id]
        if isinstance(node, ast.Attribute | ast.Subscript):
            first, *rest = _carried_path(node)
            values = columns[CARRIED + first]
            return _objects([_member(value, rest) for value in values]) if rest else values
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            members = [self._value(member, columns) for member in node.elts]
            if any(isinstance(member, np.ndarray) for member in members):
                raise UsageError(f"members of {ast.unparse(node)!r} must be constants")
            return members
        if isinstance(node, ast.BoolOp):
            parts = [_truth(self._value(value, columns)) for value in node.values]
            combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            result = parts[0]
            for part in parts[1:]:
                result = combine(result, part)
            return result
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, columns)
            if isinstance(node.op, ast.Not):
                return np.logical_not(_truth(value))
            return _by_value(operator.sub, 0, value, node, missing=None)
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, columns), self._value(node.right, columns)
            return _by_value(_ARITHMETIC[type(node.op)], left, right, node, missing=None)
        assert isinstance(node, ast.Compare)
        held_all: Any = True
        left = self._value(node.left, columns)
        for kind, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._value(comparator, columns)
            ordering = isinstance(kind, _ORDERING)
            held = _by_value(
                _COMPARE[type(kind)], left, right, node, missing=False, skip_none=ordering
            )
            held_all = np.logical_and(held_all, held)
            left = right
        return held_all


def parse_filter(text: str) -> ast.Expression:
    """A filter's expression, not yet looked at."""
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


def _member(value: Any, path: list[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # one by one: numpy would unpack lists of equal length
        array[place] = value
    return array


def _broadcast(value: Any, rows: int) -> npt.NDArray[Any]:
    return value if isinstance(value, np.ndarray) and value.ndim else np.full(rows, value)


def _truth(value: Any) -> Any:
    is_objects = isinstance(value, np.ndarray) and value.dtype == object
    return value.astype(np.bool_) if is_objects else value


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return isinstance(value, bool | int | float | np.bool_)


def _by_value(
    function: Callable[[Any, Any], Any],
    left: Any,
    right: Any,
    node: ast.expr,
    *,
    missing: Any,
    skip_none: bool = True,
) -> Any:
    """Apply a function to two columns or constants."""
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
