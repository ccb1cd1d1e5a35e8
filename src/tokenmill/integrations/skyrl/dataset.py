"""Rows of stores as SkyRL's SFT trainer takes them.

SkyRL describes a row by its *window*: ``num_actions`` is how many tokens stand from the first
trained one to the end, ``loss_mask`` says for each of those whether it is trained:

    tokens      p p p a a u u a a          p prompt, u user between, a assistant
    mask        0 0 0 1 1 0 0 1 1
    row         num_actions = 6, loss_mask = [1, 1, 0, 0, 1, 1]

`SFTDataset` is a store, a view or several one after another in that form: map-style, with
``sequence_lengths`` that cost no row, batched fetches, and ``dataset_lengths`` per source. Where
SkyRL is loaded, it is a virtual subclass of its dataset classes, so that its mixing of several
sources works. It pickles as a description, so workers may be spawned.

Rows with pictures also have ``pixel_values`` and ``image_grid_thw``, made by the store's own
processor when the row is asked for. SkyRL's head takes these two alone, and no batch in which some
rows have pictures and others none; both are refused at the start. It drops such rows where they are
too long, and so does this.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils import data as torch_data

from tokenmill import fingerprint
from tokenmill.dataset import View, as_view, concat, unweighted
from tokenmill.errors import SourceError, UsageError, check_positive
from tokenmill.integrations.hosts import Items, response_mask, row_pixels, rows_alone
from tokenmill.media import Processor
from tokenmill.sampling import Int64Array
from tokenmill.store import Row, Store, open_store
from tokenmill.work.processor import processor_of

Item = dict[str, Any]
Source = Store | View | str | os.PathLike[str]

_HOST = "skyrl.train.dataset.sft_dataset"
VISION = ("pixel_values", "image_grid_thw")
"""What SkyRL hands to a vision model."""
_CHUNK = 1 << 10  # overlong rows looked at a time


def window(row: Row, max_length: int | None = None) -> Item:
    """One row in SkyRL's form.

    The first token is never trained: nothing stands before it that could predict it.

    Args:
        row: The row.
        max_length: Tokens to keep, from the start.
    """
    mask = row.loss_mask[:max_length]
    response = response_mask(mask)
    return {
        "input_ids": row.input_ids[:max_length].tolist(),
        "attention_mask": [1] * len(mask),
        "num_actions": len(response),
        "loss_mask": response.tolist(),
    }


class SFTDataset(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Rows of stores in SkyRL's form.

    Args:
        *sources: Stores, views or paths of stores; served one after another.
        max_length: Longer rows are cut at their end; what has no trained token left is dropped,
            as SkyRL does with pretokenized data, and so is a longer row with pictures.
    """

    def __init__(self, *sources: Source, max_length: int | None = None) -> None:
        if not sources:
            raise UsageError("SFTDataset needs at least one store")
        if max_length is not None:
            check_positive("max_length", max_length)
        opened = (open_store(s) if isinstance(s, str | os.PathLike) else s for s in sources)
        self._sources = [as_view(source) for source in opened]
        self.view = rows_alone(unweighted(concat(self._sources), "SkyRL"))
        self.max_length = max_length
        self._dropped = _without_loss(self.view, max_length)
        self._check_pictures()
        if not len(self):
            raise SourceError(f"no row has a trained token within max_length={max_length}")
        _introduce_to_the_host()

    def _check_pictures(self) -> None:
        """Refuse before the run what SkyRL would refuse in the middle of it."""
        if not self.view.has_media:
            return
        pictures = self.view.pictures_at(np.arange(len(self.view), dtype=np.int64))
        if not pictures.any():
            return
        without = np.flatnonzero(pictures == 0)
        if without.size:
            raise UsageError(
                "some rows have pictures and others none, and SkyRL takes no batch of both: serve "
                'them apart, by store.filter("pictures > 0")',
                **self.view[int(without[0])].origin.location,
            )
        names = set(row_pixels(self.view[0], self._processor, "SkyRL"))
        if names != set(VISION):
            raise UsageError(
                f"SkyRL takes {' and '.join(VISION)}, and the processor of these rows gives "
                f"{', '.join(sorted(names))}"
            )

    @cached_property
    def _processor(self) -> Processor:
        stores = {store.processor_key: store for store in self.view.stores if store.has_media}
        if len(stores) > 1:
            raise UsageError("rows with pictures of different processors cannot be one dataset")
        return processor_of(*stores.values())

    def _item(self, row: Row) -> Item:
        if not row.media:
            return window(row, self.max_length)
        return {**window(row), **row_pixels(row, self._processor, "SkyRL")}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_processor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _introduce_to_the_host()

    @property
    def key(self) -> str:
        """Name of the content, which a sampler's state carries."""
        if self.max_length is None:
            return self.view.key
        return fingerprint.key({"skyrl": self.view.key, "max_length": self.max_length})

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every row, after cutting and dropping."""
        lengths = self.view.lengths
        if self.max_length is None:
            return lengths
        kept = np.delete(np.asarray(lengths), self._dropped)
        return np.minimum(kept, np.int32(self.max_length))

    @property
    def dataset_lengths(self) -> list[int]:
        """Rows of every source, in order: what SkyRL mixes by."""
        ends = np.cumsum([len(source) for source in self._sources])
        ends -= np.searchsorted(self._dropped, ends)
        return [int(rows) for rows in np.diff(ends, prepend=0)]

    def __len__(self) -> int:
        return len(self.view) - len(self._dropped)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Rows in SkyRL's form."""
        # The k-th dropped row d has d - k kept rows before it.
        before = self._dropped - np.arange(len(self._dropped))
        numbers = numbers + np.searchsorted(before, numbers, side="right")
        return [self._item(row) for row in self.view.rows(numbers)]


def _without_loss(view: View, max_length: int | None) -> npt.NDArray[np.int64]:
    """Rows of which the cut leaves nothing to train, or not all pictures; only those it cuts."""
    if max_length is None:
        return np.zeros(0, dtype=np.int64)
    overlong = np.flatnonzero(view.lengths > max_length)
    dropped: list[int] = []
    for first in range(0, len(overlong), _CHUNK):
        numbers = overlong[first : first + _CHUNK]
        rows = view.rows(numbers)
        dropped += [
            number
            for number, row in zip(numbers.tolist(), rows, strict=True)
            if row.media or not row.loss_mask[1:max_length].any()
        ]
    return np.asarray(dropped, dtype=np.int64)


def _introduce_to_the_host() -> None:
    """Let SkyRL's own ``isinstance`` checks pass; it is never imported for that.

    Its trainer mixes several sources only where it recognises a concatenation; with one source
    that recognition changes nothing.
    """
    host = sys.modules.get(_HOST)
    for name in ("SFTDataset", "ConcatSFTDataset"):
        theirs = getattr(host, name, None)
        if theirs is not None:
            theirs.register(SFTDataset)
