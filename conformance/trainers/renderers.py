"""`renderers`: chat templates rewritten as Python code, with a training mask.

It is a library, not a trainer. `CONFIGS` maps models to its renderers.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

from conformance.trainers import Prepared, one_by_one

NAME = "renderers"
CHECKOUT = None
PATHS = ()
PACKAGE = "renderers"
STAND_INS = ()
TRAINS = "every"
HOW = "`build_training_sample`, its own renderer of that model"

CONFIGS = {
    "qwen3": "Qwen3RendererConfig",
    "llama3.1": "Llama3RendererConfig",
    "deepseek-v3": "DeepSeekV3RendererConfig",
    "gpt-oss": "GptOssRendererConfig",
}


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Rows as its builder of training samples makes them."""
    package = importlib.import_module("renderers")
    base = importlib.import_module("renderers.base")
    if template not in CONFIGS:
        raise LookupError("renderers has none of this model")
    renderer = package.create_renderer(tokenizer, getattr(package, CONFIGS[template])())

    def one(row: dict[str, Any]) -> Prepared:
        row = copy.deepcopy(row)
        made = base.build_training_sample(
            renderer,
            row["messages"],
            role_to_mask=lambda message: message["role"] == "assistant",
            tools=row.get("tools"),
        )
        return list(made.token_ids), [int(place) for place in made.loss_mask]

    return one_by_one(rows, one)
