"""From SkyRL's SFTConfig to a dataset.

`from_config` takes an SFTConfig, or anything with its names, and returns what
``SFTTrainer.load_dataset`` would: an `SFTDataset`, made by tokenmill. `eval_from_config` does the
same for ``load_eval_datasets``. Raw datasets (``train_datasets``, ``train_dataset_splits``) are
prepared, once per pair, into stores. ``pretokenized_dataset_paths`` are opened: stores by us, what
others tokenized (Parquet, JSON lines, Arrow, ``save_to_disk``) by SkyRL's own loader.

The host's flags are all there is to configure: the tokenizer encodes as transformers would
(``tokenizer_backend="transformers"``), and a template that prints the date takes it from the
environment, ``TOKENMILL_DATE``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.errors import RowError, UsageError, check_one_of
from tokenmill.files import PrivateDirectory
from tokenmill.integrations.hosts import is_store, noted, prepared, stated_date
from tokenmill.integrations.skyrl.dataset import SFTDataset
from tokenmill.integrations.skyrl.splits import NO_COLUMN, sources_of
from tokenmill.optional import optional
from tokenmill.source import open_rows
from tokenmill.store import Store

TURN_ENDS = {"last_assistant_message": "turn", "all_assistant_messages": "stop"}
"""train_on_what → where SkyRL ends a trained turn."""

_log = logging.getLogger(__name__)


def from_config(config: Any, *, tokenizer: Any = None, **more: Any) -> Any:
    """The training dataset of an SFTConfig: an `SFTDataset`, or SkyRL's over pretokenized files.

    Args:
        config: SFTConfig, or an object or mapping with its names; missing ones have no say.
        tokenizer: As for `tokenmill.prepare`; None takes ``config.model.path``.
        **more: Arguments of `tokenmill.prepare` that SkyRL has no name for, such as ``date``,
            ``chat_template``, ``template_kwargs``, ``carry``, ``executor``; they win.
    """
    paths = _get(config, "pretokenized_dataset_paths")
    if paths:
        return _pretokenized(paths, _get(config, "max_length"))
    names, splits = _pairs(config, "train", "dataset_name", "dataset_split", "train")
    if not names:
        raise UsageError("the config names no data: set train_datasets")
    stores = [
        _prepared(config, name, split, tokenizer, more)
        for name, split in zip(names, splits, strict=True)
    ]
    return SFTDataset(*stores)


def eval_from_config(
    config: Any, *, tokenizer: Any = None, **more: Any
) -> list[tuple[str, Any]] | None:
    """The evaluation datasets of an SFTConfig with their names, or None where it has none.

    Args:
        config: As for `from_config`.
        tokenizer: As for `from_config`.
        **more: As for `from_config`.
    """
    limit, stated = _get(config, "max_length"), _get(config, "eval_dataset_names")
    paths = _get(config, "eval_pretokenized_dataset_paths")
    if paths:
        labels = stated or [os.path.basename(str(path).rstrip("/")) for path in paths]
        _check_names(labels, paths)
        return [
            (label, _pretokenized([path], limit)) for label, path in zip(labels, paths, strict=True)
        ]
    names, splits = _pairs(config, "eval", "eval_dataset_name", "eval_dataset_split", "validation")
    if not names:
        return None
    labels = stated or [name.replace("/", "_") for name in names]
    _check_names(labels, names)
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
    """Datasets and their splits; SkyRL's single, deprecated names count where no list is given."""
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


def _check_names(labels: Any, sources: Any) -> None:
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
    stated: dict[str, Any] = {
        "sources": sources,
        "tokenizer": tokenizer,
        "tokenizer_backend": "transformers",
        # Its default is ours: one store, whether this or `tokenmill prepare` was there first.
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
        # SkyRL lets both be set; without a cache there is nothing to make again.
        "force_recache": bool(_get(config, "force_recache", False)) and not disabled,
    }
    return _run(stated, options, dict(more), f"{dataset!r} (split {split!r})")


def _is_alpaca(sources: Sequence[str], messages_key: str, cache_dir: Any) -> bool:
    """Whether SkyRL would see instructions and outputs: it asks the columns of all rows."""
    rows = open_rows(list(sources), cache_dir=cache_dir)

    def look() -> dict[str, Any]:
        columns: set[str] = set()
        for _, row in rows.scan():
            if isinstance(row, RowError):
                continue  # preparing rejects it
            columns.update(row)
            if messages_key in columns:
                return {"alpaca": False}
        return {"alpaca": {"instruction", "output"} <= columns}

    asked = {"instructions and outputs without": messages_key}
    return bool(noted(rows, cache_dir, asked, look)["alpaca"])


def _run(stated: dict[str, Any], options: dict[str, Any], more: dict[str, Any], what: str) -> Store:
    progress = more.pop("progress", None)
    for name, value in more.items():
        if name in Recipe.__struct_fields__:
            stated[name] = value
        elif name in RunOptions.__struct_fields__:
            options[name] = value
        else:
            raise UsageError(f"unknown argument: {name}")
    recipe, how = Recipe(**stated), RunOptions(**options)
    store = prepared(recipe, how, progress=progress)
    rejected = ", ".join(f"{count:,} {why}" for why, count in store.rejected.items()) or "none"
    level = logging.WARNING if store.rejected else logging.INFO
    _log.log(level, "%s: %s rows, rejected: %s; %s", what, f"{len(store):,}", rejected, store.path)
    return store
