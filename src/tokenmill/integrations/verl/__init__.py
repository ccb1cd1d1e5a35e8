"""tokenmill as verl's ``data.custom_cls``: datasets for its SFT and its RL trainers.

    data.custom_cls.path=pkg://tokenmill.integrations.verl data.custom_cls.name=SFTDataset

`SFTDataset` serves input_ids, position_ids and loss_mask from stores that are made on first use
(or from stores given as files); `RLDataset` serves rows with ``raw_prompt`` from a lazy index of
prompts. Both are made with verl's own arguments and are already in our order: item i is what
stands at position i. What verl has no name for is set under ``+data.tokenmill.…``: see `Settings`.

Importing this needs PyTorch, not verl.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("torch"):
    from tokenmill.integrations.verl.rl import RLDataset
    from tokenmill.integrations.verl.settings import Settings
    from tokenmill.integrations.verl.sft import SFTDataset

    __all__ = ["RLDataset", "SFTDataset", "Settings"]
