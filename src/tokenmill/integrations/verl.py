"""tokenmill as verl's ``data.custom_cls``: `SFTDataset` and `RLDataset`.

Items are in our order already, epoch after epoch, so a trainer with ``total_epochs=1`` and no
shuffle resumes by its own count. verl also constructs the validation set from the same class; it is
recognized by its files and stays in file order. Importing this needs PyTorch, not verl.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from tokenmill._core.optional import optional
from tokenmill._core.options import check_names
from tokenmill.chat.calls import IMAGE_PARTS
from tokenmill.chat.spec import IMAGE_COLUMNS
from tokenmill.data.order import ORDERS, Int64Array
from tokenmill.data.prompts import PromptSettings, open_prompts
from tokenmill.data.view import View, as_view, concat
from tokenmill.errors import RowError, SourceError, UsageError, check_one_of, check_positive
from tokenmill.integrations.trainers import (
    VERBATIM,
    VERL,
    ItemRows,
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

with optional("torch"):
    import torch
    from torch.utils import data as torch_data

__all__ = ["RLDataset", "SFTDataset", "Settings"]

Item = dict[str, Any]
Config = dict[str, Any]
Thinking = bool | None  # a row's value; None is the config's default

DATE_FLAG = "+data.tokenmill.date"
PAD_MODES = ("right", "no_padding")
TRUNCATIONS = ("error", "left", "right")
SETTINGS_OF_PREPARE = ("date", "train_on", "turn_end", "thinking_opener", "trailing", "num_workers",
                       "cache_dir", "media_root", "lazy")  # fmt: skip
NO_VIDEOS = "use verl's own dataset for videos"
QWEN_VL_AXES = 4  # positions of text, time, height and width; in text they are the same
GRID = "image_grid_thw"
PROCESSOR_IDENTITY = ("class", "image_token", "answers")  # decides whether features fit tokens


# Settings


@dataclass(frozen=True)
class Settings:
    """The keys of ``data.tokenmill``. Defaults of the last group are what verl does."""

    seed: int | None = None  # of the order; None: data.seed, else 42
    epochs: int = 1  # in the dataset, one after the other
    order: str = "feistel"  # or sequential
    cache_dir: str | None = None
    num_workers: int | None = None  # that prepare; 0 runs inline
    lazy: bool = False  # SFT: tokenize rows when they are served, instead of preparing them
    date: str | None = None  # for templates that print it; None: the environment's TOKENMILL_DATE
    media_root: str | None = None  # SFT: directory of images; None: that of the row's file
    undo_shuffle: bool = False  # SFT: see `SFTDataset`
    # SFT, as for `tokenmill.prepare`:
    train_on: str | None = None
    turn_end: str = "turn"
    thinking_opener: str = "prompt"
    trailing: str = "trim"

    def __post_init__(self) -> None:
        check_one_of("data.tokenmill.order", self.order, ORDERS)
        check_positive("data.tokenmill.epochs", self.epochs)

    @classmethod
    def of(cls, config: Config, files: list[str]) -> Settings:
        stated = dict(config.get("tokenmill") or {})
        names = [field.name for field in fields(cls)]
        check_names(stated, names, "settings under data.tokenmill")
        if stated.get("seed") is None:
            stated["seed"] = 42 if config.get("seed") is None else config["seed"]
        stated["date"] = stated.get("date") or stated_date()
        if _is_validation(config, files):
            stated.update(order="sequential", epochs=1, undo_shuffle=False)
        return cls(**stated)

    def item_rows(self, rows: int, max_samples: int | None, *, shuffle: bool) -> ItemRows:
        subset = None
        if max_samples is not None and 0 < max_samples < rows:
            rows, subset = (rows, max_samples) if shuffle else (max_samples, None)
        return ItemRows(rows, self.order, int(self.seed or 0), self.epochs, subset)


def _is_validation(config: Config, files: list[str]) -> bool:
    theirs, train = config.get("val_files"), config.get("train_files")
    if not theirs or _file_list(theirs) != files:
        return False
    return not train or _file_list(train) != files


def _plain(value: Any) -> Any:
    """Convert OmegaConf's containers to Python's own."""
    if hasattr(value, "items"):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _file_list(files: Any) -> list[str]:
    several = [files] if isinstance(files, str | os.PathLike) else list(files)
    return [os.path.expanduser(os.fspath(file)) for file in several]


class _Overridable:
    """Refuses subclasses that override a method of verl's datasets that is never called."""

    uncalled: tuple[str, ...]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in cls.uncalled:
            if name in vars(cls):
                raise UsageError(
                    f"{cls.__name__}.{name} would never be called: rows come from a store or an "
                    "index. Change the files, or override __getitem__."
                )


