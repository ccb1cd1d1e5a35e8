"""verl's RL rows from a lazy index of prompts.

verl asks each row for ``raw_prompt`` (messages, rendered later by its agent loop), a tensor that
keeps its batches from being empty, ``index``, ``tools_kwargs`` and ``interaction_kwargs`` out of
``extra_info``, and every column of the source, from which rewards are computed. `RLDataset` builds
on `tokenmill.PromptDataset`: lengths are measured once, a filter is a compare, and a row is read
and parsed when it is asked for. Nothing is loaded into memory and nothing is filtered per run.

Rows of one batch have the same columns: what a row lacks is None there, as in a table.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch.utils import data as torch_data

from tokenmill.errors import UsageError
from tokenmill.integrations.hosts import Items, date_named
from tokenmill.integrations.verl.settings import (
    DATE_FLAG,
    ItemRows,
    Settings,
    file_list,
    plain,
    refuse_hooks,
)
from tokenmill.optional import optional
from tokenmill.prompts import PromptDataset
from tokenmill.sampling import Int64Array

Item = dict[str, Any]

UNCALLED = ("_download", "_read_files_and_tokenize", "maybe_filter_out_long_prompts")


class RLDataset(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Prompts for verl's RL trainers, in our order.

    Args:
        data_files: Source files, as verl's ``train_files``.
        tokenizer: verl's transformers tokenizer.
        config: verl's ``data`` config; beside its own names `Settings` under ``tokenmill``.
        processor: verl's processor, for prompts with media.
        max_samples: At most so many rows of the source, -1 for all.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        refuse_hooks(cls, UNCALLED, "prompts are read and measured by an index")

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        stated = plain(config or {})
        files = file_list(data_files)
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
                "lengths do not count the tools of tool_config_path or function_tool_path: set "
                "data.filter_overlong_prompts=False, or filter the files beforehand"
            )
        cache_dir = self.settings.cache_dir or stated.get("cache_dir")
        with date_named(tokenizer, DATE_FLAG):
            self.prompts = PromptDataset(
                files,
                tokenizer,
                processor,
                limit,
                prompt_key=self.prompt_key,
                metadata_key="extra_info",
                multimodal_keys=None if processor is None else self._media(),
                apply_chat_template=True,
                # verl renders with the processor's template where there is one.
                chat_template=getattr(processor, "chat_template", None),
                apply_chat_template_kwargs=stated.get("apply_chat_template_kwargs") or None,
                date=self.settings.date,
                tokenizer_backend="transformers",
                convention="slime",  # messages and tools go to the template as the row has them
                seed=int(self.settings.seed or 0),
                num_workers=self.settings.num_workers,
                cache_dir=None if cache_dir is None else os.path.expanduser(cache_dir),
            )
        rows, drawn = len(self.prompts), bool(stated.get("shuffle"))
        if not drawn and max_samples is not None and max_samples > 0:
            rows, max_samples = self.prompts.kept_before(max_samples), -1
        self._row_numbers = ItemRows(rows, self.settings, max_samples, shuffled=drawn)
        if not len(self._row_numbers):
            raise UsageError(f"no prompt is left: {self.prompts.rejected}", path=files[0])

    def __len__(self) -> int:
        return len(self._row_numbers)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Items, all with the same columns."""
        rows = [self._item(row) for row in self.prompts.source_rows_at(self._row_numbers(numbers))]
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{name: row.get(name) for name in columns} for row in rows]

    def _media(self) -> dict[str, str]:
        """Kind of media → its column."""
        return {"image": self.image_key, "video": self.video_key, "audio": self.audio_key}

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        """A row's conversation, media put where it names them, by verl's own code.

        Subclasses may override it, as they do verl's: it makes every ``raw_prompt``. Lengths are
        measured without it.
        """
        key = self.prompt_key if key is None else key
        messages = example[key]
        if isinstance(messages, str):
            return [{"role": "user", "content": messages}]
        if not any(example.get(column) for column in self._media().values()):
            return messages
        if self.processor is None:
            raise UsageError("prompts with media need a processor, and verl gave none")
        build = _verls()._build_messages
        if "key" in inspect.signature(build).parameters:
            return build(self, example, key=key)
        return build(self, example)  # an older verl knows one key

    def _item(self, row: dict[str, Any]) -> Item:
        messages = self._build_messages(row, key=self.prompt_key)
        item = {name: value for name, value in row.items() if name not in self._media().values()}
        extra = item.get("extra_info") or {}
        return {
            **item,
            "raw_prompt": messages,
            # verl's batches must not be without a tensor.
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            "extra_info": extra,
            "index": extra.get("index", 0),
            "tools_kwargs": extra.get("tools_kwargs") or {},
            "interaction_kwargs": extra.get("interaction_kwargs") or {},
        }

    @classmethod
    async def process_vision_info(cls, messages: Any, image_patch_size: Any, config: Any) -> Any:
        """Images and videos of a prompt, by verl's own dataset class."""
        return await _verls().process_vision_info(messages, image_patch_size, config)

    @classmethod
    async def process_multi_modal_info(
        cls, messages: Any, image_patch_size: Any, config: Any
    ) -> Any:
        """Images, videos and sounds of a prompt, by verl's own dataset class."""
        theirs = _verls()
        if hasattr(theirs, "process_multi_modal_info"):
            return await theirs.process_multi_modal_info(messages, image_patch_size, config)
        # An older verl knows no sounds.
        found = await theirs.process_vision_info(messages, image_patch_size, config)
        return (*found, None)


def _verls() -> Any:
    with optional("verl", "reading the media of prompts"):
        from verl.utils.dataset.rl_dataset import RLHFDataset
    return RLHFDataset
