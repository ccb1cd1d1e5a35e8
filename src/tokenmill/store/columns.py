"""A slice in memory, between the builder and the disk.

`SliceColumns` holds what one slice will serve as plain arrays: flat token ids and mask with row
starts, flat turns with turn starts, one origin per row, carried columns as JSON text, and the rows
that were rejected. It knows its totals and its *content digest*; it knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill.fingerprint import canonical
from tokenmill.store.record import RejectedRow
from tokenmill.store.runs import runs_of

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class SliceColumns:
    """Everything one slice will serve.

    Attributes:
        ids: Token ids of all rows, one after another.
        mask: 1 where a token is trained, as long as ``ids``.
        starts: Where each row starts in ``ids``; one more entry than rows.
        row: Number of each served row within the slice's source rows.
        part: Turn number under ``expand="turns"``, else 0.
        line: Physical line within the slice, from 0; -1 when the format has none.
        offset: Byte offset within the slice; -1 when the format has none.
        raw_length: Bytes of the source row.
        digest: xxh3-64 of the source row's bytes.
        turn_ends: Token at which each turn ends, within its row, all rows one after another.
        turn_roles: Index into ``roles`` of each turn, of the type that `role_type` says.
        turn_starts: Where each row's turns start; one more entry than rows.
        roles: Names of the roles met, in order of first appearance.
        carried: Column name → JSON text of each row.
        source_rows: Rows of the source in this slice.
        rows_in: Rows after expansion: served plus rejected.
        rejected: The rows that are not served.
    """

    ids: Int32
    mask: NDArray[np.uint8]
    starts: Int64
    row: Int32
    part: Int32
    line: Int64
    offset: Int64
    raw_length: Int64
    digest: NDArray[np.uint64]
    turn_ends: Int32
    turn_roles: NDArray[np.signedinteger[Any]]
    turn_starts: Int64
    roles: tuple[str, ...]
    source_rows: int
    rows_in: int
    rejected: Sequence[RejectedRow] = ()
    carried: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.row)
        if len(self.starts) != rows + 1 or len(self.turn_starts) != rows + 1:
            raise AssertionError("one start per row and one at the end")
        if self.rows_in != rows + len(self.rejected):
            raise AssertionError(f"{self.rows_in} rows in, {rows} + {len(self.rejected)} out")

    @cached_property
    def lengths(self) -> Int32:
        """Tokens of each row."""
        return np.diff(self.starts).astype(np.int32)

    @cached_property
    def trained(self) -> Int32:
        """Trained tokens of each row."""
        counts = np.zeros(len(self.row), np.int32)
        some = self.starts[:-1] < self.starts[1:]  # an empty row has no place to add from
        if some.any():
            counts[some] = np.add.reduceat(self.mask, self.starts[:-1][some], dtype=np.int32)
        return counts

    @cached_property
    def mask_runs(self) -> tuple[Int32, Int64]:
        """The tokens at which each row's mask changes, and where each row's begin."""
        return runs_of(self.mask, self.starts)

    def content(self) -> str:
        """Digest of the values, independent of how any library lays them out in a file.

        What follows from others (lengths, trained counts, runs of the mask) is not part of it.
        """
        hasher = xxhash.xxh3_128()
        for array in (
            self.ids, self.mask, self.starts, self.row, self.part, self.line, self.offset,
            self.raw_length, self.digest, self.turn_ends, self.turn_roles, self.turn_starts,
        ):  # fmt: skip
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            hasher.update(f"{array.dtype.str[1:]}:{len(array)};".encode())
            hasher.update(little.data)
        rest: dict[str, Any] = {
            "roles": self.roles,
            "source_rows": self.source_rows,
            "rows_in": self.rows_in,
            "carried": {name: list(texts) for name, texts in self.carried.items()},
            "rejected": list(self.rejected),
        }
        hasher.update(canonical(rest))
        return hasher.hexdigest()
