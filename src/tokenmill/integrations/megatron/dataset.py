"""`SFTDataset` for Megatron's builder; ``--data-path`` names stores instead of prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.data.packs import Pack
from tokenmill.data.view import View, as_view
from tokenmill.errors import UsageError
from tokenmill.integrations.megatron import PackedSamples
from tokenmill.store import open_store

with optional("megatron"):
    import torch
    from megatron.core.datasets.megatron_dataset import MegatronDataset


class SFTDataset(MegatronDataset):  # type: ignore[misc]
    """Packs of a store's rows. A subclass may set ``oversize`` (as for `Pack`) and ``order``."""

    oversize = "error"
    order = "feistel"

    def __init__(
        self,
        dataset: View,
        dataset_path: str | None,
        indices: Any,
        num_samples: int | None,
        index_split: Any,
        config: Any,
    ) -> None:
        if config.create_attention_mask or config.reset_attention_mask:
            raise UsageError(
                "Packed rows are separated by cu_seqlens, not by an attention mask. Set "
                "--no-create-attention-mask-in-dataloader and remove --reset-attention-mask."
            )
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.samples = PackedSamples(
            # None with --dataloader-fast-cache-load, where every split has its own path.
            dataset if indices is None else dataset[_range(indices)],
            Pack(config.sequence_length, oversize=self.oversize),
            count=num_samples,
            seed=config.random_seed,
            order=self.order,
            context_parallel=config.context_parallel_size or 1,
        )
        # Whatever Megatron caches by this name must not be used for other rows at the same path.
        self.unique_identifiers["rows"] = self.samples.run.spec.dataset

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: View) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> View:
        return as_view(open_store(dataset_path))

    def __len__(self) -> int:
        return len(self.samples) if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        sample = self.samples[0 if idx is None else int(idx)]
        if idx is None:
            sample["loss_mask"][:] = 0
        return {name: torch.from_numpy(np.asarray(value)) for name, value in sample.items()}


def _range(indices: Any) -> slice:
    numbers = np.asarray(indices)
    if numbers.size and not np.array_equal(numbers, np.arange(numbers[0], numbers[-1] + 1)):
        raise UsageError("A split of a store must be a contiguous range of its rows.")
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if numbers.size else slice(0, 0)
