"""Columns by which an SFT row says itself how it is rendered: whether to think, and its media.

verl asks every row for ``enable_thinking`` and hands it to the template. A store has one
rendering, so a source whose rows differ is prepared once per value, and `SwitchedRows` takes each
row from the store of its own value, in the order of the source. Rows with videos are refused, as
are those with pictures where verl gave no processor.

Every row is looked at, once per content: what was found is kept in the cache as a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenmill.chat.calls import IMAGE_PARTS
from tokenmill.dataset import PartView, concat
from tokenmill.errors import RowError, UsageError
from tokenmill.integrations.hosts import noted
from tokenmill.sampling import Int64Array
from tokenmill.source import Rows, open_rows
from tokenmill.store import Store

Switch = bool | None
"""What a row says; None (null, or no such column) is the default of the config."""


class SwitchedRows(PartView):
    """Each row of one source from the store of its own value, in the order of the source.

    Holds 8 bytes per row, made again where it is unpickled.

    Args:
        stores: What rows say → the store in which the whole source is rendered so. The column was
            carried along.
        column: Its name.
    """

    def __init__(self, stores: Mapping[Switch, Store], column: str) -> None:
        self._stores, self._column = dict(stores), column
        super().__init__(concat(self._stores.values()))
        self._numbers = self._numbers_in_all()

    def __reduce__(self) -> Any:
        return SwitchedRows, (self._stores, self._column)

    def _numbers_in_all(self) -> Int64Array:
        """Numbers in the stores, one after the other, by the row's place in the source."""
        origins, numbers, begin = [], [], 0
        for switch, store in self._stores.items():
            carried = f"carried.{self._column}"
            for at, (first, columns) in enumerate(store.columns(["row_in_slice", carried])):
                said = (_switch(json.loads(text)) for text in columns[carried])
                here = [number for number, value in enumerate(said) if value is switch]
                rows = np.asarray(here, dtype=np.int64)
                entry = store.table[at]
                in_file = int(entry["source_row"]) + columns["row_in_slice"][rows].astype(np.int64)
                origins.append(np.stack([in_file, np.full(rows.size, int(entry["source"]))]))
                numbers.append(begin + first + rows)
            begin += len(store)
        found: Int64Array = np.concatenate(numbers)[np.lexsort(np.concatenate(origins, axis=1))]
        return found

    @property
    def document(self) -> Any:
        """The stores by what rows say."""
        keys = {str(switch): store.key for switch, store in self._stores.items()}
        return {"switched by": self._column, "stores": keys}

    def __len__(self) -> int:
        return int(self._numbers.size)

    @property
    def group_count(self) -> int:
        """As many as rows: verl's belong to no groups."""
        return len(self)

    def numbers(self, indices: Int64Array) -> Int64Array:
        """Row numbers in all stores, one store after the other."""
        return self._numbers[indices]


class Said(NamedTuple):
    """What the rows of a source say.

    Attributes:
        switches: Whether to think.
        pictures: Whether any has pictures, in a column or in parts of its messages.
    """

    switches: set[Switch]
    pictures: bool


def said_by(
    files: Sequence[str],
    column: str | None,
    images: str,
    refused: Mapping[str, str],
    cache_dir: str | None,
) -> Said:
    """What the rows say in their columns.

    Args:
        files: The source.
        column: Name of the column that switches thinking; None: rows are not asked.
        images: Name of the column of pictures.
        refused: Columns of media that no row may have, and what to do about them.
        cache_dir: Where the note is kept.

    Raises:
        UsageError: A row has such media, or says neither true nor false nor null; with the row.
    """
    rows = open_rows(list(files), cache_dir=cache_dir)
    asked = {"what rows say in": column, "images": images, "refused": dict(refused)}
    note = noted(rows, cache_dir, asked, lambda: _look(rows, column, images, refused))
    if note["refused"] is not None:
        raise UsageError(note["refused"], **rows.origin(note["row"]).location)
    return Said(set(note["said"]), note["pictures"])


def _look(
    rows: Rows, column: str | None, images: str, refusals: Mapping[str, str]
) -> dict[str, Any]:
    said: set[Switch] = set()
    pictures = False
    for number, row in rows.scan():
        if isinstance(row, RowError):
            continue  # preparing rejects it
        refused = None
        for name, advice in refusals.items():
            if row.get(name):
                refused = f"a row has {name}: {advice}"
        pictures = pictures or bool(row.get(images)) or any(_pictures_in(row.values()))
        value = None if column is None else row.get(column)
        try:
            said.add(_switch(value))
        except ValueError:
            refused = f"{column} is {value!r}; it is true, false or null"
        if refused is not None:
            return {"said": [], "pictures": False, "refused": refused, "row": number}
    told = sorted(said, key=str)
    return {"said": told, "pictures": pictures, "refused": None, "row": None}


def _pictures_in(columns: Iterable[Any]) -> Iterator[bool]:
    """Whether parts of messages are pictures."""
    for column in columns:
        for message in column if isinstance(column, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                yield isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _switch(value: Any) -> Switch:
    """A row's value; tables without booleans have 0 and 1."""
    if value is None:
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    # verl would take the text "false" for true.
    raise ValueError(value)
