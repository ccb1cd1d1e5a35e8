"""Carried columns as columns of a table.

In goes a view, out come Arrow fields and arrays for `tables`; lines of JSON ask for the names
alone. A store keeps what it carries as JSON text, one value per row, each of its own shape. A table
wants one type per column. `CarriedColumns` looks at all values once and decides: a column of
strings, of whole numbers, of numbers, or of booleans (null or not) gets that type and its plain
values; one that holds lists, objects or a mixture stays JSON text, value for value, so that nothing
is forced into a shape and no key is invented. Lines of JSON need none of this: there the text is
the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from tokenmill.dataset import View
from tokenmill.store import Row

_EXACT = 1 << 53  # whole numbers beyond it would change in a column of floating-point numbers
JSON_METADATA = {b"tokenmill": b"json"}
"""Metadata of a column that holds JSON text."""


def carried_names(view: View) -> list[str]:
    """Every column that any store beneath a view carries, in order of first appearance."""
    names: dict[str, None] = {}
    for store in view.stores:
        if len(store.table):
            names.update(dict.fromkeys(store.slice_at(0).record.carried))
    return list(names)


class CarriedColumns:
    """The carried columns of all rows that will be written.

    Args:
        view: The rows.
        taken: Column names that are in use; a carried one of that name is called ``carried.name``.
        only: These of them, in this order; None: all.
    """

    def __init__(self, view: View, taken: Sequence[str], only: Sequence[str] | None = None) -> None:
        names = carried_names(view)
        self.names = names if only is None else [name for name in only if name in names]
        self._kinds = _kinds(view, self.names)
        self.titles = {name: f"carried.{name}" if name in taken else name for name in self.names}

    @property
    def fields(self) -> list[pa.Field]:
        """One field per column."""
        return [
            pa.field(self.titles[name], pa.string(), metadata=JSON_METADATA)
            if self._kinds[name] is None
            else pa.field(self.titles[name], self._kinds[name])
            for name in self.names
        ]

    def arrays(self, rows: Sequence[Row]) -> list[pa.Array]:
        """One array per column."""
        if not self.names:
            return []
        texts = [row.carried_json for row in rows]
        return [self._array(name, [text.get(name) for text in texts]) for name in self.names]

    def _array(self, name: str, texts: list[str | None]) -> pa.Array:
        kind = self._kinds[name]
        if kind is None:
            return pa.array(texts, pa.string())
        values = [None if text is None else msgspec.json.decode(text) for text in texts]
        return pa.array(values, kind)


def _kinds(view: View, names: list[str]) -> dict[str, pa.DataType | None]:
    """The type of every column; None where only JSON text will do."""
    met: dict[str, set[str]] = {name: set() for name in names}
    if names:
        for texts in _texts(view):
            for name in met.keys() & texts.keys():
                met[name].add(_kind(texts[name]))
    return {name: _type(kinds - {"null"}) for name, kinds in met.items()}


def _type(kinds: set[str]) -> pa.DataType | None:
    if kinds <= {"string"}:
        return pa.string()
    if kinds == {"boolean"}:
        return pa.bool_()
    if kinds <= {"exact", "whole"}:
        return pa.int64()
    if kinds <= {"exact", "number"}:
        return pa.float64()
    return None


def _texts(view: View) -> Iterator[dict[str, str]]:
    for first in range(0, len(view), 1000):
        numbers = range(first, min(first + 1000, len(view)))
        for row in view.batch(numbers):
            yield row.carried_json


def _kind(text: str) -> str:
    """What a JSON text is; *exact* is a whole number that a float holds, *whole* one of 64 bits."""
    first = text[:1]
    if first == '"':
        return "string"
    if first in "tf":
        return "boolean"
    if first == "n":
        return "null"
    if first in "[{":
        return "json"
    if any(letter in text for letter in ".eE"):
        return "number"
    value = int(text) if len(text) < 24 else 1 << 80
    if abs(value) <= _EXACT:
        return "exact"
    return "whole" if -(1 << 63) <= value < 1 << 63 else "json"
