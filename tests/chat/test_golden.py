"""Compare with other libraries on real rows: transformers' texts, TRL's spans, SkyRL's masks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat.conversations import DATE, ODD, turns
from tests.sampling import sampled
from tokenizers import Tokenizer
from tokenmill.chat import ChatSpec, Renderer

NAMES = (
    "chatglm3",
    "command-r-plus",
    "deepseek-v3",
    "gemma3",
    "gpt-oss",
    "llama3.1",
    "mistral-nemo",
    "phi-3-mini",
    "qwen2.5",
    "qwen3",
)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def special_tokens(directory: Path) -> dict[str, str]:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    found = {}
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        token = config.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            found[f"{name}_token"] = token
    return found


def renderer(shared: Path, name: str, **options: Any) -> Renderer:
    directory = shared / "tokenizers" / name
    template = (directory / "chat_template.jinja").read_text()
    return Renderer(ChatSpec(date=DATE, **options), template, special_tokens(directory))


@pytest.mark.parametrize("name", NAMES)
def test_text_equals_the_render_of_transformers(shared: Path, name: str) -> None:
    rows = lines(shared / "golden" / "ids" / f"{name}.jsonl")
    result = renderer(shared, name, train_on="everything").render(rows)
    assert {i for i, *_ in result.rejected} == {i for i, r in enumerate(rows) if "error" in r}
    assert {error.reason for *_, error in result.rejected} <= {"template_error"}
    for index, text, spans in zip(result.source, result.texts, result.spans, strict=True):
        assert len(text) == rows[index]["chars"]
        assert hashlib.sha256(text.encode()).hexdigest() == rows[index]["text_sha256"]
        assert spans is None


def test_spans_of_training_templates_are_exact(shared: Path) -> None:
    seen = 0
    for path in sorted((shared / "golden" / "spans").glob("*.jsonl")):
        source = (shared / "templates" / "trl" / path.name.removesuffix(".jsonl")).read_text()
        rows = lines(path)
        # `turn_end` and the others do not change generation blocks.
        made = Renderer(ChatSpec(date=DATE, turn_end="stop"), source, rows[0]["special_tokens"])
        for row in rows:
            result = made.render([row])
            if "error" in row:
                assert [error.reason for *_, error in result.rejected] == ["template_error"]
                continue
            assert result.texts == [row["text"]], (path.name, row["case"], result.rejected)
            assert result.spans == [[tuple(span) for span in row["trained_spans"]]]
            seen += 1
    assert seen > 100


def test_templates_without_generation_blocks_train_the_same_words(shared: Path) -> None:
    """Without generation blocks, the trained text is what the blocks would contain."""
    compared = differing = 0
    for path in sorted((shared / "golden" / "spans").glob("*.jsonl")):
        counterpart = path.name.replace("_training.jinja.jsonl", ".jinja")
        if counterpart.startswith(("glm4moe", "phi3", "deepseekv3", "cohere2")):
            continue  # their training versions print or train other text
        source = (shared / "templates" / "trl" / counterpart).read_text()
        rows = lines(path)
        spec = ChatSpec(turn_end="turn", thinking_opener="trained")  # as those blocks do
        made = Renderer(spec, source, rows[0]["special_tokens"])
        for row in rows:
            if "error" in row:
                continue
            result = made.render([row])
            if result.texts == [row["text"]]:
                compared += 1
                differing += result.spans != [[tuple(s) for s in row["trained_spans"]]]
    assert compared > 40
    assert differing == 0


def tokens(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int]]) -> Any:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    (starts, ends), (first, stop) = np.array(encoding.offsets).T, np.array(spans).T
    last = np.searchsorted(first, ends) - 1  # the last span that begins before the token ends
    mask = (last >= 0) & (stop[last] > starts)
    return encoding.ids, mask.astype(int).tolist(), encoding.offsets


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["qwen2.5", "qwen3", "llama3.1"], 3))
def test_skyrl_masks_are_equal_wherever_its_ids_are(shared: Path, name: str) -> None:
    rows = lines(shared / "golden" / "skyrl" / f"{name}.jsonl")
    tokenizer = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    build_stats: Counter[str] = Counter()
    for mode, turn_end in (
        ("all_assistant_messages", "stop"),
        ("last_assistant_message", "turn"),
    ):
        made = renderer(shared, name, train_on=mode, turn_end=turn_end)
        result = made.render([row["row"] for row in rows])
        build_stats.update(error.reason for *_, error in result.rejected)
        for index, text, spans in zip(result.source, result.texts, result.spans, strict=True):
            row = rows[index]
            assert spans is not None
            ids, mask, offsets = tokens(tokenizer, text, spans)
            assert ids == row["full_ids"], f"row {index}: other ids than the whole render"
            theirs = row[f"{mode}/None"]
            last = mode == "last_assistant_message"
            if theirs["input_ids"] != ids or (last and not row["last_turn_is_prefix_preserving"]):
                build_stats[f"{mode}: its ids are not the whole render's"] += 1
                continue
            padded = [0] * (len(ids) - len(theirs["loss_mask"])) + theirs["loss_mask"]
            different = [i for i in range(len(ids)) if mask[i] != padded[i]]
            if different:
                # A token across the turn's start: half header, half answer. We train it.
                build_stats[f"{mode}: seam token"] += 1
                starts = [start for start, _ in spans]
                assert all(
                    any(offsets[i][0] < start < offsets[i][1] for start in starts)
                    for i in different
                ), f"row {index} differs at {different}"
            else:
                build_stats[f"{mode}: equal"] += 1
    print(name, dict(build_stats))
    assert build_stats["mask_unproven"] == 0
    assert set(build_stats) <= {
        "trailing_user",  # the conversation ends with a question
        "template_drops_content",  # Llama's template prints no tool calls
        *(
            f"{m}: {w}"
            for m in ("all_assistant_messages", "last_assistant_message")
            for w in ("equal", "seam token", "its ids are not the whole render's")
        ),
    }
    assert build_stats["template_drops_content"] == (42 if name == "llama3.1" else 0)
    assert build_stats["last_assistant_message: seam token"] <= 1


def test_gpt_oss_end_of_turn_tokens_differ_by_position_and_kind(shared: Path) -> None:
    called = ODD["tools"]
    row = {**called, "messages": [*turns("ua"), *called["messages"]]}
    result = renderer(shared, "gpt-oss").render([row])
    assert result.rejected == []
    spans = result.spans[0]
    assert spans is not None
    closers = [result.texts[0][a:b].rsplit("<|", 1)[1] for a, b in spans]
    assert closers == ["end|>", "call|>", "return|>"]


def test_thousand_turns_are_one_path_per_kind_of_turn(shared: Path) -> None:
    source = (shared / "tokenizers" / "qwen3" / "chat_template.jinja").read_text()
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"word {i}"} for i in range(1000)
    ]
    result = Renderer(ChatSpec(), source).render([{"messages": messages}])
    (spans,) = result.spans
    assert spans is not None
    assert len(spans) == 500
    for number, (start, end) in enumerate(spans):
        assert result.texts[0][start:end].endswith(f"word {2 * number + 1}<|im_end|>")
