"""Columns of the export formats: Arrow tables and JSON lines.

Labels are unshifted, with -100 at the first token of every row. ``loss_mask`` of a row is the
stored one; in a pack it is 0 at the first token of every row, as in the loader's batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.data.fill import Piece, fill_packs, labels_of
from tokenmill.data.filler import WEIGHTS
from tokenmill.data.group_batches import GroupFiller, group_kind, mismatched
from tokenmill.data.packs import Packs
from tokenmill.data.view import View
from tokenmill.errors import UsageError
from tokenmill.store import Row
from tokenmill.store.slice_writer import number_type

if TYPE_CHECKING:
    from tokenmill.exports.export_files import ExportPlan

# Formats with the columns of trainers. For grouped data they write a record per group; every other
# format writes a record per row.
TRAINERS = ("hf", "axolotl", "llama-factory")
LENGTHS = ("length", "lengths")  # names of the token count in transformers and ms-swift

_FLOAT = pa.list_(pa.float32())
_INT8, _INT32, _INT64 = (pa.list_(kind()) for kind in (pa.int8, pa.int32, pa.int64))
ORIGIN = pa.struct(
    [("path", pa.string()), *((name, pa.int64()) for name in ("row", "line", "offset", "length"))]
)
MEDIA = (
    *((name, pa.string()) for name in ("kind", "reference", "digest")),
    *((name, pa.int32()) for name in ("width", "height", "start", "count")),
    ("grid", pa.list_(pa.int32())),
)
LLAMA_FACTORY_MEDIA = ("images", "videos", "audios")  # its collators for groups require these
PACK = {
    "input_ids": _INT32,
    "labels": _INT64,
    "loss_mask": _INT8,
    "position_ids": _INT32,
    "seq_lengths": _INT32,
    "cu_seqlens": _INT32,
    "rows": _INT64,
}
BRIDGE_PACK = {"input_ids": _INT32, "loss_mask": _INT8, "seq_start_id": _INT32}
MAX_EXACT = 1 << 53  # larger integers would change in a column of floating-point numbers


class Record(NamedTuple):
    row: Row  # the first row of a group
    sequences: Sequence[Piece]  # ids and mask of every sequence
    extra: dict[str, str]  # kept columns as JSON text, by name


@dataclass(frozen=True)
class Column:
    """An Arrow field, and the function that returns its value in a record."""

    name: str
    kind: pa.DataType
    value: Callable[[Any], Any]
    metadata: dict[bytes, bytes] | None = None

    def array(self, records: Sequence[Any]) -> pa.Array:
        values = [self.value(record) for record in records]
        if pa.types.is_list(self.kind) and pa.types.is_primitive(self.kind.value_type):
            return list_array(values, number_type(self.kind.value_type))
        return pa.array(values, self.kind)


@dataclass(frozen=True)
class Table:
    """Converts blocks of samples into Arrow tables or JSON lines."""

    columns: list[Column]
    records: Callable[[Packs], list[Any]]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(c.name, c.kind, metadata=c.metadata) for c in self.columns])

    def table(self, block: Packs) -> pa.Table:
        records = self.records(block)
        arrays = [column.array(records) for column in self.columns]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def lines(self, block: Packs) -> bytes:
        """Return a JSON object per record, without the columns that the row's store lacks."""
        lines = []
        for record in self.records(block):
            values = {column.name: column.value(record) for column in self.columns}
            present = {name: value for name, value in values.items() if value is not None}
            lines.append(msgspec.json.encode(present, enc_hook=np.ndarray.tolist) + b"\n")
        return b"".join(lines)


def make_table(plan: ExportPlan) -> Table:
    view = plan.run.view
    if plan.format == "packed-parquet":
        return _pack_table(plan)
    if plan.run.unit == "groups":
        return _group_table(plan)
    if plan.format in TRAINERS:
        own = sequence_columns("", 0) + _weight_columns(view, "labels")
        columns = own + also_columns(view, own, plan.also, ("origin", *LENGTHS))
    else:
        own = _row_columns(view, plan)
        extra = raw_columns if plan.format == "jsonl" else extra_columns
        columns = own + extra(view, {column.name for column in own})
    return Table(columns, lambda block: [_record(row) for row in view.rows(block.rows)])


def _record(row: Row) -> Record:
    return Record(row, [(row.input_ids, row.loss_mask)], row.extra_json)


