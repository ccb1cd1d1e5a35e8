"""Tables as streams of bytes: Parquet, Arrow, lines of JSON.

In go tables, out come buffers; `export_files` calls it. Each function here is a generator of
buffers for one file, fed block by block: what pyarrow's writers produce is caught in memory
(`_Catch`) and passed on at once, because only the room `files` writes files. Parquet is compressed
with zstd, a row group per block. Arrow is an IPC stream without compression, which `datasets` maps.
Files depend on the rows and pyarrow's version only.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.formats.carried import carried_names
from tokenmill.formats.plan import ExportPlan
from tokenmill.formats.tables import media_of, origin_of, weights_of
from tokenmill.loader.attached import WEIGHTS
from tokenmill.packing import Packs, labels_of


class _Catch(io.RawIOBase):
    """A file that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: object) -> int:
        held = bytes(memoryview(data))  # type: ignore[arg-type]  # whatever pyarrow hands over
        self._held.append(held)
        self._size += len(held)
        return len(held)

    def take(self) -> list[bytes]:
        held, self._held = self._held, []
        return held


def parquet_stream(schema: pa.Schema, tables: Iterable[pa.Table]) -> Iterator[bytes]:
    """One Parquet file, a row group per table."""
    catch = _Catch()
    with pq.ParquetWriter(pa.PythonFile(catch, mode="w"), schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            yield from catch.take()
    yield from catch.take()


def arrow_stream(schema: pa.Schema, tables: Iterable[pa.Table]) -> Iterator[bytes]:
    """One Arrow IPC stream, a record batch per table."""
    catch = _Catch()
    with pa.ipc.new_stream(pa.PythonFile(catch, mode="w"), schema) as writer:
        for table in tables:
            writer.write_table(table)
            yield from catch.take()
    yield from catch.take()


def json_lines(plan: ExportPlan, blocks: Iterable[Packs]) -> Iterator[bytes]:
    """One object per row; a carried value is written as the store holds it."""
    view = plan.run.view
    own = ("input_ids", plan.mask, *[WEIGHTS] * view.has_weights, "origin")
    own += ("media",) * view.has_media
    titles = {name: f"carried.{name}" if name in own else name for name in carried_names(view)}
    for block in blocks:
        lines = []
        for row in view.rows(block.rows):
            ids, mask = row.input_ids, row.loss_mask
            marks = mask if plan.mask == "loss_mask" else labels_of(ids, mask)
            record = {
                "input_ids": ids.tolist(),
                plan.mask: marks.tolist(),
                **({WEIGHTS: weights_of(row, plan.mask).tolist()} if view.has_weights else {}),
                "origin": origin_of(row),
                **({"media": media_of(row)} if view.has_media else {}),
            }
            for name, text in row.carried_json.items():
                record[titles[name]] = msgspec.Raw(text.encode())
            lines.append(msgspec.json.encode(record))
        yield b"\n".join([*lines, b""])
