"""tokenmill in OpenRLHF's SFT: `train_sft` is its program over stores.

OpenRLHF names its dataset class in its program and in no flag, so that program is run with ours:
``python -m tokenmill.integrations.openrlhf.train_sft --data.dataset STORE …``.
"""
