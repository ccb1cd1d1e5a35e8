"""Lazy datasets for Hugging Face `datasets` and TRL, and the collator and subclasses they need.

`datasets` reads rows through three methods of a `datasets.table.Table` (``fast_slice``,
``fast_gather``, ``to_reader``). `LazyTable` implements these with a `Reader`, so select, shard,
shuffle, set_format, map and pickling work as on any dataset. Fingerprints are computed from the
content, so `datasets` hashes nothing and finds its own cached maps in another process.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from tokenmill._core import fingerprint
from tokenmill._core.optional import installed_version, optional
from tokenmill.data.batch_media import Pixels
from tokenmill.data.fill import check_multiple
from tokenmill.data.filler import Filler
from tokenmill.data.group_batches import GroupFiller, group_counts
from tokenmill.data.mixture import Mixture
from tokenmill.data.packs import Pack
from tokenmill.data.prompt_rows import shape_row
from tokenmill.data.prompts import PromptDataset, PromptSettings, open_prompts
from tokenmill.data.samples import Samples, Step
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import View, ViewSidecar, as_view, tokens_alone, unweighted
from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.exports.columns import list_array, weights_of
from tokenmill.integrations.trainers import FIELDS, VERBATIM
from tokenmill.store import Row, Store
from tokenmill.store.by_source import SourceRows, needs_store

with optional("datasets"):
    import datasets
    from datasets.table import TableBlock, table_cast

__all__ = [
    "VisionCollator",
    "as_prepared",
    "for_grpo",
    "for_trl",
    "in_order",
    "to_hf",
]

READ_ROWS = 1000  # rows per batch of a full scan, as in `datasets`
MASKS = ("labels", "loss_mask", "assistant_masks")
SHAPES: dict[str, dict[str, tuple[str, Any]]] = {
    "loss_mask": {"input_ids": ("ids", np.int32), "loss_mask": ("stored_mask", np.int8)},
    "labels": {"input_ids": ("ids", np.int32), "labels": ("labels", np.int64)},
    "assistant_masks": {"input_ids": ("ids", np.int32), "assistant_masks": ("mask", np.int8)},
    "packs": {
        "input_ids": ("ids", np.int32),
        "labels": ("labels", np.int64),
        "seq_lengths": ("length", np.int64),
    },
}
"""Columns of each shape: a field of `FIELDS` and the type of its elements."""
ROW = "row"  # the column of the shape ``rows``: numbers of rows, or of samples of prompts
ROW_NUMBERS = pa.schema({ROW: pa.int64()})
WEIGHTS = pa.field("loss_weights", pa.list_(pa.float32()))


@dataclass(frozen=True)
class Reader:
    """What a `LazyTable` is computed from; its functions must be picklable."""

    rows: int
    schema: pa.Schema
    nbytes: Callable[[], int]  # an estimate for all columns; reads all lengths
    read: Callable[[Sequence[int]], pa.Table]


def to_hf(data: Store | SourceRows | View | Mixture, mask: str = "labels") -> datasets.Dataset:
    """Return rows as a lazy `datasets.Dataset`.

    Rows are in the order of the store or view. A mixture's rows are in the order in which one epoch
    interleaves them by the weights, each source in its own order.

    Args:
        data: A store, a view or a mixture.
        mask: ``labels``: columns input_ids and labels, -100 where a token is not trained and at
            the first token of every row, as in the loader. ``loss_mask``: the stored columns
            input_ids and loss_mask. ``assistant_masks``: columns input_ids and assistant_masks,
            from which TRL computes those labels when it truncates or packs.
    """
    check_one_of("mask", mask, MASKS)
    samples = RunIndex(data, order="sequential")
    if samples.view.has_media or mask == "assistant_masks":
        tokens_alone(samples.view, f"a dataset with {mask}")
    return lazy_dataset(samples, mask)


def lazy_dataset(samples: RunIndex, shape: str) -> datasets.Dataset:
    if shape == "rows":
        nbytes = partial(int, 8 * len(samples))
        reader = Reader(len(samples), ROW_NUMBERS, nbytes, partial(_numbers, samples))
    else:
        columns = SHAPES[shape]
        schema = pa.schema(
            {name: pa.list_(pa.from_numpy_dtype(dtype)) for name, (_, dtype) in columns.items()}
        )
        if samples.view.has_weights:
            schema = schema.append(WEIGHTS)
        nbytes = partial(_token_bytes, samples, 12 if "labels" in columns else 5)
        reader = Reader(len(samples), schema, nbytes, partial(_columns, samples, shape))
    identity = {"shape": shape, "epochs": samples.epochs, **vars(samples.spec)}
    return as_dataset(reader, identity, GroupDataset if samples.view.has_groups else None)


def _token_bytes(samples: RunIndex, size: int) -> int:
    return samples.tokens * size


def as_dataset(reader: Reader, identity: Any, kind: type[Any] | None = None) -> datasets.Dataset:
    table = LazyTable(reader, range(reader.rows), reader.schema.names, reader.schema)
    return (kind or datasets.Dataset)(table, fingerprint=fingerprint.key(identity)[:16])


class GroupDataset(datasets.Dataset):  # type: ignore[misc]
    """A dataset of encoded groups or their rows. Trainers that tokenize texts cannot use it."""

    def map(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().map(*arguments, **named)
        except KeyError as error:
            raise UsageError(
                f"no column {error} in this dataset, which is tokenized already. A plain "
                "DPOTrainer or KTOTrainer tokenizes texts; use hf.as_prepared(DPOTrainer) with the "
                "dataset of hf.for_trl"
            ) from error


def _numbers(samples: RunIndex, indices: Sequence[int]) -> pa.Table:
    return pa.table([pa.array(samples.packs(indices).rows)], schema=ROW_NUMBERS)


def _columns(samples: RunIndex, shape: str, indices: Sequence[int]) -> pa.Table:
    found = samples.pieces(indices)
    if shape == "packs":  # an empty pack, which ``balanced`` creates, holds one untrained token
        pad = np.full(1, samples.pad_token_id or 0, np.int32), np.zeros(1, np.uint8)
        found = [pieces or [pad] for pieces in found]
    table = pa.table(
        {
            name: list_array(
                [np.concatenate([FIELDS[field](*p) for p in ps]) for ps in found], dtype
            )
            for name, (field, dtype) in SHAPES[shape].items()
        }
    )
    if samples.view.has_weights:
        rows = samples.view.rows(samples.packs(indices).rows)
        weights = list_array([weights_of(row, shape) for row in rows], np.float32)
        table = table.append_column(WEIGHTS, weights)
    return table


class LazyTable(TableBlock):  # type: ignore[misc]
    """Some rows and columns of a reader, computed when they are read.

    It implements what `datasets` calls; operations that need a whole column, such as adding one,
    read `table`.
    """

    def __init__(
        self, reader: Reader, span: range, columns: Sequence[str], schema: pa.Schema
    ) -> None:
        # The parent's constructor would need the rows.
        self._reader = reader
        self._span = span
        self._columns = list(columns)
        self._schema = schema

    def __reduce__(self) -> Any:
        return LazyTable, (self._reader, self._span, self._columns, self._schema)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTable:
        return self  # immutable

    def __repr__(self) -> str:
        return f"LazyTable({self.num_rows} rows, {', '.join(self.column_names)})"

    # Rows

    def _read(self, numbers: Sequence[int]) -> pa.Table:
        if not len(numbers):
            return self._schema.empty_table()
        found = self._reader.read(numbers).select(self._columns)
        return table_cast(found.rename_columns(self._schema.names), self._schema)

    def fast_slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        if offset < 0:
            raise IndexError("offset must be non-negative")
        stop = len(self._span) if length is None else offset + max(length, 0)
        return self._read(self._span[offset:stop])

    def fast_gather(self, indices: Any) -> pa.Table:
        numbers = np.asarray(indices, dtype=np.int64)
        return self._read((numbers + self._span.start).tolist())

    def to_reader(self, max_chunksize: int | None = None) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches(max_chunksize))

    def _batches(self, size: int | None = None) -> Iterator[pa.RecordBatch]:
        size = min(size or READ_ROWS, READ_ROWS)
        for first in range(0, len(self._span), size):
            yield from self._read(self._span[first : first + size]).to_batches()

    @property
    def table(self) -> pa.Table:
        return pa.Table.from_batches(self._batches(), schema=self._schema)

    def column(self, i: int | str) -> pa.ChunkedArray:
        return self.select([i]).table.column(0)

    # Metadata

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def num_rows(self) -> int:
        return len(self._span)

    def __len__(self) -> int:
        return len(self._span)

    @property
    def num_columns(self) -> int:
        return len(self._columns)

    @property
    def column_names(self) -> list[str]:
        return list(self._schema.names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns

    @property
    def nbytes(self) -> int:
        rows = self._reader.nbytes() * len(self._span) // max(self._reader.rows, 1)
        return rows * len(self._columns) // len(self._reader.schema)

    # Derived tables

    def slice(self, offset: int = 0, length: int | None = None) -> LazyTable:
        stop = len(self._span) if length is None else offset + length
        return LazyTable(self._reader, self._span[offset:stop], self._columns, self._schema)

    def select(self, columns: Sequence[str | int]) -> LazyTable:
        names = self._schema.names
        positions = [names.index(name) if isinstance(name, str) else name for name in columns]
        schema = pa.schema(
            [self._schema.field(position) for position in positions], self._schema.metadata
        )
        kept = [self._columns[position] for position in positions]
        return LazyTable(self._reader, self._span, kept, schema)

    def drop(self, columns: str | Sequence[str]) -> LazyTable:
        dropped = {columns} if isinstance(columns, str) else set(columns)
        missing = dropped - set(self._schema.names)
        if missing:
            raise KeyError(f"column {sorted(missing)[0]!r} does not exist")
        return self.select([name for name in self._schema.names if name not in dropped])

    def rename_columns(self, names: Sequence[str]) -> LazyTable:
        fields = [f.with_name(name) for f, name in zip(self._schema, names, strict=True)]
        return self.cast(pa.schema(fields, self._schema.metadata))

    def replace_schema_metadata(self, metadata: Any = None) -> LazyTable:
        return self.cast(self._schema.with_metadata(metadata))

    def cast(self, target_schema: pa.Schema, *_: Any, **__: Any) -> LazyTable:
        return LazyTable(self._reader, self._span, self._columns, target_schema)

    def flatten(self, *_: Any, **__: Any) -> LazyTable:
        return self  # nothing is nested


# Runs for TRL

# Config arguments with which any trainer reads a dataset once.
_ONE_PASS: dict[str, Any] = {
    "num_train_epochs": 1,  # the epochs are in the dataset
    "remove_unused_columns": False,
    "ignore_data_skip": False,  # the skip makes a resume exact
}
_SEQUENTIAL = "train_sampling_strategy"  # of TrainingArguments; older ones always shuffle

TAKES_LABELS = "0.19.0"  # older collators use input_ids as labels: they train every token
TAKES_BOUNDARIES = "0.23.1"  # older ones restart positions with flash attention only, or never
HAS_SHUFFLE = "0.26.0"  # versions with the setting ``shuffle_dataset``

_IDS = pa.list_(pa.int32())
TRAINERS = {
    "dpo": pa.schema({"prompt_ids": _IDS, "chosen_ids": _IDS, "rejected_ids": _IDS}),
    "kto": pa.schema({"prompt_ids": _IDS, "completion_ids": _IDS, "KL_completion_ids": _IDS,
                      "label": pa.bool_()}),
    "reward": pa.schema({"chosen_ids": _IDS, "rejected_ids": _IDS}),
}  # fmt: skip
KINDS = {"dpo": "preference", "kto": "kto", "reward": "preference"}
REFERENCE = {"dpo": ("ref_chosen_logps", "ref_rejected_logps"), "kto": ("ref_logps",)}
"""Trainers with a reference model, and the columns of its log-probabilities."""


def for_trl(
    data: Store | SourceRows | View | Mixture,
    *,
    epochs: int = 1,
    seed: int = 42,
    order: str = "feistel",
    pack: Pack | None = None,
    padding_free: bool = False,
    world_size: int = 1,
    trainer: str | None = None,
    ref_logps: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Return a dataset in our order for one of TRL's trainers, and the arguments of its config.

    Rows with images need a `VisionCollator` of the same data.

    Args:
        data: A store, a view or a mixture.
        epochs: Number of epochs of the run; they are unrolled, the trainer runs one.
        seed: Seed of the order.
        order: As for the loader.
        pack: Samples are packs; all of them are planned now, since the dataset has a length.
        padding_free: Rows of a batch are concatenated instead of padded.
        world_size: Number of ranks, for packing with ``balanced``.
        trainer: For data with groups: ``dpo``, ``kto`` or ``reward``; None: kto where groups have
            labels of their own, else dpo. See `as_prepared`.
        ref_logps: The name of a sidecar with the reference model's log-probability of every row's
            answer; that model is then not called. For dpo, and for kto with a loss that has no KL
            term (``apo_zero_unpaired``).
        config: Your own arguments of the config; they are returned with the ones that the dataset
            needs. A warning names those that are replaced.

    Returns:
        The dataset, and all keyword arguments for ``SFTConfig``, ``DPOConfig``, ``KTOConfig`` or
        ``RewardConfig``.
    """
    view = unweighted(data.view if isinstance(data, Mixture) else as_view(data), "TRL")
    if view.is_by_source and view.has_media:
        raise needs_store("images for TRL")
    for what, present in (("images", view.has_media), ("groups", view.has_groups)):
        if present and (pack is not None or padding_free):
            raise UsageError(
                f"TRL cannot pack rows with {what}. Use tm.Loader(data, pack=...) instead."
            )
    if view.has_groups:
        tokens_alone(view, "TRL's trainer of groups")
        samples = RunIndex(data, epochs=epochs, seed=seed, order=order, unit="groups")
        known: dict[str, Any] = {} if ref_logps is None else {"precompute_ref_log_probs": True}
        dataset = _group_dataset(samples, trainer, seed, ref_logps)
        return dataset, _merged(config, _in_our_order() | known)
    if trainer is not None or ref_logps is not None:
        raise UsageError(
            ("trainer",), " and ", ("ref_logps",), " need data with groups, but this data has none."
        )
    _check_trl("labels of a dataset", TAKES_LABELS)
    if padding_free or pack is not None:
        _check_trl("the boundaries of concatenated rows", TAKES_BOUNDARIES)
    samples = RunIndex(
        data, epochs=epochs, seed=seed, order=order, pack=pack, world_size=world_size
    )
    shape = "rows" if view.has_media else "labels" if pack is None else "packs"
    dataset = lazy_dataset(samples, shape)
    arguments = _in_our_order() | {
        "dataset_kwargs": {"skip_prepare_dataset": True},
        # With packs also `packing`: TRL checks it where packs would be wrong (context parallelism).
        "packing": pack is not None,
        "padding_free": padding_free or pack is not None,
        "assistant_only_loss": False,  # TRL would look for messages
    }
    if _trl_is(HAS_SHUFFLE):
        arguments["shuffle_dataset"] = False
    # The collator converts arrays to tensors without a Python integer per token.
    return dataset.with_format("numpy"), _merged(config, arguments)


