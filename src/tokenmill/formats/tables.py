"""Blocks of rows and packs as Arrow tables.

In goes an `ExportPlan`, out comes a table maker, whose tables `streams` turns into bytes. A *table
maker* has a schema and turns a block (`Packs`: integers that name rows and pieces) into a table of
it. `RowTables` holds what a row is: ids, mask or labels, origin, carried columns. `TrainerTables`
holds the three columns that trainers of transformers take, and others only where they are asked
for; `GroupTables` the same columns of every side of a group. `PackTables` lays pieces side by side
as the loader does, without a padding tail: whoever reads packs pads them, or does not need to.

Labels are unshifted and -100 at the first token of every row, as everywhere; ``loss_mask`` of a row
is the stored one. In a pack the mask is 0 at the first token of every row, as in the loader's
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.dataset import View
from tokenmill.errors import UsageError
from tokenmill.formats.carried import CarriedColumns, carried_names
from tokenmill.formats.megatron_bridge import bridge_record, eos_of, stored_slots
from tokenmill.formats.plan import LENGTHS, TRAINERS, ExportPlan
from tokenmill.loader.attached import WEIGHTS
from tokenmill.loader.group_batches import GroupFiller, group_kind, mismatched
from tokenmill.packing import Packs, Piece, fill_packs, labels_of
from tokenmill.store import Row
from tokenmill.store.slice_writer import number_type

_FLOAT = pa.list_(pa.float32())
_INT8, _INT32, _INT64 = (pa.list_(kind()) for kind in (pa.int8, pa.int32, pa.int64))
TRAINER = pa.schema({"input_ids": _INT32, "attention_mask": _INT8, "labels": _INT64})
"""What a trainer of transformers takes of a sequence."""
MEDIA = ("images", "videos", "audios")
ORIGIN = pa.struct(
    {
        "path": pa.string(),
        "row": pa.int64(),
        "line": pa.int64(),
        "offset": pa.int64(),
        "length": pa.int64(),
    }
)


class TableMaker(Protocol):
    """Turns blocks into tables of one schema."""

    @property
    def schema(self) -> pa.Schema:
        """Of every table."""

    def table(self, block: Packs) -> pa.Table:
        """The records of a block."""


def maker_of(plan: ExportPlan) -> TableMaker:
    """The table maker of a plan's format."""
    if plan.format == "packed-parquet":
        return PackTables(plan)
    if plan.run.unit == "groups":
        return GroupTables(plan)
    if plan.format in TRAINERS:
        return TrainerTables(plan.run.view, plan.also)
    return RowTables(plan.run.view, plan.mask, embed_media=plan.embed_media)


