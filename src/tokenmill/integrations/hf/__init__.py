"""tokenmill for Hugging Face `datasets` and TRL.

    to_hf           the rows of a store, view or mixture as a `datasets.Dataset`
    for_trl         a whole run for TRL's `SFTTrainer`: a dataset in our order, and the arguments of
                    its config; with groups, for `DPOTrainer`, `KTOTrainer` or `RewardTrainer`
    for_grpo        the same with prompts, for `GRPOTrainer` and similar trainers
    VisionCollator  the collator for `for_trl` with images
    as_prepared     a subclass of a trainer for groups that tokenizes nothing
    VERBATIM        the `convention` of prompts that TRL renders
    in_order        a subclass of a trainer that does not shuffle, for older transformers

All datasets are lazy: their rows are read from the store when they are used. They need no memory
per row, verify what they read, and pickle as a description.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("datasets"):
    from tokenmill.integrations.hf.dataset import to_hf
    from tokenmill.integrations.hf.trl import (
        VisionCollator,
        as_prepared,
        for_grpo,
        for_trl,
        in_order,
    )
    from tokenmill.integrations.trainers import VERBATIM

    __all__ = [
        "VERBATIM",
        "VisionCollator",
        "as_prepared",
        "for_grpo",
        "for_trl",
        "in_order",
        "to_hf",
    ]
