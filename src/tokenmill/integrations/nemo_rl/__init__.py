"""tokenmill as the ``dataset_name`` of NeMo RL's SFT.

    data.train.dataset_name=tokenmill.integrations.nemo_rl.SFTDataset ++data.train.data_path=STORE

`SFTDataset` is made by NeMo RL from that part of its config; its rows are message logs whose
trained pieces have the role ``assistant``. `message_log` makes one of a store's row, for a loop of
one's own. `PreferenceLogs` are pairs for its DPO and its reward models, for a script of one's own.

Importing this needs PyTorch, not NeMo RL.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("torch"):
    from tokenmill.integrations.nemo_rl.preference import PreferenceLogs
    from tokenmill.integrations.nemo_rl.sft import MessageLogs, SFTDataset, message_log

    __all__ = ["MessageLogs", "PreferenceLogs", "SFTDataset", "message_log"]
