"""TRL, SFT: the dataset as `SFTTrainer` prepares it, with the loss on assistants only.

The trainer gets a tiny model, since TRL has no function that only prepares data. It replaces
templates that it recognizes with its own training templates and raises an error for others. Values
of different shapes are passed as the ``Json`` type, as TRL's documentation advises.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

from conformance.trainers import Prepared, describe, from_labels, in_halves

NAME = "TRL, SFT"
CHECKOUT = None
PATHS = ()
PACKAGE = "trl"
STAND_INS = ()
TRAINS = "every"
HOW = "`SFTTrainer` with `assistant_only_loss=True`"


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """Names of caches by chance: to hash the tokenizer for them takes most of a trainer's time.

    Rows that raise are found by halving, which takes many trainers.
    """
    from datasets.fingerprint import Hasher, generate_random_fingerprint

    by_chance = mock.Mock(side_effect=lambda *given: generate_random_fingerprint())
    with mock.patch.object(Hasher, "hash", by_chance):
        yield


def tiny_model(tokenizer: Any) -> Any:
    """The smallest model that a trainer takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer) + 8,
            hidden_size=2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )


def arrow(rows: list[dict[str, Any]]) -> Any:
    """Rows as a dataset; of mixed shapes as JSON. The first row's names are the columns."""
    from datasets import Dataset

    columns = dict.fromkeys(name for row in rows for name in row)
    alike = [{name: copy.deepcopy(row.get(name)) for name in columns} for row in rows]
    return Dataset.from_list(alike, on_mixed_types="use_json")


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """The whole dataset at once; where that raises, in halves, to see which."""
    from trl import SFTConfig, SFTTrainer

    model = tiny_model(tokenizer)

    def train_on(some: list[dict[str, Any]]) -> list[Prepared]:
        with tempfile.TemporaryDirectory() as directory:
            config = SFTConfig(
                output_dir=directory,
                assistant_only_loss=True,
                max_length=None,
                report_to="none",
                use_cpu=True,
                bf16=False,
                dataset_num_proc=None,
            )
            trainer = SFTTrainer(
                model, args=config, processing_class=tokenizer, train_dataset=arrow(some)
            )
            made = [from_labels(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
        if len(made) < len(some):
            raise LookupError("left out: no trained token")  # and which, is found by halving
        return made

    try:
        train_on(rows[:1])
    except ValueError as error:
        if "chat template" in str(error):  # refused before any row is looked at
            return [describe(error)] * len(rows)
    return in_halves(rows, train_on)
