"""tokenmill for SkyRL's SFT and RL trainers; all but `main_sft` and `main_base` need only torch."""

from __future__ import annotations

from tokenmill._core.optional import optional

with optional("torch"):
    from tokenmill.integrations.skyrl.data import (
        PromptDataset,
        Sampler,
        SFTDataset,
        eval_from_config,
        from_config,
    )

    __all__ = ["PromptDataset", "SFTDataset", "Sampler", "eval_from_config", "from_config"]
