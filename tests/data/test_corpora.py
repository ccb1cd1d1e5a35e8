"""Golden answers of miles, and equality with the eager way on every corpus."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.eager import Eager, eager
from tests.data.making import TOKENIZER, open_prompts
from tests.sampling import sampled
from tokenmill import PromptDataset


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts-cache")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("tokenizer", ["qwen3", pytest.param("llama3.1", marks=pytest.mark.soak)])
def test_golden_prompts_of_miles_are_given_exactly(
    shared: Path, warm: Path, tokenizer: str
) -> None:
    texts: dict[int, str] = {}
    measured = []
    for limit in (160, 96):
        path = shared / "golden" / "miles" / f"prompts-{tokenizer}-{limit}.jsonl"
        golden = json.loads(path.read_text())
        arguments: dict[str, Any] = {
            "tokenizer": shared / "tokenizers" / tokenizer,
            "prompt_key": golden["prompt_key"],
            "label_key": golden["label_key"],
            "apply_chat_template": golden["apply_chat_template"],
            "date": "2026-11-15",
            "cache_dir": warm,
        }
        source = shared / "corpora" / golden["corpus"]
        prompts = open_prompts(source, max_length=limit, **arguments)
        measured.append(prompts.measured)
        if not texts:  # the shorter limit keeps a part of these
            texts = {prompt.row: str(prompt.prompt) for prompt in prompts}
        everything = open_prompts(source, **arguments).lengths
        assert digest(json.dumps(everything.tolist())) == golden["lengths_sha256"]
        kept = [row for row in range(len(everything)) if everything[row] <= limit]
        assert [prompt.row for prompt in prompts[:50]] == kept[:50] == golden["kept_head"]
        assert prompts[-1].row == kept[-1]
        assert prompts.lengths.tolist() == everything[kept].tolist()
        assert len(prompts) == golden["kept"]
        assert prompts.source_rows == golden["rows"]
        assert digest(json.dumps(kept)) == golden["kept_indices_sha256"]
        assert prompts[0].prompt == golden["first_prompt"]
        assert digest("\0".join(texts[row] for row in kept)) == golden["prompts_sha256"]
    assert measured == [golden["rows"], 0]


CORPORA: dict[str, dict[str, Any]] = {
    "alpaca_eval_en": {"prompt_key": "messages", "rows": 150},
    "alpaca_zh": {"prompt_key": "instruction", "label_key": "output", "rows": 400},
    "codealpaca": {"prompt_key": "instruction", "label_key": "output", "rows": 400},
    "drone_tool_calls": {"prompt_key": "messages", "tool_key": "tools"},
    "gsm8k_prompts": {"prompt_key": "prompt", "label_key": "label", "rows": 400},
    "reason_tool_use": {"prompt_key": "messages", "tool_key": "tools"},
    "smilechat_zh": {"prompt_key": "messages", "rows": 100},
    "tau_bench_trajectories": {"prompt_key": "messages", "rows": 30},
    "think_traces": {"prompt_key": "messages", "rows": 60},
    "toy_chat": {"prompt_key": "messages"},
    "math_vision/math_vision": {"prompt_key": "problem", "label_key": "answer"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {**columns, "apply_chat_template": True} for name, columns in CORPORA.items()},
    "gsm8k_prompts not thinking": {
        "prompt_key": "prompt", "rows": 200, "apply_chat_template": True,
        "kwargs": {"enable_thinking": False},
    },
    "codealpaca as it is": {"prompt_key": "instruction", "rows": 300},
    "glaive_tools_sharegpt as it is": {
        "prompt_key": "conversations", "tool_key": "tools", "rows": 300
    },
    "toy_chat as it is": {"prompt_key": "messages", "tool_key": "tools"},
    "math_vision/math_vision with images": {
        "prompt_key": "problem", "label_key": "answer", "multimodal_keys": {"image": "images"}
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def template(shared: Path) -> str:
    """A real template for the small tokenizer: the rendering is Qwen3's, the encoding is quick."""
    return str(shared / "tokenizers" / "qwen3" / "chat_template.jinja")


@pytest.fixture(scope="module")
def reference(template: str) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = Path(template).read_text()
    return tokenizer


def compare(prompts: PromptDataset, wanted: Eager) -> None:
    """Kept rows, prompts, labels, metadata, tools and lengths."""
    served = list(prompts)
    assert [prompt.row for prompt in served] == wanted.kept
    for prompt, sample in zip(served, wanted.samples, strict=True):
        assert prompt.prompt == sample["prompt"]
        assert prompt.label == sample["label"]
        assert type(prompt.label) is type(sample["label"])
        assert prompt.metadata == sample["metadata"]
        assert prompt.tools == sample["tools"]
        if isinstance(prompt.prompt, str):
            assert prompt.length == wanted.lengths[prompt.row]
    # Refused by the framework, and counted by us.
    lost = sum(count for reason, count in prompts.rejected.items() if reason != "overlong")
    assert lost == len(wanted.refused)
    assert prompts.source_rows == len(served) + sum(prompts.rejected.values())


@pytest.mark.parametrize("name", sampled(VARIANTS, 3))
def test_corpus_equals_the_eager_way(
    shared: Path, warm: Path, template: str, reference: Any, name: str
) -> None:
    columns = dict(VARIANTS[name])
    rows, kwargs = columns.pop("rows", None), columns.pop("kwargs", {})
    path = shared / "corpora" / f"{name.split()[0]}.jsonl"
    everything = eager(path, reference, rows=rows, kwargs=kwargs, **columns)
    lengths = sorted(everything.lengths.values())
    # Qwen3's template fails on contents that are lists of parts, here as in the eager way.
    assert bool(everything.samples) == (name != "reason_tool_use")
    for max_length in (None, lengths[2 * len(lengths) // 3] if lengths else 9):
        prompts = open_prompts(
            path if rows is None else f"{path}@[0:{rows}]",
            max_length=max_length,
            chat_template=template,
            tokenizer_backend="auto",
            cache_dir=warm,
            apply_chat_template_kwargs=kwargs,
            **columns,
        )
        assert prompts.hit == (max_length is not None)
        compare(prompts, everything.limited(max_length))
    if kwargs:
        assert "<think>\n\n</think>" in str(prompts[0].prompt)