def listed(pieces: Sequence[npt.NDArray[Any]], kind: Any) -> pa.ListArray:
    """Arrays as one list column."""
    offsets = np.concatenate(([0], np.cumsum([piece.size for piece in pieces]))).astype(np.int32)
    values = np.concatenate([*pieces, np.zeros(0, kind)]).astype(kind, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


class RowTables:
    """Rows with everything that is known of them.

    Args:
        view: The rows.
        mask: ``loss_mask`` or ``labels``.
        embed_media: Whether the bytes of pictures stand beside what is said of them.
    """

    def __init__(self, view: View, mask: str, *, embed_media: bool = False) -> None:
        self._view = view
        self._mask = mask
        self._embed = embed_media
        kind = _INT8 if mask == "loss_mask" else _INT64
        own = [pa.field("input_ids", _INT32), pa.field(mask, kind)]
        own += [pa.field(WEIGHTS, _FLOAT)] * view.has_weights
        own.append(pa.field("origin", ORIGIN))
        if view.has_media:
            picture = pa.struct([*PICTURE, *[pa.field("bytes", pa.binary())] * embed_media])
            own.append(pa.field("media", pa.list_(picture)))
        self._carried = CarriedColumns(view, [field.name for field in own])
        self.schema = pa.schema([*own, *self._carried.fields])

    def table(self, block: Packs) -> pa.Table:
        rows = self._view.rows(block.rows)
        return pa.Table.from_arrays(
            [
                listed([row.input_ids for row in rows], np.int32),
                self._masks(rows),
                *weight_columns(self._view, rows, self._mask),
                pa.array([origin_of(row) for row in rows], ORIGIN),
                *self._media(rows),
                *self._carried.arrays(rows),
            ],
            schema=self.schema,
        )

    def _media(self, rows: list[Row]) -> list[pa.Array]:
        if not self._view.has_media:
            return []
        made = [media_of(row) for row in rows]
        if self._embed:
            for row, pictures in zip(rows, made, strict=True):
                for number, picture in enumerate(pictures):
                    picture["bytes"] = row.picture(number)
        return [pa.array(made, self.schema.field("media").type)]

    def _masks(self, rows: list[Row]) -> pa.ListArray:
        if self._mask == "loss_mask":
            return listed([row.loss_mask for row in rows], np.int8)
        return listed([labels_of(row.input_ids, row.loss_mask) for row in rows], np.int64)


def weights_of(row: Row, mask: str) -> npt.NDArray[np.float32]:
    """Weights of one row: 0 where ``labels`` are -100, or where ``loss_mask`` is 0."""
    weights = row.weights
    if mask == "labels":
        weights[:1] = 0
    return weights


def weight_columns(view: View, rows: list[Row], mask: str) -> list[pa.ListArray]:
    """The column of weights, where the data has some."""
    return [listed([weights_of(row, mask) for row in rows], np.float32)] if view.has_weights else []


def origin_of(row: Row) -> dict[str, Any]:
    """A row's origin by names."""
    origin = row.origin
    return {name: getattr(origin, name) for name in ("path", "row", "line", "offset", "length")}


PICTURE = (
    pa.field("kind", pa.string()),
    pa.field("reference", pa.string()),
    pa.field("digest", pa.string()),
    pa.field("width", pa.int32()),
    pa.field("height", pa.int32()),
    pa.field("start", pa.int32()),
    pa.field("count", pa.int32()),
    pa.field("grid", pa.list_(pa.int32())),
)
"""What is said of a picture, as `tokenmill.Media` has it."""


def media_of(row: Row) -> list[dict[str, Any]]:
    """A row's pictures by names."""
    return [{field.name: getattr(one, field.name) for field in PICTURE} for one in row.media]


def trainer_columns(pieces: Sequence[Piece]) -> list[pa.Array]:
    """The columns of `TRAINER` for sequences of ids and mask."""
    return [
        listed([ids for ids, _ in pieces], np.int32),
        listed([np.ones(ids.size, np.int8) for ids, _ in pieces], np.int8),
        listed([labels_of(ids, mask) for ids, mask in pieces], np.int64),
    ]


class TrainerTables:
    """Rows as a trainer takes them that is told they are tokenized already.

    Collators make tensors of whatever a row holds, so a column that nobody asked for breaks them.

    Args:
        view: The rows.
        also: Columns to add: ``origin``, one of `LENGTHS`, or carried ones.
    """

    def __init__(self, view: View, also: Sequence[str] = ()) -> None:
        self._view = view
        own = [*TRAINER, *([pa.field(WEIGHTS, _FLOAT)] if view.has_weights else [])]
        names = [field.name for field in own]
        self._also = AlsoColumns(view, names, also, ("origin", *LENGTHS))
        self.schema = pa.schema([*own, *self._also.fields])

    def table(self, block: Packs) -> pa.Table:
        rows = self._view.rows(block.rows)
        own = trainer_columns([(row.input_ids, row.loss_mask) for row in rows])
        own += weight_columns(self._view, rows, "labels")
        return pa.Table.from_arrays([*own, *self._also.arrays(rows)], schema=self.schema)


class GroupTables:
    """Groups as trainers take them: the columns of `TRAINER` once for every sequence of a group.

    Of a pair these are ``chosen_*`` and ``rejected_*``. Of a KTO row they are its own, ``kl_*``
    (its prompt with another row's answer, as in the loader's batches) and whether it is wanted.
    LLaMA-Factory calls that ``kto_tags``, and its collators ask for columns of media.

    Args:
        plan: Which groups, which format.
    """

    def __init__(self, plan: ExportPlan) -> None:
        self._view = plan.run.view
        self._shift = GroupFiller.shift_of(self._view, plan.run.spec.seed)
        self._pairs = group_kind(self._view) == "preference"
        of_host = plan.format == "llama-factory"
        prefixes = ("chosen_", "rejected_") if self._pairs else ("", "kl_")
        own = [pa.field(prefix + f.name, f.type) for prefix in prefixes for f in TRAINER]
        if not self._pairs:
            own.append(pa.field("kto_tags" if of_host else "label", pa.bool_()))
        self._empty = [pa.field(name, pa.null()) for name in (MEDIA if of_host else ())]
        names = [field.name for field in (*own, *self._empty)]
        self._also = AlsoColumns(self._view, names, plan.also, ("origin", "margin"))
        self.schema = pa.schema([*own, *self._empty, *self._also.fields])

    def table(self, block: Packs) -> pa.Table:
        rows = self._view.rows(block.rows)
        firsts = [rows[first] for first in block.bounds[:-1].tolist()]
        pieces = [(row.input_ids, row.loss_mask) for row in rows]
        if self._pairs:
            columns = [*trainer_columns(pieces[::2]), *trainer_columns(pieces[1::2])]
        else:
            others = mismatched(self._view, block.rows, rows, self._shift)
            columns = [*trainer_columns(pieces), *trainer_columns(others)]
            columns.append(pa.array([row.label for row in rows], pa.bool_()))
        columns += [pa.nulls(len(firsts)) for _ in self._empty]
        return pa.Table.from_arrays([*columns, *self._also.arrays(firsts)], schema=self.schema)


class AlsoColumns:
    """Columns that were asked for beside a trainer's own.

    Args:
        view: The rows.
        own: Names that are taken.
        also: Names to add.
        known: Those that are not carried: some of ``origin``, ``margin`` and `LENGTHS`.
    """

    def __init__(
        self, view: View, own: Sequence[str], also: Sequence[str], known: Sequence[str]
    ) -> None:
        types = {"origin": ORIGIN, "margin": pa.float64()} | dict.fromkeys(LENGTHS, pa.int64())
        self._given = [name for name in also if name in known]
        carried = [name for name in also if name not in known]
        self._carried = CarriedColumns(view, [*own, *self._given], carried)
        missing = sorted(set(carried) - set(self._carried.names))
        if missing or len(set(also)) != len(also):
            raise UsageError(
                f"also is {', '.join(also)}: each column once, of {', '.join(known)} and what the "
                f"store carries ({', '.join(carried_names(view)) or 'nothing'})"
            )
        given = [pa.field(name, types[name]) for name in self._given]
        self.fields = [*given, *self._carried.fields]

    def arrays(self, rows: list[Row]) -> list[pa.Array]:
        """The columns of rows."""
        made = []
        for name in self._given:
            if name == "origin":
                made.append(pa.array([origin_of(row) for row in rows], ORIGIN))
            elif name == "margin":
                made.append(pa.array([row.margin for row in rows], pa.float64()))
            else:
                made.append(pa.array([len(row) for row in rows], pa.int64()))
        return [*made, *self._carried.arrays(rows)]


class PackTables:
    """Packs, pieces side by side.

    The layout of Megatron-Bridge (`bridge`) has a mask of another meaning, and no column beside
    what its reader asks for, so that neither reader takes the other's file for its own.

    Args:
        plan: Which rows, which layout.
    """

    def __init__(self, plan: ExportPlan) -> None:
        self._plan = plan
        self._run = plan.run
        self._bridge = plan.layout == "megatron-bridge"
        self._eos = 0 if plan.run.slots is None else eos_of(plan.run.view)
        self.schema = (
            pa.schema({"input_ids": _INT32, "loss_mask": _INT8, "seq_start_id": _INT32})
            if self._bridge
            else pa.schema(
                {
                    "input_ids": _INT32,
                    "labels": _INT64,
                    "loss_mask": _INT8,
                    "position_ids": _INT32,
                    "seq_lengths": _INT32,
                    "cu_seqlens": _INT32,
                    "rows": _INT64,
                }
            )
        )

    def table(self, block: Packs) -> pa.Table:
        pieces = self._run.read(block)
        slots = stored_slots(self._plan, block).tolist()
        records = [
            bridge_record(pieces[first:stop], slots[first:stop], self._eos)
            if self._bridge
            else self._record(pieces[first:stop], block.rows[first:stop])
            for first, stop in pairwise(block.bounds.tolist())
        ]
        columns = [
            listed([record[field.name] for record in records], number_type(field.type.value_type))
            for field in self.schema
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _record(
        self, pieces: list[Piece], rows: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        filled = fill_packs([pieces], sum(ids.size for ids, _ in pieces), pad_id=0)
        per_token = ("input_ids", "labels", "loss_mask", "position_ids")
        return {
            **{name: filled[name].reshape(-1) for name in per_token},
            "seq_lengths": np.diff(filled["cu_seqlens"]),
            "cu_seqlens": filled["cu_seqlens"],
            "rows": rows,
        }
