"""OpenRLHF's SFT over stores: ``python -m tokenmill.integrations.openrlhf.train_sft``."""
