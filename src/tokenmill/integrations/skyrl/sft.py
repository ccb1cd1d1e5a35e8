"""SFT data for SkyRL: rows of stores in its format, and datasets from its SFTConfig.

SkyRL describes a row by its *window*: ``num_actions`` is the number of tokens from the first
trained one to the end, ``loss_mask`` says for each of those whether it is trained:

    tokens      p p p a a u u a a          p prompt, u user in between, a assistant
    mask        0 0 0 1 1 0 0 1 1
    row         num_actions = 6, loss_mask = [1, 1, 0, 0, 1, 1]

Rows with images also have ``pixel_values`` and ``image_grid_thw``, computed by the store's own
processor when the row is read. SkyRL takes no other features, and no batch in which only some rows
have images; both are refused at the start.

`from_config` returns what ``SFTTrainer.load_dataset`` would, and `eval_from_config` what
``load_eval_datasets`` would. Raw datasets are prepared, once per pair of dataset and split.
``pretokenized_dataset_paths`` are opened: stores by us, other formats by SkyRL's own loader.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils import data as torch_data

from tokenmill import fingerprint
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.dataset import View, as_view, concat
from tokenmill.errors import RowError, SourceError, UsageError, check_one_of, check_positive
from tokenmill.files import PrivateDirectory
from tokenmill.integrations.skyrl.common import NO_COLUMN, sources_of
from tokenmill.integrations.trainers import (
    SKYRL,
    RowDataset,
    cached_scan,
    image_features,
    is_store,
    prepared,
    stated_date,
)
from tokenmill.media import Processor
from tokenmill.optional import optional
from tokenmill.sampling import Int64Array
from tokenmill.source import open_rows
from tokenmill.store import Row, Store, open_store
from tokenmill.work.processor import processor_of

Item = dict[str, Any]
Source = Store | View | str | os.PathLike[str]

VISION = ("pixel_values", "image_grid_thw")
"""The features that SkyRL passes to a vision model."""
TURN_ENDS = {"last_assistant_message": "turn", "all_assistant_messages": "stop"}
"""train_on_what to where SkyRL ends a trained turn."""
_SKYRL_MODULE = "skyrl.train.dataset.sft_dataset"
_CHUNK = 1 << 10  # overlong rows read at a time

_log = logging.getLogger(__name__)


# Rows


def window(row: Row, max_length: int | None = None) -> Item:
    """Return a row in SkyRL's format, truncated to its first ``max_length`` tokens."""
    item = SKYRL.item(row.input_ids[:max_length], row.loss_mask[:max_length])
    return {**item, "num_actions": len(item["loss_mask"])}


