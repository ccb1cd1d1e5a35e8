"""tokenmill for PyTorch.

`DataLoader` serves batches of a `tokenmill.Loader` as tensors, filled in worker processes; its
state counts the batches that were handed out and is exact for any number of workers. `Dataset` is
for trainers that own the sampler: rows by number, with `__getitems__` and a collate function.

Nothing here reads or advances torch's global random generators.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("torch"):
    from tokenmill.integrations.torch.dataloader import DataLoader, Dataset

    __all__ = ["DataLoader", "Dataset"]
