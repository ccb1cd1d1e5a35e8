"""ms-swift: `Template.encode` in training mode, with its own template of the model family."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

from conformance.trainers import Prepared, from_labels, one_by_one

NAME = "ms-swift"
CHECKOUT = "ms-swift"
PATHS = ("",)
PACKAGE = "ms-swift"
STAND_INS = ("vllm", "lmdeploy", "sglang", "deepspeed", "torchvision", "qwen_vl_utils", "oss2",
             "matplotlib", "sklearn", "tensorboard", "rouge", "jieba", "nltk", "gradio",
             "transformers_stream_generator", "megatron")  # fmt: skip
TRAINS = "every"
HOW = "`get_template`, `Template.encode` in mode `train`, its own template of that model"

TEMPLATES = {
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
    "trl/qwen3_instruct_2507@qwen3": "qwen3_nothinking",
    "llama3.1": "llama3",  # the template here is that of Llama 3, without a date
    "gemma3": "gemma3_text",
    "mistral-nemo": "mistral_nemo",
    "phi-3-mini": "phi3",
    "deepseek-v3": "deepseek_v2_5",
    "gpt-oss": "gpt_oss",
    "command-r-plus": "c4ai",
}


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as its lazy dataset encodes them."""
    from swift.template import get_template

    if template not in TEMPLATES:
        raise LookupError("ms-swift has no template of this model")
    tokenizer.model_info = SimpleNamespace(
        config=None, task_type="causal_lm", max_model_len=1_000_000, model_dir="", torch_dtype=None
    )
    tokenizer.model_meta = SimpleNamespace(is_multimodal=False, template=None, model_arch=None)
    chosen = get_template(tokenizer, template_type=TEMPLATES[template], max_length=1_000_000)
    chosen.set_mode("train")

    def one(row: dict[str, Any]) -> Prepared:
        given = swift_row(row)
        made = chosen.encode(given)
        return from_labels(made["input_ids"], made["labels"])

    return one_by_one(rows, one)


def swift_row(row: dict[str, Any]) -> dict[str, Any]:
    """Messages in the form of its documentation: calls are turns of their own."""
    messages: list[dict[str, Any]] = []
    for message in copy.deepcopy(row["messages"]):
        calls = message.pop("tool_calls", None) or []
        role = {"tool": "tool_response"}.get(message["role"], message["role"])
        if message.get("content") or not calls:
            messages.append({**message, "role": role, "content": message.get("content") or ""})
        for call in calls:
            content = json.dumps(call["function"], ensure_ascii=False)
            messages.append({"role": "tool_call", "content": content})
    given: dict[str, Any] = {"messages": messages}
    if row.get("tools"):
        given["tools"] = row["tools"]
    return given
