"""Rows as a `datasets.Dataset`, lazily.

`to_hf` is the public verb; `lazy_dataset` is what it and `for_trl` are made of: a dataset over a
`LazyTable`, with a fingerprint taken from the content (store, order, packing), so that `datasets`
hashes nothing and finds its own cached maps again in another process.

The loader's order plays no part in `to_hf`: rows come as the store or view numbers them. A mixture
has no numbering of its own; its rows come as one epoch interleaves them by the weights, each source
in its own order.
"""

from __future__ import annotations

from typing import Any

import datasets

from tokenmill import fingerprint
from tokenmill.dataset import Mixture, View
from tokenmill.errors import UsageError
from tokenmill.integrations.hf.shapes import ShapedSamples
from tokenmill.integrations.hf.table import LazyTable
from tokenmill.loader import Unrolled
from tokenmill.store import Store

MASKS = ("labels", "loss_mask", "assistant_masks")


def to_hf(data: Store | View | Mixture, mask: str = "labels") -> datasets.Dataset:
    """Rows as a `datasets.Dataset` that reads through the store, nothing materialised.

    Args:
        data: A store, a view or a mixture.
        mask: ``labels``: columns input_ids and labels, -100 where a token is not trained and at
            the first token of every row, as the loader hands them out. ``loss_mask``: the stored
            columns input_ids and loss_mask, over the same bytes. ``assistant_masks``: columns
            input_ids and assistant_masks, of which TRL makes those labels when it truncates or
            packs by itself.
    """
    if mask not in MASKS:
        raise UsageError(f"mask is {mask!r}; it is one of {', '.join(MASKS)}")
    return lazy_dataset(Unrolled(data, order="sequential"), mask)


def lazy_dataset(samples: Unrolled, shape: str) -> datasets.Dataset:
    """A dataset over samples of a run, in a shape of `SCHEMAS`."""
    passport = samples.passport
    document: dict[str, Any] = {
        "shape": shape,
        "epochs": samples.epochs,
        "dataset": passport.dataset,
        "seed": passport.seed,
        "order": passport.order,
        "packing": passport.packing,
    }
    key = fingerprint.key(document)[:16]
    return datasets.Dataset(LazyTable.of(ShapedSamples(samples, shape)), fingerprint=key)
