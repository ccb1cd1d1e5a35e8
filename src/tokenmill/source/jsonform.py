"""Arrow values as the dicts that JSON would have given.

Null members of structs are dropped, at every level and at the top: Arrow fills up ragged records,
JSON does not. Nulls inside lists stay. Maps with text keys become objects. What JSON has no form
for gets a documented one: binary as base64, dates and times as ISO 8601, durations as seconds,
decimals as text. What has none (NaN, infinities, other keys, text that is not UTF-8) makes the row
bad, as it would in a JSON file.

The *raw* form of a row is its compact JSON, members in the order of the schema.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from tokenmill.errors import RowError, UsageError
from tokenmill.source.limits import MAX_NESTING, MAX_ROW
from tokenmill.source.parse import over_limit

Convert = Callable[[Any], Any]
_SUSPECT = MAX_ROW // 6  # decoded bytes: JSON's escapes make at most six of one
encode = msgspec.json.Encoder().encode
"""The raw form of a row."""


class _NoFormError(Exception):
    """A value that JSON cannot hold."""


_PROBLEMS = (_NoFormError, ValueError, pa.ArrowException)
"""What turning a record batch into rows can raise."""


class CheckedBatch(NamedTuple):
    """A record batch after its bytes were looked at: once, for whoever wants rows of it.

    Attributes:
        batch: Its columns, in types that Python has values for if it is valid.
        is_valid: Whether it is whole; else each row is looked at by itself.
        is_large: Whether a row of it may be over the limit.
    """

    batch: Any
    is_valid: bool
    is_large: bool

    def slice(self, first: int, count: int) -> CheckedBatch:
        return self._replace(batch=self.batch.slice(first, count))


class RowForm:
    """Turns record batches of one schema into rows."""

    def __init__(self, schema: Any, path: str) -> None:
        self._path = path
        try:
            self._convert = _members([(field.name, _converter(field.type, 2)) for field in schema])
        except UsageError as error:
            raise UsageError(error.message, path=path) from None
        names = list(schema.names)
        if len(set(names)) != len(names):
            raise UsageError("two columns have the same name", path=path)
        self._target = pa.schema([pa.field(f.name, _in_microseconds(f.type)) for f in schema])
        self._casts = self._target.types != schema.types

    def checked(self, batch: Any) -> CheckedBatch:
        is_large = batch.nbytes > _SUSPECT
        try:
            return CheckedBatch(self._validated(batch), True, is_large)
        except _PROBLEMS:
            return CheckedBatch(batch, False, is_large)

    def rows(self, checked: CheckedBatch, first_row: int) -> list[dict[str, Any] | RowError]:
        """The rows of a batch; one that has no JSON form is a RowError."""
        if checked.is_valid and not checked.is_large:
            try:
                return list(map(self._convert, checked.batch.to_pylist()))
            except _PROBLEMS:
                pass
        return [self.row(checked, n, first_row + n) for n in range(checked.batch.num_rows)]

    def row(self, checked: CheckedBatch, number: int, row: int) -> dict[str, Any] | RowError:
        """The row of this number in a batch, and of that one in the file."""
        one = checked.batch.slice(number, 1)
        try:
            plain = one if checked.is_valid else self._validated(one)
            value: dict[str, Any] = self._convert(plain.to_pylist()[0])
        except _PROBLEMS as error:
            message = f"not UTF-8: {error.reason}" if isinstance(error, UnicodeDecodeError) else ""
            refusal = RowError(
                message or f"no JSON form: {error}", reason="bad_json", path=self._path, row=row
            )
            refusal.__cause__ = error
            return refusal
        if checked.is_large and one.nbytes > _SUSPECT and (length := len(encode(value))) > MAX_ROW:
            return RowError(over_limit(length), reason="limit", path=self._path, row=row)
        return value

    def _validated(self, batch: Any) -> Any:
        # Bytes from outside: an offset that points nowhere must be an error, not a crash.
        batch.validate(full=True)
        if not self._casts:
            return batch
        # Column by column: batches as a whole are cast only from pyarrow 16 on.
        columns = zip(batch.columns, self._target.types, strict=True)
        cast = [column.cast(kind, safe=True) for column, kind in columns]
        return pa.RecordBatch.from_arrays(cast, schema=self._target)


def _members(fields: list[tuple[str, Convert | None]]) -> Convert:
    """A struct's converter: null members dropped, the others converted."""
    if all(convert is None for _, convert in fields):
        return _without_nulls
    converters = dict(fields)

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for name, member in value.items():
            if member is not None:
                change = converters[name]
                result[name] = member if change is None else change(member)
        return result

    return convert


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not None}


def _converter(kind: Any, depth: int) -> Convert | None:
    """What turns a non-null value of an Arrow type into its JSON form; None: nothing to do."""
    if depth > MAX_NESTING:
        raise UsageError(f"the schema is nested more than {MAX_NESTING} levels deep")
    types = pa.types
    if types.is_struct(kind):
        return _members([(field.name, _converter(field.type, depth + 1)) for field in kind])
    if types.is_map(kind):
        return _object(_converter(kind.item_type, depth + 1))
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _converter(kind.value_type, depth)
    if hasattr(kind, "value_type"):  # every kind of list
        return _each(_converter(kind.value_type, depth + 1))
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type, depth)
    if types.is_floating(kind):
        return _finite
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _base64
    if types.is_duration(kind):
        return lambda value: value.total_seconds()
    if types.is_temporal(kind):
        return lambda value: value.isoformat()
    if types.is_decimal(kind):
        return str
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind):
        return None
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return None
    if str(kind) == "binary_view":
        return _base64
    raise UsageError(f"a column of type {kind} has no JSON form")


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    change = convert
    return lambda values: [None if value is None else change(value) for value in values]


def _object(convert: Convert | None) -> Convert:
    def change(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        result = {}
        for name, value in pairs:
            if not isinstance(name, str):
                raise _NoFormError(f"a map has the key {name!r}, which is not text")
            if value is not None:
                result[name] = value if convert is None else convert(value)
        return result

    return change


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise _NoFormError(f"{number} is not a JSON number")
    return number


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _in_microseconds(kind: Any) -> Any:
    """The same type with nanoseconds as microseconds: Python's clocks know no finer ones."""
    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, _in_microseconds(f.type)) for f in kind])
    if types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_in_microseconds(kind.value_type))
    return kind
