"""What the adapters to host frameworks have in common; it knows none of them.

Hosts differ in names and shapes, and agree in what they leave to a dataset:

    prepared, is_store   raw files become a store on first use, a store's directory is opened
    noted                what every row was looked at for is kept in the cache
    stated_date          a template's date comes from the environment, for hosts have no flag
    Items                a dataset is asked for items by number, one or a batch
    predicted            the first token of a row is never trained: nothing before it predicts it
    response_mask        a row is described by its mask from the first trained token on
    rows_alone           rows that belong to groups are refused where a host takes rows one by one
    rows_within          rows longer than the host's limit are refused before the run
    row_pixels           what a processor makes of the pictures of a row
    check_…              what a config says and nobody could follow is refused by name

Orders by name, and positions that count on through epochs, are those of `tokenmill.sampling`.
"""

from __future__ import annotations

import abc
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.errors import CacheError, SourceError, TemplateError, UsageError
from tokenmill.files import default_cache_dir
from tokenmill.media import Pictures, Processor
from tokenmill.sampling import Int64Array
from tokenmill.source import Rows
from tokenmill.source.index import Shelf
from tokenmill.store import Row, Store, StoreLayout
from tokenmill.work.inputs import source_documents

if TYPE_CHECKING:
    from tokenmill.build.recipe import Recipe, RunOptions
    from tokenmill.dataset import View

DATE = "TOKENMILL_DATE"
MaskArray = npt.NDArray[np.uint8]
T = TypeVar("T")


# Stores and templates


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a store's directory."""
    return StoreLayout(Path(path)).manifest.is_file()


def prepared(
    recipe: Recipe,
    options: RunOptions,
    *,
    progress: Any = None,
    flag: str = "",
) -> Store:
    """The store of a recipe, found or made.

    Args:
        recipe: What is to be made.
        options: How.
        progress: As for `tokenmill.prepare`.
        flag: As for `date_named`.
    """
    # Not before there is something to prepare: a trainer's workers only read.
    from tokenmill.build.run import run

    with date_named(recipe.tokenizer, flag):
        found = run(recipe, options, progress=progress)
    found.judge()
    return found.store


def noted(
    rows: Rows, cache_dir: Any, asked: dict[str, Any], look: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What was found by looking at every row, once per content.

    Args:
        rows: The rows.
        cache_dir: Where the note is kept.
        asked: What is looked for: JSON values.
        look: Looks at the rows, and gives JSON values.
    """
    shelf = Shelf(Path(cache_dir or default_cache_dir()).absolute())
    sources = [document for _, document in source_documents(rows.blocks())]
    key = fingerprint.key({**asked, "sources": sources})
    note: dict[str, Any] | None = shelf.note(key)
    if note is None:
        note = look()
        with suppress(CacheError):  # a cache that cannot be written: looked at again
            shelf.write_note(key, note)
    return note


def stated_date() -> str | None:
    """The date for templates that print it, of the environment."""
    return os.environ.get(DATE) or None


@contextmanager
def date_named(tokenizer: Any, flag: str = "") -> Iterator[None]:
    """Where a template is refused for printing the date, say how it is pinned here.

    Args:
        tokenizer: Whose template it is: an object, or its name.
        flag: The host's way beside the environment, where it has one.
    """
    try:
        yield
    except TemplateError as error:
        from tokenmill.chat.template import REMEDY

        if REMEDY not in error.message:
            raise
        other = f" (or {flag}=2026-11-15)" if flag else ""
        raise TemplateError(
            f"the template of {getattr(tokenizer, 'name_or_path', tokenizer)} prints the date: "
            f"pin it in the environment, {DATE}=2026-11-15{other}"
        ) from error


# Items by number


class Items(abc.ABC, Generic[T]):
    """A map-style dataset; a subclass says how many items there are and makes them in bulk."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def items_at(self, numbers: Int64Array) -> list[T]:
        """Items by checked numbers, in the order asked for."""

    def __getitem__(self, item: int) -> T:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[T]:
        """Items in the order asked for; negative numbers count from the end."""
        size = len(self)
        numbers = np.asarray([operator.index(item) for item in items], dtype=np.int64)
        wrong = (numbers < -size) | (numbers >= size)
        if wrong.any():
            raise IndexError(f"item {int(numbers[wrong][0])} of a dataset of {size}")
        return self.items_at(np.where(numbers < 0, numbers + size, numbers))


# Pictures


def row_pixels(row: Row, processor: Processor, host: str) -> dict[str, npt.NDArray[Any]]:
    """What a processor makes of the pictures of a row: arrays under the model's own names.

    Args:
        row: The row.
        processor: The one that it was prepared with.
        host: Who takes the arrays row by row, and joins them picture after picture.

    Raises:
        UsageError: Some of the arrays cannot be joined so.
    """
    pictures = Pictures()
    opened = [
        pictures.open(row.picture(number), one.reference) for number, one in enumerate(row.media)
    ]
    found = processor.features([opened])
    apart = sorted(set(found) - processor.joined)
    if apart:
        raise UsageError(
            f"{host} joins what a processor gives for single pictures, and {', '.join(apart)} "
            f"of {type(processor.original).__name__} cannot be joined: use {host}'s own dataset"
        )
    return found


# What a host's config may say


def rows_alone(view: View) -> View:
    """A view whose rows stand for themselves; a host that takes them one by one parts groups.

    Raises:
        UsageError: They belong to groups.
    """
    if view.has_groups:
        raise UsageError(
            "the rows of this data belong to groups (docs/preference.md), and this host takes rows "
            "one by one: serve it with a Loader, or with hf.for_trl"
        )
    return view


def rows_within(view: View, limit: int | None, name: str, remedy: str) -> View:
    """A view of which a host cuts no row, nor refuses one in the middle of a run.

    Args:
        view: The rows.
        limit: Tokens that the host takes of a row; None: any.
        name: What the host calls its limit.
        remedy: What to do about longer ones.

    Raises:
        SourceError: A row is longer.
    """
    overlong = np.flatnonzero(view.lengths > limit) if limit is not None else np.zeros(0, int)
    if overlong.size:
        row = view[int(overlong[0])]
        raise SourceError(
            f"{len(row)} tokens, {name} is {limit} ({overlong.size:,} such rows): {remedy}",
            **row.origin.location,
        )
    return view


def check_names(given: Iterable[str], known: Collection[str], where: str) -> None:
    """Refuse settings that nobody would look at."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"unknown names {where}: {', '.join(unknown)}")


# Masks of a row


def predicted(mask: MaskArray) -> MaskArray:
    """A copy of a mask without the first token."""
    mask = mask.copy()
    mask[:1] = 0
    return mask


def response_mask(mask: MaskArray) -> MaskArray:
    """The mask from the first trained token on, after the first of the row; empty without one."""
    trained = np.flatnonzero(mask[1:])
    return mask[int(trained[0]) + 1 if trained.size else len(mask) :]
