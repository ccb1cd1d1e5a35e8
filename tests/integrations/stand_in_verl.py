"""A stand-in for verl's own SFT dataset, by its documented behaviour."""

from __future__ import annotations

from typing import Any

import torch


def sft_reference(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    def ids(turns: list[dict[str, Any]], *, opened: bool = False) -> list[int]:
        found = tokenizer.apply_chat_template(
            turns, add_generation_prompt=opened, tokenize=True, return_dict=True
        )
        return list(found["input_ids"])

    empty = [{"role": "user", "content": ""}]
    one, two, asked = ids(empty), ids(empty * 2), ids(empty, opened=True)
    lead = one[: len(one) - (len(two) - len(one))]  # what the template prints unasked
    header = asked[len(one) :]
    all_ids: list[int] = []
    mask: list[int] = []
    for number, message in enumerate(messages):
        found = ids([message])
        if number and message["role"] != "system":
            found = found[len(lead) :]
        trained = message["role"] == "assistant"
        all_ids += found
        mask += [int(trained and place >= len(header)) for place in range(len(found))]
    return all_ids, mask


class SFTDataset:
    """verl's rows; refused, as there, where the joined messages are not the whole render."""

    def __init__(self, rows: list[dict[str, Any]], tokenizer: Any) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        messages = self.rows[number]["messages"]
        ids, mask = sft_reference(self.tokenizer, messages)
        whole = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        assert ids == list(whole["input_ids"])
        columns = {"input_ids": ids, "position_ids": range(len(ids)), "loss_mask": mask}
        return {name: torch.tensor(list(values)) for name, values in columns.items()}
