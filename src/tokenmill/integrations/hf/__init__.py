"""tokenmill in the shapes of Hugging Face: `datasets` and TRL.

    to_hf        the rows of a store, view or mixture as a `datasets.Dataset`
    for_trl      a whole run for TRL's `SFTTrainer`: a dataset in our order, and what its config
                 needs; of groups, for `DPOTrainer`, `KTOTrainer` or `RewardTrainer`
    for_grpo     the same of prompts, for `GRPOTrainer` and those of its kind
    VisionCollator  the collator for `for_trl` of rows with pictures
    as_prepared  a class of the trainers for groups that tokenizes nothing
    in_order     a trainer class that does not shuffle, for transformers without such a setting

All datasets are lazy: their table is computed from the store when rows are asked for, so they
hold no memory that grows with the rows, check what they read, and pickle as a description.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("datasets"):
    from tokenmill.integrations.hf.dataset import to_hf
    from tokenmill.integrations.hf.preference import as_prepared
    from tokenmill.integrations.hf.prompts import for_grpo
    from tokenmill.integrations.hf.trl import for_trl, in_order
    from tokenmill.integrations.hf.vision import VisionCollator

    __all__ = ["VisionCollator", "as_prepared", "for_grpo", "for_trl", "in_order", "to_hf"]
