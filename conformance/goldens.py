"""What others say of templates, held against our own answer.

The source distribution of ``renderers`` has a file of conversations with, per model and settings,
whether its template leaves standing what it printed once more messages follow. `Bridge` answers the
same question for any template: the texts are compared here, of the models whose template we have.
Which tokenizer encodes them plays no part in that.
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
"""Models of the corpus, and where their template lies among the shared data."""
OWN_SETTINGS = ("name", "thinking_retention", "auto_drop_analysis")
"""Settings of the package itself, which no template knows."""


@dataclass
class Golden:
    """One conversation: what is stated of it, and what we find."""

    case: str
    model: str
    stated: bool
    found: bool | None = None
    """None: the template, or its renderer here, refuses it."""
    detail: str = ""


def hold(hosts: Path, shared: Path) -> list[Golden] | str:
    """All cases of templates that are there; text where the corpus is not."""
    path = hosts / CORPUS
    if not path.exists():
        return f"no {CORPUS} under HOSTS"
    corpus = json.loads(path.read_text(encoding="utf-8"))
    found = []
    for case in corpus["cases"]:
        settings = {name: value for name, value in case["config"].items() if name != "name"}
        if case["model"] not in TEMPLATES or set(settings) & set(OWN_SETTINGS):
            continue
        golden = Golden(case["id"], case["model"], case["stable"])
        _answer(golden, corpus["scenarios"][case["scenario"]], settings, shared)
        found.append(golden)
    return found


def _answer(
    golden: Golden, scenario: dict[str, Any], settings: dict[str, Any], shared: Path
) -> None:
    from tokenmill import Bridge
    from tokenmill.errors import TokenmillError

    place = shared / TEMPLATES[golden.model]
    given: dict[str, Any] = {"tokenizer": str(place)}
    if place.suffix == ".jinja":
        given = {"tokenizer": str(shared / "tokenizers" / "qwen3"), "chat_template": str(place)}
    try:
        bridge = Bridge(
            **given, template_kwargs=settings or None, date="2026-11-15",
            tokenizer_backend="transformers",
        )  # fmt: skip
        rewrite = bridge.rewrite(scenario["messages"] + scenario["append"], scenario.get("tools"))
    except TokenmillError as error:
        golden.detail = str(error)
        return
    golden.found, golden.detail = rewrite is None, str(rewrite or "")
