"""Recorded rollouts, and the bridge that continues a rollout with the ids of a template."""
