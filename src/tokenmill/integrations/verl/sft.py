"""verl's SFT rows from stores.

verl asks each row for tensors: input_ids, position_ids and loss_mask as long as the row
(``pad_mode=no_padding``), or padded on the right to ``max_length`` with an attention_mask
(``pad_mode=right``). `SFTDataset` answers from a store: raw files are prepared on first use, with
every assistant turn trained up to the next turn as verl does it, but from one render of the whole
conversation; a file that is a store's directory is opened as it is. Rows are prepared before any
of verl's hooks could see them, so a subclass that overrides one is refused.

Rows with pictures are prepared with verl's processor, and have ``multi_modal_inputs``: what the
processor makes of their pictures, opened when the row is asked for. The positions of Qwen-VL models
are computed by verl's own function, from the grids.

verl shifts the masks of a whole batch by one token across its rows, so a row whose first token
were trained would train the last token of the row before it: the first token never is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.chat.pictures import COLUMNS
from tokenmill.dataset import View, as_view, concat, unweighted
from tokenmill.errors import SourceError, UsageError, check_one_of
from tokenmill.integrations.hosts import (
    Items,
    is_store,
    predicted,
    prepared,
    row_pixels,
    rows_alone,
    rows_within,
)
from tokenmill.integrations.verl.columns import SwitchedRows, said_by
from tokenmill.integrations.verl.settings import (
    DATE_FLAG,
    ItemRows,
    Settings,
    file_list,
    plain,
    refuse_hooks,
)
from tokenmill.media import Processor
from tokenmill.optional import optional
from tokenmill.sampling import Int64Array
from tokenmill.store import Row, open_store

Item = dict[str, Any]

PAD_MODES = ("right", "no_padding")
TRUNCATIONS = ("error", "left", "right")
OF_SETTINGS = ("date", "train_on", "turn_end", "thinking_opener", "trailing")
UNCALLED = ("_read_files_and_process", "_build_messages", "_process_single_message")
NO_VIDEOS = "for videos use verl's own dataset"
QWEN_VL_AXES = 4
"""verl gives Qwen-VL models text, time, height and width positions; in text they are the same."""
GRID = "image_grid_thw"


class SFTDataset(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows for verl's SFT trainer, in our order.

    verl's SFT trainer always shuffles, with torch's ``DistributedSampler`` of seed 0. With
    ``data.tokenmill.undo_shuffle`` and ``trainer.total_epochs=1`` items are laid out so that
    that shuffle serves our order, each global batch being consecutive positions.

    Args:
        parquet_files: Raw files, or directories of stores, as verl's ``train_files``.
        tokenizer: verl's transformers tokenizer.
        config: verl's ``data`` config; beside its own names `Settings` under ``tokenmill``.
        processor: verl's processor, where the checkpoint has one: its template, the shape of
            positions, and what becomes of pictures.
        max_samples: At most so many rows, -1 for all.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        refuse_hooks(cls, UNCALLED, "rows come from a store")

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        stated = plain(config or {})
        mode = stated.get("pad_mode", "right")
        self.pad_mode = str(getattr(mode, "value", mode))
        self.truncation = str(stated.get("truncation", "error"))
        self.max_length = int(stated.get("max_length", 1024))
        check_one_of("pad_mode", self.pad_mode, PAD_MODES)
        check_one_of("truncation", self.truncation, TRUNCATIONS)
        files = file_list(parquet_files)
        self.settings = Settings.of(stated, files)
        preparing = _Preparing(tokenizer, processor, stated, self.settings, self._limit())
        self.view = rows_alone(unweighted(preparing.view_of(files), "verl"))
        self._processor = processor
        self._check_lengths()
        self._check_pictures()
        kind = type(getattr(processor, "image_processor", None)).__name__
        self._axes = QWEN_VL_AXES if "Qwen2VLImageProcessor" in kind else None
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad_id = 0 if pad is None else int(pad)
        self._row_numbers = ItemRows(
            len(self.view), self.settings, max_samples, shuffled=bool(stated.get("shuffle"))
        )
        self._layout = self._laid_out()

    def _limit(self) -> int | None:
        """The limit that preparing applies: rows of which nothing trained is left are counted."""
        return self.max_length if self.truncation == "right" else None

    def _check_lengths(self) -> None:
        """Refuse before the run what verl would refuse in the middle of it."""
        if self.truncation == "error":
            remedy = "raise it, or set data.truncation=right"
            rows_within(self.view, self.max_length, "data.max_length", remedy)

    def _check_pictures(self) -> None:
        """Refuse before the run pictures that would not reach the model whole."""
        if not self.view.has_media:
            return
        if self._processor is None:
            raise UsageError("rows of a store with pictures need a processor, and verl gave none")
        found = plain_answers(self._loaded_processor)
        for store in self.view.stores:
            if store.has_media:
                wanted = store.manifest["document"]["processor"]
                if [wanted[name] for name in ANSWERS] != found:
                    raise UsageError(
                        "verl's processor is not the one that the rows were prepared with: its "
                        "pixels would not fit the tokens",
                        path=store.path,
                    )
        if self.truncation == "left":
            cut = np.flatnonzero(self.view.lengths > self.max_length)
            cut = cut[self.view.pictures_at(cut) > 0]
            if cut.size:
                row = self.view[int(cut[0])]
                raise SourceError(
                    f"{len(row)} tokens, data.max_length is {self.max_length}, and it has pictures,"
                    f" which a cut on the left would part from their tokens ({cut.size:,} such "
                    "rows): set data.truncation=right, which drops rows it would cut a picture of",
                    **row.origin.location,
                )

    @cached_property
    def _loaded_processor(self) -> Processor:
        return Processor.load(self._processor)

    def _laid_out(self) -> torch.Tensor | None:
        """Item → position in our order, under the trainer's shuffle of its first epoch."""
        if not self.settings.undo_shuffle:
            return None
        generator = torch.Generator()
        generator.manual_seed(0)
        shuffle = torch.randperm(len(self), generator=generator)
        layout = torch.empty_like(shuffle)
        layout[shuffle] = torch.arange(len(self))
        return layout

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_layout": None}  # made again: it grows with the rows
        state.pop("_loaded_processor", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layout = self._laid_out()

    def __len__(self) -> int:
        return len(self._row_numbers)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Rows as verl's tensors."""
        if self._layout is not None:
            numbers = self._layout[torch.from_numpy(numbers)].numpy()
        return [self._item(row) for row in self.view.rows(self._row_numbers(numbers))]

    def _item(self, row: Row) -> Item:
        length, limit = len(row), self.max_length
        kept = slice(max(0, length - limit), length)
        if self.truncation != "left":
            kept = slice(0, limit)
        input_ids = row.input_ids[kept].astype(np.int64)
        loss_mask = predicted(row.loss_mask[kept]).astype(np.int64)
        position_ids = np.arange(length, dtype=np.int64)[kept]
        found = {"input_ids": input_ids, "position_ids": position_ids, "loss_mask": loss_mask}
        if self.pad_mode == "right":
            found["attention_mask"] = np.ones_like(input_ids)
            missing = limit - len(input_ids)
            found = {
                name: np.pad(
                    values,
                    (0, missing),
                    constant_values=self.pad_id if name == "input_ids" else 0,
                )
                for name, values in found.items()
            }
        tensors: Item = {name: torch.from_numpy(values) for name, values in found.items()}
        inputs: dict[str, torch.Tensor] = {}
        if row.media:
            pixels = row_pixels(row, self._loaded_processor, "verl")
            inputs = {name: torch.from_numpy(values) for name, values in pixels.items()}
        if self._axes is not None:
            axes = tensors["position_ids"].repeat(self._axes, 1)
            if GRID in inputs:
                axes[1:] = 0
                seen = rope_index(self._processor, row.input_ids, inputs[GRID])[:, kept]
                axes[1:, : seen.shape[1]] = seen
            tensors["position_ids"] = axes
        if inputs:
            tensors["multi_modal_inputs"] = inputs
        return tensors


ANSWERS = ("class", "image_token", "answers")
"""What of a processor's identity says whether its pixels fit stored tokens."""


def plain_answers(processor: Processor) -> list[Any]:
    """Those of a processor, as a manifest has them."""
    return [json.loads(json.dumps(processor.identity[name])) for name in ANSWERS]


def rope_index(processor: Any, input_ids: Any, grid: torch.Tensor) -> torch.Tensor:
    """Time, height and width of every token of a row, by verl's own function."""
    with optional("verl", "the positions of pictures"):
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
    """How raw files become rows, as the host's configuration says."""

    tokenizer: Any
    processor: Any
    config: dict[str, Any]
    settings: Settings
    limit: int | None

    def view_of(self, files: list[str]) -> View:
        """The rows of files, neighbours that are raw prepared together."""
        views: list[View] = []
        for stores, neighbours in groupby(files, is_store):
            if stores:
                views += [as_view(open_store(file)) for file in neighbours]
            else:
                views.append(self._prepared(list(neighbours)))
        return concat(views)

    def _prepared(self, files: list[str]) -> View:
        """Raw files, each row rendered as it says itself whether to think."""
        settings = self.settings
        column = self.config.get("enable_thinking_key", "enable_thinking") or None
        images = str(self.config.get("image_key") or COLUMNS[0])
        refused = {str(self.config.get("video_key") or "videos"): NO_VIDEOS}
        if self.processor is None:
            refused[images] = "pictures need a processor, and verl gave none"
        elif images not in COLUMNS:
            refused[images] = f"the column of pictures must be called {' or '.join(COLUMNS)}"
        default = self.config.get("enable_thinking_default")
        said = said_by(files, column, images, refused, settings.cache_dir)
        carry = () if len(said.switches) == 1 else (str(column),)
        stores = {}
        for switch in sorted(said.switches, key=str):
            thinking = default if switch is None else switch
            variables = dict(self.config.get("apply_chat_template_kwargs") or {})
            if thinking is not None:
                variables["enable_thinking"] = bool(thinking)
            stores[switch] = prepared(
                self._recipe(files, variables, carry, pictures=said.pictures),
                RunOptions(
                    num_workers=settings.num_workers,
                    cache_dir=settings.cache_dir,
                    media_root=settings.media_root,
                ),
                flag=DATE_FLAG,
            )
        if len(stores) == 1:
            return as_view(*stores.values())
        return SwitchedRows(stores, str(column))

    def _recipe(
        self,
        files: list[str],
        variables: dict[str, Any],
        carry: tuple[str, ...],
        *,
        pictures: bool,
    ) -> Recipe:
        config, settings = self.config, self.settings
        key = config.get("messages_key")
        # verl renders with the processor's template where there is one.
        template = getattr(self.processor, "chat_template", None)
        return Recipe(
            sources=tuple(files),
            tokenizer=self.tokenizer,
            tokenizer_backend="transformers",
            processor=self.processor if pictures else None,
            messages_key=None if key == "messages" else key,
            tools_key=config.get("tools_key") or "tools",
            chat_template=template if isinstance(template, str) else None,
            template_kwargs=variables,
            **{name: getattr(settings, name) for name in OF_SETTINGS},
            max_length=self.limit,
            overlong="truncate",
            carry=carry,
        )