class SFTDataset(RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows of stores in SkyRL's format.

    Where SkyRL is loaded, this is a virtual subclass of its dataset classes, so that it mixes
    several sources by ``dataset_lengths``.

    Args:
        *sources: Stores, views or paths of stores; served one after another.
        max_length: Longer rows are truncated at their end. Rows without a trained token left are
            dropped, as SkyRL does with pretokenized data, and so are longer rows with images.
    """

    trainer = SKYRL

    def __init__(self, *sources: Source, max_length: int | None = None) -> None:
        if not sources:
            raise UsageError("SFTDataset needs at least one store")
        if max_length is not None:
            check_positive("max_length", max_length)
        opened = (open_store(s) if isinstance(s, str | os.PathLike) else s for s in sources)
        self._sources = [as_view(source) for source in opened]
        self.view = self.trainer.check(concat(self._sources))
        self.max_length = max_length
        self._dropped = _untrained(self.view, max_length)
        self._check_images()
        if not len(self):
            raise SourceError(f"no row has a trained token within max_length={max_length}")
        _register_subclass()

    def _check_images(self) -> None:
        """Raise before the run what SkyRL would raise in the middle of it."""
        if not self.view.has_media:
            return
        images = self.view.pictures_at(np.arange(len(self.view), dtype=np.int64))
        if not images.any():
            return
        without = np.flatnonzero(images == 0)
        if without.size:
            raise UsageError(
                "some rows have pictures and others none, and SkyRL takes no batch of both: serve "
                'them apart, by store.filter("pictures > 0")',
                **self.view[int(without[0])].origin.location,
            )
        names = set(image_features(self.view[0], self._processor, "SkyRL"))
        if names != set(VISION):
            raise UsageError(
                f"SkyRL takes {' and '.join(VISION)}, and the processor of these rows gives "
                f"{', '.join(sorted(names))}"
            )

    @cached_property
    def _processor(self) -> Processor:
        stores = {store.processor_key: store for store in self.view.stores if store.has_media}
        if len(stores) > 1:
            raise UsageError("rows with pictures of different processors cannot be one dataset")
        return processor_of(*stores.values())

    def item(self, row: Row) -> Item:
        if not row.media:
            return window(row, self.max_length)
        return {**window(row), **image_features(row, self._processor, "SkyRL")}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_processor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register_subclass()

    @property
    def key(self) -> str:
        """Content key, which is part of a sampler's state."""
        if self.max_length is None:
            return self.view.key
        return fingerprint.key({"skyrl": self.view.key, "max_length": self.max_length})

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every row, after truncating and dropping."""
        lengths = self.view.lengths
        if self.max_length is None:
            return lengths
        kept = np.delete(np.asarray(lengths), self._dropped)
        return np.minimum(kept, np.int32(self.max_length))

    @property
    def dataset_lengths(self) -> list[int]:
        """Rows of every source, in order."""
        ends = np.cumsum([len(source) for source in self._sources])
        ends -= np.searchsorted(self._dropped, ends)
        return [int(rows) for rows in np.diff(ends, prepend=0)]

    def __len__(self) -> int:
        return len(self.view) - len(self._dropped)

    def row_numbers(self, numbers: Int64Array) -> Int64Array:
        # The k-th dropped row d has d - k kept rows before it.
        before = self._dropped - np.arange(len(self._dropped))
        found: Int64Array = numbers + np.searchsorted(before, numbers, side="right")
        return found


def _untrained(view: View, max_length: int | None) -> Int64Array:
    """Rows of which truncation leaves nothing to train, or not all images."""
    if max_length is None:
        return np.zeros(0, dtype=np.int64)
    overlong = np.flatnonzero(view.lengths > max_length)
    dropped: list[int] = []
    for first in range(0, len(overlong), _CHUNK):
        numbers = overlong[first : first + _CHUNK]
        dropped += [
            number
            for number, row in zip(numbers.tolist(), view.rows(numbers), strict=True)
            if row.media or not row.loss_mask[1:max_length].any()
        ]
    return np.asarray(dropped, dtype=np.int64)


def _register_subclass() -> None:
    """Let the ``isinstance`` checks of SkyRL pass, without importing it.

    Its trainer mixes several sources only if the dataset is a concatenation.
    """
    module = sys.modules.get(_SKYRL_MODULE)
    for name in ("SFTDataset", "ConcatSFTDataset"):
        theirs = getattr(module, name, None)
        if theirs is not None:
            theirs.register(SFTDataset)


# Config


def from_config(config: Any, *, tokenizer: Any = None, **more: Any) -> Any:
    """Return the training dataset of an SFTConfig.

    Args:
        config: SFTConfig, or an object or mapping with its names; any may be missing.
        tokenizer: As for `tokenmill.prepare`; None takes ``config.model.path``.
        **more: Arguments of `tokenmill.prepare` that SkyRL does not have, such as ``date``,
            ``chat_template``, ``template_kwargs``, ``carry``, ``executor``; they take precedence.
    """
    paths = _get(config, "pretokenized_dataset_paths")
    if paths:
        return _pretokenized(paths, _get(config, "max_length"))
    names, splits = _pairs(config, "train", "dataset_name", "dataset_split", "train")
    if not names:
        raise UsageError("the config names no data: set train_datasets")
    pairs = zip(names, splits, strict=True)
    return SFTDataset(*(_prepared(config, *pair, tokenizer, more) for pair in pairs))


def eval_from_config(
    config: Any, *, tokenizer: Any = None, **more: Any
) -> list[tuple[str, Any]] | None:
    """Return the evaluation datasets of an SFTConfig with their names, or None if it has none.

    The arguments are those of `from_config`.
    """
    limit, stated = _get(config, "max_length"), _get(config, "eval_dataset_names")
    paths = _get(config, "eval_pretokenized_dataset_paths")
    if paths:
        labels = stated or [os.path.basename(str(path).rstrip("/")) for path in paths]
        _check_labels(labels, paths)
        return [
            (label, _pretokenized([path], limit)) for label, path in zip(labels, paths, strict=True)
        ]
    names, splits = _pairs(config, "eval", "eval_dataset_name", "eval_dataset_split", "validation")
    if not names:
        return None
    labels = stated or [name.replace("/", "_") for name in names]
    _check_labels(labels, names)
    return [
        (label, SFTDataset(_prepared(config, name, split, tokenizer, more)))
        for label, name, split in zip(labels, names, splits, strict=True)
    ]


def _pretokenized(paths: Sequence[str], limit: int | None) -> Any:
    foreign = [path for path in paths if os.path.exists(path) and not is_store(path)]
    if not foreign:
        return SFTDataset(*paths, max_length=limit)
    purpose = "no store of tokenmill's: reading it by SkyRL's own loader"
    with optional("skyrl", purpose, path=foreign[0]):
        from skyrl.train.dataset.pretokenized import load_from_pretokenized
        from skyrl.train.dataset.sft_dataset import ConcatSFTDataset
    sources = [
        load_from_pretokenized(str(path), max_length=limit)
        if path in foreign
        else SFTDataset(path, max_length=limit)
        for path in paths
    ]
    return sources[0] if len(sources) == 1 else ConcatSFTDataset(sources)


def _get(config: Any, name: str, default: Any = None) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _pairs(
    config: Any, side: str, old_name: str, old_split: str, default_split: str
) -> tuple[list[str], list[str]]:
    """Datasets and their splits; SkyRL's deprecated single names count if there is no list."""
    names, splits = _get(config, f"{side}_datasets"), _get(config, f"{side}_dataset_splits")
    if names is None:
        single = _get(config, old_name)
        names = [] if single is None else [single]
        if splits is None and _get(config, old_split) is not None:
            splits = [_get(config, old_split)]
    if isinstance(names, str) or isinstance(splits, str):
        raise UsageError(f"{side}_datasets and {side}_dataset_splits are lists")
    names = [os.fspath(name) for name in names]
    splits = [default_split] * len(names) if splits is None else [str(split) for split in splits]
    if len(names) != len(splits):
        raise UsageError(
            f"{side}_dataset_splits names {len(splits)} splits for {len(names)} datasets"
        )
    return names, splits


def _check_labels(labels: Any, sources: Any) -> None:
    labels = list(labels)
    if len(labels) != len(sources) or len(set(labels)) != len(labels) or not all(labels):
        raise UsageError(
            f"eval_dataset_names must be {len(sources)} different names, not {labels}: set them"
        )


def _prepared(
    config: Any, dataset: str, split: str, tokenizer: Any, more: Mapping[str, Any]
) -> Store:
    what = _get(config, "train_on_what", "last_assistant_message")
    train_on = str(getattr(what, "value", what))
    check_one_of("train_on_what", train_on, TURN_ENDS)
    if tokenizer is None:
        tokenizer = _get(_get(config, "model"), "path")
    if tokenizer is None:
        raise UsageError("no tokenizer: give tokenizer=, or a config with model.path")
    cache_dir, messages_key = _get(config, "cache_dir"), _get(config, "messages_key")
    sources = sources_of(dataset, split)
    disabled = bool(_get(config, "disable_cache", False))
    if train_on == "all_assistant_messages":
        private = PrivateDirectory() if disabled else None
        indexes = cache_dir if private is None else private.path
        if _is_alpaca(sources, messages_key or "messages", indexes):
            train_on = "last_assistant_message"  # SkyRL has nothing else for these rows
    recipe: dict[str, Any] = {
        "sources": sources,
        "tokenizer": tokenizer,
        "tokenizer_backend": "transformers",
        # The default is left unset, so that `tokenmill prepare` finds the same store.
        "messages_key": None if messages_key == "messages" else messages_key,
        "tools_key": _get(config, "tools_key", "tools") or NO_COLUMN,
        "system_key": _get(config, "system_key", "system") or NO_COLUMN,
        "date": stated_date(),
        "train_on": train_on,
        "turn_end": TURN_ENDS[train_on],
        "max_length": _get(config, "max_length"),
        "overlong": "truncate",
    }
    options: dict[str, Any] = {
        "num_workers": _get(config, "num_workers"),
        "cache_dir": cache_dir,
        "disable_cache": disabled,
        # SkyRL accepts both; without a cache there is nothing to rebuild.
        "force_recache": bool(_get(config, "force_recache", False)) and not disabled,
    }
    progress = None
    for name, value in more.items():
        if name == "progress":
            progress = value
        elif name in Recipe.__struct_fields__:
            recipe[name] = value
        elif name in RunOptions.__struct_fields__:
            options[name] = value
        else:
            raise UsageError(f"unknown argument: {name}")
    store = prepared(Recipe(**recipe), RunOptions(**options), progress=progress)
    rejected = ", ".join(f"{count:,} {why}" for why, count in store.rejected.items()) or "none"
    _log.log(
        logging.WARNING if store.rejected else logging.INFO,
        "%r (split %r): %s rows, rejected: %s; %s",
        dataset, split, f"{len(store):,}", rejected, store.path,
    )  # fmt: skip
    return store


def _is_alpaca(sources: Sequence[str], messages_key: str, cache_dir: Any) -> bool:
    """Whether SkyRL would read instructions and outputs: the columns of all rows decide."""
    rows = open_rows(list(sources), cache_dir=cache_dir)

    def scan() -> dict[str, Any]:
        columns: set[str] = set()
        for _, row in rows.scan():
            if isinstance(row, RowError):
                continue  # the build rejects it
            columns.update(row)
            if messages_key in columns:
                return {"alpaca": False}
        return {"alpaca": {"instruction", "output"} <= columns}

    query = {"instructions and outputs without": messages_key}
    return bool(cached_scan(rows, cache_dir, query, scan)["alpaca"])