def list_array(values: Sequence[npt.NDArray[Any]], kind: Any) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum([value.size for value in values]))).astype(np.int32)
    flat = np.concatenate([*values, np.zeros(0, kind)]).astype(kind, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


# Rows


def _row_columns(view: View, plan: ExportPlan) -> list[Column]:
    columns = [Column("input_ids", _INT32, lambda record: record.row.input_ids)]
    if plan.mask == "loss_mask":
        columns.append(Column("loss_mask", _INT8, lambda record: record.row.loss_mask))
    else:
        columns.append(Column("labels", _INT64, lambda record: labels_of(*record.sequences[0])))
    columns += _weight_columns(view, plan.mask)
    columns.append(Column("origin", ORIGIN, lambda record: record.row.origin._asdict()))
    if view.has_media:
        embedded = [("bytes", pa.binary())] if plan.embed_media else []
        kind = pa.list_(pa.struct([*MEDIA, *embedded]))
        columns.append(Column("media", kind, lambda r: _media_of(r.row, embed=plan.embed_media)))
    return columns


def _weight_columns(view: View, mask: str) -> list[Column]:
    if not view.has_weights:
        return []
    return [Column(WEIGHTS, _FLOAT, lambda record: weights_of(record.row, mask))]


def weights_of(row: Row, mask: str) -> npt.NDArray[np.float32]:
    """Return the weights of a row: 0 where ``labels`` are -100, or where ``loss_mask`` is 0."""
    weights = row.weights
    if mask == "labels":
        weights[:1] = 0
    return weights


def _media_of(row: Row, *, embed: bool) -> list[dict[str, Any]]:
    records = [{name: getattr(media, name) for name, _ in MEDIA} for media in row.media]
    for number, record in enumerate(records if embed else ()):
        record["bytes"] = row.image(number)
    return records


# Trainers and groups. Their collators turn every column into a tensor, so other columns are opt-in.


def sequence_columns(prefix: str, number: int) -> list[Column]:
    """Return the columns of one sequence of a record, as trainers of transformers name them."""
    return [
        Column(f"{prefix}input_ids", _INT32, lambda record: record.sequences[number][0]),
        Column(
            f"{prefix}attention_mask",
            _INT8,
            lambda record: np.ones(record.sequences[number][0].size, np.int8),
        ),
        Column(f"{prefix}labels", _INT64, lambda record: labels_of(*record.sequences[number])),
    ]


def _group_table(plan: ExportPlan) -> Table:
    """Return pairs as ``chosen_*`` and ``rejected_*``; KTO rows with ``kl_*`` and their label."""
    view = plan.run.view
    for_llama_factory = plan.format == "llama-factory"
    if group_kind(view) == "preference":
        own = sequence_columns("chosen_", 0) + sequence_columns("rejected_", 1)
    else:
        own = sequence_columns("", 0) + sequence_columns("kl_", 1)
        label = "kto_tags" if for_llama_factory else "label"
        own.append(Column(label, pa.bool_(), lambda record: record.row.label))
    if for_llama_factory:
        own += [Column(name, pa.null(), lambda _: None) for name in LLAMA_FACTORY_MEDIA]
    shift = GroupFiller.shift_of(view, plan.run.spec.seed)

    def records(block: Packs) -> list[Record]:
        rows = view.rows(block.rows)
        pieces = [(row.input_ids, row.loss_mask) for row in rows]
        if group_kind(view) == "preference":
            sequences = [pieces[first:stop] for first, stop in pairwise(block.bounds.tolist())]
        else:
            others = mismatched(view, block.rows, rows, shift)
            sequences = [list(both) for both in zip(pieces, others, strict=True)]
        firsts = [rows[first] for first in block.bounds[:-1].tolist()]
        return [
            Record(row, pieces, row.extra_json)
            for row, pieces in zip(firsts, sequences, strict=True)
        ]

    return Table(own + also_columns(view, own, plan.also, ("origin", "margin")), records)


def also_columns(
    view: View, own: Sequence[Column], also: Sequence[str], computed: Collection[str]
) -> list[Column]:
    """Return the requested columns: first those of ``computed``, then kept ones."""
    available = {
        "origin": Column("origin", ORIGIN, lambda record: record.row.origin._asdict()),
        "margin": Column("margin", pa.float64(), lambda record: record.row.margin),
        **{name: Column(name, pa.int64(), lambda record: len(record.row)) for name in LENGTHS},
    }
    columns = [available[name] for name in also if name in computed]
    names = [name for name in also if name not in computed]
    if set(names) - set(extra_names(view)) or len(set(also)) != len(also):
        choices = ", ".join([*computed, *extra_names(view)])
        raise UsageError(
            ("also",), f" must be different columns of {choices}; got {', '.join(also)}"
        )
    used_names = {column.name for column in (*own, *columns)}
    return columns + extra_columns(view, used_names, names)


# Kept columns. A store contains them as JSON text; a table needs one type per column.


def extra_names(view: View) -> list[str]:
    """Return the kept columns of all stores of a view, in order of first appearance."""
    records = [store.slice_at(0).record for store in view.stores if len(store.table)]
    return list(dict.fromkeys(name for record in records for name in record.extra))


def raw_columns(view: View, used_names: Collection[str]) -> list[Column]:
    return [
        Column(_title(name, used_names), pa.null(), _extra(name, lambda t: msgspec.Raw(t.encode())))
        for name in extra_names(view)
    ]


def _extra(name: str, convert: Callable[[str], Any]) -> Callable[[Record], Any]:
    return lambda record: convert(record.extra[name]) if name in record.extra else None


def extra_columns(
    view: View, used_names: Collection[str], names: Sequence[str] | None = None
) -> list[Column]:
    """Return kept columns, each with the type that fits all of its values.

    A column of lists, objects or several types stays JSON text and is marked in its metadata.
    """
    names = extra_names(view) if names is None else names
    types: dict[str, set[str]] = {name: set() for name in names}
    for first in range(0, len(view) if names else 0, 1000):
        for row in view.batch(range(first, min(first + 1000, len(view)))):
            texts = row.extra_json
            for name in types.keys() & texts.keys():
                types[name].add(_json_type(texts[name]))
    columns = []
    for name, kinds in types.items():
        kind, title = _arrow_type(kinds - {"null"}), _title(name, used_names)
        if kind is None:
            is_json = {b"tokenmill": b"json"}
            columns.append(Column(title, pa.string(), _extra(name, str), is_json))
        else:
            columns.append(Column(title, kind, _extra(name, msgspec.json.decode)))
    return columns


def _title(name: str, used_names: Collection[str]) -> str:
    return f"extra.{name}" if name in used_names else name


def _arrow_type(kinds: set[str]) -> pa.DataType | None:
    if kinds <= {"string"}:
        return pa.string()
    if kinds == {"boolean"}:
        return pa.bool_()
    if kinds <= {"exact", "int64"}:
        return pa.int64()
    return pa.float64() if kinds <= {"exact", "number"} else None


def _json_type(text: str) -> str:
    """Return the type of a JSON text; *exact* is an integer that a float represents exactly."""
    types = {'"': "string", "t": "boolean", "f": "boolean", "n": "null", "[": "json", "{": "json"}
    if text[:1] in types:
        return types[text[:1]]
    if any(letter in text for letter in ".eE"):
        return "number"
    value = int(text) if len(text) < 24 else 1 << 80
    if abs(value) <= MAX_EXACT:
        return "exact"
    return "int64" if -(1 << 63) <= value < 1 << 63 else "json"


# Packs


def _pack_table(plan: ExportPlan) -> Table:
    """Return packs with our columns, or with those of Megatron-Bridge's packed dataset."""
    for_bridge = plan.layout == "megatron-bridge"
    kinds = BRIDGE_PACK if for_bridge else PACK
    eos = 0 if plan.run.slots is None else _eos_of(plan.run.view)

    def records(block: Packs) -> list[dict[str, npt.NDArray[Any]]]:
        pieces, slots = plan.run.read(block), stored_slots(plan, block).tolist()
        return [
            _bridge_record(pieces[first:stop], slots[first:stop], eos)
            if for_bridge
            else _pack_record(pieces[first:stop], block.rows[first:stop])
            for first, stop in pairwise(block.bounds.tolist())
        ]

    return Table([Column(name, kind, itemgetter(name)) for name, kind in kinds.items()], records)


def _pack_record(pieces: list[Piece], rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    filled = fill_packs([pieces], sum(ids.size for ids, _ in pieces), pad_token_id=0)
    per_token = ("input_ids", "labels", "loss_mask", "position_ids")
    return {
        **{name: filled[name].reshape(-1) for name in per_token},
        "seq_lengths": np.diff(filled["cu_seqlens"]),
        "cu_seqlens": filled["cu_seqlens"],
        "rows": rows,
    }


def _bridge_record(pieces: list[Piece], slots: list[int], eos: int) -> dict[str, npt.NDArray[Any]]:
    """Return one pack for Megatron-Bridge, with each row padded to its slot with eos.

    Its mask is one token earlier than ours: it marks positions whose *next* token is trained.
    """
    size = sum(slots)
    ids, mask = np.full(size, eos, np.int32), np.zeros(size, np.uint8)
    starts = np.concatenate(([0], np.cumsum(slots, dtype=np.int64)))[:-1]
    for start, (tokens, trained) in zip(starts.tolist(), pieces, strict=True):
        ids[start : start + tokens.size] = tokens
        mask[start : start + max(tokens.size - 1, 0)] = trained[1:]
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}


def stored_slots(plan: ExportPlan, packs: Packs) -> npt.NDArray[np.int64]:
    """Return the tokens of every row of packs, padding included."""
    slots = plan.run.slots
    return packs.lengths if slots is None else packs.lengths + slots.label_shift


def _eos_of(view: View) -> int:
    ids = {store.manifest["tokenizer"].get("eos_token_id") for store in view.stores}
    if len(ids) != 1 or None in ids:
        raise UsageError(
            ("pad_multiple",), f" needs data with one eos_token_id, got {sorted(ids, key=str)}"
        )
    eos: int = ids.pop()
    return eos
