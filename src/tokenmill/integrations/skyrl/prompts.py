"""SkyRL's RL prompts from a lazy index.

SkyRL's ``PromptDataset`` loads every file into memory and tokenizes every prompt at each start.
`PromptDataset` here has its arguments and items: ``(messages, env_class, extras, uid)``, the column
of the prompt, that of the environment, all others, and the item's number as text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from torch.utils import data as torch_data

from tokenmill import prompts
from tokenmill.errors import UsageError
from tokenmill.integrations.skyrl.common import NO_COLUMN, sources_of
from tokenmill.integrations.trainers import VERBATIM, Items, date_named, stated_date
from tokenmill.sampling import Int64Array

Item = tuple[Any, Any, dict[str, Any], str]

_FILES = (".parquet", ".json", ".jsonl")  # anything else is, to SkyRL, a name and perhaps a split

_log = logging.getLogger(__name__)


class PromptDataset(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Prompts for SkyRL's RL trainers, in file order; its dataloader shuffles.

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
            raise UsageError("the config names no prompts: set data.train_data")
        self.prompt_key, self.env_class_key = prompt_key, env_class_key
        with date_named(tokenizer):
            self.prompts = prompts.PromptDataset(
                [source for name in names for source in _sources(name)],
                tokenizer,
                max_length=max_prompt_length,
                prompt_key=prompt_key,
                metadata_key=NO_COLUMN,
                apply_chat_template=True,
                date=stated_date(),
                tokenizer_backend="transformers",
                convention=VERBATIM,
                # SkyRL asks for 8 on any machine.
                num_workers=min(num_workers, os.cpu_count() or 1) if num_workers > 1 else 0,
                cache_dir=cache_dir,
            )
        if self.prompts.rejected:
            _log.warning("%r: not served: %s", self.prompts, self.prompts.rejected)

    @property
    def key(self) -> str:
        """Content key, which is part of a sampler's state."""
        return f"{self.prompts.key}/{self.prompts.max_length}"

    def __len__(self) -> int:
        return len(self.prompts)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        rows = self.prompts.source_rows_at(numbers)
        return [
            (row.pop(self.prompt_key), row.pop(self.env_class_key, None), row, str(number))
            for row, number in zip(rows, numbers.tolist(), strict=True)
        ]

    @staticmethod
    def collate_fn(items: Sequence[Item]) -> list[dict[str, Any]]:
        names = ("prompt", "env_class", "env_extras", "uid")
        return [dict(zip(names, item, strict=True)) for item in items]


def _sources(name: str) -> list[str]:
    if os.path.splitext(name)[-1].lower() in _FILES:
        return [name]
    name, _, split = name.partition(":")
    return sources_of(name, split or "train")
