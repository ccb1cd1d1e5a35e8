"""A range of rows of a Parquet or Arrow file, read by whoever builds it.

A worker takes the ranges of a file mostly in order, so the `Cursor` of the last one is kept: a row
group can only be decoded from its beginning, and is decoded once. Before the rows are handed out,
the file is held against the state that was planned: by its stat, by its version where it lives
elsewhere, and by its content where neither proves anything.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import RowError
from tokenmill.files import is_remote
from tokenmill.source.block import Block, BlockRows, changed, open_remote_block
from tokenmill.source.bytefile import LocalFile, Signature
from tokenmill.source.columnar import content_digest, distant_table, has_settled, range_digest
from tokenmill.source.jsonform import RowForm, encode
from tokenmill.source.tables import Cursor, open_table

if TYPE_CHECKING:
    from tokenmill.files.ranged import RemoteFile

_cursors: list[tuple[int, str, tuple[Any, ...], Cursor]] = []  # at most one, taken while in use


def _cursor(block: Block) -> Cursor:
    """The cursor of the last block, when this one is of the same state of the same file."""
    try:
        process, location, signature, cursor = _cursors.pop()
    except IndexError:
        process = 0
    if process == os.getpid() and (location, signature) == (block.location, _state(block)):
        return cursor
    if is_remote(block.location):
        file = open_remote_block(block)
        return Cursor(distant_table(block.kind, file, block.path, block.spans, block.spans_row))
    return Cursor(open_table(block.kind, block.location, block.path))


def _state(block: Block) -> tuple[Any, ...]:
    return (*block.signature, block.version, block.spans)


_proven: dict[str, tuple[Any, ...]] = {}
"""File whose stamp or version alone proved nothing → the state in which this process hashed it, and
the content that it found."""


def _open_unchanged(block: Block) -> LocalFile | RemoteFile:
    """The file of a block, in the state that was planned."""
    file: LocalFile | RemoteFile
    if is_remote(block.location):
        file = open_remote_block(block)
    else:
        file = LocalFile(block.location, Signature(*block.signature))
        file.path = block.path
    state = (block.signature, block.version, block.content)
    if block.settled or _proven.get(block.location) == state:
        return file
    if content_digest(file, block.kind) != block.content:
        raise changed(block)
    # Once per worker: hashing the file before every block would read it as often as it has some.
    # A stamp that is fresh proves nothing yet, and does so a moment later; one that lies ahead of
    # this machine's clock never will.
    if (
        not isinstance(file, LocalFile)
        or has_settled(file)
        or file.signature.lies_ahead(file.opened_ns)
    ):
        _proven[block.location] = state
    return file


def read_columnar_block(block: Block) -> BlockRows:
    """Read a range of rows."""
    file = _open_unchanged(block)
    first, last = block.first_row, block.first_row + block.rows
    if range_digest(block.content, first, last) != block.digest:
        raise changed(block)
    cursor = _cursor(block)
    if last > cursor.table.rows:
        raise changed(block)
    form = RowForm(cursor.table.schema, block.path)
    try:
        values = [v for row, batch in cursor.take(first, last) for v in form.rows(batch, row)]
    finally:
        if isinstance(file, LocalFile):
            file.check()  # changed rather than damaged? (a remote range was compared as it came)
    _cursors[:] = [(os.getpid(), block.location, _state(block), cursor)]
    raw = [b"" if isinstance(value, RowError) else encode(value) for value in values]
    unknown = np.full(len(raw), -1, dtype=np.int64)
    lengths = np.array([len(data) for data in raw], dtype=np.int64)
    return BlockRows(raw, values, unknown, unknown.copy(), lengths)
