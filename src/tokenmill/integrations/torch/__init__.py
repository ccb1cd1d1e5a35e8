"""tokenmill in PyTorch's shapes.

Four ways, by who decides what is served when:

    DataLoader        we do: batches of a `tokenmill.Loader` as tensors, filled in worker processes;
                      its state counts handed-out batches and is exact for any number of workers
    StatefulSampler   we do, inside torchdata's `StatefulDataLoader`; exact where torchdata is
    OrderedDataset    we order, the trainer walks through it without shuffling
    Dataset           the trainer does: rows by number, with `__getitems__` and a collate function

Nothing here reads or advances torch's global random generators.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("torch"):
    from tokenmill.integrations.torch.dataloader import DataLoader
    from tokenmill.integrations.torch.dataset import Dataset, OrderedDataset
    from tokenmill.integrations.torch.sampler import StatefulSampler

    __all__ = ["DataLoader", "Dataset", "OrderedDataset", "StatefulSampler"]
