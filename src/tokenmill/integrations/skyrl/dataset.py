"""Rows of stores as SkyRL's SFT trainer takes them.

SkyRL describes a row by its *window*: ``num_actions`` is how many tokens stand from the first
trained one to the end, ``loss_mask`` says for each of those whether it is trained:

    tokens      p p p a a u u a a          p prompt, u user between, a assistant
    mask        0 0 0 1 1 0 0 1 1
    row         num_actions = 6, loss_mask = [1, 1, 0, 0, 1, 1]

`SFTDataset` is a store, a view or several behind each other in that form: map-style, with
``sequence_lengths`` that cost no row, batched fetches, and ``dataset_lengths`` per source. Where
SkyRL is loaded, it is a virtual subclass of its dataset classes, so that its mixing of several
sources works. It pickles as a description, so workers may be spawned.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils import data as torch_data

from tokenmill import fingerprint
from tokenmill.dataset import View, as_view, concat, tokens_alone
from tokenmill.errors import SourceError, UsageError
from tokenmill.integrations.hosts import Items, check_positive, response_mask, rows_alone
from tokenmill.sampling import Int64Array
from tokenmill.store import Row, Store, open_store

Item = dict[str, Any]
Source = Store | View | str | os.PathLike[str]

_HOST = "skyrl.train.dataset.sft_dataset"
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
        *sources: Stores, views or paths of stores; served behind each other.
        max_length: Longer rows are cut at their end; what has no trained token left is dropped,
            as SkyRL does with pretokenized data.
    """

    def __init__(self, *sources: Source, max_length: int | None = None) -> None:
        if not sources:
            raise UsageError("SFTDataset needs at least one store")
        if max_length is not None:
            check_positive("max_length", max_length)
        opened = (open_store(s) if isinstance(s, str | os.PathLike) else s for s in sources)
        self._sources = [as_view(source) for source in opened]
        self.view = rows_alone(tokens_alone(concat(self._sources), "SkyRL"))
        self.max_length = max_length
        self._dropped = _without_loss(self.view, max_length)
        if not len(self):
            raise SourceError(f"no row has a trained token within max_length={max_length}")
        _introduce_to_the_host()

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
        return [window(row, self.max_length) for row in self.view.rows(numbers)]


def _without_loss(view: View, max_length: int | None) -> npt.NDArray[np.int64]:
    """Rows whose trained tokens all lie behind the cut; only rows that are cut are looked at."""
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
            if not row.loss_mask[1:max_length].any()
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
