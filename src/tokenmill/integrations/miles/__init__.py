"""tokenmill for miles and slime, which share their interfaces; importing it needs neither."""

from __future__ import annotations

from tokenmill.integrations.miles.conventions import MILES, SLIME, MilesOrder
from tokenmill.integrations.miles.source import DataSource, sft_rollout

__all__ = ["MILES", "SLIME", "DataSource", "MilesOrder", "sft_rollout"]
