"""Rows as a `datasets.Dataset`, lazily.

`to_hf` is the public verb; `lazy_dataset` is what it and `for_trl` are made of: a dataset over a
`LazyTable`, with a fingerprint taken from the content (store, order, packing), so that `datasets`
hashes nothing and finds its own cached maps again in another process. Its columns have a *shape*:

    loss_mask    input_ids int32, loss_mask int8: the stored columns, over the same bytes
    labels       input_ids int32, labels int64 (-100 where a token is not trained)
    assistant_masks
                 input_ids int32, assistant_masks int8: what TRL makes labels of
    packs        input_ids, labels, seq_lengths int64: rows of a pack one after another, no padding
    rows         row int64: the numbers of the rows, for a collator that reads them itself

Labels follow the loader's rule: unshifted, and -100 at the first token of every row, since nothing
before it predicts it; ``assistant_masks`` is 0 there, too, so that TRL's labels are these. The
column ``loss_mask`` is what is stored, first token included: hosts that take a mask shift it
themselves. Everything here pickles as a description.

The loader's order plays no part in `to_hf`: rows come as the store or view numbers them. A mixture
has no numbering of its own; its rows come as one epoch interleaves them by the weights, each source
in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill import fingerprint
from tokenmill.dataset import Mixture, View, tokens_alone
from tokenmill.errors import check_one_of
from tokenmill.formats.columns import listed, weights_of
from tokenmill.integrations.hf.table import LazyTable
from tokenmill.integrations.hosts import predicted
from tokenmill.loader import WholeRun
from tokenmill.packing import Piece, labels_of
from tokenmill.store import Store

_IDS, _MASK, _LABELS = pa.list_(pa.int32()), pa.list_(pa.int8()), pa.list_(pa.int64())

SCHEMAS = {
    "loss_mask": pa.schema({"input_ids": _IDS, "loss_mask": _MASK}),
    "labels": pa.schema({"input_ids": _IDS, "labels": _LABELS}),
    "assistant_masks": pa.schema({"input_ids": _IDS, "assistant_masks": _MASK}),
    "rows": pa.schema({"row": pa.int64()}),
    "packs": pa.schema({"input_ids": _IDS, "labels": _LABELS, "seq_lengths": _LABELS}),
}

MASKS = ("labels", "loss_mask", "assistant_masks")
WEIGHTS = pa.field("loss_weights", pa.list_(pa.float32()))
"""A further column of labels and loss_mask, where the data has weights."""


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
    check_one_of("mask", mask, MASKS)
    samples = WholeRun(data, order="sequential")
    if samples.view.has_media or mask == "assistant_masks":
        tokens_alone(samples.view, f"a dataset with {mask}")
    return lazy_dataset(samples, mask)


def lazy_dataset(samples: WholeRun, shape: str) -> datasets.Dataset:
    """A dataset over samples of a run, in a shape of `SCHEMAS`."""
    spec = samples.spec
    document: dict[str, Any] = {
        "shape": shape,
        "epochs": samples.epochs,
        "dataset": spec.dataset,
        "seed": spec.seed,
        "order": spec.order,
        "packing": spec.packing,
    }
    key = fingerprint.key(document)[:16]
    return datasets.Dataset(LazyTable.of(ShapedSamples(samples, shape)), fingerprint=key)


class ShapedSamples:
    """Samples of a run as Arrow columns.

    Args:
        samples: The run.
        shape: One of `SCHEMAS`.
    """

    def __init__(self, samples: WholeRun, shape: str) -> None:
        self.samples = samples
        self.shape = shape

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def schema(self) -> pa.Schema:
        """Columns and their types."""
        own = SCHEMAS[self.shape]
        return own.append(WEIGHTS) if self._weighs else own

    @property
    def _weighs(self) -> bool:
        return self.samples.view.has_weights and self.shape != "rows"

    @property
    def nbytes(self) -> int:
        """About how many bytes all columns have together."""
        return self.samples.tokens * (12 if "labels" in self.schema.names else 5)

    def read(self, indices: Sequence[int]) -> pa.Table:
        """Samples by number."""
        if self.shape == "rows":
            numbers = self.samples.packs(indices).rows
            return pa.table([pa.array(numbers)], schema=SCHEMAS[self.shape])
        table = self._of_masks(indices)
        if not self._weighs:
            return table
        rows = self.samples.view.rows(self.samples.packs(indices).rows)
        weights = [weights_of(row, self.shape) for row in rows]
        return table.append_column(WEIGHTS, listed(weights, np.float32))

    def _of_masks(self, indices: Sequence[int]) -> pa.Table:
        found = self.samples.pieces(indices)
        if self.shape == "loss_mask":
            return self._stored(found)
        if self.shape == "packs":
            found = [pieces or [self._nothing()] for pieces in found]
        joined = [np.concatenate([ids for ids, _ in pieces]) for pieces in found]
        columns = {"input_ids": listed(joined, np.int32)}
        if self.shape == "assistant_masks":
            columns[self.shape] = listed([predicted(mask) for ((_, mask),) in found], np.int8)
        else:
            trained = [np.concatenate([labels_of(*piece) for piece in pieces]) for pieces in found]
            columns["labels"] = listed(trained, np.int64)
        if self.shape == "packs":
            sizes = [np.asarray([ids.size for ids, _ in pieces]) for pieces in found]
            columns["seq_lengths"] = listed(sizes, np.int64)
        return pa.Table.from_pydict(columns, schema=SCHEMAS[self.shape])

    def _nothing(self) -> Piece:
        """What a pack without rows holds (``balanced`` makes such): one untrained token."""
        pad = 0 if self.samples.pad_id is None else self.samples.pad_id
        return np.full(1, pad, np.int32), np.zeros(1, np.uint8)

    def _stored(self, found: list[list[Piece]]) -> pa.Table:
        """Rows as batches of one, each over the mapped bytes of the store."""
        batches = [
            pa.RecordBatch.from_arrays(
                [_one_row(ids, pa.int32()), _one_row(mask, pa.int8())], schema=SCHEMAS[self.shape]
            )
            for ((ids, mask),) in found
        ]
        return pa.Table.from_batches(batches, schema=SCHEMAS[self.shape])


def _one_row(values: npt.NDArray[Any], kind: pa.DataType) -> pa.ListArray:
    """One row over the bytes of an array, nothing copied."""
    flat = pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(pa.array([0, values.size], pa.int32()), flat)
