"""tokenmill as a dataset of torchtune's recipes.

Releases of torchtune up to 0.6 shift labels in the recipe; later ones shift them in the dataset.
The wrong kind raises no error, so `labels_are_shifted` runs torchtune's own transform.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.data.fill import IGNORE
from tokenmill.data.view import View, as_view
from tokenmill.errors import UsageError
from tokenmill.integrations.trainers import TORCHTUNE, ItemRows, RowDataset
from tokenmill.store import Store, open_store

with optional("torch"):
    from torch.utils import data as torch_data

__all__ = ["TokenizedRows", "sft_dataset"]

Item = dict[str, list[int]]
_SHIFTED = replace(TORCHTUNE, columns={**TORCHTUNE.columns, "labels": ("next_labels", np.int64)})


class TokenizedRows(RowDataset, torch_data.Dataset[Item]):  # type: ignore[misc]
    """Ids and labels of a view's rows; ``shifted`` labels are those of the next token."""

    def __init__(
        self, view: View, max_seq_len: int | None = None, *, shifted: bool | None = None
    ) -> None:
        self.view = TORCHTUNE.check(view, max_seq_len)
        shifted = labels_are_shifted() if shifted is None else shifted
        self.trainer = _SHIFTED if shifted else TORCHTUNE
        self.item_rows = ItemRows(len(view))


def labels_are_shifted() -> bool:
    """Whether the installed torchtune's datasets give the label of the next token."""
    with optional("torchtune", "labels"):
        from torchtune.datasets._sft import SFTTransform
    probe = {"tokens": [5, 6, 7], "mask": [True, False, False]}
    sample = SFTTransform(model_transform=lambda sample: dict(probe))({})
    labels = [int(label) for label in sample["labels"]]
    known: dict[tuple[int, ...], bool] = {(6, 7, IGNORE): True, (IGNORE, 6, 7): False}
    if tuple(labels) not in known:
        raise UsageError(
            f"This version of torchtune is not supported: its SFTTransform returns the labels "
            f"{labels} for the tokens 5 6 7, of which the first is masked."
        )
    return known[tuple(labels)]


def sft_dataset(
    tokenizer: Any, *, source: str | os.PathLike[str] | Store | View, packed: bool = False
) -> Any:
    """Create the dataset that ``_component_`` names; torchtune's own `PackedDataset` packs.

    The tokenizer's ``max_seq_len`` is the length of packs and the limit of rows.
    """
    if isinstance(source, str | os.PathLike):
        source = open_store(os.path.expanduser(source))
    limit = getattr(tokenizer, "max_seq_len", None)
    rows = TokenizedRows(as_view(source), limit)
    if not packed:
        return rows
    if limit is None:
        raise UsageError("packed=True needs a length. Set tokenizer.max_seq_len.")
    with optional("torchtune", "packing by it"):
        from torchtune.datasets import PackedDataset
    return PackedDataset(rows, max_seq_len=limit)
