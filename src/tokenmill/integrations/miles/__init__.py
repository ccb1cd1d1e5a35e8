"""tokenmill for miles and slime, which share their interfaces.

    DataSource    --data-source-path tokenmill.integrations.miles.DataSource
    sft_rollout   --rollout-function-path tokenmill.integrations.miles.sft_rollout
    MILES, SLIME  the `convention` of a `PromptDataset` that renders as they do
    MilesOrder    the `order` of a `PromptDataset` that serves as they do

`DataSource` replaces their rollout data source and its buffer: prompts come from a lazy
`tokenmill.PromptDataset` instead of a list of every sample. `sft_rollout` fills tokens and loss
masks from a store instead of rendering every step. Both read the framework's own flags. Importing
this needs neither framework.
"""

from __future__ import annotations

from tokenmill.integrations.miles.conventions import MILES, SLIME, MilesOrder
from tokenmill.integrations.miles.source import DataSource, sft_rollout

__all__ = ["MILES", "SLIME", "DataSource", "MilesOrder", "sft_rollout"]
