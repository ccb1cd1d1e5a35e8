"""Write in-memory rows to the cache as JSONL, so that they can be read like a file."""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import io
import itertools
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenmill._core.publish import NewFile, Staging
from tokenmill.errors import IN_MEMORY, IN_MEMORY_DIRECTORY, UsageError

_BATCH = 1024  # rows of a table converted at once
_encode = msgspec.json.Encoder().encode


def as_addresses(sources: Any, root: Path, nullable: Collection[Any] = ()) -> Any:
    """Return sources with in-memory data replaced by the paths of files below ``root``.

    In-memory data is a `datasets.Dataset`, a pandas or polars frame, an Arrow table, or an
    iterable of dicts. Anything else is returned unchanged. Null members of a table are left out,
    since Arrow adds them, as for Parquet; but not those of the columns ``nullable``.
    """
    if sources is None or isinstance(sources, str | bytes | os.PathLike):
        return sources
    if isinstance(sources, Mapping):
        names = ", ".join(map(str, sources))
        kind = type(sources).__name__
        raise UsageError(
            f"a {kind} is not a source: pass one of its values ({names}), or a list if it is a row"
        )
    rows = _table_rows(sources)
    if rows is not None:
        return [_write(rows, root, nullable)]
    if not isinstance(sources, Iterable):
        return sources
    items = iter(sources)
    first = next(items, None)
    if isinstance(first, Mapping):
        return [_write(itertools.chain([first], items), root)]
    if isinstance(sources, list | tuple) and all(isinstance(one, str) for one in sources):
        return sources
    addresses = []
    for one in () if first is None else itertools.chain([first], items):
        rows = _table_rows(one)
        addresses.append(one if rows is None else _write(rows, root, nullable))
    return addresses


def _table_rows(data: Any) -> Iterable[Any] | None:
    """Return the rows of a table as dicts, None for other objects."""
    library = type(data).__module__.partition(".")[0]
    if library == "datasets" and hasattr(data, "with_format"):
        if hasattr(data, "num_rows"):  # not streamed: stored images are not decoded
            batches = data.with_format("arrow").iter(_BATCH)
            return (row for batch in batches for row in batch.to_pylist())
        return data  # type: ignore[no-any-return]
    if library == "polars" and hasattr(data, "lazy"):
        return data.iter_rows(named=True)  # type: ignore[no-any-return]
    if library == "pandas" and hasattr(data, "iloc"):
        starts = range(0, len(data), _BATCH)
        records = (data.iloc[at : at + _BATCH].to_dict("records") for at in starts)
        return itertools.chain.from_iterable(records)
    if library == "pyarrow" and hasattr(data, "to_batches"):
        return (row for batch in data.to_batches() for row in batch.to_pylist())
    return None


def _is_null(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _write(rows: Iterable[Any], root: Path, nullable: Collection[Any] | None = None) -> str:
    hasher = hashlib.blake2b(digest_size=20)
    row = -1
    with Staging(root) as staging:
        with NewFile(staging.path / "rows") as file:
            for row, value in enumerate(rows):
                if not isinstance(value, Mapping):
                    message = f"a row must be a dict, got {type(value).__name__}"
                    raise UsageError(message, path=IN_MEMORY, row=row)
                try:
                    plain = _plain(value, drop_nulls=nullable is not None)
                    plain |= {n: None for n in nullable or () if n in value and n not in plain}
                    line = _encode(plain) + b"\n"
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
                    raise UsageError(f"no JSON form: {error}", path=IN_MEMORY, row=row) from error
                hasher.update(line)
                file.write(line)
        if row < 0:
            raise UsageError(f"{IN_MEMORY} has no rows")
        target = root / IN_MEMORY_DIRECTORY / f"{hasher.hexdigest()}.jsonl"
        staging.publish(staging.path / "rows", target)
    return str(target)


def _plain(value: Any, drop_nulls: bool = False) -> Any:
    """Return a value in its JSON form: NaN becomes null, bytes and images base64."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"the name {name!r} is not a string")
        kept = ((name, one) for name, one in value.items() if not (drop_nulls and _is_null(one)))
        return {name: _plain(one, drop_nulls) for name, one in kept}
    if isinstance(value, list | tuple):
        return [_plain(one, drop_nulls) for one in value]
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{value} is not a JSON number")
        return float(value)  # NaN is encoded as null
    if _is_null(value):
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if type(value).__module__ == "numpy":
        return _plain(value.tolist(), drop_nulls)
    if type(value).__module__.partition(".")[0] == "PIL":
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return _plain(buffer.getvalue())
    raise TypeError(f"{value!r:.60} is of type {type(value).__name__}")
