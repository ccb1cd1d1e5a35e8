"""Deriving: another ``max_length`` without tokenizing again.

With ``overlong="drop"`` a limit only decides which rows are kept, so the slice of one limit can be
made from the slice of another by copying rows: from a larger limit (or none) always, from a smaller
one when that dropped nothing as overlong. The result is bit for bit what tokenizing would have
given, including the words of its rejections; tests compare the two. This is the worker's half;
`builder` says which slices can serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import CorruptionError
from tokenmill.store import CacheLayout
from tokenmill.store.columns import SliceColumns, weights_along, weights_or_none
from tokenmill.store.record import RejectedRow, role_type
from tokenmill.store.slice_writer import encode_slice, publish_slice
from tokenmill.store.slices import SliceReader
from tokenmill.tokenizer import overlong_message
from tokenmill.tokenizer.encoded import starts_of
from tokenmill.work.tasks import Rest, Work


def open_deriver(options: dict[str, Any]) -> Work:
    """Entry for executors: returns the function that derives one slice."""
    layout = CacheLayout(Path(options["cache"]))
    limit = options["max_length"]

    def derive(payload: dict[str, Any]) -> dict[str, Any] | Rest:
        source = layout.slice(payload["from"])
        try:
            reader = SliceReader(source, None, mapped=False, check=True)
            columns = kept_columns(reader, limit)
        except CorruptionError:
            return {"built": False, "derived": False}  # then it is tokenized like any other
        encoded = encode_slice(payload["key"], columns)

        def publish() -> dict[str, Any]:
            publish_slice(layout, encoded)
            return {"built": False, "derived": True}

        return publish

    return derive


def kept_columns(reader: SliceReader, limit: int | None) -> SliceColumns:
    """The columns of a slice under another limit."""
    record = reader.record
    lengths = reader.column("length")
    keep = np.ones(record.rows, bool) if limit is None else lengths <= limit
    part = reader.column("part")
    lost = np.flatnonzero(~keep)
    if record.groups is not None:  # a group of which one is too long is left out, and said once
        firsts = np.flatnonzero(part == 0)
        sizes = np.diff(firsts, append=record.rows)
        keep = np.repeat(np.logical_and.reduceat(keep, firsts), sizes)
        lost = firsts[~keep[firsts]]
    starts = np.asarray(reader.starts, np.int64)
    ends, bounds, roles = reader.all_turns()
    rejected = [_reworded(row, limit) for row in record.rejected]
    rejected += [_dropped(reader, int(row), limit) for row in lost]
    kept_turns = np.repeat(keep, np.diff(bounds))
    names, numbers = _renumbered(record.roles, roles[kept_turns])
    ids, mask = reader.all_tokens()
    kept_tokens = np.repeat(keep, np.diff(starts))
    return SliceColumns(
        ids=ids[kept_tokens],
        mask=mask[kept_tokens],
        starts=starts_of(np.diff(starts)[keep]),
        row=reader.column("row_in_slice")[keep],
        part=part[keep],
        line=reader.column("line_in_slice")[keep],
        offset=reader.column("offset_in_slice")[keep],
        raw_length=reader.column("raw_length")[keep],
        digest=reader.column("digest")[keep],
        turn_ends=ends[kept_turns],
        turn_roles=numbers,
        turn_starts=starts_of(np.diff(bounds)[keep]),
        roles=names,
        source_rows=record.source_rows,
        rows_in=record.rows_in,
        rejected=sorted(rejected, key=lambda row: (row.row, row.part)),
        carried={
            name: [
                text for text, kept in zip(reader.carried_texts(name), keep, strict=True) if kept
            ]
            for name in record.carried
        },
        groups=None if record.groups is None else reader.group_columns().take(keep),
        weights=_weights(reader, mask, starts, kept_tokens),
        media=None if (media := reader.media_columns()) is None else media.take(keep),
    )


def _weights(
    reader: SliceReader,
    mask: NDArray[np.uint8],
    starts: NDArray[np.int64],
    kept: NDArray[np.bool_],
) -> NDArray[np.float32] | None:
    """Weights of the tokens that are kept; None where each of them now weighs what all do."""
    if not reader.record.has_weights:
        return None
    rows = range(reader.record.rows)
    each = [
        weights_along(*reader.weight_runs(row), mask[starts[row] : starts[row + 1]]) for row in rows
    ]
    return weights_or_none(np.concatenate(each)[kept], mask[kept])


def _renumbered(
    names: tuple[str, ...], roles: NDArray[np.signedinteger[Any]]
) -> tuple[tuple[str, ...], NDArray[np.signedinteger[Any]]]:
    """Role numbers in order of first appearance, as a slice made from these rows alone has them."""
    present, first = np.unique(roles, return_index=True)
    order = present[np.argsort(first)]
    number = np.zeros(max(len(names), 1), role_type(len(order)))
    number[order] = np.arange(len(order))
    return tuple(names[n] for n in order), number[roles]


def _reworded(row: RejectedRow, limit: int | None) -> RejectedRow:
    """A row that was too long before is too long now: under the limit of this recipe."""
    if row.reason != "overlong" or limit is None:
        return row
    return msgspec.structs.replace(row, detail=overlong_message(limit))


def _dropped(reader: SliceReader, number: int, limit: int | None) -> RejectedRow:
    assert limit is not None
    return RejectedRow(
        row=int(reader.column("row_in_slice")[number]),
        part=int(reader.column("part")[number]),
        line=int(reader.column("line_in_slice")[number]),
        offset=int(reader.column("offset_in_slice")[number]),
        length=int(reader.column("raw_length")[number]),
        reason="overlong",
        detail=overlong_message(limit),
    )
