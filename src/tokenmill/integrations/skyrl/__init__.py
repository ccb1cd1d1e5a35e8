"""tokenmill for SkyRL's trainers.

    a store's path    SFT: in ``pretokenized_dataset_paths``, without any code of ours
    Sampler           SFT: for ``sampler_class_path``: our order and exact resume, over any dataset
    main_sft          SFT: SkyRL's program of that name with the data of `from_config`
    from_config       SFT: the dataset of an SFTConfig, prepared by tokenmill
    eval_from_config  SFT: the same for evaluation
    SFTDataset        SFT: rows of stores with ``num_actions`` and window ``loss_mask``
    main_base         RL: SkyRL's program of that name with
    PromptDataset     RL: prompts from a lazy index

The two programs need SkyRL; importing the rest needs PyTorch alone.
"""

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
