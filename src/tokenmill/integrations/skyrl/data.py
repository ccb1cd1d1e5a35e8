"""Datasets and a sampler for SkyRL's SFT and RL trainers.

SkyRL describes a row by its *window*: ``num_actions`` is the number of tokens from the first
trained one to the end, and ``loss_mask`` covers only those. It passes `VISION` features to a model,
and takes no batch in which only some rows have images; both are checked at the start.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils import data as torch_data

from tokenmill._core import fingerprint
from tokenmill._core.optional import optional
from tokenmill._core.process import PrivateDirectory
from tokenmill.build.processor import processor_of
from tokenmill.data import prompts
from tokenmill.data.cursor import Cursor, StreamSpec
from tokenmill.data.interleave import MixedOrder, Schedule
from tokenmill.data.order import LARGEST, Int64Array, Order, check_seed, make_order, unroll
from tokenmill.data.view import View, as_view, concat
from tokenmill.errors import (
    RowError,
    SourceError,
    SourceMissing,
    StateError,
    UsageError,
    check_integer,
    check_one_of,
    check_positive,
)
from tokenmill.integrations.trainers import (
    SKYRL,
    VERBATIM,
    Items,
    RowDataset,
    cached_scan,
    date_named,
    image_features,
    is_store,
    prepared,
    stated_date,
)
from tokenmill.media import Processor
from tokenmill.sources.rows import open_rows
from tokenmill.store import Row, Store, open_store

NO_COLUMN = "\x00"  # a column that no row has, for a column that SkyRL sets to None

_PART = re.compile(r"^(?P<name>\w[\w.\-]*)(?P<slice>\[[^\[\]]*\])?$")
_HUB_NAME = re.compile(r"^[\w.\-]+(/[\w.\-]+)?$")


def sources_of(dataset: str, split: str) -> list[str]:
    """Return the addresses of a split, named as in `datasets`: ``test[10%:]+validation``."""
    return [_address(dataset, part.strip(), split) for part in split.split("+")]


def _address(dataset: str, part: str, split: str) -> str:
    match = _PART.match(part)
    if match is None:
        raise UsageError(
            f"split {split!r} of {dataset!r}: write it like train, train[:1000] or train[10%:]"
        )
    if os.path.isdir(dataset):
        return f"{dataset}@{part}"
    if os.path.lexists(dataset) or glob.has_magic(dataset):
        words = re.split(r"[^A-Za-z]+", os.path.basename(dataset).lower())
        if match["name"] != "train" and match["name"].lower() not in words:
            raise UsageError(
                f"split {match['name']!r} of a file whose name does not contain it: "
                "write train, or name the file after the split",
                path=dataset,
            )
        return f"{dataset}@{match['slice']}" if match["slice"] else dataset
    if not _HUB_NAME.match(dataset):
        raise SourceMissing("no such file or directory, and no name on the hub", path=dataset)
    return f"hf://datasets/{dataset}:{part}"


def as_task(function: Callable[..., None]) -> Any:
    """Return a Ray task of one CPU, as SkyRL's own are, with our environment variables."""
    import ray

    ours = {name: value for name, value in os.environ.items() if name.startswith("TOKENMILL_")}
    return ray.remote(num_cpus=1, runtime_env={"env_vars": ours})(function)


# Sampler

_BLOCK = 1024  # positions computed at a time: the order is a vectorised function


