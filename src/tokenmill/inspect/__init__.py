"""Look at data: statistics, lint, rollout checks, the page, the doctor."""
