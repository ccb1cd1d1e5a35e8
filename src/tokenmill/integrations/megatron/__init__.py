"""tokenmill as a dataset of Megatron-LM: packs of rows, shifted by one token.

`PackedSamples` computes the samples and needs no Megatron. Nothing is predicted across the end of a
row. With context parallelism a row is padded to a multiple of twice its degree; the padding is part
of the row's segment and is not trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill._core.optional import lazy_exports
from tokenmill.data.packs import Pack, Slots
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import View, as_view, tokens_alone
from tokenmill.errors import UsageError, check_integer, check_positive

if TYPE_CHECKING:
    from tokenmill.integrations.megatron.dataset import SFTDataset

__all__ = ["PackedSamples", "SFTDataset"]

__getattr__ = lazy_exports(__name__, dataset="SFTDataset")


class PackedSamples:
    """The samples of a run by number: of one epoch, or at least ``count`` of several."""

    def __init__(
        self,
        view: View,
        pack: Pack,
        *,
        count: int | None = None,
        seed: int = 42,
        order: str = "feistel",
        context_parallel: int = 1,
    ) -> None:
        check_positive("context_parallel", context_parallel)
        if not isinstance(pack, Pack):
            raise UsageError(("pack",), f" must be a Pack, got {pack!r:.200}")
        check_integer("count", 0 if count is None else count, 0)
        slots = Slots(1 if context_parallel == 1 else 2 * context_parallel)
        epochs, view = 1, tokens_alone(as_view(view), "Megatron-LM")
        while True:
            self.run = RunIndex(view, epochs=epochs, seed=seed, order=order, pack=pack, slots=slots)
            if count is None or len(self.run) >= count:
                break
            # Epochs differ by a few packs, so the first one gives only an estimate.
            epochs = max(epochs + 1, count * epochs // len(self.run))
        self.length = pack.length
        self._pad = self.run.pad_token_id or 0

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, number: int) -> dict[str, npt.NDArray[Any]]:
        packs = self.run.packs([number])
        tokens = np.full(self.length, self._pad, np.int64)
        labels = tokens.copy()
        loss_mask = np.zeros(self.length, np.float32)
        bounds = np.concatenate(([0], np.cumsum(packs.lengths)))
        for start, (ids, mask) in zip(bounds.tolist(), self.run.read(packs), strict=False):
            stop = start + ids.size
            tokens[start:stop] = ids
            labels[start : stop - 1] = ids[1:]
            loss_mask[start : stop - 1] = mask[1:]
        cu_seqlens = np.full(self.length + 1, self.length, np.int32)
        cu_seqlens[: bounds.size] = bounds
        segments = np.diff(cu_seqlens)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": np.arange(self.length) - np.repeat(cu_seqlens[:-1], segments),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": segments.max(),
        }
