"""LLaMA-Factory: its converter of OpenAI messages and its `SupervisedDatasetProcessor`.

It has its own template per model family; models without one are not run.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from conformance.trainers import Prepared, from_labels, one_by_one

NAME = "LLaMA-Factory"
CHECKOUT = "LLaMA-Factory"
PATHS = ("src",)
PACKAGE = "llamafactory"
STAND_INS = ("bitsandbytes", "vllm", "gradio", "matplotlib", "torchaudio", "torchvision")
TRAINS = "every"
HOW = (
    "`OpenAIDatasetConverter`, `SupervisedDatasetProcessor`, its own template of that model; the "
    "converter of `formatting: openai` adds a line to the system turn (by its source, that of "
    "`sharegpt` does not; it was not run)"
)

TEMPLATES = {
    "qwen2.5": "qwen",
    "qwen3": "qwen3",
    "trl/qwen3_instruct_2507@qwen3": "qwen3_nothink",
    "llama3.1": "llama3",
    "gemma3": "gemma3",
    "mistral-nemo": "ministral",
    "phi-3-mini": "phi",
    "deepseek-v3": "deepseek3",
    "smollm2": "smollm2",
    "gpt-oss": "gpt_oss",
    "command-r-plus": "cohere",
}


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as its loader would align and tokenize them."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from llamafactory.data.converter import OpenAIDatasetConverter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    if template not in TEMPLATES:
        raise LookupError("LLaMA-Factory has no template of this model")
    data = DataArguments(template=TEMPLATES[template], cutoff_len=1_000_000)
    chosen = get_template_and_fix_tokenizer(tokenizer, data)
    shape = DatasetAttr("file", dataset_name="rows", formatting="openai", messages="messages")
    shape.tools = "tools"
    for tag, value in {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                       "assistant_tag": "assistant", "observation_tag": "tool",
                       "function_tag": "function", "system_tag": "system"}.items():  # fmt: skip
        setattr(shape, tag, value)
    convert = OpenAIDatasetConverter(shape, data)
    processor = SupervisedDatasetProcessor(chosen, tokenizer, None, data)

    def one(row: dict[str, Any]) -> Prepared:
        row = copy.deepcopy(row)
        tools = json.dumps(row["tools"]) if row.get("tools") else ""
        aligned = convert({**row, "tools": tools})
        made = processor.preprocess_dataset({name: [value] for name, value in aligned.items()})
        if not made["input_ids"]:
            return "dropped: invalid example"
        return from_labels(made["input_ids"][0], made["labels"][0])

    return one_by_one(rows, one)
