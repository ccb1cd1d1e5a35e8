"""tokenmill as a dataset of torchtune's recipes.

    dataset:
      _component_: tokenmill.integrations.torchtune.sft_dataset
      source: STORE
      packed: True

`sft_dataset` is called by torchtune with its tokenizer, as its own builders of datasets are.
`TokenizedRows` are the rows it serves: ids, and labels as torchtune's loss reads them.

torchtune's datasets give ``tokens`` and ``labels`` of one length, as lists; its collator pads them
and `PackedDataset` joins them. Which label stands where depends on its version: releases up to 0.6
shift labels in the recipe, later code shifts them in the dataset, where the label at a token is the
token after it:

    tokens                 p p a b c
    labels, recipe shifts  _ _ a b c          _ ignored
    labels, dataset shifts _ a b c _

Labels of the wrong kind raise no error: a model would learn to repeat its input. So torchtune's own
transform is asked what it makes of three tokens.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tokenmill.dataset import View, as_view, tokens_alone
from tokenmill.errors import UsageError
from tokenmill.integrations.hosts import Items, rows_alone, rows_within
from tokenmill.optional import optional
from tokenmill.packing import IGNORE, labels_of
from tokenmill.sampling import Int64Array
from tokenmill.store import Store, open_store

with optional("torch"):
    from torch.utils import data as torch_data

__all__ = ["TokenizedRows", "sft_dataset"]

Item = dict[str, list[int]]


class TokenizedRows(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Ids and labels of a view's rows, in the order of the view.

    Args:
        view: The rows.
        max_seq_len: Rows must not be longer; None: any length.
        shifted: Whether the label at a token is that of the next one; None: as torchtune has it.
    """

    def __init__(
        self, view: View, max_seq_len: int | None = None, *, shifted: bool | None = None
    ) -> None:
        self.view = rows_within(
            rows_alone(tokens_alone(view, "torchtune")),
            max_seq_len,
            "tokenizer.max_seq_len",
            "raise it, or prepare with --max-length",
        )
        self.shifted = labels_are_shifted() if shifted is None else shifted

    def __len__(self) -> int:
        return len(self.view)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Rows as lists, which torchtune's packing adds to each other."""
        made = []
        for row in self.view.rows(numbers):
            wanted = labels_of(row.input_ids, row.loss_mask)
            if self.shifted:
                wanted = np.append(wanted[1:], IGNORE)
            made.append({"tokens": row.input_ids.tolist(), "labels": wanted.tolist()})
        return made


def labels_are_shifted() -> bool:
    """Whether the installed torchtune's datasets give the label of the next token.

    Raises:
        UsageError: Its transform answers neither way.
    """
    with optional("torchtune", "its place of labels"):
        from torchtune.datasets._sft import SFTTransform
    asked = {"tokens": [5, 6, 7], "mask": [True, False, False]}
    made = SFTTransform(model_transform=lambda sample: dict(asked))({})
    found = [int(label) for label in made["labels"]]
    known: dict[tuple[int, ...], bool] = {(6, 7, IGNORE): True, (IGNORE, 6, 7): False}
    if tuple(found) not in known:
        raise UsageError(
            f"torchtune's SFTTransform gives the labels {found} for the tokens 5 6 7, of which the "
            "first is masked: this version is not known here"
        )
    return known[tuple(found)]


def sft_dataset(
    tokenizer: Any,
    *,
    source: str | os.PathLike[str] | Store | View,
    packed: bool = False,
) -> Any:
    """What ``_component_`` names; torchtune gives the tokenizer.

    Args:
        tokenizer: torchtune's. Its ``max_seq_len`` is the length of packs, and bounds rows.
        source: A store's directory; in a script of one's own also a store or a view.
        packed: Whether torchtune packs the rows, by its own `PackedDataset`.
    """
    if isinstance(source, str | os.PathLike):
        source = open_store(os.path.expanduser(source))
    limit = getattr(tokenizer, "max_seq_len", None)
    rows = TokenizedRows(as_view(source), limit)
    if not packed:
        return rows
    if limit is None:
        raise UsageError("packs need a length: set tokenizer.max_seq_len")
    with optional("torchtune", "packing by it"):
        from torchtune.datasets import PackedDataset
    return PackedDataset(rows, max_seq_len=limit)
