"""What users do today, written from its documented behaviour, to measure beside ours.

`skyrl_rows` is the slice path of SkyRL's SFT tokenization: for each row the whole conversation and
its prompt are rendered and encoded by transformers, and the mask is the difference of their lengths
(last assistant message). `datasets_map` is `datasets.map` over ``apply_chat_template``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def load_auto(directory: str) -> Any:
    """The tokenizer as a trainer loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def as_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a row of the benchmark corpora."""
    messages: list[dict[str, Any]] = row.get("messages") or row["conversations"]
    return messages


def skyrl_rows(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> int:
    """Two renders and two encodes per row, mask by difference of lengths; returns the tokens."""
    tokens = 0
    for row in rows:
        messages = as_messages(row)
        if messages[-1]["role"] != "assistant":
            continue  # such rows are rejected on both sides
        whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        mask = [0] * len(prompt) + [1] * (len(whole) - len(prompt))
        tokens += len(mask)
    return tokens


def datasets_map(tokenizer: Any, rows: Sequence[dict[str, Any]], num_proc: int = 1) -> Any:
    """`datasets.map(apply_chat_template)`, one conversation after another."""
    import datasets

    data = datasets.Dataset.from_list([{"messages": as_messages(row)} for row in rows])
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
