"""Whole runs for TRL's trainers.

`for_trl` returns a lazy dataset of all epochs in our order and the config arguments with which the
trainer reads it once, from the first sample to the last. The trainer's own resume ("skip the
batches already seen") is exact, because sample i depends on (seed, i) only.

Packs have the format of TRL's own packing: rows without padding and ``seq_lengths``, collated
without padding (``padding_free``), so that positions restart at every row. TRL versions that would
silently drop labels or boundaries are refused.

Groups have the columns of the trainer's own collator. TRL splits a row where the prompt rendered
alone and the whole row differ; here the group's ``prompt_tokens`` is that place:

    dpo      prompt_ids, chosen_ids, rejected_ids; with ref_logps= ref_chosen_logps,
             ref_rejected_logps
    kto      prompt_ids, completion_ids, KL_completion_ids, label; with ref_logps= ref_logps
    reward   chosen_ids, rejected_ids, each with its prompt; margin if the data has any

Of these trainers only `RewardTrainer` takes tokens by itself; `as_prepared` subclasses the others.
A sidecar has one value per row. KTO's KL term also needs the reference's value of every mismatched
sequence, which depends on the seed and the served rows. So ``ref_logps`` works only with the KTO
losses that have no such term.

Rows with images are row numbers in the dataset: `VisionCollator` reads their tokens and labels and
runs the image processor. Prompts are sample numbers: a transform reads the rows of a batch.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from tokenmill import fingerprint
from tokenmill.dataset import Mixture, View, ViewSidecar, as_view, tokens_alone, unweighted
from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.integrations.hf.dataset import (
    LazyTable,
    Reader,
    as_dataset,
    lazy_dataset,
    run_identity,
    token_bytes,
)
from tokenmill.loader import LengthGrouped, WholeRun
from tokenmill.loader.filler import Filler
from tokenmill.loader.group_batches import GroupFiller, group_counts
from tokenmill.loader.media import Pixels
from tokenmill.loader.samples import Step, Units
from tokenmill.optional import installed_version
from tokenmill.packing import Pack
from tokenmill.prompts import PromptDataset, shape_row
from tokenmill.store import Row, Store

_SEQUENTIAL = "train_sampling_strategy"  # of TrainingArguments; older ones always shuffle
ROW, SAMPLE = "row", "sample"

TAKES_LABELS = "0.19.0"
"""Older collators use input_ids as labels: they train every token."""
TAKES_BOUNDARIES = "0.23.1"
"""Older collators restart positions with flash attention only, or never."""
HAS_SHUFFLE = "0.26.0"
"""Versions with the setting ``shuffle_dataset``."""

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
    data: Store | View | Mixture,
    *,
    epochs: int = 1,
    seed: int = 42,
    order: str | LengthGrouped = "feistel",
    pack: Pack | None = None,
    padding_free: bool = False,
    world_size: int = 1,
    trainer: str | None = None,
    ref_logps: str | None = None,
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

    Returns:
        The dataset, and keyword arguments for ``SFTConfig``, ``DPOConfig``, ``KTOConfig`` or
        ``RewardConfig``. They must take precedence over your own.
    """
    view = unweighted(data.view if isinstance(data, Mixture) else as_view(data), "TRL")
    if view.has_media:
        if pack is not None or padding_free:
            raise UsageError("TRL does not pack pictures: serve packs of them with a Loader")
        if view.has_groups:
            tokens_alone(view, "TRL's trainer of groups")
    if view.has_groups:
        if pack is not None or padding_free:
            raise UsageError("TRL does not pack groups: serve packs of them with a Loader")
        samples = WholeRun(data, epochs=epochs, seed=seed, order=order, unit="groups")
        known: dict[str, Any] = {} if ref_logps is None else {"precompute_ref_log_probs": True}
        return _group_dataset(samples, trainer, seed, ref_logps), _in_our_order() | known
    if trainer is not None or ref_logps is not None:
        raise UsageError("trainer= and ref_logps= are for data with groups; this has none")
    _check_trl("labels of a dataset", TAKES_LABELS)
    if padding_free or pack is not None:
        _check_trl("the boundaries of rows that are laid behind each other", TAKES_BOUNDARIES)
    samples = WholeRun(
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
    return dataset.with_format("numpy"), arguments


def _in_our_order() -> dict[str, Any]:
    """Config arguments with which any trainer reads a dataset once, in its order."""
    arguments: dict[str, Any] = {
        "num_train_epochs": 1,  # the epochs are in the dataset
        "max_length": None,  # rows have their length already
        "remove_unused_columns": False,
        "ignore_data_skip": False,  # the skip makes a resume exact
    }
    if _can_be_sequential():
        arguments[_SEQUENTIAL] = "sequential"
    else:
        warnings.warn(
            "this transformers shuffles every training set by itself: build the trainer from "
            "tokenmill.integrations.hf.in_order(SFTTrainer), or the order is not ours",
            stacklevel=3,
        )
    return arguments


def _check_trl(what: str, lowest: str) -> None:
    if not _trl_is(lowest):
        raise UsageError(
            f"TRL {installed_version('trl')} ignores {what} without a word: "
            f"pip install 'trl>={lowest}'"
        )


def _trl_is(lowest: str) -> bool:
    """Whether the installed TRL is at least this version; without one, assume a current one."""
    installed = installed_version("trl")
    return installed is None or _release(installed) >= _release(lowest)


def _release(version: str) -> tuple[int, ...]:
    """``0.24.0rc1`` to (0, 24, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


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
    samples: WholeRun, trainer: str | None, seed: int, ref_logps: str | None
) -> datasets.Dataset:
    counts = group_counts(samples.view)
    if trainer is None:
        trainer = "kto" if counts["kto"] else "dpo"
    check_one_of("trainer", trainer, tuple(TRAINERS))
    others = [kind for kind in KINDS.values() if kind != KINDS[trainer]] + ["ranked", "single"]
    found = [kind for kind in dict.fromkeys(others) if counts[kind]]
    if found or not counts[KINDS[trainer]]:
        there = ", ".join(f"{counts[kind]:,} {kind}" for kind in found) or "none"
        raise UsageError(f"trainer={trainer!r} wants groups of {KINDS[trainer]}; there are {there}")
    if ref_logps is not None and trainer not in REFERENCE:
        raise UsageError(f"ref_logps= is for dpo and kto; trainer={trainer!r} has no reference")
    groups = _Groups(samples, trainer, seed, ref_logps)
    reader = Reader(len(samples), groups.schema, partial(token_bytes, samples, 4), groups.read)
    producer = None if groups.sidecar is None else groups.sidecar.made_by
    return as_dataset(reader, [trainer, producer, run_identity(samples)])


class _Groups:
    """Groups of a run as columns of a trainer; the seed decides which KTO answers mismatch."""

    def __init__(self, samples: WholeRun, trainer: str, seed: int, ref_logps: str | None) -> None:
        self._arguments = (samples, trainer, seed, ref_logps)
        self.samples = samples
        self.trainer = trainer
        self._has_margins = trainer == "reward" and group_counts(samples.view)["margins"] > 0
        self._shift = GroupFiller.shift_of(samples.view, seed)
        self.sidecar: ViewSidecar | None = None
        if ref_logps is not None:
            self.sidecar = samples.view.sidecar(ref_logps)
            if self.sidecar.per != "row":
                raise UsageError(f"sidecar {ref_logps!r} is per token: TRL wants one value per row")

    def __reduce__(self) -> Any:
        return _Groups, self._arguments

    @property
    def schema(self) -> pa.Schema:
        schema = TRAINERS[self.trainer]
        if self.sidecar is not None:
            for name in REFERENCE[self.trainer]:
                schema = schema.append(pa.field(name, pa.float32()))
        return schema.append(pa.field("margin", pa.float64())) if self._has_margins else schema

    def read(self, indices: Sequence[int]) -> pa.Table:
        packs = self.samples.packs(indices)
        rows = self.samples.view.rows(packs.rows)
        groups = [rows[first:stop] for first, stop in pairwise(packs.bounds.tolist())]
        columns: dict[str, Any] = {}
        cuts = [0] * len(groups)
        if self.trainer != "reward":
            cuts = [_prompt_tokens(group[0]) for group in groups]
            columns["prompt_ids"] = [
                group[0].input_ids[:cut] for group, cut in zip(groups, cuts, strict=True)
            ]
        sides = ("completion_ids",) if self.trainer == "kto" else ("chosen_ids", "rejected_ids")
        for side, name in enumerate(sides):
            columns[name] = [
                group[side].input_ids[cut:] for group, cut in zip(groups, cuts, strict=True)
            ]
        if self._has_margins:
            columns["margin"] = [group[0].margin or 0.0 for group in groups]
        if self.trainer == "kto":
            view = self.samples.view
            others = view.rows((packs.rows + self._shift) % len(view))
            answers = [other.input_ids[_prompt_tokens(other) :] for other in others]
            columns["KL_completion_ids"] = answers
            columns["label"] = [group[0].label for group in groups]
        if self.sidecar is not None:
            names = REFERENCE[self.trainer]
            values = self.sidecar.of_rows(packs.rows).reshape(-1, len(names))
            columns |= dict(zip(names, values.T, strict=True))
        schema = self.schema
        arrays = [pa.array(columns[name], schema.field(name).type) for name in schema.names]
        return pa.Table.from_arrays(arrays, schema=schema)


def _prompt_tokens(row: Row) -> int:
    if row.prompt_tokens is None:
        raise UsageError(
            f"{row.origin}: the template writes the prompt differently for the answers of this "
            "group, and TRL takes one prompt for both: serve it with a Loader, or leave it out"
        )
    return row.prompt_tokens


def as_prepared(trainer: type[Any]) -> type[Any]:
    """Subclass a trainer so that it takes the dataset of `for_trl` without tokenizing it.

    If the dataset has the reference's log-probabilities, it does not load a reference model.

    Args:
        trainer: `DPOTrainer`, `KTOTrainer` or a subclass; `RewardTrainer` needs no subclass.
    """

    def _prepare_dataset(self: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
        if _is_ours(dataset):
            return dataset
        return trainer._prepare_dataset(self, dataset, *arguments, **named)

    def _precompute_ref_logps(self: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
        known = set(dataset.column_names) if _is_ours(dataset) else set()
        if known.issuperset(REFERENCE["kto"]) and self.calculate_KL:
            raise UsageError(
                f"loss_type={self.loss_type!r} wants the reference's log-probabilities of "
                "mismatched answers, too, which no value per row holds: leave ref_logps= out, or "
                "take a loss without a KL term (apo_zero_unpaired)"
            )
        if any(known.issuperset(names) for names in REFERENCE.values()):
            return dataset
        return trainer._precompute_ref_logps(self, dataset, *arguments, **named)

    members = {
        "_prepare_dataset": _prepare_dataset,
        "_precompute_ref_logps": _precompute_ref_logps,
    }
    return type(f"Prepared{trainer.__name__}", (trainer,), members)


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
        pad_id: int | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        view = data.view if isinstance(data, Mixture) else as_view(data)
        if not view.has_media:
            raise UsageError("rows of this data have no pictures: TRL's own collator will do")
        pad_id = view.pad_id if pad_id is None else pad_id
        if pad_id is None:
            raise UsageError("the tokenizer names neither a pad nor an eos token: say pad_id")
        self._filler = Filler(view, pad_id, multiple=pad_to_multiple_of)
        self._pixels = Pixels(view, processor)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of tensors under the model's argument names."""
        import torch

        numbers = np.asarray([int(item[ROW]) for item in items], dtype=np.int64)
        view = self._filler.view
        packs = Units(view).as_packs(numbers)
        filled = self._filler.fill(Step(packs, 0, numbers.size))
        batch = {name: filled[name] for name in ("input_ids", "attention_mask", "labels")}
        batch["attention_mask"] = batch["attention_mask"].astype(np.int64)
        rows = [(row, row.media) for row in view.rows(numbers)]
        batch |= self._pixels.features(rows)
        name = self._pixels.processor.token_types_name
        if name is not None:
            width = batch["input_ids"].shape[1]
            lines = ((line * width, *row) for line, row in enumerate(rows))
            found = self._pixels.token_types(batch["input_ids"], lines)
            batch[name] = found.get(name, np.zeros_like(batch["input_ids"]))
        return {name: torch.from_numpy(value) for name, value in batch.items()}


# Prompts


def for_grpo(prompts: PromptDataset, *, epochs: int = 1) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Return a dataset of prompts in our order for `GRPOTrainer`, and the arguments of its config.

    The column ``prompt`` has messages: TRL renders them itself, with its own tools and template
    arguments. All other columns go to the reward functions.

    Args:
        prompts: The prompts; with ``apply_chat_template=True`` their lengths are those of TRL.
        epochs: Number of epochs of the run; they are unrolled, the trainer runs one.

    Returns:
        The dataset, and keyword arguments for ``GRPOConfig``. They must take precedence over yours.
    """
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
    schema = pa.schema({SAMPLE: pa.int64()})
    reader = Reader(rows, schema, partial(operator.mul, 8, rows), _sample_numbers)
    dataset = as_dataset(reader, identity).with_transform(partial(_prompt_rows, prompts))
    # `datasets` would hash the transform, and with it the position of `prompts`.
    dataset._fingerprint = fingerprint.key(identity)[:16]
    arguments = {
        "num_train_epochs": 1,  # the epochs are in the dataset
        "shuffle_dataset": False,  # and so is the order
        "remove_unused_columns": False,  # rewards are computed from them
        "ignore_data_skip": False,  # the skip makes a resume exact
    }
    return dataset, arguments


def _sample_numbers(indices: Sequence[int]) -> pa.Table:
    return pa.table({SAMPLE: np.asarray(indices, dtype=np.int64)})


def _prompt_rows(prompts: PromptDataset, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
    numbers = prompts.numbers_at(np.asarray(batch[SAMPLE], dtype=np.int64))
    rows, spec = prompts.source_rows_at(numbers), prompts.spec
    for row in rows:
        prompt = shape_row(row, spec).prompt
        del row[spec.prompt_key]
        row["prompt"] = prompt
    # Reward functions expect every row to have the columns of the first, as in a table.
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
