"""The bundled tokenizer: reproducible, lossless, the same through every library, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenizers import Tokenizer

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = PROJECT / "src" / "tokenmill" / "examples"
DIRECTORY = EXAMPLES / "tokenizer"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
           "</tool_call>"]  # fmt: skip
ENGINE = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
ROWS = [json.loads(line) for line in (EXAMPLES / "conversations.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def auto() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def renders(auto: Any) -> list[str]:
    return [
        auto.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        for row in ROWS
    ]


def test_training_again_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", minversion="0.20")  # older ones write other names
    script = PROJECT / "scripts" / "train_tokenizer.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes(), name


def test_vocabulary_is_small_and_control_tokens_come_first() -> None:
    assert ENGINE.get_vocab_size() == 4096
    assert [ENGINE.id_to_token(number) for number in range(len(CONTROL))] == CONTROL
    assert sum(file.stat().st_size for file in DIRECTORY.iterdir()) < 300_000


def test_merges_are_spelled_as_old_releases_read_them() -> None:
    document = json.loads((DIRECTORY / "tokenizer.json").read_bytes())
    assert all(isinstance(merge, str) for merge in document["model"]["merges"])


def test_every_example_gives_the_same_ids_through_auto_tokenizer(
    auto: Any, renders: list[str]
) -> None:
    assert (auto.bos_token, auto.eos_token, auto.pad_token) == (
        "<|endoftext|>", "<|im_end|>", "<|endoftext|>",
    )  # fmt: skip
    plain = [encoding.ids for encoding in ENGINE.encode_batch(renders, add_special_tokens=False)]
    assert auto(renders, add_special_tokens=False)["input_ids"] == plain
    assert auto(renders)["input_ids"] == plain  # nothing is added behind the template's back
    assert [ENGINE.decode(ids, skip_special_tokens=False) for ids in plain] == renders


def test_every_example_gives_the_same_ids_through_fastokens(renders: list[str]) -> None:
    fastokens = pytest.importorskip("fastokens")
    fast = fastokens.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    for text in renders:
        assert list(fast.encode(text).ids) == ENGINE.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@example("e\u0301 \u212b \u0958 \r\n\u2028 \ufb01\x00")
@given(st.lists(st.sampled_from([*CONTROL, " ", "\n", "0"]) | st.text(), max_size=8).map("".join))
def test_any_text_survives_encoding_byte_for_byte(text: str) -> None:
    ids = ENGINE.encode(text, add_special_tokens=False).ids
    assert ENGINE.decode(ids, skip_special_tokens=False) == text


def render(auto: Any, *turns: dict[str, Any], **more: Any) -> str:
    return str(auto.apply_chat_template(list(turns), tokenize=False, **more))


def test_template_prints_thinking_of_the_last_turn_only(auto: Any) -> None:
    ask = {"role": "user", "content": "7?"}
    inline = {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nseven"}
    apart = {"role": "assistant", "content": "eight", "reasoning_content": "second"}
    assert render(auto, ask, inline, ask, apart) == (
        "<|im_start|>user\n7?<|im_end|>\n<|im_start|>assistant\nseven<|im_end|>\n"
        "<|im_start|>user\n7?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nsecond\n</think>\n\neight<|im_end|>\n"
    )
    assert "<think>\nfirst\n</think>\n\nseven<|im_end|>" in render(auto, ask, inline)
    assert "<think>\nsecond" in render(
        auto, ask, {**apart, "reasoning_content": None, "thinking": "second"}
    )


def test_template_prints_calls_alike_from_objects_and_strings(auto: Any) -> None:
    def calling(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    ask, answer = {"role": "user", "content": "1+1"}, {"role": "tool", "content": "2"}
    by_object = render(auto, ask, calling({"a": 1, "b": "ü"}), answer)
    assert by_object == render(auto, ask, calling('{"a": 1, "b": "ü"}'), answer)
    assert by_object.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
    )


def test_template_generation_prompt_is_a_prefix_of_the_answer(auto: Any) -> None:
    for row in ROWS:
        *before, last = row["messages"]
        more = {"tools": row.get("tools")}
        prompt = render(auto, *before, add_generation_prompt=True, **more)
        assert render(auto, *before, last, **more).startswith(prompt)
    closed = render(
        auto, *ROWS[0]["messages"][:1], add_generation_prompt=True, enable_thinking=False
    )
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "narrator", "content": "Night falls."}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_template_refuses_what_it_cannot_print(auto: Any, turns: list[dict[str, Any]]) -> None:
    from jinja2 import TemplateError

    with pytest.raises(TemplateError, match=r"unknown role|must come first|only text parts"):
        render(auto, *turns)
