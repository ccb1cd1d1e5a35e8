"""Reports about stores and data: rows, statistics, lint, doctor, rollout checks, the page."""