def _merged(own: Mapping[str, Any] | None, needed: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(own, Mapping | None):
        raise UsageError(
            ("config",),
            f" must be a mapping of arguments, like dict(output_dir='out'), got {own!r:.40}; make "
            "the config from the arguments that for_trl returns",
        )
    own = dict(own or {})
    replaced = [name for name in needed if name in own and own[name] != needed[name]]
    if replaced:
        shown = ", ".join(f"{name}={own[name]!r} by {needed[name]!r}" for name in replaced)
        warnings.warn(f"for_trl replaces {shown}: the dataset contains that", stacklevel=3)
    return own | needed


def _in_our_order() -> dict[str, Any]:
    arguments = {**_ONE_PASS, "max_length": None}  # rows have their length already
    if _can_be_sequential():
        arguments[_SEQUENTIAL] = "sequential"
    else:
        warnings.warn(
            "This version of transformers always shuffles the training set. Use "
            "tokenmill.integrations.hf.in_order(SFTTrainer) to keep the order of the dataset.",
            stacklevel=3,
        )
    return arguments


def _check_trl(what: str, lowest: str) -> None:
    if not _trl_is(lowest):
        raise UsageError(
            f"TRL {installed_version('trl')} silently ignores {what}. Upgrade it: "
            f"pip install 'trl>={lowest}'"
        )


def _trl_is(lowest: str) -> bool:
    """Whether the installed TRL is at least this version; without one, assume a current one."""
    versions = (installed_version("trl") or lowest, lowest)
    found, needed = ([int(part) for part in re.findall(r"\d+", v)[:3]] for v in versions)
    return found >= needed


def _can_be_sequential() -> bool:
    try:
        from transformers import TrainingArguments
    except ImportError:
        return True  # current releases can
    return _SEQUENTIAL in {field.name for field in fields(TrainingArguments)}


def in_order(trainer: type[Any]) -> type[Any]:
    """Subclass a trainer so that it reads its training set in the dataset's order.

    Needed only where transformers has no ``train_sampling_strategy``; harmless otherwise.
    """
    from torch.utils.data import SequentialSampler

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    return type(
        f"InOrder{trainer.__name__}", (trainer,), {"_get_train_sampler": _get_train_sampler}
    )


# Groups


def _group_dataset(
    samples: RunIndex, trainer: str | None, seed: int, ref_logps: str | None
) -> datasets.Dataset:
    counts = group_counts(samples.view)
    if trainer is None:
        trainer = "kto" if counts["kto"] else "dpo"
    check_one_of("trainer", trainer, tuple(TRAINERS))
    others = [kind for kind in KINDS.values() if kind != KINDS[trainer]] + ["ranked", "single"]
    found = sorted({kind for kind in others if counts[kind]})
    if found or not counts[KINDS[trainer]]:
        present = ", ".join(f"{counts[kind]:,} {kind}" for kind in found) or "none"
        raise UsageError(
            ("trainer", trainer),
            f" needs groups of kind {KINDS[trainer]}; other groups in this data: {present}.",
        )
    if ref_logps is not None and trainer not in REFERENCE:
        raise UsageError(
            ("ref_logps",),
            " applies to dpo and kto; ",
            ("trainer", trainer),
            " has no reference model.",
        )
    groups = _Groups(samples, trainer, seed, ref_logps)
    reader = Reader(len(samples), groups.schema, partial(_token_bytes, samples, 4), groups.read)
    producer = None if groups.sidecar is None else groups.sidecar.producer
    return as_dataset(reader, [trainer, producer, samples.epochs, vars(samples.spec)], GroupDataset)


class _Groups:
    """Groups of a run as columns of a trainer; the seed decides which KTO answers mismatch."""

    def __init__(self, samples: RunIndex, trainer: str, seed: int, ref_logps: str | None) -> None:
        self._arguments = (samples, trainer, seed, ref_logps)
        self.samples = samples
        self.trainer = trainer
        self._shift = GroupFiller.shift_of(samples.view, seed)
        self.schema = TRAINERS[trainer]
        self.sidecar: ViewSidecar | None = None
        if ref_logps is not None:
            self.sidecar = samples.view.sidecar(ref_logps)
            if self.sidecar.per != "row":
                raise UsageError(
                    f"Sidecar {ref_logps!r} has values per token, but TRL needs one value per row."
                )
            for name in REFERENCE[trainer]:
                self.schema = self.schema.append(pa.field(name, pa.float32()))
        if trainer == "reward" and group_counts(samples.view)["margins"]:
            self.schema = self.schema.append(pa.field("margin", pa.float64()))

    def __reduce__(self) -> Any:
        return _Groups, self._arguments

    def read(self, indices: Sequence[int]) -> pa.Table:
        groups = self.samples.groups(indices)
        cut = _prompt_tokens if self.trainer != "reward" else lambda row: 0
        columns: dict[str, Any] = {
            "prompt_ids": [group[0].input_ids[: cut(group[0])] for group in groups],
            "margin": [group[0].margin or 0.0 for group in groups],
            "label": [group[0].label for group in groups],
        }
        sides = ("completion_ids",) if self.trainer == "kto" else ("chosen_ids", "rejected_ids")
        for side, name in enumerate(sides):
            columns[name] = [group[side].input_ids[cut(group[0]) :] for group in groups]
        if self.trainer == "kto":
            view = self.samples.view
            numbers = self.samples.packs(indices).rows
            others = view.rows((numbers + self._shift) % len(view))
            columns["KL_completion_ids"] = [row.input_ids[_prompt_tokens(row) :] for row in others]
        if self.sidecar is not None:
            names = REFERENCE[self.trainer]
            numbers = self.samples.packs(indices).rows
            values = self.sidecar.of_rows(numbers).reshape(-1, len(names))
            columns |= dict(zip(names, values.T, strict=True))
        return pa.table([pa.array(columns[f.name], f.type) for f in self.schema], self.schema)


def _prompt_tokens(row: Row) -> int:
    if row.prompt_tokens is None:
        raise UsageError(
            f"{row.origin}: The template renders the prompt differently for the answers of this "
            "group, but TRL takes one prompt for both. Use tm.Loader, or remove the group."
        )
    return row.prompt_tokens


def as_prepared(trainer: type[Any]) -> type[Any]:
    """Subclass `DPOTrainer` or `KTOTrainer` to take the dataset of `for_trl` without tokenizing it.

    If the dataset has the reference's log-probabilities, it does not load a reference model.
    """

    def _prepare_dataset(self: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
        if _is_ours(dataset):
            return dataset
        return trainer._prepare_dataset(self, dataset, *arguments, **named)

    def _precompute_ref_logps(self: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
        known = set(dataset.column_names) if _is_ours(dataset) else set()
        if known.issuperset(REFERENCE["kto"]) and self.calculate_KL:
            raise UsageError(
                f"loss_type={self.loss_type!r} also needs the reference's log-probabilities of "
                "mismatched answers, which a sidecar cannot provide. Remove ref_logps, or use a "
                "loss without a KL term (apo_zero_unpaired)."
            )
        if any(known.issuperset(names) for names in REFERENCE.values()):
            return dataset
        return trainer._precompute_ref_logps(self, dataset, *arguments, **named)

    members = (_prepare_dataset, _precompute_ref_logps)
    return type(f"Prepared{trainer.__name__}", (trainer,), {f.__name__: f for f in members})


def _is_ours(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "data", None), LazyTable)


# Images


class VisionCollator:
    """Batches of rows with images: the ``data_collator`` for `for_trl`'s dataset.

    The batches equal those of TRL's own collator, with the labels of the store. The arguments are
    the data of the dataset, and those of `tokenmill.Loader`.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        processor: Any = None,
        pad_token_id: int | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        view = data.view if isinstance(data, Mixture) else as_view(data)
        if not view.has_media:
            raise UsageError("This data has no images. Use TRL's own collator.")
        pad_token_id = view.pad_token_or(pad_token_id)
        if pad_token_id is None:
            raise UsageError("The tokenizer has no pad or eos token. Set ", ("pad_token_id",), ".")
        self._filler = Filler(view, pad_token_id, multiple=check_multiple(pad_to_multiple_of))
        self._pixels = Pixels(view, processor)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        numbers = np.asarray([int(item[ROW]) for item in items], dtype=np.int64)
        view = self._filler.view
        packs = Samples(view).as_packs(numbers)
        filled = self._filler.fill(Step(packs, 0, numbers.size))
        batch = {name: filled[name] for name in ("input_ids", "attention_mask", "labels")}
        batch["attention_mask"] = batch["attention_mask"].astype(np.int64)
        rows = [(row, row.media) for row in view.rows(numbers)]
        batch |= self._pixels.features(rows)
        name = self._pixels.processor.layout.types_name
        if name is not None:
            width = batch["input_ids"].shape[1]
            lines = ((line * width, *row) for line, row in enumerate(rows))
            found = self._pixels.token_types(batch["input_ids"], lines)
            batch[name] = found.get(name, np.zeros_like(batch["input_ids"]))
        return {name: torch.from_numpy(value) for name, value in batch.items()}


# Prompts


def grpo_prompts(*arguments: Any, **options: Any) -> PromptDataset:
    """Return a `PromptDataset` whose lengths are those of messages as TRL renders them.

    It takes the arguments of `PromptDataset`.
    """
    return open_prompts(PromptSettings(convention=VERBATIM), *arguments, **options)


def for_grpo(prompts: PromptDataset, *, epochs: int = 1) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Return a dataset of prompts in our order for `GRPOTrainer`, and the arguments of its config.

    The column ``prompt`` has messages: TRL renders them itself, with its own tools and template
    arguments. All other columns go to the reward functions.

    Args:
        prompts: The prompts; `grpo_prompts` counts their tokens as TRL renders them.
        epochs: Number of epochs of the run; they are unrolled, the trainer runs one.

    Returns:
        The dataset, and keyword arguments for ``GRPOConfig``. They must take precedence over yours.
    """
    if not isinstance(prompts, PromptDataset):
        raise UsageError(
            ("prompts",), f" must be a PromptDataset, got {type(prompts).__name__};"
            " make one with tokenmill.PromptDataset or grpo_prompts"
        )  # fmt: skip
    check_positive("epochs", epochs)
    if not len(prompts):
        raise UsageError(f"no prompt is left: {prompts.rejected}")
    identity = {
        "prompts": prompts.key,
        "max_length": prompts.max_length,
        "seed": prompts.seed,
        "order": prompts.order,
        "epochs": epochs,
    }
    rows = len(prompts) * epochs
    reader = Reader(rows, ROW_NUMBERS, partial(int, 8 * rows), _sample_numbers)
    dataset = as_dataset(reader, identity).with_transform(partial(_prompt_rows, prompts))
    # `datasets` would hash the transform, and with it the position of `prompts`.
    dataset._fingerprint = fingerprint.key(identity)[:16]
    return dataset, {**_ONE_PASS, "shuffle_dataset": False}


def _sample_numbers(indices: Sequence[int]) -> pa.Table:
    return pa.table([np.asarray(indices, dtype=np.int64)], schema=ROW_NUMBERS)


def _prompt_rows(prompts: PromptDataset, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
    numbers = prompts.numbers_at(np.asarray(batch[ROW], dtype=np.int64))
    rows, spec = prompts.source_rows_at(numbers), prompts.spec
    for row in rows:
        prompt = shape_row(row, spec).prompt
        del row[spec.prompt_key]
        row["prompt"] = prompt
    # Reward functions expect every row to have the columns of the first, as in a table.
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
