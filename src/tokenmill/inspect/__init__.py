"""Inspect data: statistics, lint, rollout checks, the page, the doctor."""
