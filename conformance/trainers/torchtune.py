"""torchtune's `HuggingFaceModelTokenizer`, which takes any template, over `OpenAIToMessages`.

It reads the template from ``tokenizer_config.json``, so the driver writes a copy of that file. It
does not support tools.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from conformance.trainers import Prepared, one_by_one

NAME = "torchtune"
CHECKOUT = "torchtune"
PATHS = ("",)
PACKAGE = "torchtune"
STAND_INS = ("torchao", "torchvision", "kagglehub")
TRAINS = "every"
HOW = "`OpenAIToMessages`, `HuggingFaceModelTokenizer.tokenize_messages`"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as its SFT dataset makes them: messages, then tokens."""
    from torchtune.data import OpenAIToMessages
    from torchtune.modules.transforms.tokenizers import HuggingFaceModelTokenizer

    directory = Path(tokenizer.name_or_path)
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = tokenizer.chat_template
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "tokenizer_config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        encoder = HuggingFaceModelTokenizer(
            str(directory / "tokenizer.json"), tokenizer_config_json_path=str(path)
        )
    to_messages = OpenAIToMessages(masking_strategy="train_on_assistant")

    def one(row: dict[str, Any]) -> Prepared:
        messages = to_messages(copy.deepcopy(row))["messages"]
        ids, masked = encoder.tokenize_messages(messages)
        return list(ids), [int(not place) for place in masked]

    return one_by_one(rows, one)
