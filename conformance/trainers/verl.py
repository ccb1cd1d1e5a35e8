"""verl's `MultiTurnSFTDataset` with its defaults, from a Parquet file per row.

It raises an error if its ids differ from the whole render. In a common Parquet file, every call
would get the arguments of all calls.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from conformance.trainers import Prepared, one_by_one

NAME = "verl"
CHECKOUT = None
PATHS = ()
PACKAGE = "verl"
STAND_INS = ("vllm", "flash_attn", "megatron")
TRAINS = "every"
HOW = "`MultiTurnSFTDataset`, its defaults"


def prepare(
    rows: list[dict[str, Any]], tokenizer: Any, template: str, **options: Any
) -> list[Prepared]:
    """Rows as the dataset serves them."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from omegaconf import OmegaConf
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 1_000_000, **options})

    def one(row: dict[str, Any]) -> Prepared:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "row.parquet"
            pq.write_table(pa.Table.from_pylist([row]), path)
            made = MultiTurnSFTDataset(str(path), tokenizer, config)[0]
        return made["input_ids"].tolist(), made["loss_mask"].tolist()

    return one_by_one(rows, one)
