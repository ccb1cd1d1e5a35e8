"""A whole run for TRL's `SFTTrainer`.

TRL knows two things about a prepared dataset: input_ids and labels. It does not know ``loss_mask``.
`for_trl` hands it both: a lazy dataset of all epochs one after another in our order, and the
arguments of `SFTConfig` that make the trainer walk through it once, from the first sample to the
last. The trainer's own resume ("skip the batches already seen") then is exact, because sample i is
a function of (seed, i) and nothing else decides what is served.

Packs are handed over as TRL's own packing hands them over: rows one after another without padding,
with ``seq_lengths``, collated without padding (``padding_free``), so that positions restart at
every row and rows do not see each other. A TRL that would drop the labels or the boundaries without
a word is refused by its version.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import fields
from typing import Any

import datasets

from tokenmill.dataset import Mixture, View, as_view, tokens_alone, unweighted
from tokenmill.errors import UsageError
from tokenmill.integrations.hf.dataset import lazy_dataset
from tokenmill.integrations.hf.preference import group_dataset
from tokenmill.loader import LengthGrouped, WholeRun
from tokenmill.optional import installed_version
from tokenmill.packing import Pack
from tokenmill.store import Store

_SEQUENTIAL = "train_sampling_strategy"  # of TrainingArguments; older ones always shuffle

TAKES_LABELS = "0.19.0"
"""Older collators make labels of input_ids, whatever the dataset says: they train every token."""

TAKES_BOUNDARIES = "0.23.1"
"""Older collators restart positions at a row with flash attention only, the oldest never: with any
other attention the rows of a pack would see each other."""

HAS_SHUFFLE = "0.26.0"
"""The setting ``shuffle_dataset``; before, there was nothing to turn off."""


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
    """A dataset in our order for one of TRL's trainers, and the arguments its config needs.

    Args:
        data: A store, a view or a mixture.
        epochs: How many epochs the run has; they are unrolled, for the trainer it is one.
        seed: Of the order.
        order: As for the loader.
        pack: Samples are packs; all of them are planned now, since the dataset has a length.
        padding_free: Rows of a batch are laid one after another instead of being padded.
        world_size: Ranks; only packing with ``balanced`` asks for them.
        trainer: Of data with groups: ``dpo``, ``kto`` or ``reward``; None: kto where groups have
            labels of their own, else dpo. See `as_prepared`.
        ref_logps: The name of a sidecar with the reference model's log-probability of every row's
            answer: then that model is not called. For dpo, and for kto with a loss that has no KL
            term (``apo_zero_unpaired``).

    Rows with pictures come as row numbers: give the trainer a `VisionCollator` of the same data.

    Returns:
        The dataset, and keyword arguments for ``SFTConfig``, ``DPOConfig``, ``KTOConfig`` or
        ``RewardConfig``. They must win over your own.

    Raises:
        UsageError: The installed TRL is too old for labels, or for rows one after another.
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
        groups = group_dataset(
            data, trainer, epochs=epochs, seed=seed, order=order, ref_logps=ref_logps
        )
        known: dict[str, Any] = {} if ref_logps is None else {"precompute_ref_log_probs": True}
        return groups, _in_our_order() | known
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
        # With packs also `packing`: TRL asks it where packs would be wrong (context parallelism).
        "packing": pack is not None,
        "padding_free": padding_free or pack is not None,
        "assistant_only_loss": False,  # the labels say it; TRL would look for messages
    }
    if _trl_is(HAS_SHUFFLE):
        arguments["shuffle_dataset"] = False
    # As arrays: the collator makes tensors of them without a Python integer per token.
    return dataset.with_format("numpy"), arguments


def _in_our_order() -> dict[str, Any]:
    """What makes any of the trainers walk through a dataset once, as it stands."""
    arguments: dict[str, Any] = {
        "num_train_epochs": 1,  # the epochs are in the dataset
        "max_length": None,  # rows have their length already
        "remove_unused_columns": False,
        "ignore_data_skip": False,  # the skip is what makes a resume exact
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
    """Whether the installed TRL is of this version or a later one; none is taken for current."""
    installed = installed_version("trl")
    return installed is None or _numbers(installed) >= _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    """``0.24.0rc1`` → (0, 24, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _can_be_sequential() -> bool:
    try:
        from transformers import TrainingArguments
    except ImportError:
        return True  # nobody here to ask; current releases can
    return _SEQUENTIAL in {field.name for field in fields(TrainingArguments)}


def in_order(trainer: type[Any]) -> type[Any]:
    """A trainer class that serves its training set as it stands.

    Needed only where transformers has no ``train_sampling_strategy``; harmless elsewhere.

    Args:
        trainer: `SFTTrainer`, or any other subclass of `transformers.Trainer`.
    """
    from torch.utils.data import SequentialSampler

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    return type(
        f"InOrder{trainer.__name__}", (trainer,), {"_get_train_sampler": _get_train_sampler}
    )
