"""A plugin of pytest that puts our classes in the place of a host's, before its tests are imported.

``CONFORMANCE_REPLACE`` names the function below that does it; empty, the host's own classes stay
there, so that both runs differ in nothing else. ``CONFORMANCE_STAND_INS`` are packages that the
host imports and its tests do not use.
"""

from __future__ import annotations

import os
import typing
from typing import Any

import typing_extensions

from conformance.stand_ins import stand_in


def skyrl_samplers() -> None:
    """Both samplers of SkyRL, with its own arguments."""
    from skyrl.train.dataset import samplers

    from tokenmill.integrations.skyrl import Sampler

    class Sequential(Sampler):
        def __init__(self, data_source: Any) -> None:
            super().__init__(data_source, order="sequential")

    class Mixing(Sampler):
        def __init__(
            self,
            data_source: Any,
            lengths: Any,
            weights: Any,
            num_samples: int | None = None,
            seed: int = 0,
            replacement: bool = True,
        ) -> None:
            super().__init__(
                data_source, seed=seed, num_samples=num_samples, lengths=lengths, weights=weights
            )

    samplers.StatefulSequentialSampler = Sequential
    samplers.DataMixingSampler = Mixing


def slime_data_source() -> None:
    """Both data sources of slime."""
    from slime.rollout import data_source

    from tokenmill.integrations.miles import DataSource

    data_source.RolloutDataSource = DataSource
    data_source.RolloutDataSourceWithBuffer = DataSource


def verl_sft() -> None:
    """Verl's SFT dataset."""
    from verl.utils.dataset import multiturn_sft_dataset

    from tokenmill.integrations.verl import SFTDataset

    multiturn_sft_dataset.MultiTurnSFTDataset = SFTDataset


def verl_rl() -> None:
    """Verl's RL dataset."""
    from verl.utils.dataset import rl_dataset

    from tokenmill.integrations.verl import RLDataset

    rl_dataset.RLHFDataset = RLDataset


def pytest_configure(config: Any) -> None:
    """Replace what the environment names."""
    stand_in(name for name in os.environ.get("CONFORMANCE_STAND_INS", "").split(",") if name)
    # Pydantic takes no other on Python 3.11.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    name = os.environ.get("CONFORMANCE_REPLACE")
    if name:
        globals()[name]()
