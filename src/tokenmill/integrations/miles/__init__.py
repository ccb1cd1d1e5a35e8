"""tokenmill in the shapes of miles and slime, which share them.

    DataSource    --data-source-path tokenmill.integrations.miles.DataSource
    sft_rollout   --rollout-function-path tokenmill.integrations.miles.sft_rollout

`DataSource` is a drop-in for their rollout data source with its buffer: prompts come from a
`tokenmill.PromptDataset` instead of a list of every sample. `sft_rollout` fills tokens and loss
masks from a store instead of rendering every step. Both are configured by the hosts' own flags.
Importing this needs neither framework; a `DataSource` asks for whichever is there.
"""

from __future__ import annotations

from tokenmill.integrations.miles.sft import sft_rollout
from tokenmill.integrations.miles.source import DataSource

__all__ = ["DataSource", "sft_rollout"]
