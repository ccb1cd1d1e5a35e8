"""What users do today, written from its documented behaviour, to measure beside ours.

`skyrl_rows` is what SkyRL's SFT tokenization does to a row for the last assistant message: the
prompt and the whole conversation are rendered and encoded by transformers, and the mask is the
difference of their lengths. `skyrl_slices` is its parallel path around that: the file is opened
with `datasets`, each spawned worker opens it again and takes a contiguous share, rows come back
through the pool as lists, and the parent saves them. `datasets_map` is `datasets.map` over
``apply_chat_template``.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_auto(directory: str) -> Any:
    """The tokenizer as a trainer loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def as_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a row of the benchmark corpora."""
    messages: list[dict[str, Any]] = row.get("messages") or row["conversations"]
    return messages


def skyrl_row(tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Two renders and two encodes, mask by difference of lengths."""
    if messages[-1]["role"] != "assistant":
        return None  # such rows are rejected on both sides
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    actions = len(whole) - len(prompt)
    return {
        "input_ids": whole,
        "attention_mask": [1] * len(whole),
        "num_actions": actions,
        "loss_mask": [1] * actions,
    }


def skyrl_rows(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows one after another, in this process."""
    found = (skyrl_row(tokenizer, as_messages(row)) for row in rows)
    return [row for row in found if row is not None]


def _skyrl_share(share: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    path, directory, start, stop = share
    tokenizer = load_auto(directory)
    rows = _open_json(path).select(range(start, stop))
    return skyrl_rows(tokenizer, rows)


def _open_json(path: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset("json", data_files=path, split="train")


def skyrl_slices(path: Path, directory: str, out: Path, workers: int = 2) -> None:
    """The parallel path: shares of the rows in spawned workers, saved as a dataset."""
    import datasets

    count = len(_open_json(str(path)))
    bounds = [count * n // workers for n in range(workers + 1)]
    shares = [(str(path), directory, *pair) for pair in itertools.pairwise(bounds)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.map(_skyrl_share, shares)
    datasets.Dataset.from_list(list(itertools.chain(*results))).save_to_disk(str(out))


def datasets_map(tokenizer: Any, rows: Sequence[dict[str, Any]], num_proc: int = 1) -> Any:
    """`datasets.map(apply_chat_template)`, one conversation after another."""
    import datasets

    data = datasets.Dataset.from_list([{"messages": list(as_messages(row))} for row in rows])
    return data.map(
        lambda row: {
            "input_ids": tokenizer.apply_chat_template(
                row["messages"], tokenize=True, return_dict=False
            )
        },
        num_proc=num_proc if num_proc > 1 else None,
        load_from_cache_file=False,
        remove_columns=["messages"],
    )
