"""Compare `Bridge.rewrite` with a golden file of the ``renderers`` package.

The file states, per model and settings, whether a template keeps what it printed when more
messages follow. Models whose template is available are compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = "renderers/tests/fixtures/prefix_stability.json"
TEMPLATES = {
    "Qwen/Qwen3-8B": "tokenizers/qwen3",
    "deepseek-ai/DeepSeek-V3": "tokenizers/deepseek-v3",
    "openai/gpt-oss-20b": "tokenizers/gpt-oss",
    "Qwen/Qwen3.5-9B": "templates/trl/qwen3_5_think.jinja",
    "Qwen/Qwen3-VL-4B-Instruct": "templates/trl/qwen3_vl.jinja",
    "google/gemma-4-31B-it": "templates/models/google-gemma-4-31B-it-interleaved.jinja",
    "moonshotai/Kimi-K2-Instruct": "templates/models/Kimi-K2-Instruct.jinja",
    "MiniMaxAI/MiniMax-M2.5": "templates/models/MiniMax-M2.jinja",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "templates/trl/nemotron_3_nano.jinja",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "templates/trl/nemotron_3_ultra.jinja",
    "poolside/Laguna-XS-2.1": "templates/models/poolside-Laguna-XS-2.1.jinja",
    "meta-llama/Llama-3.2-1B-Instruct": "templates/models/meta-llama-Llama-3.2-3B-Instruct.jinja",
    "tencent/Hy3": "templates/models/tencent-Hy3.jinja",
}
"""Models of the file, and the paths of their templates in the shared data."""
OWN_SETTINGS = ("name", "thinking_retention", "auto_drop_analysis")
"""Settings of the package itself, not of a template."""


@dataclass
class Golden:
    case: str
    model: str
    expected: bool
    actual: bool | None = None
    """None if the template or our renderer refuses the conversation."""
    detail: str = ""


def run_goldens(trainers: Path, shared: Path) -> list[Golden] | str:
    """Return the cases of available templates, or the reason why there are none."""
    path = trainers / CORPUS
    if not path.exists():
        return f"no {CORPUS} under TRAINERS"
    corpus = json.loads(path.read_text(encoding="utf-8"))
    actual = []
    for case in corpus["cases"]:
        settings = {name: value for name, value in case["config"].items() if name != "name"}
        if case["model"] not in TEMPLATES or set(settings) & set(OWN_SETTINGS):
            continue
        golden = Golden(case["id"], case["model"], case["stable"])
        _compare(golden, corpus["scenarios"][case["scenario"]], settings, shared)
        actual.append(golden)
    return actual


def _compare(
    golden: Golden, scenario: dict[str, Any], settings: dict[str, Any], shared: Path
) -> None:
    from tokenmill import Bridge
    from tokenmill.errors import TokenmillError

    path = shared / TEMPLATES[golden.model]
    options: dict[str, Any] = {"tokenizer": str(path)}
    if path.suffix == ".jinja":
        options = {"tokenizer": str(shared / "tokenizers" / "qwen3"), "chat_template": str(path)}
    try:
        bridge = Bridge(
            **options, chat_template_kwargs=settings or None, date="2026-11-15",
            tokenizer_backend="transformers",
        )  # fmt: skip
        rewrite = bridge.rewrite(scenario["messages"] + scenario["append"], scenario.get("tools"))
    except TokenmillError as error:
        golden.detail = str(error)
        return
    golden.actual, golden.detail = rewrite is None, str(rewrite or "")
