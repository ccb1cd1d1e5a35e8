"""Recorded rollouts, and the bridge that continues a rollout in token ids."""
