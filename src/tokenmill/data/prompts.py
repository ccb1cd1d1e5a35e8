"""`PromptDataset`: RL prompts that are read when they are served."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from tokenmill._core.origin import Origin, nothing_left
from tokenmill._core.remote import is_remote
from tokenmill.build.blocks import Source, cache_of, open_sources
from tokenmill.build.executors import executor_for
from tokenmill.build.tasks import Executor
from tokenmill.data.cursor import STATE_VERSION, validate_state
from tokenmill.data.order import ORDER_VERSION, FeistelOrder, Order, check_seed, unroll
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
    check_one_of,
    check_positive,
)
from tokenmill.sources.rows import Rows
from tokenmill.store.columns import row_numbers

if TYPE_CHECKING:
    from tokenmill.data.prompt_media import ProcessorMedia

BATCH = 256  # prompts read together while iterating
ON_BAD_ROW = ("reject", "raise")
_STATE_KIND = "tokenmill.PromptDataset"


class PromptDataset(Sequence[Prompt]):
    """RL prompts that are read when they are served.

    Opening indexes the source, finds the stored lengths or measures them once, and compares them
    with the limit. Rows and lengths are mapped; no memory grows with the rows.

    Args:
        source: File, directory, glob or a list of these, each with an optional ``@[a:b]``.
        tokenizer: Directory, ``tokenizer.json``, hub id, ``tokenizers.Tokenizer`` or a
            transformers tokenizer. None serves rows as they are: it needs
            ``apply_chat_template=False`` and no ``max_length``, and prompts then have no length.
        processor: For media: directory, hub id or a transformers processor, or whatever is called
            like one: ``processor(text=…, images=…, videos=…)["input_ids"]`` has the length of
            prompts with media. Its tokenizer and template are used where no tokenizer is given;
            a tokenizer that gives other ids than a transformers processor's own is refused.
        max_length: Most tokens of a prompt, counted without added special tokens; None: any.
        prompt_key: Column of the prompt: text, or messages.
        label_key: Column of the label.
        tool_key: Column of the tools: a list, or its JSON text.
        metadata_key: Column of the metadata.
        multimodal_keys: Kinds of media and their columns, like ``{"image": "images"}``.
        apply_chat_template: Render the conversation with the generation prompt.
        apply_chat_template_kwargs: Further template variables.
        template_kwargs: An alias of ``apply_chat_template_kwargs``.
        chat_template: Jinja source, or a file that holds it; None: the tokenizer's own.
        date: ``YYYY-MM-DD`` for templates that print the date; such a template is refused without.
        tokenizer_backend: ``auto``, ``transformers`` or ``file``.
        trust_remote_code: Allow a tokenizer to bring code of its own.
        seed: Of the shuffles.
        order: ``feistel``, or the class of a trainer's own order.
        convention: ``module:Class`` of a trainer's `Convention`; empty: tokenmill's own.
        media_root: Directory, or a list of them, that pictures are looked for in and may not lead
            out of; None: that of each row's file. Under a trainer's convention None is the
            working directory, and every file may be opened, as there.
        media_urls: Open pictures at ``http://`` and ``https://`` addresses.
        on_bad_row: ``reject`` counts a row that is no prompt, ``raise`` makes the first an error.
        num_workers: Worker processes that measure; 0 runs inline, None takes the machine's cores.
        cache_dir: Where the indexes are kept.
        executor: ``local``, ``inline``, ``ray`` or an executor object.
    """

    def __init__(
        self,
        source: Source | Sequence[Source],
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
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: Any = None,
        date: str | None = None,
        tokenizer_backend: str = "auto",
        trust_remote_code: bool = False,
        seed: int = 42,
        order: str | type[Order] = "feistel",
        convention: str = "",
        media_root: Source | Sequence[Source] | None = None,
        media_urls: bool = False,
        on_bad_row: str = "reject",
        num_workers: int | None = None,
        cache_dir: Source | None = None,
        executor: str | Executor = "local",
    ) -> None:
        if apply_chat_template_kwargs and template_kwargs:
            raise UsageError(
                ("apply_chat_template_kwargs",), " and ", ("template_kwargs",), " are one: give one"
            )
        if isinstance(order, str):
            check_one_of("order", order, ("feistel",))
        check_one_of("on_bad_row", on_bad_row, ON_BAD_ROW)
        if max_length is not None:
            check_positive("max_length", max_length)
        spec = PromptSpec(
            prompt_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            multimodal_keys=multimodal_keys,
            apply_chat_template=apply_chat_template,
            template_kwargs=apply_chat_template_kwargs or template_kwargs or {},
            date=date,
            convention=convention,
        )
        seed = check_seed(seed)
        cache = cache_of(cache_dir)
        rows = open_sources(source, cache)
        self.spec = spec
        self._processor = processor
        self._opening: dict[str, Any] = {
            "media_root": media_root,
            "media_urls": media_urls,
            "trust_remote_code": trust_remote_code,
            "cache_dir": cache.root,
        }
        if tokenizer is None and self._media is not None:
            tokenizer, own_template = self._media.tokenizer, self._media.chat_template
            tokenizer_backend = "transformers"
            chat_template = own_template if chat_template is None else chat_template
        if tokenizer is None and (apply_chat_template or max_length is not None):
            need = "max_length counts its tokens"
            if apply_chat_template:
                need = "apply_chat_template renders with its template and special tokens"
            raise UsageError(
                f"no tokenizer, but {need}: name a directory, a tokenizer.json or a hub id"
            )
        request = LengthRequest(
            rows, spec, tokenizer, tokenizer_backend, chat_template, trust_remote_code, self._media
        )
        with executor_for(executor, num_workers) as workers:
            index = find_lengths(request, cache.root, workers)
        self._open(rows, index, max_length, seed, order)
        if on_bad_row == "raise":
            for rejection in self._index.rejections():
                origin = self._rows.origin(rejection.row)
                raise RowError(rejection.detail, reason=rejection.reason, **origin.location)

    def _open(
        self, rows: Rows, index: LengthIndex, max_length: int | None, seed: int, order: Any
    ) -> None:
        self._rows = rows
        self._index = index
        self.hit, self.measured = index.hit, index.measured
        self.max_length = max_length
        self.seed = seed
        self._order_class = FeistelOrder if isinstance(order, str) else order
        self.order = order if isinstance(order, str) else order.__name__
        self._kept = Kept(self._index.lengths, max_length)
        self._order: Order = self._order_class(len(self._kept), seed)
        self._epoch = 0
        self._position = 0
        self._shuffled = False

    # What there is

    @property
    def key(self) -> str:
        """The key of the length index."""
        return self._index.directory.name

    @property
    def path(self) -> Path:
        """Where the length index lies."""
        return self._index.directory

    @property
    def rows(self) -> Rows:
        """The opened source; ``prompt.row`` is a row's number in it."""
        return self._rows

    @property
    def source_rows(self) -> int:
        """Rows of the source: the kept and the rejected."""
        return self._index.rows

    @property
    def rejected(self) -> dict[str, int]:
        """Rows that are not served, by reason; ``overlong`` counts what the limit leaves out."""
        counts = dict(self._index.rejected)
        if self._kept.overlong:
            counts["overlong"] = counts.get("overlong", 0) + self._kept.overlong
        return dict(sorted(counts.items()))

    def rejected_rows(self) -> Iterator[tuple[Origin, str, str]]:
        """Origin, reason and detail of every row that is not served, in the source's order."""
        lengths, limit = self._index.lengths, self.max_length
        overlong = (
            (row, "overlong", f"{lengths[row]} tokens, max_length is {limit}")
            for row in self._kept.overlong_rows().tolist()
        )
        for row, reason, detail in merge(self._index.rejections(), overlong):
            yield self._rows.origin(row), reason, detail

    @property
    def lengths(self) -> Int32Array:
        """Tokens of every kept prompt, in the current order; -2 where none were counted."""
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
        return self.batch([int(index)])[0]

    def batch(self, indices: Sequence[int]) -> list[Prompt]:
        """Prompts at several positions, in the given order."""
        chosen = self._rows_at(row_numbers(indices, len(self), "prompt")).tolist()
        values = self._rows.batch(chosen)
        return [self._prompt(row, value) for row, value in zip(chosen, values, strict=True)]

    def numbers_at(self, positions: Int64Array) -> Int64Array:
        """Numbers among the kept rows, at positions that count on through the epochs."""
        return unroll(self._order, positions)

    def kept_before(self, source_row: int) -> int:
        """Kept rows among the first rows of the source."""
        return self._kept.count_before(source_row)

    def source_rows_at(self, numbers: Int64Array) -> list[dict[str, Any]]:
        """Parsed rows of the source, by their number among the kept, in file order."""
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
        return PromptMaker(self.spec, self._index.template, self._index.special_tokens)

    @cached_property
    def _media(self) -> ProcessorMedia | None:
        if self._processor is None:
            return None
        from tokenmill.data.prompt_media import open_media

        return open_media(self._processor, self.spec, **self._opening)

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
        """The prompts in the current order, under the name that trainers use."""
        return self

    # The order and the cursor

    @property
    def epoch(self) -> int:
        """The epoch of the current order."""
        return self._epoch

    @property
    def position(self) -> int:
        """Prompts of this epoch that `take` handed out."""
        return self._position

    def shuffle(self, epoch: int) -> None:
        """Put the prompts in the order of an epoch; the cursor of another epoch starts anew."""
        _check_epoch(epoch, UsageError)
        if self._shuffled and epoch == self._epoch:
            return
        self._epoch, self._shuffled, self._position = epoch, True, 0

    def seek(self, epoch: int, position: int) -> None:
        """Put the cursor of `take` anywhere; shuffled or not stays as it is."""
        if not (isinstance(position, int) and 0 <= position <= len(self)):
            raise StateError(f"position is {position!r} of {len(self)} prompts")
        _check_epoch(epoch, StateError)
        self._epoch, self._position = epoch, position

    def take(self, count: int) -> list[Prompt]:
        """The next prompts of the stream, going on into the next epoch where one ends.

        The next epoch is shuffled if this one is; without `shuffle` every epoch is in file order.
        """
        if not len(self):
            path = self._rows.origin(0).path if len(self._rows) else None
            raise nothing_left("prompt", self.rejected, self.rejected_rows(), path)
        taken: list[Prompt] = []
        while count > len(taken):
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
            stop = min(len(self), self._position + count - len(taken))
            taken += self[self._position : stop]
            self._position = stop
        return taken

    def _stream(self) -> dict[str, Any]:
        limit, seed, order = self.max_length, self.seed, self.order
        return {"index": self.key, "max_length": limit, "seed": seed, "order": order}

    def state_dict(self) -> dict[str, Any]:
        """The cursor of `take`: a small JSON-able dict."""
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
        """Continue at a saved cursor; StateError if it is of another index, limit or order."""
        state = dict(state)
        validate_state(
            state,
            kind=_STATE_KIND,
            owner="prompt dataset",
            fields=self._stream(),
            numbers=("epoch", "position"),
        )
        position, shuffled = state["position"], state.get("shuffled")
        if position > len(self):
            raise StateError(f"the state's position is {position} of {len(self)} prompts")
        if not isinstance(shuffled, bool):
            raise StateError(f"the state's shuffled is {shuffled!r}, not true or false")
        self._epoch, self._position, self._shuffled = state["epoch"], position, shuffled

    # Pickling

    def __getstate__(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "spec": self.spec.as_dict(),
            "directory": str(self._index.directory),
            "max_length": self.max_length,
            "seed": self.seed,
            "order": "feistel" if self._order_class is FeistelOrder else self._order_class,
            "processor": self._processor,
            "opening": self._opening,
            "cursor": (self._epoch, self._position, self._shuffled),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.spec = PromptSpec(**state["spec"])
        self._processor, self._opening = state["processor"], state["opening"]
        index = LengthIndex(Path(state["directory"]))
        self._open(state["rows"], index, state["max_length"], state["seed"], state["order"])
        self._epoch, self._position, self._shuffled = state["cursor"]

    def __repr__(self) -> str:
        return f"<PromptDataset {len(self)} of {self._rows!r}>"


def _check_epoch(epoch: int, error: type[TokenmillError]) -> None:
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise error(f"`epoch` must be a non-negative integer, got {epoch!r}")
