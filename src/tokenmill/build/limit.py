"""Apply `max_length` to a slice.

Slices are tokenized without a limit, so another limit tokenizes nothing. A store with a limit uses
the slices that have no overlong row as they are. Of the others it uses a *limited* copy, without
what the limit removes: the files of a store are also a dataset for `datasets.load_from_disk`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.build.plan import Limit
from tokenmill.build.tasks import Completion, Work
from tokenmill.store import CacheLayout
from tokenmill.store.columns import SliceColumns, weights_along, weights_or_none
from tokenmill.store.layout import SliceFiles
from tokenmill.store.record import RejectedRow, decode_media
from tokenmill.store.slice_writer import encode_slice, publish_slice
from tokenmill.store.slices import SliceReader
from tokenmill.tokenizers.encoded import starts_of


def open_limiter(options: dict[str, Any]) -> Work:
    """Return the function that publishes the limited copy of one slice (an executor's entry)."""
    layout = CacheLayout(Path(options["cache"]))
    limit = Limit(*options["limit"])

    def limit_one(payload: dict[str, Any]) -> Completion:
        columns = limit_columns(read_columns(layout.slice(payload["key"])), limit)
        encoded = encode_slice(limit.key_of(payload["key"]), columns)

        def publish() -> dict[str, Any]:
            publish_slice(layout, encoded)
            return {}

        return publish

    return limit_one


def limit_columns(columns: SliceColumns, limit: Limit) -> SliceColumns:
    """Drop or truncate the rows that are longer than the limit.

    A group is dropped as a whole, as is a row that truncation would leave without trained tokens or
    without one of its images.
    """
    lengths = np.minimum(columns.lengths, limit.max_length).astype(np.int64)
    dropped = _dropped_rows(columns, lengths, limit)
    rejected = list(columns.rejected)
    rejected += [_rejection(columns, row, *why) for row, why in dropped.items()]
    keep = np.ones(len(columns.row), bool)
    keep[_members(columns, list(dropped))] = False
    lengths[~keep] = 0
    starts, turns = columns.starts[:-1], np.diff(columns.turn_starts)
    kept_tokens = _ranges(starts, lengths, len(columns.ids))
    kept_turns = np.repeat(keep, turns)
    mask, weights = columns.mask[kept_tokens], columns.weights
    return replace(
        columns,
        ids=columns.ids[kept_tokens],
        mask=mask,
        starts=starts_of(lengths[keep]),
        row=columns.row[keep],
        part=columns.part[keep],
        line=columns.line[keep],
        offset=columns.offset[keep],
        raw_length=columns.raw_length[keep],
        digest=columns.digest[keep],
        turn_ends=np.minimum(columns.turn_ends, np.repeat(lengths, turns))[kept_turns].astype("i4"),
        turn_roles=columns.turn_roles[kept_turns],
        turn_starts=starts_of(turns[keep]),
        rejected=sorted(rejected, key=lambda row: (row.row, row.part)),
        extra={
            name: [text for text, kept in zip(texts, keep, strict=True) if kept]
            for name, texts in columns.extra.items()
        },
        groups=None if columns.groups is None else columns.groups.take(keep),
        weights=None if weights is None else weights_or_none(weights[kept_tokens], mask),
        media=None if columns.media is None else columns.media.take(keep),
    )


def _dropped_rows(
    columns: SliceColumns, lengths: NDArray[np.int64], limit: Limit
) -> dict[int, tuple[str, str]]:
    """Return reason and detail for every row, or first row of a group, that is dropped."""
    overlong = np.flatnonzero(columns.lengths > limit.max_length)
    overlong_reason = "overlong", f"longer than {limit.max_length} tokens"
    dropped: dict[int, tuple[str, str]] = dict.fromkeys(overlong.tolist(), overlong_reason)
    if limit.overlong == "truncate":
        untrained = (
            "no_trained_tokens",
            f"nothing trained is left in the first {limit.max_length} tokens",
        )
        before = np.append(0, np.cumsum(columns.mask, dtype=np.int64))
        starts = columns.starts[:-1]
        has_trained = before[starts + lengths] > before[starts]
        for row in overlong.tolist():
            if _last_image_end(columns, row) > limit.max_length:
                continue
            if has_trained[row]:
                del dropped[row]
            else:
                dropped[row] = untrained
    if columns.groups is None:
        return dropped
    first_rows = np.maximum.accumulate(np.where(columns.part == 0, np.arange(len(lengths)), 0))
    groups: dict[int, tuple[str, str]] = {}
    for row, why in dropped.items():  # a group's reason is its first one that is not the length
        first = int(first_rows[row])
        if groups.get(first, overlong_reason) == overlong_reason:
            groups[first] = why
    return groups


def _last_image_end(columns: SliceColumns, row: int) -> int:
    if columns.media is None or not columns.media.images[row]:
        return 0
    last = decode_media(columns.media.detail[row].encode(), None)[-1]
    return last.start + last.count


def _members(columns: SliceColumns, rows: list[int]) -> NDArray[np.int64]:
    """Return the rows, or all rows of the groups that begin with them."""
    if columns.groups is None or not rows:
        return np.array(rows, np.int64)
    firsts = np.append(np.flatnonzero(columns.part == 0), len(columns.part))
    places = np.searchsorted(firsts, rows)
    return np.concatenate([np.arange(firsts[at], firsts[at + 1]) for at in places])


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64], total: int) -> NDArray[np.bool_]:
    """Return a mask of `total` tokens that covers `lengths` tokens from each start."""
    steps = np.zeros(total + 1, np.int8)
    np.add.at(steps, starts, 1)
    np.subtract.at(steps, starts + lengths, 1)
    return np.cumsum(steps[:-1], dtype=np.int8) > 0


def _rejection(columns: SliceColumns, number: int, reason: str, detail: str) -> RejectedRow:
    return RejectedRow(
        row=int(columns.row[number]),
        part=int(columns.part[number]),
        line=int(columns.line[number]),
        offset=int(columns.offset[number]),
        length=int(columns.raw_length[number]),
        reason=reason,
        detail=detail,
    )


def read_columns(files: SliceFiles) -> SliceColumns:
    """Read and verify a published slice; `CorruptionError` if it is damaged."""
    reader = SliceReader(files, None, mapped=False, check=True)
    record = reader.record
    ids, mask = reader.all_tokens()
    starts = np.asarray(reader.starts, np.int64)
    ends, turn_starts, roles = reader.all_turns()
    weights = None
    if record.has_weights:
        rows = range(record.rows)
        weights = np.concatenate(
            [weights_along(*reader.weight_runs(n), mask[starts[n] : starts[n + 1]]) for n in rows]
        )
    return SliceColumns(
        ids=ids,
        mask=mask,
        starts=starts,
        row=reader.column("row_in_slice"),
        part=reader.column("part"),
        line=reader.column("line_in_slice"),
        offset=reader.column("offset_in_slice"),
        raw_length=reader.column("raw_length"),
        digest=reader.column("digest"),
        turn_ends=ends,
        turn_roles=roles,
        turn_starts=turn_starts.astype(np.int64),
        roles=record.roles,
        source_rows=record.source_rows,
        rows_in=record.rows_in,
        rejected=record.rejected,
        extra={name: reader.extra_texts(name) for name in record.extra},
        groups=None if record.groups is None else reader.group_columns(),
        weights=weights,
        media=reader.media_columns(),
    )
