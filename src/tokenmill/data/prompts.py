"""`PromptDataset`: RL prompts that are read when they are served."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from heapq import merge
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from tokenmill._core.origin import Origin, nothing_left
from tokenmill._core.remote import is_remote
from tokenmill.build.blocks import Source, cache_of, open_sources
from tokenmill.build.executors import executor_for
from tokenmill.build.processor import TokenizerOf
from tokenmill.build.progress import open_progress
from tokenmill.build.tasks import Executor
from tokenmill.data.cursor import STATE_VERSION, validate_state
from tokenmill.data.order import LARGEST, ORDER_VERSION, FeistelOrder, Order, check_seed, unroll
from tokenmill.data.prompt_lengths import (
    Int32Array,
    Int64Array,
    Kept,
    LengthIndex,
    LengthRequest,
    find_lengths,
)
from tokenmill.data.prompt_rows import Prompt, PromptMaker, PromptSpec, Shaped, shape_row
from tokenmill.errors import (
    RowError,
    StateError,
    TokenmillError,
    UsageError,
    check_integer,
    check_positive,
)
from tokenmill.sources.rows import Rows
from tokenmill.store.columns import row_numbers

if TYPE_CHECKING:
    from tokenmill.data.prompt_media import ProcessorMedia

BATCH = 256  # prompts that iteration reads at once
_STATE_KIND = "tokenmill.PromptDataset"


class PromptSettings(NamedTuple):
    """Settings of a `PromptDataset` that integrations and commands need, and users do not."""

    convention: str = ""  # ``module:Class`` of a trainer's `Convention`; empty: tokenmill's own
    order: Any = FeistelOrder  # class of the order
    executor: str | Executor = "local"
    progress: Any = None  # as for `prepare`
    # Directories of images. None: that of each row's file; with a trainer's convention every file
    # may be opened, as in that trainer.
    media_root: Source | Sequence[Source] | None = None
    media_urls: bool = False  # download images that rows give as URLs


def open_prompts(settings: PromptSettings, *arguments: Any, **options: Any) -> PromptDataset:
    """Return a `PromptDataset` with settings that are not among its arguments."""
    prompts = PromptDataset.__new__(PromptDataset)
    prompts._settings = settings
    prompts.__init__(*arguments, **options)  # type: ignore[misc]
    return prompts


class PromptDataset(Sequence[Prompt]):
    """RL prompts that are read when they are served.

    Opening indexes the files, measures the lengths once (or finds the stored ones) and compares
    them with the limit. Rows and lengths are mapped; memory does not grow with the rows.

    Args:
        path: File, directory, glob or a list of these, each with an optional ``@[a:b]``.
        tokenizer: Directory, ``tokenizer.json``, hub id, ``tokenizers.Tokenizer`` or a
            transformers tokenizer. None serves rows as they are: prompts then have no length, and
            neither ``apply_chat_template`` nor ``max_length`` is possible.
        processor: For media: directory, hub id, a transformers processor or a callable like one:
            ``processor(text=…, images=…, videos=…)["input_ids"]`` has the length of prompts with
            media. Its tokenizer and template are the defaults; another tokenizer must give the
            same ids.
        max_length: Maximum number of tokens of a prompt, without added special tokens.
        prompt_key: Column of the prompt: text or messages.
        label_key: Column of the label.
        tool_key: Column of the tools: a list, or its JSON text.
        metadata_key: Column of the metadata.
        multimodal_keys: Kinds of media and their columns, like ``{"image": "images"}``.
        apply_chat_template: Render the conversation with the generation prompt.
        apply_chat_template_kwargs: Additional variables for the chat template.
        chat_template: Jinja source, or a file with it. Default: the tokenizer's own.
        encoder: Python function that encodes conversations, as for `prepare`.
        encoder_kwargs: Additional arguments of the encoder.
        date: ``YYYY-MM-DD`` for templates that print the date, which require it.
        tokenizer_backend: ``auto``, ``transformers`` or ``file``.
        trust_remote_code: Allow a tokenizer to run its own code.
        seed: Seed of the shuffles.
        num_workers: Number of worker processes that measure; 0 works in this process. Default:
            one per core.
        cache_dir: Cache directory.
    """

    _settings = PromptSettings()

    def __init__(
        self,
        path: Source | Sequence[Source],
        tokenizer: Any = None,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        multimodal_keys: Mapping[str, str] | None = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: Any = None,
        encoder: Any = None,
        encoder_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        tokenizer_backend: str = "auto",
        trust_remote_code: bool = False,
        seed: int = 42,
        num_workers: int | None = None,
        cache_dir: Source | None = None,
    ) -> None:
        settings = self._settings
        if max_length is not None:
            check_positive("max_length", max_length)
        self.spec = PromptSpec(
            prompt_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            multimodal_keys=multimodal_keys,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs,
            date=date,
            convention=settings.convention,
        )
        seed = check_seed(seed)
        cache = cache_of(cache_dir)
        with open_progress(settings.progress) as shown:
            shown.phase("indexing the files")
            rows = open_sources(path, cache)
        self._processor = processor
        self._media_options: dict[str, Any] = {
            "media_root": settings.media_root,
            "media_urls": settings.media_urls,
            "trust_remote_code": trust_remote_code,
            "cache_dir": cache.root,
        }
        if tokenizer is None and self._media is not None:
            tokenizer, own_template = self._media.tokenizer, self._media.chat_template
            tokenizer_backend = "transformers"
            if encoder is None and chat_template is None:
                chat_template = own_template
        if tokenizer is None and (apply_chat_template or max_length is not None):
            option = "apply_chat_template" if apply_chat_template else "max_length"
            raise UsageError(
                (option,), " needs ", ("tokenizer",),
                ": pass a directory, a tokenizer.json or a hub id",
            )  # fmt: skip
        choice = TokenizerOf(
            tokenizer, tokenizer_backend, chat_template, trust_remote_code, encoder, encoder_kwargs
        )
        self._encoded_by = None if encoder is None else choice
        with (
            executor_for(settings.executor, num_workers) as workers,
            open_progress(settings.progress) as shown,
        ):
            request = LengthRequest(rows, self.spec, choice, self._media, shown)
            index = find_lengths(request, cache.root, workers)
        self._open(rows, index, max_length, seed, settings.order)

    def _open(
        self, rows: Rows, index: LengthIndex, max_length: int | None, seed: int, order: Any
    ) -> None:
        self._rows = rows
        self._index = index
        self.hit, self.measured = index.hit, index.measured
        self.max_length = max_length
        self.seed = seed
        self._order_class = order
        self.order = "feistel" if order is FeistelOrder else order.__name__
        self._kept = Kept(self._index.lengths, max_length)
        self._order: Order = self._order_class(len(self._kept), seed)
        self._epoch = 0
        self._position = 0
        self._shuffled = False

    # Properties

    @property
    def key(self) -> str:
        """The key of the length index."""
        return self._index.directory.name

    @property
    def path(self) -> Path:
        """Directory of the length index."""
        return self._index.directory

    @property
    def rows(self) -> Rows:
        """The opened rows; ``prompt.row`` is an index into them."""
        return self._rows

    @property
    def source_rows(self) -> int:
        """Number of rows in the files, including rejected rows."""
        return self._index.rows

    @property
    def rejected(self) -> dict[str, int]:
        """Number of rejected rows by reason; ``overlong`` counts those over `max_length`."""
        counts = dict(self._index.rejected)
        if self._kept.overlong:
            counts["overlong"] = counts.get("overlong", 0) + self._kept.overlong
        return dict(sorted(counts.items()))

    def rejected_rows(self) -> Iterator[tuple[Origin, str, str]]:
        """Yield origin, reason and detail of every rejected row, in file order."""
        lengths, limit = self._index.lengths, self.max_length
        overlong = (
            (row, "overlong", f"{lengths[row]} tokens, max_length is {limit}")
            for row in self._kept.overlong_rows().tolist()
        )
        for row, reason, detail in merge(self._index.rejections(), overlong):
            yield self._rows.origin(row), reason, detail

    @property
    def lengths(self) -> Int32Array:
        """Number of tokens of every prompt, in the current order; -2 if not counted."""
        chosen = self._rows_at(np.arange(len(self), dtype=np.int64))
        return np.asarray(self._index.lengths)[chosen]

    # Rows by position

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return self.batch(range(*index.indices(len(self))))
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at several positions."""
        chosen = self._rows_at(row_numbers(indices, len(self), "prompt")).tolist()
        values = self._rows.batch(chosen)
        return [self._prompt(row, value) for row, value in zip(chosen, values, strict=True)]

    def numbers_at(self, positions: Int64Array) -> Int64Array:
        """Return numbers of kept rows, by positions that continue through the epochs."""
        return unroll(self._order, positions)

    def kept_before(self, source_row: int) -> int:
        """Return the number of kept rows before a row of the source."""
        return self._kept.count_before(source_row)

    def source_rows_at(self, numbers: Int64Array) -> list[dict[str, Any]]:
        """Return parsed rows, by their number among the kept rows in file order."""
        return self._rows.batch(self._kept.rows(numbers).tolist())

    def __iter__(self) -> Iterator[Prompt]:
        for first in range(0, len(self), BATCH):
            yield from self.batch(range(first, min(first + BATCH, len(self))))

    def _rows_at(self, positions: Int64Array) -> Int64Array:
        if self._shuffled:
            positions = self._order.indices(self._epoch, positions)
        return self._kept.rows(positions)

    def _prompt(self, row: int, value: dict[str, Any]) -> Prompt:
        shaped = shape_row(value, self.spec)
        origin = self._rows.origin(row, value)
        length = int(self._index.lengths[row])
        return Prompt(
            prompt=self._maker.text(shaped),
            label=shaped.label,
            metadata=shaped.metadata,
            tools=shaped.tools,
            origin=origin,
            row=row,
            messages=shaped.prompt if isinstance(shaped.prompt, list) else None,
            multimodal_inputs=self._inputs(shaped, origin),
            length=length if length >= 0 else None,
        )

    @cached_property
    def _maker(self) -> PromptMaker:
        choice = self._encoded_by
        if choice is not None:
            from tokenmill.tokenizers.loading import load

            loaded = load(
                choice.tokenizer,
                backend=choice.tokenizer_backend,
                encoder=choice.encoder,
                encoder_kwargs=choice.encoder_kwargs,
                trust_remote_code=choice.trust_remote_code,
            )
            return PromptMaker(self.spec, loaded.template, loaded.special_tokens, loaded)
        return PromptMaker(self.spec, self._index.template, self._index.special_tokens)

    @cached_property
    def _media(self) -> ProcessorMedia | None:
        if self._processor is None:
            return None
        from tokenmill.data.prompt_media import open_media

        return open_media(self._processor, self.spec, **self._media_options)

    def _inputs(self, shaped: Shaped, origin: Origin) -> dict[str, Any] | None:
        if self._media is None or not isinstance(shaped.prompt, list):
            return None
        path = origin.path
        base = None if path is None or is_remote(path) else os.path.dirname(os.path.abspath(path))
        try:
            return self._media.served(shaped, base)
        except RowError as error:
            raise RowError(error.message, reason=error.reason, **origin.location) from error

    @property
    def samples(self) -> PromptDataset:
        """The prompts in the current order, under the name that trainers expect."""
        return self

    # The order and the cursor

    @property
    def epoch(self) -> int:
        """The epoch of the current order."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of prompts of this epoch that `take` returned."""
        return self._position

    def shuffle(self, epoch: int) -> None:
        """Shuffle for an epoch; the cursor of `take` starts at 0 if the epoch changes."""
        _check_epoch(epoch, UsageError)
        if self._shuffled and epoch == self._epoch:
            return
        self._epoch, self._shuffled, self._position = int(epoch), True, 0

    def seek(self, epoch: int, position: int) -> None:
        """Set the cursor of `take`; it does not change whether prompts are shuffled."""
        if not (isinstance(position, Integral) and 0 <= position <= len(self)):
            raise StateError(f"position must be an integer from 0 to {len(self)}, got {position!r}")
        _check_epoch(epoch, StateError)
        self._epoch, self._position = int(epoch), int(position)

    def take(self, count: int) -> list[Prompt]:
        """Return the next prompts; continue with the next epoch at the end of one.

        The next epoch is shuffled if this one is. Without `shuffle`, epochs are in file order.
        """
        count = check_integer("count", count, 0)
        if not len(self):
            path = self._rows.origin(0).path if len(self._rows) else None
            raise nothing_left("prompt", self.rejected, self.rejected_rows(), path)
        prompts: list[Prompt] = []
        while count > len(prompts):
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
            stop = min(len(self), self._position + count - len(prompts))
            prompts += self[self._position : stop]
            self._position = stop
        return prompts

    def _stream(self) -> dict[str, Any]:
        limit, seed, order = self.max_length, self.seed, self.order
        return {"index": self.key, "max_length": limit, "seed": seed, "order": order}

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor of `take` as a small JSON-serializable dict."""
        return {
            "kind": _STATE_KIND,
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            "shuffled": self._shuffled,
            **self._stream(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved cursor; StateError if it has another index, limit or order."""
        state = dict(state) if isinstance(state, Mapping) else state
        validate_state(
            state,
            kind=_STATE_KIND,
            owner="prompt dataset",
            fields=self._stream(),
            numbers=("epoch", "position"),
        )
        position, shuffled = state["position"], state.get("shuffled")
        if position > len(self):
            raise StateError(f"invalid state: position {position} exceeds {len(self)} prompts")
        if not isinstance(shuffled, bool):
            raise StateError(f"invalid state: shuffled must be true or false, got {shuffled!r}")
        self._epoch, self._position, self._shuffled = state["epoch"], position, shuffled

    # Pickling

    def __getstate__(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "spec": self.spec.as_dict(),
            "directory": str(self._index.directory),
            "max_length": self.max_length,
            "seed": self.seed,
            "order": self._order_class,
            "processor": self._processor,
            "media_options": self._media_options,
            "encoded_by": self._encoded_by,
            "cursor": (self._epoch, self._position, self._shuffled),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.spec = PromptSpec(**state["spec"])
        self._processor, self._media_options = state["processor"], state["media_options"]
        self._encoded_by = state["encoded_by"]
        index = LengthIndex(Path(state["directory"]))
        self._open(state["rows"], index, state["max_length"], state["seed"], state["order"])
        self._epoch, self._position, self._shuffled = state["cursor"]

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f", up to {self.max_length:,} tokens"
        shown = f"{len(self):,} of {self.source_rows:,} prompts, epoch {self._epoch}"
        return f"PromptDataset({shown}, position {self._position:,}{limit}, {self._rows!r})"


def _check_epoch(epoch: int, error: type[TokenmillError]) -> None:
    if isinstance(epoch, bool) or not isinstance(epoch, Integral) or epoch < 0:
        raise error(f"`epoch` must be a non-negative integer, got {epoch!r}")
    if epoch > LARGEST:  # a state could not be loaded again
        raise error(f"`epoch` must be at most 2**62, got {epoch!r:.50}")