# SFT


class SFTDataset(_Overridable, RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows for verl's SFT trainer, in our order.

    The arguments are verl's. Files are raw, and prepared on first use, or directories of stores.
    verl shifts the masks of a whole batch by one token across its rows, so the first token of a row
    is never trained. It always shuffles, with torch's ``DistributedSampler`` of seed 0. With
    ``data.tokenmill.undo_shuffle`` and ``trainer.total_epochs=1`` items are arranged so that this
    shuffle serves our order.
    """

    trainer = VERL

    uncalled = ("_read_files_and_process", "_build_messages", "_process_single_message")

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        stated = _plain(config or {})
        mode = stated.get("pad_mode", "right")
        self.pad_mode = str(getattr(mode, "value", mode))
        self.truncation = str(stated.get("truncation", "error"))
        self.max_length = int(stated.get("max_length", 1024))
        check_one_of("pad_mode", self.pad_mode, PAD_MODES)
        check_one_of("truncation", self.truncation, TRUNCATIONS)
        files = _file_list(parquet_files)
        self.settings = Settings.of(stated, files)
        # Truncation on the right is part of the build, which rejects rows without a trained token.
        limit = self.max_length if self.truncation == "right" else None
        preparing = _Preparing(tokenizer, processor, stated, self.settings, limit)
        refused_over = self.max_length if self.truncation == "error" else None
        view = preparing.open(files)
        self.view = self.trainer.check(view, None if view.is_by_source else refused_over)
        self._processor = processor
        self._check_images()
        kind = type(getattr(processor, "image_processor", None)).__name__
        self._axes = QWEN_VL_AXES if "Qwen2VLImageProcessor" in kind else None
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad_token_id = 0 if pad is None else int(pad)
        self.item_rows = self.settings.item_rows(
            len(self.view), max_samples, shuffle=bool(stated.get("shuffle"))
        )

    def _check_images(self) -> None:
        if not self.view.has_media:
            return
        if self._processor is None:
            raise UsageError("The store has images, but verl passed no processor.")
        identity = self._loaded_processor.identity
        found = json.loads(json.dumps([identity[name] for name in PROCESSOR_IDENTITY]))
        for store in self.view.stores:
            if store.has_media:
                expected = store.manifest["document"]["processor"]
                if [expected[name] for name in PROCESSOR_IDENTITY] != found:
                    raise UsageError(
                        "The store was prepared with another processor than verl's, so pixels and "
                        "tokens would not match.",
                        path=store.path,
                    )
        if self.truncation == "left":
            cut = np.flatnonzero(self.view.lengths > self.max_length)
            cut = cut[self.view.images_at(cut) > 0]
            if cut.size:
                row = self.view[int(cut[0])]
                raise SourceError(
                    f"The row has images and {len(row)} tokens, but data.max_length is "
                    f"{self.max_length} ({cut.size:,} such rows). data.truncation=left would cut "
                    "tokens of images. Set data.truncation=right, which drops such rows.",
                    **row.origin.location,
                )

    @cached_property
    def _loaded_processor(self) -> Processor:
        return Processor.load(self._processor)

    @cached_property
    def _positions(self) -> Int64Array | None:
        """Item number to position in our order, under the trainer's shuffle of its first epoch."""
        if not self.settings.undo_shuffle:
            return None
        generator = torch.Generator()
        generator.manual_seed(0)
        shuffle = torch.randperm(len(self), generator=generator)
        positions = torch.empty_like(shuffle)
        positions[shuffle] = torch.arange(len(self))
        found: Int64Array = positions.numpy()
        return found

    def positions(self, numbers: Int64Array) -> Int64Array:
        return numbers if self._positions is None else self._positions[numbers]

    def item(self, row: Row) -> Item:
        length, limit = len(row), self.max_length
        if self.truncation == "error" and length > limit:  # by source row; others are checked
            raise self.trainer.too_long(row, limit)
        kept = slice(max(0, length - limit), length)
        if self.truncation != "left":
            kept = slice(0, limit)
        found = self.trainer.arrays(row.input_ids[kept], row.loss_mask[kept])
        found["position_ids"] += kept.start
        if self.pad_mode == "right":
            found["attention_mask"] = np.ones_like(found["input_ids"])
            missing = (0, limit - len(found["input_ids"]))
            for name, values in found.items():
                pad = self.pad_token_id if name == "input_ids" else 0
                found[name] = np.pad(values, missing, constant_values=pad)
        tensors: Item = {name: torch.from_numpy(values) for name, values in found.items()}
        inputs: dict[str, torch.Tensor] = {}
        if row.media:
            features = image_features(row, self._loaded_processor, "verl")
            inputs = {name: torch.from_numpy(values) for name, values in features.items()}
        if self._axes is not None:
            axes = tensors["position_ids"].repeat(self._axes, 1)
            if GRID in inputs:
                axes[1:] = 0
                spatial = _rope_index(self._processor, row.input_ids, inputs[GRID])[:, kept]
                axes[1:, : spatial.shape[1]] = spatial
            tensors["position_ids"] = axes
        if inputs:
            tensors["multi_modal_inputs"] = inputs
        return tensors


def _rope_index(processor: Any, input_ids: Any, grid: torch.Tensor) -> torch.Tensor:
    with optional("verl", "the positions of images"):
        from verl.models.transformers.qwen2_vl import get_rope_index
    ids = torch.from_numpy(input_ids.astype(np.int64))
    found: torch.Tensor = get_rope_index(
        processor,
        input_ids=ids,
        image_grid_thw=grid,
        video_grid_thw=None,
        second_per_grid_ts=None,
        attention_mask=torch.ones_like(ids),
    )
    return found


@dataclass(frozen=True)
class _Preparing:
    tokenizer: Any
    processor: Any
    config: Config
    settings: Settings
    limit: int | None

    def open(self, files: list[str]) -> View:
        views: list[View] = []
        for stores, neighbours in groupby(files, is_store):
            if stores:
                views += [as_view(open_store(file)) for file in neighbours]
            else:
                views.append(self._prepared(list(neighbours)))
        return concat(views)

    def _prepared(self, files: list[str]) -> View:
        """Prepare the source once per value of its thinking column; select each row with its value.

        verl passes a row's ``enable_thinking`` to the template, and a store has one rendering.
        """
        settings = self.settings
        column = self.config.get("enable_thinking_key", "enable_thinking") or None
        images = str(self.config.get("image_key") or IMAGE_COLUMNS[0])
        refused = {str(self.config.get("video_key") or "videos"): NO_VIDEOS}
        if self.processor is None:
            refused[images] = "verl passed no processor"
        elif images not in IMAGE_COLUMNS:
            refused[images] = f"the column of images must be called {' or '.join(IMAGE_COLUMNS)}"
        default = self.config.get("enable_thinking_default")
        values, has_images = _scan_columns(files, column, images, refused, settings.cache_dir)
        if settings.lazy and len(values) > 1:
            raise UsageError(
                f"data.tokenmill.lazy=true needs one value in the column {column!r}, but the rows"
                f" have {len(values)}; set data.tokenmill.lazy=false to prepare each of them",
                path=files[0],
            )
        stores: dict[Thinking, Store] = {}
        for value in values:
            thinking = default if value is None else value
            variables = dict(self.config.get("apply_chat_template_kwargs") or {})
            if thinking is not None:
                variables["enable_thinking"] = bool(thinking)
            keep_columns = () if len(values) == 1 else (str(column),)
            arguments = self._arguments(files, variables, keep_columns, has_images=has_images)
            stores[value] = prepared(self.tokenizer, DATE_FLAG, **arguments)
        if len(stores) == 1:
            return as_view(*stores.values())
        return concat(stores.values()).select(_own_rows(stores, str(column)))

    def _arguments(
        self,
        files: list[str],
        variables: Config,
        keep_columns: tuple[str, ...],
        *,
        has_images: bool,
    ) -> Config:
        config, settings = self.config, self.settings
        key = config.get("messages_key")
        # verl renders with the processor's template if it has one.
        template = getattr(self.processor, "chat_template", None)
        return {
            "sources": files,
            "tokenizer_backend": "transformers",
            "processor": self.processor if has_images else None,
            "columns": {"tools": config.get("tools_key") or "tools"}
            | ({"messages": key} if key not in (None, "messages") else {}),
            "chat_template": template if isinstance(template, str) else None,
            "chat_template_kwargs": variables,
            **{name: getattr(settings, name) for name in SETTINGS_OF_PREPARE},
            "max_length": self.limit,
            "overlong": "truncate",
            "keep_columns": keep_columns,
        }


def _own_rows(stores: Mapping[Thinking, Store], column: str) -> Int64Array:
    """Numbers of the rows whose value is that of their store, in the order of the source."""
    origins, numbers, begin = [], [], 0
    for value, store in stores.items():
        extra = f"extra.{column}"
        for at, (first, columns) in enumerate(store.columns(["row_in_slice", extra])):
            values = (_thinking(json.loads(text)) for text in columns[extra])
            rows = np.asarray([n for n, found in enumerate(values) if found is value], np.int64)
            entry = store.table[at]
            in_file = int(entry["source_row"]) + columns["row_in_slice"][rows].astype(np.int64)
            origins.append(np.stack([in_file, np.full(rows.size, int(entry["source"]))]))
            numbers.append(begin + first + rows)
        begin += len(store)
    found: Int64Array = np.concatenate(numbers)[np.lexsort(np.concatenate(origins, axis=1))]
    return found


def _scan_columns(
    files: Sequence[str],
    column: str | None,
    images: str,
    refused: Mapping[str, str],
    cache_dir: str | None,
) -> tuple[list[Thinking], bool]:
    """Read every row once: the values of the thinking column, and whether rows have images.

    Columns in ``refused`` must be empty; its values are advice for the error.
    """
    rows = open_rows(list(files), cache_dir=cache_dir)

    def scan() -> Config:
        thinking: set[Thinking] = set()
        has_images = False
        for number, row in rows.scan():
            if isinstance(row, RowError):
                continue  # the build rejects it
            for name in refused:
                if row.get(name):
                    return {"error": f"The row has {name}: {refused[name]}.", "row": number}
            has_images = has_images or bool(row.get(images)) or any(_image_parts(row.values()))
            value = None if column is None else row.get(column)
            try:
                thinking.add(_thinking(value))
            except ValueError:
                error = f"{column} must be true, false or null, got {value!r}."
                return {"error": error, "row": number}
        return {"thinking": sorted(thinking, key=str), "images": has_images}

    query = {"thinking": column, "images": images, "refused": dict(refused)}
    found = cached_scan(rows, cache_dir, query, scan)
    if "error" in found:
        raise UsageError(found["error"], **rows.origin(found["row"]).location)
    return found["thinking"], found["images"]


def _image_parts(columns: Iterable[Any]) -> Iterator[bool]:
    for column in columns:
        for message in column if isinstance(column, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                yield isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _thinking(value: Any) -> Thinking:
    """A row's value; tables without booleans have 0 and 1."""
    if value is None:
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(value)  # verl would take the text "false" for true


# RL


class RLDataset(_Overridable, Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Prompts for verl's RL trainers, in our order; the arguments are verl's.

    Lengths are measured once; a row is read when it is served. Rows of one batch have the same
    columns, with None where a row lacks one.
    """

    uncalled = ("_download", "_read_files_and_tokenize", "maybe_filter_out_long_prompts")

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        stated = _plain(config or {})
        files = _file_list(data_files)
        self.settings = Settings.of(stated, files)
        self.prompt_key = str(stated.get("prompt_key", "prompt"))
        self.need_tools_kwargs = bool(stated.get("need_tools_kwargs", False))
        self.image_key = str(stated.get("image_key") or "images")
        self.video_key = str(stated.get("video_key") or "videos")
        self.audio_key = str(stated.get("audio_key") or "audios")
        self.processor = processor
        limit = stated.get("max_prompt_length", 1024)
        if not stated.get("filter_overlong_prompts", True):
            limit = None
        elif stated.get("tool_config_path") or stated.get("function_tool_path"):
            raise UsageError(
                "Lengths do not count the tools of tool_config_path or function_tool_path. Set "
                "data.filter_overlong_prompts=False, or filter the files first."
            )
        cache_dir = self.settings.cache_dir or stated.get("cache_dir")
        with date_named(tokenizer, DATE_FLAG):
            self.prompts = open_prompts(
                PromptSettings(convention=VERBATIM),
                files,
                tokenizer,
                processor,
                limit,
                prompt_key=self.prompt_key,
                metadata_key="extra_info",
                multimodal_keys=None if processor is None else self._media(),
                apply_chat_template=True,
                # verl renders with the processor's template if it has one.
                chat_template=getattr(processor, "chat_template", None),
                apply_chat_template_kwargs=stated.get("apply_chat_template_kwargs") or None,
                date=self.settings.date,
                tokenizer_backend="transformers",
                seed=int(self.settings.seed or 0),
                num_workers=self.settings.num_workers,
                cache_dir=None if cache_dir is None else os.path.expanduser(cache_dir),
            )
        rows, shuffle = len(self.prompts), bool(stated.get("shuffle"))
        if not shuffle and max_samples is not None and max_samples > 0:
            rows, max_samples = self.prompts.kept_before(max_samples), -1
        self._ordered = self.settings.item_rows(rows, max_samples, shuffle=shuffle)
        if not len(self._ordered):
            raise UsageError(f"No prompt is left: {self.prompts.rejected}.", path=files[0])

    def __len__(self) -> int:
        return len(self._ordered)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        rows = [self._item(row) for row in self.prompts.source_rows_at(self._ordered(numbers))]
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{name: row.get(name) for name in columns} for row in rows]

    def _media(self) -> dict[str, str]:
        return {"image": self.image_key, "video": self.video_key, "audio": self.audio_key}

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        """A row's conversation with its media inserted; subclasses may override it."""
        key = self.prompt_key if key is None else key
        messages = example[key]
        if isinstance(messages, str):
            return [{"role": "user", "content": messages}]
        if not any(example.get(column) for column in self._media().values()):
            return messages
        if self.processor is None:
            raise UsageError("The prompt has media, but verl passed no processor.")
        build = _verl_dataset()._build_messages
        if "key" in inspect.signature(build).parameters:
            return build(self, example, key=key)
        return build(self, example)  # older versions have no key argument

    def _item(self, row: dict[str, Any]) -> Item:
        messages = self._build_messages(row, key=self.prompt_key)
        item = {name: value for name, value in row.items() if name not in self._media().values()}
        extra = item.get("extra_info") or {}
        return {
            **item,
            "raw_prompt": messages,
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl's batches need a tensor
            "extra_info": extra,
            "index": extra.get("index", 0),
            "tools_kwargs": extra.get("tools_kwargs") or {},
            "interaction_kwargs": extra.get("interaction_kwargs") or {},
        }

    @classmethod
    async def process_vision_info(cls, messages: Any, image_patch_size: Any, config: Any) -> Any:
        return await _verl_dataset().process_vision_info(messages, image_patch_size, config)

    @classmethod
    async def process_multi_modal_info(
        cls, messages: Any, image_patch_size: Any, config: Any
    ) -> Any:
        theirs = _verl_dataset()
        if hasattr(theirs, "process_multi_modal_info"):
            return await theirs.process_multi_modal_info(messages, image_patch_size, config)
        # Older versions have no audio.
        found = await theirs.process_vision_info(messages, image_patch_size, config)
        return (*found, None)


def _verl_dataset() -> Any:
    with optional("verl", "reading the media of prompts"):
        from verl.utils.dataset.rl_dataset import RLHFDataset
    return RLHFDataset
