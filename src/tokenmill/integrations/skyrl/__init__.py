"""tokenmill in the shapes of SkyRL's trainers.

SFT, by how much is left to the host:

    a store's path   in ``pretokenized_dataset_paths``, as it is: no code of ours in the trainer
    Sampler          for ``sampler_class_path``: our order, exact resume, over any dataset there
    main_sft         SkyRL's program of that name, its data by `from_config`
    from_config      an SFTConfig to a dataset: its raw datasets prepared by tokenmill, or the
                     stores it names; `eval_from_config` is the same for evaluation
    SFTDataset       rows with ``num_actions`` and window ``loss_mask``, straight from stores

RL:

    main_base        SkyRL's program of that name, with
    PromptDataset    its prompts from a lazy index

The two programs need SkyRL; importing the rest needs PyTorch alone.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("torch"):
    from tokenmill.integrations.skyrl.prompts import PromptDataset
    from tokenmill.integrations.skyrl.sampler import Sampler
    from tokenmill.integrations.skyrl.sft import SFTDataset, eval_from_config, from_config

    __all__ = ["PromptDataset", "SFTDataset", "Sampler", "eval_from_config", "from_config"]
