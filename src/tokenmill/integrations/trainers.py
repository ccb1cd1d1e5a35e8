"""Shared by the integrations: the columns of each trainer, dataset base classes, and checks."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill._core import fingerprint
from tokenmill._core.paths import cache_root
from tokenmill.build.blocks import source_documents
from tokenmill.data.by_source import Draws
from tokenmill.data.fill import IGNORE, labels_of
from tokenmill.data.order import FeistelOrder, Int64Array, Order, make_order, unroll
from tokenmill.data.prompt_rows import Convention, Conversation, Shaped
from tokenmill.data.view import View, tokens_alone, unweighted
from tokenmill.errors import CacheError, SourceError, TemplateError, UsageError, check_positive
from tokenmill.media import Images, Processor
from tokenmill.sources.index import IndexCache
from tokenmill.sources.rows import Rows
from tokenmill.store import Row, Store, StoreLayout
from tokenmill.store.columns import row_numbers

DATE = "TOKENMILL_DATE"
Array = npt.NDArray[Any]
MaskArray = npt.NDArray[np.uint8]
T = TypeVar("T")
_SUBSET_STREAM = 1 << 16  # keeps the choice of a subset independent of every order of rows


# Fields of a row


def response_mask(mask: MaskArray) -> MaskArray:
    """Return the mask from the first trained token on, the first of the row not counted."""
    trained = np.flatnonzero(mask[1:])
    return mask[int(trained[0]) + 1 if trained.size else len(mask) :]


FIELDS: dict[str, Callable[[Array, MaskArray], Array]] = {
    "ids": lambda ids, mask: ids,
    "ones": lambda ids, mask: np.ones_like(ids),
    "positions": lambda ids, mask: np.arange(len(ids)),
    "length": lambda ids, mask: np.asarray([len(ids)]),
    "labels": labels_of,
    "next_labels": lambda ids, mask: np.append(labels_of(ids, mask)[1:], IGNORE),
    "stored_mask": lambda ids, mask: mask,
    "mask": lambda ids, mask: np.append(np.zeros_like(mask[:1]), mask[1:]),
    "next_mask": lambda ids, mask: np.append(mask[1:], 0),
    "response_mask": lambda ids, mask: response_mask(mask),
}
"""Columns of trainers, computed from ids and loss mask; ``next_``: of the following token."""


@dataclass(frozen=True)
class Trainer:
    name: str
    columns: Mapping[str, tuple[str, Any]]  # column -> a field of FIELDS and its dtype
    tensors: bool = True  # or lists
    takes_images: bool = False
    limit: str = "max_length"  # the trainer's name of its length limit
    advice: str = "Raise it, or prepare with --max-length"

    def check(self, view: View, max_length: int | None = None) -> View:
        """Return the view, or raise if the trainer would train it wrongly or refuse it later."""
        view = (unweighted if self.takes_images else tokens_alone)(view, self.name)
        require_ungrouped(view)
        if max_length is not None and (long := np.flatnonzero(view.lengths > max_length)).size:
            raise self.too_long(view[int(long[0])], max_length, f" ({long.size:,} such rows)")
        return view

    def too_long(self, row: Row, limit: int | None, others: str = "") -> SourceError:
        return SourceError(
            f"The row has {len(row)} tokens, but {self.limit} is {limit}{others}. {self.advice}.",
            **row.origin.location,
        )

    def arrays(self, ids: Array, mask: MaskArray) -> dict[str, Array]:
        return {
            column: FIELDS[field](ids, mask).astype(dtype, copy=False)
            for column, (field, dtype) in self.columns.items()
        }

    def item(self, ids: Array, mask: MaskArray) -> dict[str, Any]:
        arrays = self.arrays(ids, mask)
        if not self.tensors:
            return {column: values.tolist() for column, values in arrays.items()}
        import torch

        return {column: torch.from_numpy(values) for column, values in arrays.items()}


_INT, _MASK = np.int64, np.uint8
TORCH = Trainer(
    "a map-style dataset",
    {"input_ids": ("ids", _INT), "labels": ("labels", _INT), "loss_mask": ("mask", _MASK)},
)
VERL = Trainer(
    "verl",
    {"input_ids": ("ids", _INT), "position_ids": ("positions", _INT), "loss_mask": ("mask", _INT)},
    takes_images=True,
    limit="data.max_length",
    advice="Raise it, or set data.truncation=right",
)
SKYRL = Trainer(
    "SkyRL",
    {
        "input_ids": ("ids", _INT),
        "attention_mask": ("ones", _INT),
        "loss_mask": ("response_mask", _MASK),
    },
    tensors=False,
    takes_images=True,
)
OPENRLHF = Trainer(
    "OpenRLHF",
    {
        "input_ids": ("ids", _INT),
        "attention_mask": ("ones", _INT),
        "loss_mask": ("next_mask", np.float32),
    },
    limit="--data.max_len",
)
TORCHTUNE = Trainer(
    "torchtune",
    {"tokens": ("ids", _INT), "labels": ("labels", _INT)},
    tensors=False,
    limit="tokenizer.max_seq_len",
)
NEMO_RL = Trainer("NeMo RL", {})


# Datasets


class Items(abc.ABC, Generic[T]):
    """A map-style dataset that reads its items in batches."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def items_at(self, numbers: Int64Array) -> list[T]: ...  # the numbers are in range

    def __getstate__(self) -> dict[str, Any]:
        cls = type(self)
        cached = {name for name in dir(cls) if isinstance(getattr(cls, name), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in cached}

    def __getitem__(self, item: int) -> T:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[T]:
        return self.items_at(row_numbers(items, len(self), "item"))


class ItemRows(Order):
    """The row number of each item: every epoch in its own order, one after the other."""

    def __init__(
        self,
        rows: int,
        order: str = "sequential",
        seed: int = 0,
        epochs: int = 1,
        subset: int | None = None,  # serve only this many rows, chosen at random
    ) -> None:
        check_positive("epochs", epochs)
        self.rows = rows if subset is None else subset
        self._subset = None if subset is None else FeistelOrder(rows, seed, _SUBSET_STREAM)
        self._order = make_order(order, self.rows, seed)
        self._epochs = epochs
        self.seed = seed

    def indices(self, epoch: int, positions: Int64Array) -> Int64Array:
        return self(positions + epoch * self.rows)

    def __len__(self) -> int:
        return self.rows * self._epochs

    def __call__(self, items: Int64Array) -> Int64Array:
        found = unroll(self._order, items)
        return found if self._subset is None else self._subset.indices(0, found)


class RowDataset(Items[Any]):
    trainer: Trainer
    view: View
    item_rows: ItemRows

    def __len__(self) -> int:
        return len(self.item_rows)

    def positions(self, numbers: Int64Array) -> Int64Array:
        """Return the positions of items in the order of `item_rows`."""
        return numbers

    def row_numbers(self, positions: Int64Array) -> Int64Array:
        return self.item_rows(positions)

    def items_at(self, numbers: Int64Array) -> list[Any]:
        positions = self.positions(numbers)
        if not self.view.is_by_source:
            return [self.item(row) for row in self.view.rows(self.row_numbers(positions))]
        draws = Draws(self.view, self.item_rows, self.item_rows.seed, {"data": len(self.view)})
        return [self.item(row) for [row] in draws.plain_rows(positions)]

    def item(self, row: Row) -> Any:
        return self.trainer.item(row.input_ids, row.loss_mask)


def image_features(row: Row, processor: Processor, trainer: str) -> dict[str, Array]:
    """Run the processor on a row's images and return arrays by the model's argument names."""
    images = Images()
    opened = [images.open(row.image(number), one.reference) for number, one in enumerate(row.media)]
    found = processor.features([opened])
    apart = sorted(set(found) - processor.layout.joined)
    if apart:
        raise UsageError(
            f"{trainer} concatenates the features of single images, but {', '.join(apart)} of "
            f"{type(processor.original).__name__} cannot be concatenated. Use "
            f"{trainer}'s own dataset."
        )
    return found


# Prompts


class Verbatim(Convention):
    """Pass messages and tools to the template unchanged."""

    is_trainer = True

    def conversation(self, shaped: Shaped) -> Conversation:
        assert isinstance(shaped.prompt, list)
        return shaped.prompt, shaped.tools, None


VERBATIM = f"{__name__}:{Verbatim.__name__}"


# Checks


def require_ungrouped(view: View) -> View:
    if view.has_groups:
        raise UsageError(
            "This data contains preference groups, which this trainer would split. Use tm.Loader "
            "or hf.for_trl instead."
        )
    return view


# Stores


def is_store(path: str | os.PathLike[str]) -> bool:
    return StoreLayout(Path(path)).manifest.is_file()


def prepared(tokenizer: Any, flag: str = "", **arguments: Any) -> Store:
    """Call `tokenmill.prepare`; ``flag`` is the trainer's setting of the date."""
    from tokenmill.build.calls import prepare

    with date_named(tokenizer, flag):
        store: Store = prepare(tokenizer=tokenizer, **arguments)
    return store


def cached_scan(
    rows: Rows, cache_dir: Any, query: dict[str, Any], scan: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the JSON values that a scan of all rows found, cached by content and query."""
    index_cache = IndexCache(cache_root(cache_dir))
    sources = [document for _, document in source_documents(rows.blocks())]
    key = fingerprint.key({**query, "sources": sources})
    found: dict[str, Any] | None = index_cache.note(key)
    if found is None:
        found = scan()
        with suppress(CacheError):  # a read-only cache: the next run scans again
            index_cache.write_note(key, found)
    return found


def stated_date() -> str | None:
    return os.environ.get(DATE) or None


@contextmanager
def date_named(tokenizer: Any, flag: str = "") -> Iterator[None]:
    """If a template is refused because it prints the date, name ``flag``, the trainer's setting."""
    try:
        yield
    except TemplateError as error:
        from tokenmill.chat.template import PRINTS_DATE

        if PRINTS_DATE not in error.message:
            raise
        other = f" (or {flag}=2026-11-15)" if flag else ""
        raise TemplateError(
            f"The template of {getattr(tokenizer, 'name_or_path', tokenizer)} prints the date. "
            f"Set {DATE}=2026-11-15 in the environment{other}."
        ) from error