class Sampler(torch_data.Sampler[int]):  # type: ignore[misc]
    """Row numbers in our order, for ``sampler_class_path``.

    It yields one endless stream: epoch after epoch of our order, or, with ``weights``, an
    interleave of the sources in those shares. A pass is ``num_samples`` positions of it; the next
    pass continues where the last one ended, so a resume is exact in this and in all later epochs.

    Of ``data_source`` only its length, and its ``key`` where it has one, matter. Without
    ``num_samples``, a pass has as many positions as there are rows; the number of steps times the
    batch size makes the whole run one pass. SkyRL fills in ``lengths``, the rows of every source.
    """

    def __init__(
        self,
        data_source: Sized,
        seed: int = 42,
        order: str = "feistel",
        num_samples: int | None = None,
        lengths: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        rows = len(data_source)
        if not rows:
            raise UsageError("The data has no rows to sample.")
        if num_samples is not None:
            check_positive("num_samples", num_samples)
        sizes = [rows] if lengths is None else [int(length) for length in lengths]
        if sum(sizes) != rows:
            raise UsageError(
                f"lengths {sizes} add up to {sum(sizes)}, but the data has {rows} rows."
            )
        self.num_samples = rows if num_samples is None else num_samples
        self.order: Order
        if weights is None:
            self.order = make_order(order, rows, check_seed(seed))
        elif len(weights) == len(sizes):
            schedule = Schedule(sizes, list(weights), "repeat")
            self.order = MixedOrder.of(schedule, order, check_seed(seed))
        else:
            raise UsageError(f"weights has {len(weights)} values for {len(sizes)} datasets.")
        shares = "" if weights is None else f"/{sizes}/{[str(weight) for weight in weights]}"
        self._spec = StreamSpec(
            dataset=str(getattr(data_source, "key", None) or f"{rows} rows"),
            seed=int(seed),
            order=order + shares,
            packing=None,
        )
        self.next_pass = 0  # stream position at which the next pass begins
        self._loaded: SamplerPass | None = None  # a pass that the next iterator continues
        self._current: SamplerPass | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> SamplerPass:
        new = SamplerPass(self, self.next_pass, self.next_pass, self.num_samples)
        self._current, self._loaded = self._loaded or new, None
        return self._current

    def set_epoch(self, epoch: int) -> None:
        epoch = check_integer("epoch", epoch, 0)
        self.next_pass, self._current, self._loaded = epoch * self.num_samples, None, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the current pass; between passes, the start of the next."""
        current = self._current or self._loaded
        if current is not None and not current.ended:
            return current.state_dict()
        return self.save(self.next_pass, self.next_pass, self.num_samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        begun, position, length = self.load(state)
        self.next_pass, self._current = begun, None
        self._loaded = SamplerPass(self, begun, position, length)

    def save(self, begun: int, position: int, length: int) -> dict[str, Any]:
        cursor = Cursor(*divmod(position, self.order.rows))
        state = self._spec.save(cursor, begun // self.order.rows)
        return {**state, "begun": begun, "num_samples": length}

    def load(self, state: Any) -> tuple[int, int, int]:
        cursor, _ = self._spec.load(state)
        position = cursor.epoch * self.order.rows + cursor.position
        begun, length = state.get("begun"), state.get("num_samples")
        for number in (begun, length, position):
            if type(number) is not int or not 0 <= number <= LARGEST:
                raise StateError(f"Not a state of this sampler: {number!r} is no position.")
        if not begun <= position <= begun + length:
            raise StateError(
                f"The pass of the state began at {begun}, but its position is {position}."
            )
        return begun, position, length


class SamplerPass(Iterator[int]):
    """One pass from ``begun``, at ``position``; stateful in torchdata's sense."""

    def __init__(self, sampler: Sampler, begun: int, position: int, length: int) -> None:
        self._sampler = sampler
        self._seek(begun, position, length)

    def _seek(self, begun: int, position: int, length: int) -> None:
        self._begun, self._position, self._end = begun, position, begun + length
        self._block: list[int] = []
        self._inside = 0
        self.ended = False

    def __next__(self) -> int:
        if self._position >= self._end:
            # torchdata may drop a finished iterator, so it moves the sampler.
            if not self.ended:
                self.ended = True
                self._sampler.next_pass = self._end
            raise StopIteration
        if self._inside == len(self._block):
            positions = np.arange(self._position, min(self._position + _BLOCK, self._end))
            self._block, self._inside = unroll(self._sampler.order, positions).tolist(), 0
        self._inside += 1
        self._position += 1
        return self._block[self._inside - 1]

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.save(self._begun, self._position, self._end - self._begun)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seek(*self._sampler.load(state))
        if self._position >= self._end:
            self._sampler.next_pass = self._end


Item = dict[str, Any]
Source = Store | View | str | os.PathLike[str]

VISION = ("pixel_values", "image_grid_thw")
TURN_ENDS = {"last_assistant_message": "turn", "all_assistant_messages": "stop"}  # by train_on_what
_SKYRL_MODULE = "skyrl.train.dataset.sft_dataset"
_CHUNK = 1 << 10  # overlong rows read at a time

_log = logging.getLogger(__name__)


# Rows


def window(row: Row, max_length: int | None = None) -> Item:
    item = SKYRL.item(row.input_ids[:max_length], row.loss_mask[:max_length])
    return {**item, "num_actions": len(item["loss_mask"])}


class SFTDataset(RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows of stores, views or paths of stores in SkyRL's format, one source after another.

    Rows over ``max_length`` are truncated at their end. Rows without a trained token left are
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
            raise SourceError("No row has a trained token within ", ("max_length", max_length), ".")
        _register_subclass()

    def _check_images(self) -> None:
        """Raise before the run what SkyRL would raise in the middle of it."""
        if not self.view.has_media:
            return
        images = self.view.images_at(np.arange(len(self.view), dtype=np.int64))
        without = np.flatnonzero(images == 0)
        if without.size == images.size:
            return
        if without.size:
            raise UsageError(
                "Only some rows have images, but SkyRL cannot mix them in a batch. Separate them "
                'with store.filter("images > 0").',
                **self.view[int(without[0])].origin.location,
            )
        names = set(image_features(self.view[0], self._processor, "SkyRL"))
        if names != set(VISION):
            raise UsageError(
                f"SkyRL needs the features {' and '.join(VISION)}, but the processor of these rows "
                f"returns {', '.join(sorted(names))}."
            )

    @cached_property
    def _processor(self) -> Processor:
        stores = {store.processor_key: store for store in self.view.stores if store.has_media}
        if len(stores) > 1:
            raise UsageError("The stores were prepared with different image processors.")
        return processor_of(*stores.values())

    def item(self, row: Row) -> Item:
        if not row.media:
            return window(row, self.max_length)
        return {**window(row), **image_features(row, self._processor, "SkyRL")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register_subclass()

    @property
    def key(self) -> str:
        if self.max_length is None:
            return self.view.key
        return fingerprint.key({"skyrl": self.view.key, "max_length": self.max_length})

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        lengths = self.view.lengths
        if self.max_length is None:
            return lengths
        kept = np.delete(np.asarray(lengths), self._dropped)
        return np.minimum(kept, np.int32(self.max_length))

    @property
    def dataset_lengths(self) -> list[int]:
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
    """Return the rows that truncation leaves without trained tokens or without an image."""
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
    """Pass SkyRL's ``isinstance`` checks: it mixes the sources of a concatenation only."""
    module = sys.modules.get(_SKYRL_MODULE)
    for name in ("SFTDataset", "ConcatSFTDataset"):
        theirs = getattr(module, name, None)
        if theirs is not None:
            theirs.register(SFTDataset)


# Config


def from_config(config: Any, *, tokenizer: Any = None, **more: Any) -> Any:
    """Return the training dataset of an SFTConfig, or of an object or mapping with its names.

    Without a tokenizer, take ``config.model.path``. ``more`` are arguments of `tokenmill.prepare`,
    which take precedence.
    """
    paths = _get(config, "pretokenized_dataset_paths")
    if paths:
        return _pretokenized(paths, _get(config, "max_length"))
    pairs = _pairs(config, "train", "dataset_name", "dataset_split", "train")
    if not pairs:
        raise UsageError("The config has no data. Set train_datasets.")
    return SFTDataset(*(_prepared(config, *pair, tokenizer, more) for pair in pairs))


def eval_from_config(
    config: Any, *, tokenizer: Any = None, **more: Any
) -> list[tuple[str, Any]] | None:
    """Return the evaluation datasets of an SFTConfig with their names, or None if it has none."""
    limit, stated = _get(config, "max_length"), _get(config, "eval_dataset_names")
    paths = _get(config, "eval_pretokenized_dataset_paths")
    if paths:
        labels = stated or [os.path.basename(str(path).rstrip("/")) for path in paths]
        _check_labels(labels, paths)
        return list(zip(labels, (_pretokenized([path], limit) for path in paths), strict=True))
    pairs = _pairs(config, "eval", "eval_dataset_name", "eval_dataset_split", "validation")
    if not pairs:
        return None
    labels = stated or [name.replace("/", "_") for name, _ in pairs]
    _check_labels(labels, pairs)
    built = (SFTDataset(_prepared(config, *pair, tokenizer, more)) for pair in pairs)
    return list(zip(labels, built, strict=True))


def _pretokenized(paths: Sequence[str], limit: int | None) -> Any:
    foreign = [path for path in paths if os.path.exists(path) and not is_store(path)]
    if not foreign:
        return SFTDataset(*paths, max_length=limit)
    purpose = "reading a dataset that is not a store"
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
) -> list[tuple[str, str]]:
    """Datasets and their splits; SkyRL's deprecated single names count if there is no list."""
    names, splits = _get(config, f"{side}_datasets"), _get(config, f"{side}_dataset_splits")
    if names is None:
        single = _get(config, old_name)
        names = [] if single is None else [single]
        if splits is None and _get(config, old_split) is not None:
            splits = [_get(config, old_split)]
    if isinstance(names, str) or isinstance(splits, str):
        raise UsageError(f"{side}_datasets and {side}_dataset_splits must be lists.")
    names = [os.fspath(name) for name in names]
    splits = [default_split] * len(names) if splits is None else [str(split) for split in splits]
    if len(names) != len(splits):
        raise UsageError(
            f"{side}_dataset_splits has {len(splits)} splits for {len(names)} datasets."
        )
    return list(zip(names, splits, strict=True))


def _check_labels(labels: Any, sources: Any) -> None:
    labels = list(labels)
    if len(labels) != len(sources) or len(set(labels)) != len(labels) or not all(labels):
        raise UsageError(
            f"eval_dataset_names must have {len(sources)} different names, got {labels}."
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
        raise UsageError(
            "No tokenizer: pass ", ("tokenizer",), ", or set model.path in the config."
        )
    cache_dir, messages_key = _get(config, "cache_dir"), _get(config, "messages_key")
    sources = sources_of(dataset, split)
    disabled = bool(_get(config, "disable_cache", False))
    if train_on == "all_assistant_messages":
        private = PrivateDirectory() if disabled else None
        indexes = cache_dir if private is None else private.path
        if _is_alpaca(sources, messages_key or "messages", indexes):
            train_on = "last_assistant_message"  # SkyRL has nothing else for these rows
    columns = {role: _get(config, f"{role}_key", role) or None for role in ("tools", "system")}
    if messages_key not in (None, "messages"):  # so that `tokenmill prepare` finds the same store
        columns["messages"] = messages_key
    arguments: dict[str, Any] = {
        "sources": sources,
        "tokenizer": tokenizer,
        "tokenizer_backend": "transformers",
        "columns": columns,
        "date": stated_date(),
        "train_on": train_on,
        "turn_end": TURN_ENDS[train_on],
        "max_length": _get(config, "max_length"),
        "overlong": "truncate",
        "num_workers": _get(config, "num_workers"),
        "cache_dir": cache_dir,
        "disable_cache": disabled,
        # SkyRL accepts both; without a cache there is nothing to rebuild.
        "force_recache": bool(_get(config, "force_recache", False)) and not disabled,
    }
    store = prepared(**{**arguments, **more})
    rejected = ", ".join(f"{count:,} {why}" for why, count in store.rejected.items()) or "none"
    _log.log(
        logging.WARNING if store.rejected else logging.INFO,
        "%r (split %r): %s rows, rejected: %s; %s",
        dataset, split, f"{len(store):,}", rejected, store.path,
    )  # fmt: skip
    return store


def _is_alpaca(sources: Sequence[str], messages_key: str, cache_dir: Any) -> bool:
    """Whether SkyRL would read instructions and outputs, from the columns of all rows."""
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


# Prompts

PromptItem = tuple[Any, Any, dict[str, Any], str]
_FILES = (".parquet", ".json", ".jsonl")  # anything else is, to SkyRL, a name and perhaps a split


class PromptDataset(Items[PromptItem], torch_data.Dataset[PromptItem]):  # type: ignore[misc]
    """Prompts for SkyRL's RL trainers from a lazy index, in file order; its dataloader shuffles.

    It has the arguments and items of SkyRL's class: ``(messages, env_class, extras, uid)``.
    ``datasets`` are files or names, as ``name`` or ``name:split``; one or a list.
    """

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: Any,
        max_prompt_length: int,
        num_workers: int = 8,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        names = [datasets] if isinstance(datasets, str) else list(datasets)
        if not names:
            raise UsageError("The config has no prompts. Set data.train_data.")
        self.prompt_key, self.env_class_key = prompt_key, env_class_key
        with date_named(tokenizer):
            self.prompts = prompts.open_prompts(
                prompts.PromptSettings(convention=VERBATIM),
                [source for name in names for source in _sources(name)],
                tokenizer,
                max_length=max_prompt_length,
                prompt_key=prompt_key,
                metadata_key=NO_COLUMN,
                apply_chat_template=True,
                date=stated_date(),
                tokenizer_backend="transformers",
                # SkyRL's default is 8 on any machine.
                num_workers=min(num_workers, os.cpu_count() or 1) if num_workers > 1 else 0,
                cache_dir=cache_dir,
            )
        if self.prompts.rejected:
            _log.warning("%r: rejected: %s", self.prompts, self.prompts.rejected)

    @property
    def key(self) -> str:
        return f"{self.prompts.key}/{self.prompts.max_length}"

    def __len__(self) -> int:
        return len(self.prompts)

    def items_at(self, numbers: Int64Array) -> list[PromptItem]:
        rows = self.prompts.source_rows_at(numbers)
        return [
            (row.pop(self.prompt_key), row.pop(self.env_class_key, None), row, str(number))
            for row, number in zip(rows, numbers.tolist(), strict=True)
        ]

    @staticmethod
    def collate_fn(items: Sequence[PromptItem]) -> list[dict[str, Any]]:
        names = ("prompt", "env_class", "env_extras", "uid")
        return [dict(zip(names, item, strict=True)) for item in items]


def _sources(name: str) -> list[str]:
    if os.path.splitext(name)[-1].lower() in _FILES:
        return [name]
    name, _, split = name.partition(":")
    return sources_of(name, split or "train")
